"""Cache: what one forward of an adapted model hands on to the next, so that a text is written token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from visitlens.hooks.adapters.editor import StepEditor


@dataclass(eq=False)
class Cache:
    """`length` tokens so far; `passed` are the arguments that hand the model's own cache on."""

    length: int = 0
    passed: dict[str, Any] = field(default_factory=dict, repr=False)
    changed: dict[tuple[StepEditor, str, int], Tensor] = field(default_factory=dict, repr=False)
    """Keys and values [batch, kv head, token, d] as an `intervene` made them, by site and step: the model's own cache is
    filled before they are changed."""


def cache_of(result: Any) -> dict[str, Any]:
    """The argument that hands a forward's cache on to the next one; nothing where there is none."""
    for name in ("cache", "past_key_values"):
        if (cache := getattr(result, name, None)) is not None:
            return {name: cache}
    return {}
