"""One prompt and everything about it as plain arrays, for the live probe of the dashboard."""

from visitlens.moved import from_module

__getattr__ = from_module(__name__, "live_model")
