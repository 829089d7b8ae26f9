"""Ouro (remote code): every layer, `total_ut_steps` times over; each sub-layer's output is normalised before it is added.

A norm closes each pass over the layers, so residuals chain within a pass. The early exit chooses which pass is read out
and never makes fewer passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from visitlens.errors import InputError
from visitlens.hooks.adapters.family import NO_ROUTER, Anatomy, Family, Layer, pre_norm_reads
from visitlens.hooks.adapters.transformers_compat import cache_sizes, default_rope, mask_arguments, tied_to, token_ids


class Ouro(Family):
    """`steps` passes (the model's own number by default): set on the model while a forward runs, which reads it there."""

    model_types = ("ouro",)
    mends = (tied_to("model.embed_tokens.weight"), token_ids, default_rope, mask_arguments, cache_sizes)

    def __init__(self, steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise InputError(f"expected at least 1 pass, got {steps}")
        self.steps = steps

    @contextmanager
    def looping(self, model: Any, visits: int) -> Iterator[None]:
        before, self.steps = self.steps, visits
        try:
            yield
        finally:
            self.steps = before

    @contextmanager
    def running(self, model: Any) -> Iterator[None]:
        """Its code makes as many passes as the body says, and a cache for as many as the configuration says."""
        with ExitStack() as undo:
            holders: tuple[Any, Any] = self.body(model), model.config
            for holder in holders:
                undo.callback(setattr, holder, "total_ut_steps", holder.total_ut_steps)
                holder.total_ut_steps = self.steps
            yield

    def anatomy(self, model: Any) -> Anatomy:
        body: Any = self.body(model)
        self.steps = self.steps or body.total_ut_steps
        count = model.config.num_hidden_layers
        reads = pre_norm_reads(attn_write="input_layernorm_2", mlp_write="post_attention_layernorm_2")
        return Anatomy(
            tuple(Layer((f"layers.{i}",), reads) for i in range(count)),
            tuple([*range(count)] * self.steps),
            missing=NO_ROUTER,
            notes=(
                "a norm closes each pass over the layers: residuals chain within a pass",
                "writes are taken after their own norm, where they are added",
                "early exit selects the read-out and never reduces the passes",
            ),
        )
