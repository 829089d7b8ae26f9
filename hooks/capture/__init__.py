"""Reading site values of a forward pass or of a generation, by layer and visit."""

from visitlens.moved import from_module

__getattr__ = from_module(__name__, "capture")
