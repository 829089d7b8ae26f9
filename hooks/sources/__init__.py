"""Models that another tool holds: TransformerLens bridges and nnsight."""
