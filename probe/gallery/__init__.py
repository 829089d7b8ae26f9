"""Figure, the base of every figure; the register of figures; writing them to files."""
