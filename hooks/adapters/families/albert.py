"""ALBERT: groups of layers run several times in a row; an encoder that attends both ways, with a norm after each addition.

`x1 = LN(x + Attn(x))`, `x' = LN(x1 + MLP(x1))`: the attention reads the residual itself, and the norms lie on the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from visitlens.hooks.adapters.family import NO_ROUTER, Anatomy, Family, Layer, Read

POST_NORM = "a LayerNorm lies on the stream after each addition, so writes don't add up to the next residual"

MASKED = "it fills in masked tokens and sees both sides of each, so its logits at a token aren't of the next one"


class Albert(Family):
    model_types = ("albert",)
    call = MappingProxyType({})
    causal = False
    loops = "config.num_hidden_layers"

    @contextmanager
    def looping(self, model: Any, visits: int) -> Iterator[None]:
        with super().looping(model, visits * model.config.num_hidden_groups):
            yield

    def anatomy(self, model: Any) -> Anatomy:
        config = model.config
        reads = (
            Read("resid", "", "input"),
            Read("X", "attention", "input"),
            Read("O", "attention.dense"),
            Read("attn_write", "attention.dense"),
            Read("moe_in", "ffn", "input", 0, "input"),
            Read("moe_write", "ffn_output"),
            Read("resid_out", ""),
        )
        groups, inner = config.num_hidden_groups, config.inner_group_num
        paths = [f"encoder.albert_layer_groups.{g}.albert_layers.{i}" for g in range(groups) for i in range(inner)]
        group_of = [int(i / (config.num_hidden_layers / groups)) for i in range(config.num_hidden_layers)]
        order = [g * inner + i for g in group_of for i in range(inner)]
        return Anatomy(
            tuple(Layer((path,), reads, attention="attention") for path in paths),
            tuple(order),
            missing={"sum of writes": POST_NORM, "next token": MASKED, **NO_ROUTER},
            notes=(
                "attention goes both ways: a query also sees later tokens of its document",
                "queries are left out of measures by their position, as if attention were causal",
            ),
        )
