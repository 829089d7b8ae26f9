"""A recording opened for reading, and pairs and grids of recordings."""
