"""Ouro (remote code): every layer, `total_ut_steps` times over; each sub-layer's output is normalised before it is added.

A norm closes each pass over the layers, so residuals chain within a pass. The early exit chooses which pass is read out
and never makes fewer passes.
"""

from __future__ import annotations

from typing import Any

from visitlens.hooks.adapters.family import NO_ROUTER, Anatomy, Family, Layer, pre_norm_reads
from visitlens.kernels.errors import InputError


class Ouro(Family):
    """`steps` passes (the model's own number by default): set on the model, which reads it at each forward."""

    model_types = ("ouro",)
    loops = "base_model.total_ut_steps"

    def __init__(self, steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise InputError(f"expected at least 1 pass, got {steps}")
        self.steps = steps

    def anatomy(self, model: Any) -> Anatomy:
        body: Any = self.body(model)
        if self.steps is not None:
            body.total_ut_steps = self.steps
        count = model.config.num_hidden_layers
        reads = pre_norm_reads(attn_write="input_layernorm_2", mlp_write="post_attention_layernorm_2")
        return Anatomy(
            tuple(Layer((f"layers.{i}",), reads) for i in range(count)),
            tuple([*range(count)] * body.total_ut_steps),
            missing=NO_ROUTER,
            notes=(
                "a norm closes each pass over the layers: residuals chain within a pass",
                "writes are taken after their own norm, where they are added",
                "early exit selects the read-out and never reduces the passes",
            ),
        )
