"""Llama-shaped dense decoders: unlooped baselines with a pre-norm block and a gated MLP."""

from __future__ import annotations

from typing import Any

from visitlens.hooks.adapters.family import NO_ROUTER, Anatomy, Family, Layer, pre_norm_reads


class DenseDecoder(Family):
    model_types = ("llama", "mistral", "qwen2", "qwen3", "smollm3")

    def anatomy(self, model: Any) -> Anatomy:
        count = len(self.body(model).layers)  # type: ignore[arg-type]
        layers = tuple(Layer((f"layers.{i}",), pre_norm_reads()) for i in range(count))
        return Anatomy(layers, tuple(range(count)), missing=dict.fromkeys(("router", "experts", "gates"), NO_ROUTER))
