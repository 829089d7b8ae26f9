"""Attention rows computed tile by tile: the rule of a row, three back ends, and the choice between them."""
