"""Picks the implementation of a kernel when it is called, never at import.

Importing an optional compiler costs seconds, and most of visitlens never needs one: so nothing here imports it
either, it only asks whether it could be.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from visitlens.errors import InputError, UnavailableError

ATTENTION_ROWS = ("torch", "numba", "triton")
_COMPILED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRITON_WIDEST = 256


def choose_attention_rows(
    device_type: str,
    dtype: torch.dtype,
    requested: str = "auto",
    *,
    width: int = 64,
) -> str:
    """Name of the implementation of `attention_rows` to run, one of `ATTENTION_ROWS`.

    Args:
        device_type: `tensor.device.type` of the queries and keys.
        dtype: their dtype.
        requested: "auto", or a name that forces one.
        width: d of the queries and keys.

    Raises:
        InputError: an unknown name or one forced on tensors that it can't take.
        UnavailableError: one forced where it isn't installed.
    """
    if requested not in ("auto", *ATTENTION_ROWS):
        raise InputError(f"expected implementation 'auto' or one of {ATTENTION_ROWS}, got {requested!r}")
    refusals = {
        "numba": _numba_refuses(device_type, dtype),
        "triton": _triton_refuses(device_type, dtype, width),
        "torch": None,
    }
    if requested == "auto":
        # Not triton on a GPU: it agrees with float64 under its interpreter, but no GPU has run it yet.
        return "numba" if refusals["numba"] is None else "torch"
    if (refusal := refusals[requested]) is not None:
        raise refusal
    return requested


def _numba_refuses(device_type: str, dtype: torch.dtype) -> Exception | None:
    if not _numba_is_installed():
        return UnavailableError(
            "implementation 'numba' needs numba, which isn't installed: pip install 'visitlens[fast]', "
            "or leave implementation='auto' to run the torch version"
        )
    if device_type != "cpu" or dtype not in _COMPILED_DTYPES:
        return InputError(
            f"implementation 'numba' takes float32, bfloat16 or float16 on the CPU; got {dtype} on {device_type}. "
            "Use implementation='torch' or 'auto'"
        )
    return None


def _triton_refuses(device_type: str, dtype: torch.dtype, width: int) -> Exception | None:
    if not _triton_is_installed():
        return UnavailableError(
            "implementation 'triton' needs triton, which isn't installed (PyTorch for CUDA on Linux brings it): "
            "leave implementation='auto' to run the torch version"
        )
    if device_type != "cuda" and not _triton_is_interpreted():
        return InputError(
            f"implementation 'triton' takes tensors on a GPU; got {device_type}. Use implementation='torch' or 'auto' "
            "(TRITON_INTERPRET=1 in the environment runs it on the CPU, for tests only)"
        )
    if dtype not in _COMPILED_DTYPES or width > _TRITON_WIDEST:
        return InputError(
            f"implementation 'triton' takes float32, bfloat16 or float16 with d <= {_TRITON_WIDEST}; got {dtype} with "
            f"d = {width}. Use implementation='torch' or 'auto'"
        )
    return None


@cache
def _numba_is_installed() -> bool:
    return find_spec("numba") is not None


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def _triton_is_interpreted() -> bool:
    """Triton's own switch; it is read when the kernels are first imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
