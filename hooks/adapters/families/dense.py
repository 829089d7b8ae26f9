"""Llama-shaped dense decoders: a pre-norm block and a gated MLP. Unlooped, or recursive: layers whose Parameters are tied
are one physical layer that several modules run.
"""

from __future__ import annotations

from typing import Any

from visitlens.hooks.adapters.family import NO_ROUTER, Anatomy, Family, Layer, by_identity, pre_norm_reads


class DenseDecoder(Family):
    model_types = ("llama", "mistral", "qwen2", "qwen3", "smollm3")

    def anatomy(self, model: Any) -> Anatomy:
        groups, order = by_identity(self.body(model))
        layers = tuple(Layer(tuple(paths), pre_norm_reads()) for paths in groups)
        return Anatomy(layers, order, missing=NO_ROUTER)
