"""Picks the implementation of a kernel when it is called, never at import.

Importing an optional compiler costs seconds, and most of visitlens never needs one: so nothing here imports it
either, it only asks whether it could be.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from visitlens.kernels.errors import InputError, UnavailableError

ATTENTION_ROWS = ("torch", "numba")
_NUMBA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_attention_rows(device_type: str, dtype: torch.dtype, requested: str = "auto") -> str:
    """Name of the implementation of `attention_rows` to run, one of `ATTENTION_ROWS`.

    Args:
        device_type: `tensor.device.type` of the queries and keys.
        dtype: their dtype.
        requested: "auto", or a name that forces one.

    Raises:
        InputError: an unknown name, or `numba` forced on tensors that it can't take.
        UnavailableError: `numba` forced where it isn't installed.
    """
    if requested not in ("auto", *ATTENTION_ROWS):
        raise InputError(f"expected implementation 'auto' or one of {ATTENTION_ROWS}, got {requested!r}")
    fits = device_type == "cpu" and dtype in _NUMBA_DTYPES
    if requested == "auto":
        return "numba" if fits and _numba_is_installed() else "torch"
    if requested == "numba":
        if not _numba_is_installed():
            raise UnavailableError(
                "implementation 'numba' needs numba, which isn't installed: pip install 'visitlens[fast]', "
                "or leave implementation='auto' to run the torch version"
            )
        if not fits:
            raise InputError(
                f"implementation 'numba' takes float32, bfloat16 or float16 on the CPU; got {dtype} on {device_type}. "
                "Use implementation='torch' or 'auto'"
            )
    return requested


@cache
def _numba_is_installed() -> bool:
    return find_spec("numba") is not None
