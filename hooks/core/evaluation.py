"""A model in evaluation mode for as long as it is read, and as its owner left it afterwards. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, no module of the model drops out or trains its statistics; at the end each is in its own mode again.

    The flags alone are set: `train()` and `eval()` may do more than that (a LoRA layer merges its weights).
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
