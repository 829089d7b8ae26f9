"""Files for people: the report, its findings, comparisons, exports; `reproduce` makes them all."""
