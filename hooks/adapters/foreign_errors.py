"""Errors of the code that a checkpoint folder brings along, as ours: they say where in that code they came up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch

from visitlens.errors import TRACEBACK, CheckpointError, InputError, VisitlensError

PACKAGE = "visitlens_folder_"
"""How the names of such code's modules begin (`own_loader`)."""


_PASSING = "visitlens.hooks.adapters.attention_calls"
"""Through which such code calls attention, whatever goes wrong there."""


def place_of(error: BaseException, *, own_fault: bool = False) -> str | None:
    """FILE:LINE, the innermost of such code; None where none of it was running. `own_fault`: also where one of our hooks, or what a
    hook calls (a progress function that stops the run), raised inside it."""
    place = None
    for frame, line in walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(PACKAGE):
            place = f"{frame.f_code.co_filename}:{line}"
        elif own_fault and name.startswith("visitlens.") and name != _PASSING:
            place = None
    return place


@contextmanager
def forward_told() -> Iterator[None]:
    """Around a forward. Our own errors pass unchanged, as do those of memory and those of any other code."""
    try:
        yield
    except (VisitlensError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "multiple of 16 bytes" in str(error):
            raise InputError(
                "torch's grouped product of experts takes rows of a multiple of 16 bytes, and an expert or the residual stream of this "
                'model is of another width: call model.set_experts_implementation("eager") before adapting it'
            ) from error
        place = place_of(error, own_fault=True)
        if place is None or "can't allocate memory" in str(error):  # of torch, on a CPU
            raise
        raise CheckpointError(
            f"{place}: the model's forward failed ({type(error).__name__}: {error}); {TRACEBACK}=1 shows the traceback"
        ) from error
