"""Cache: what one forward of an adapted model hands on to the next, so that a text is written token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from visitlens.hooks.adapters.editor import StepEditor


@dataclass(eq=False)
class Cache:
    """`length` tokens so far; `passed` are the arguments that hand the model's own cache on."""

    length: int = 0
    broken: bool = field(default=False, repr=False)
    """Whether a forward ended in an error, which leaves some layers with its tokens and others without."""
    passed: dict[str, Any] = field(default_factory=dict, repr=False)
    changed: dict[tuple[StepEditor, str, int], Tensor] = field(default_factory=dict, repr=False)
    """Keys and values [batch, kv head, token, d] as an `intervene` made them, by site and step: the model's own cache is
    filled before they are changed."""


def takes_cache(model: Any) -> bool:
    """Whether its forward has an argument `use_cache`."""
    takes = signature(model.forward).parameters.values()
    return any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in takes)


def cache_of(result: Any, model: Any) -> dict[str, Any]:
    """The argument that hands a forward's cache on to the next one; nothing where there is none. A model's own code may
    take it by the name that transformers gave up."""
    names = ("cache", "past_key_values")
    cache = next((found for name in names if (found := getattr(result, name, None)) is not None), None)
    takes = signature(model.forward).parameters
    return {} if cache is None else {next((name for name in names if name in takes), names[0]): cache}
