"""From a folder or a hub name to a model that can be observed, and the inspection of one."""

from visitlens.moved import from_module

__getattr__ = from_module(__name__, "load_model")
