"""MoEUT: a group of layers repeated; experts in the feed-forward and in attention's values and outputs.

The router is a bare Parameter (`expert_sel`), with no module to hook: its scores, the experts and the gates are read from
the torch functions that run inside the feed-forward module. Queries, keys and the router read LN(x); values and experts
read x itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from visitlens.hooks.adapters.families.deepseek import SIGMOID
from visitlens.hooks.adapters.family import Anatomy, Family, Inside, Layer, Read


class MoEUT(Family):
    """Of a `MoEUTLM`: `adapt(model, MoEUT())`. Token ids of BOS and so on aren't the model's; give them to the recorder's text."""

    model_types = ("moeut",)
    attention_calls = "sdpa"
    loops = "transformer.n_repeats"
    call = MappingProxyType({})

    def __init__(self, context_length: int = 1024) -> None:
        self.context_length = context_length

    def body(self, model: Any) -> Any:
        return model

    def logits(self, result: Any) -> Any:
        return result.outputs

    def anatomy(self, model: Any) -> Anatomy:
        reads = (
            Read("resid", "", "input", name="x"),
            Read("X", "ln1"),
            Read("O", "attention"),
            Read("attn_write", "attention"),
            Read("expert_in", "ffn", "input", name="input"),
            Read("moe_write", "ffn"),
            Read("resid_out", ""),
        )
        inside = (Inside("ffn", ("router", "experts", "gates"), _routing),)
        count = len(model.transformer.layers)
        paths = [f"transformer.layers.{i}" for i in range(count)]
        return Anatomy(
            tuple(Layer((path,), reads, attention="attention", inside=inside) for path in paths),
            tuple([*range(count)] * model.transformer.n_repeats),
            missing={
                "softmax router": SIGMOID,
                "expert_out": "its experts run in one kernel, which gives their weighted sum alone",
                "moe_in": "its experts read the residual stream itself; the router alone reads a norm of it",
            },
            notes=(
                "queries, keys and the router read LN(x); values and experts read x",
                "values and attention outputs have experts of their own, which aren't recorded",
                "queries and keys each carry the square root of the scale",
            ),
        )

    def sizes(self, model: Any) -> dict[str, Any]:
        layer = model.transformer.layers[0]
        heads, d = layer.attention.n_heads, layer.attention.projection_size
        return {
            "vocab_size": model.embedding.num_embeddings,
            "hidden_size": model.embedding.embedding_dim,
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": d,
            "value_dim": d,
            "num_experts": layer.ffn.n_experts,
            "experts_per_token": layer.ffn.n_heads,
            "context_length": self.context_length,
        }


def _routing(module: Any, func: Any, args: tuple, result: Any) -> Mapping[str, torch.Tensor]:
    """Scores where the router's Parameter is applied; experts and gates where the top k of its sigmoids are taken."""
    if func is torch.nn.functional.linear and args[1] is module.expert_sel:
        return {"router": result}
    if func in (torch.Tensor.topk, torch.topk):
        return {"gates": result[0], "experts": result[1]}
    return {}
