"""The one family of errors. Each message says what was expected, what came and what to try."""

from __future__ import annotations

TRACEBACK = "VISITLENS_TRACEBACK"
"""A variable of the environment: set, a command ends in the whole traceback of its error."""


class VisitlensError(Exception):
    """Base of every error that visitlens raises on purpose.

    Examples:
        >>> try:
        ...     vl.open("nowhere.vlens")
        ... except vl.VisitlensError as error:
        ...     print("said in one line")
        said in one line
    """


class InputError(VisitlensError, ValueError):
    """A value that a user gave is wrong."""


class PlanError(VisitlensError, RuntimeError):
    """A model ran its layers in another order than its plan says."""


class CheckpointError(VisitlensError, ValueError):
    """A checkpoint folder is incomplete, or disagrees with its configuration."""


class MemoryLimitError(VisitlensError, MemoryError):
    """What was asked for doesn't fit in memory."""


class RecordingError(VisitlensError, ValueError):
    """A recording can't be read, or doesn't hold what was asked of it."""


class StorageError(VisitlensError, OSError):
    """The disk or the object store refused: no room, no permission, no answer, or another writer is at work."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class UnavailableError(VisitlensError, RuntimeError):
    """An optional program or package is needed here and isn't installed."""
