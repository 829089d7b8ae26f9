"""One file is one statistic of a forward pass."""
