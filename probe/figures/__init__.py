"""One file is one figure."""
