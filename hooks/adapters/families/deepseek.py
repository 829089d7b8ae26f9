"""DeepSeek-V3: multi-head latent attention, and a sigmoid router with a bias and expert groups; the first layers are dense.

K and V are those that the scores and the context are made of: the per-head keys expanded from the compressed latent with
the shared rotary part beside them, and the expanded per-head values. The latent itself is what a cache would keep; it isn't
a site. Queries and keys have `qk_head_dim` entries a head, values and PV `v_head_dim`.
"""

from __future__ import annotations

from typing import Any

from visitlens.hooks.adapters.families.moe import MoEDecoder

SIGMOID = "its router scores are sigmoids, one an expert: no distribution over experts"


class DeepseekV3(MoEDecoder):
    model_types = ("deepseek_v3",)

    def missing(self) -> dict[str, str]:
        return {"softmax router": SIGMOID}

    def notes(self) -> tuple[str, ...]:
        return (
            "K and V are expanded from the compressed latent, per head; the rotary part of K is shared by all heads",
            "shared experts run for every token beside the routed ones and are part of the MoE write",
            "experts are those used, after the router's bias and expert groups; gates include the routed scaling factor",
        )

    def sizes(self, model: Any) -> dict[str, Any]:
        config = self.text_config(model)
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        heads = config.num_attention_heads
        return {**super().sizes(model), "num_kv_heads": heads, "head_dim": head_dim, "value_dim": config.v_head_dim}
