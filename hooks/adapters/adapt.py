"""adapt: the adapter that fits a model, found by its `model_type` among the files of `families/`."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn

from visitlens import plugins
from visitlens.errors import InputError
from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.hooks.adapters.family import Family

_FAMILIES = "visitlens.hooks.adapters.families"


@plugins.once
def families() -> dict[str, type[Family]]:
    """Model type -> its family, over every file of `families/`, other packages and what a notebook registered."""
    plugins.modules(_FAMILIES)
    found: dict[str, type[Family]] = {}
    waiting = [Family]
    while waiting:
        for cls in waiting.pop().__subclasses__():
            waiting.append(cls)
            own = not cls.__module__.startswith(_FAMILIES)  # a user's own family isn't for all
            if "model_types" in cls.__dict__ and not own:
                found.update(dict.fromkeys(cls.model_types, cls))
    for cls in plugins.added("families", _model_types_of, found).values():
        found.update(dict.fromkeys(cls.model_types, cls))
    return found


def _model_types_of(name: str, cls: Any) -> list[str]:
    plugins.need(cls, Family)
    if not cls.__dict__.get("model_types"):
        raise InputError(f"{cls.__name__} lacks model_types: the model_type of each configuration that it reads")
    return list(cls.model_types)


NO_TOKENS = {
    "funnel": "it pools the sequence between blocks: from the second block on a position is no token of the text, so nothing has a "
    "value at (token, visit)"
}
"""Model type -> why it can't be read, of looped families that have no adapter for a reason."""


WHY_NOT = {
    "steps": ": it runs its layers as often as its configuration says",
    "state_seed": ": its loop starts from no random state",
}
"""Option -> why most models don't take it."""


def adapt(model: nn.Module, family: Family | str | None = None, **options: Any) -> AdaptedModel:
    """A model as visitlens reads it, by the adapter for its `model_type`, or by `family`: another's name, or one of your own.
    `options` go to the family, for example `steps=8` where loops are counted at run time.

    Raises:
        InputError: no adapter knows this kind of model, or an option that its family doesn't take.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> vl.adapt(LlamaForCausalLM(config)).plan.visits
        {0: 1, 1: 1}
    """
    if family is None or isinstance(family, str):
        kind = family or getattr(getattr(model, "config", None), "model_type", None)
        known = families()
        if kind in NO_TOKENS:
            raise InputError(
                f"{kind} can't be read by visitlens: {NO_TOKENS[kind]}. `visitlens inspect` shows its steps"
            )
        if kind not in known:
            raise InputError(
                f"no adapter for model type {kind!r}; there are {', '.join(sorted(known))}: name the one that its layers are built "
                "like (--family). `visitlens inspect` shows how the model runs its layers, docs/adapters.md how to write an "
                "adapter: then adapt(model, YourFamily())"
            )
        takes = list(signature(known[kind]).parameters)
        if unknown := [name for name in options if name not in takes]:
            why = WHY_NOT.get(unknown[0], "")
            raise InputError(f"{kind} takes no option {unknown[0]!r}{why}; it takes {', '.join(takes) or 'none'}")
        family = known[kind](**options)
    elif options:
        raise InputError(
            f"options {', '.join(options)} belong to the family: give them to {type(family).__name__}(...)"
        )
    return AdaptedModel(model, family)
