"""Mixture of Recursions, expert choice: a block of Llama layers runs several times, each time over fewer tokens.

Before each recursion a router ranks the tokens that are left and the block gets the best of them alone: keys are those too.
Recursions are distinct modules (`layers.i`, with the block in `layers.i.block`) whose Parameters are tied. What the block makes of
a token is weighted and added to the stream, so residuals chain within a recursion. Which tokens were chosen shows only in the
torch functions of the recursion's module: the sorted top k among those left, then their places among all.
"""

from __future__ import annotations

from typing import Any

import torch

from visitlens.errors import InputError
from visitlens.hooks.adapters.family import (
    NO_ROUTER,
    Anatomy,
    Family,
    Layer,
    Visited,
    physical_layers,
    pre_norm_reads,
)


class MixtureOfRecursions(Family):
    """Of a Llama whose layers were made recursive: `adapt(model, MixtureOfRecursions())`; its configuration still says llama."""

    model_types = ("mixture_of_recursions",)

    def anatomy(self, model: Any) -> Anatomy:
        body: Any = self.body(model)
        paths = []
        for i, layer in enumerate(body.layers):
            block = getattr(layer, "block", None)
            if block is not None and getattr(layer, "mor_type", "expert") != "expert":
                raise InputError(
                    f"layers.{i} routes by {layer.mor_type!r} choice; the adapter reads expert-choice routers"
                )
            paths += [f"layers.{i}"] if block is None else [f"layers.{i}.block.{j}" for j in range(len(block))]
        groups = physical_layers({path: body.get_submodule(path) for path in paths})
        number = {path: n for n, group in enumerate(groups) for path in group}
        return Anatomy(
            tuple(Layer(tuple(g), pre_norm_reads(), visited=_CHOSEN if ".block." in g[0] else None) for g in groups),
            tuple(number[path] for path in paths),
            missing={**NO_ROUTER, "cached generation": _AHEAD},
            notes=(
                "each recursion is given the tokens that its router ranks highest: measures of a visit are over those",
                "the block's output is weighted by the router before it is added: residuals chain within a recursion",
            ),
        )


_AHEAD = "the choice looks at the whole sequence: token by token, through a cache, others would be chosen"


def _chosen(func: Any, args: tuple, result: Any) -> torch.Tensor | None:
    """[batch, n, 1]: the sorted ranks of the chosen among those left, and then their places among all."""
    if func is torch.sort:
        return result[1] if result[0].is_floating_point() else result[0]
    if func is torch.gather and not result.is_floating_point() and result.ndim == 3 and result.shape[2] == 1:
        return result
    return None


_CHOSEN = Visited(gathered=True, routes=_chosen, above=2)
