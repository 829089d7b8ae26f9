"""One file is one figure of a table of runs."""
