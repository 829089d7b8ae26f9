"""How glibc keeps freed memory: with the process, in few places, or not. No effect on other systems."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # names of glibc's malloc.h


@cache
def keep_freed_memory() -> None:
    """From now on freed blocks stay with the process: fresh pages cost a quarter of a training step on CPU, and up to a seventh
    of a forward whose activations are kept."""
    if (glibc := _glibc()) is not None:
        glibc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        glibc.mallopt(_MMAP_MAX, 0)


def share_arenas() -> None:
    """Threads that start from now on allocate in two arenas: of its own, each would keep what its largest answer took."""
    if (glibc := _glibc()) is not None:
        glibc.mallopt(_ARENA_MAX, 2)


def give_back_freed_memory() -> None:
    """What is freed now goes back to the system, wherever it lies: for a process that will do nothing large for a while."""
    if (glibc := _glibc()) is not None:
        glibc.malloc_trim(0)


def _glibc() -> Any:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if library is not None and hasattr(library, "malloc_trim") else None  # musl's has none
