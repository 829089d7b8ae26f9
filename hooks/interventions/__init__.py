"""Changing site values at chosen layers, visits, heads, experts and tokens."""
