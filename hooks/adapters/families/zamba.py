"""Zamba and Zamba2: Mamba layers, and a transformer block whose Parameters are tied over several hybrid layers.

Each hybrid layer has its own module object of the shared block (sharing shows in Parameter identity only) and its own Mamba
layer. Steps are the shared block and the Mamba layers, in execution order. Zamba2 may have several shared blocks in turn,
and low-rank adapters of each visit inside them. The block reads [hidden, embedding] and its output goes, through a linear map
of the hybrid layer, into the Mamba layer's input: it never enters the residual stream by itself.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from visitlens.hooks.adapters.family import NO_ROUTER, Anatomy, Family, Layer, Read

_MAMBA = "a Mamba layer: no attention and no feed-forward block"
_SHARED = (
    "the shared block's output goes into a Mamba layer's input and isn't added to the residual; Mamba layers have no "
    "attention or feed-forward write"
)
_ON_BLOCK_ONLY = ("X", "Q", "K", "V", "P", "PV", "O", "moe_in")


class Zamba(Family):
    model_types = ("zamba", "zamba2")

    def anatomy(self, model: Any) -> Anatomy:
        block = "shared_transf" if model.config.model_type == "zamba" else "shared_transformer"
        shared_reads = (
            Read("resid", "", "input"),
            Read("X", "input_layernorm"),
            Read("O", "self_attn"),
            Read("moe_in", "pre_ff_layernorm"),
        )
        paths: dict[object, list[str]] = {}
        order: list[object] = []
        body: Any = self.body(model)
        for i, module in enumerate(body.layers):
            if hasattr(module, block):
                key = _identity(getattr(module, block))
                paths.setdefault(key, []).append(f"layers.{i}.{block}")
                order.append(key)
            mamba = f"layers.{i}.mamba_decoder" if hasattr(module, block) else f"layers.{i}"
            paths[mamba] = [mamba]
            order.append(mamba)
        number = {key: n for n, key in enumerate(dict.fromkeys(order))}
        layers, mambas, shared = [], {}, {}
        for key, n in number.items():
            is_mamba = isinstance(key, str)
            reads = (Read("resid", "", "input"), Read("resid_out", "")) if is_mamba else shared_reads
            layers.append(Layer(tuple(paths[key]), reads, None if is_mamba else "self_attn"))
            (mambas if is_mamba else shared)[n] = _MAMBA if is_mamba else _SHARED
        return Anatomy(
            tuple(layers),
            tuple(number[key] for key in order),
            missing={
                "sum of writes": _SHARED,
                "attn_write": _SHARED,
                "moe_write": _SHARED,
                **NO_ROUTER,
            },
            absent=dict.fromkeys(_ON_BLOCK_ONLY, mambas) | {"resid_out": shared},
            notes=(
                "X of the shared block is the norm of [hidden, embedding], twice as wide as the residual",
                *(("adapters of each visit inside the shared block",) if _has_adapters(model) else ()),
            ),
        )

    def sizes(self, model: Any) -> dict[str, Any]:
        config = model.config
        d = config.attention_head_dim
        return {**super().sizes(model), "head_dim": d, "value_dim": d}


def _identity(module: nn.Module) -> object:
    """The same for modules that hold the same Parameters."""
    return frozenset(id(p) for p in module.parameters())


def _has_adapters(model: Any) -> bool:
    return model.config.model_type == "zamba2"
