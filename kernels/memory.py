"""What glibc does with freed memory: keep it (fast) or give it back (small). No effect on other systems."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of glibc's malloc.h


@cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def keep_freed_memory() -> None:
    """From now on freed blocks stay with the process: fresh pages cost a quarter of a training step on CPU."""
    if (glibc := _glibc()) is not None:
        glibc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        glibc.mallopt(_MMAP_MAX, 0)


def return_freed_memory() -> None:
    """Gives free pages back now: many large tensors freed between small ones leave holes that are never reused whole."""
    if (glibc := _glibc()) is not None:
        glibc.malloc_trim(0)
