"""A recording on disk: its format, its store, and how it is written, read and maintained."""

from visitlens.moved import from_module

__getattr__ = from_module(__name__, "read.recording")
