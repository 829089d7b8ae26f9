"""Charts, tables and selectors that pages are made of."""
