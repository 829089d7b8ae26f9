"""Documents and prompts to experiment on, and the scores over them."""

from visitlens.moved import from_module

__getattr__ = from_module(__name__, "sample")
