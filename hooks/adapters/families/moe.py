"""MoE decoders, unlooped or with tied layers: pre-norm blocks whose MLP is a router (`gate`) and a bank of experts; some layers may be dense."""

from __future__ import annotations

from typing import Any

from visitlens.hooks.adapters.family import ROUTING, Anatomy, Family, Layer, by_identity, pre_norm_reads

DENSE_LAYER = "a dense feed-forward layer among MoE layers"


class MoEDecoder(Family):
    """Qwen3-MoE, OLMoE, Mixtral. OLMoE doesn't renormalise its gates; what is read are the gates that weigh the experts."""

    model_types = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral")
    router, experts = "gate", "experts"

    def anatomy(self, model: Any) -> Anatomy:
        body = self.body(model)
        groups, order = by_identity(body)
        layers: list[Layer] = []
        dense: dict[int, str] = {}
        for i, paths in enumerate(groups):
            module: Any = body.get_submodule(paths[0])
            sparse = hasattr(module.mlp, self.experts)
            names = {"router": self.router, "experts": self.experts} if sparse else {}
            layers.append(Layer(tuple(paths), pre_norm_reads(**names)))
            if not sparse:
                dense[i] = DENSE_LAYER
        absent = dict.fromkeys(ROUTING, dense) if dense else {}
        return Anatomy(tuple(layers), order, missing=self.missing(), absent=absent, notes=self.notes())

    def missing(self) -> dict[str, str]:
        return {}

    def notes(self) -> tuple[str, ...]:
        return ()

    def sizes(self, model: Any) -> dict[str, Any]:
        config = self.text_config(model)
        experts = next(
            getattr(config, name)
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if getattr(config, name, None)
        )
        return {**super().sizes(model), "num_experts": experts, "experts_per_token": config.num_experts_per_tok}
