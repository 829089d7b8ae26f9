"""The three budgets that a looped model and its Baseline share: parameters, training FLOPs per token, KV cache. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from visitlens.hooks.models.config import LoopedMoEConfig


@dataclass(frozen=True)
class Budget:
    """Counts of one configuration; embeddings and the output head are left out, as in the paper.

    `total` parameters are stored; `active` are those of one traversal of each physical layer with k experts (router
    included); `executed` counts a looped layer once a visit. `flops_per_token` is for training (forward and backward).
    """

    total: int
    active: int
    executed: int
    flops_per_token: float
    kv_values_per_token: int

    @classmethod
    def of(cls, config: LoopedMoEConfig, mean_document: float) -> Budget:
        """`mean_document`: tokens; a query sees half of them on average.

        FLOPs = 6 x executed parameters + 6 x mean document x query width, a step: the rule that reproduces the paper's
        published ratios.
        """
        h, d = config.hidden_size, config.head_dim
        query, kv = config.num_heads * d, config.num_kv_heads * d
        attention = 2 * h * query + 2 * h * kv + (2 * d if config.qk_norm else 0)
        router, norms = h * config.num_experts, 2 * h
        expert, shared = 3 * h * config.expert_dim, 3 * h * config.shared_expert_dim
        fixed = attention + router + norms + shared
        layer_active = fixed + config.experts_per_token * expert
        steps = len(config.loop_spec.plan())
        executed = steps * layer_active + h
        return cls(
            total=config.num_layers * (fixed + config.num_experts * expert) + h,
            active=config.num_layers * layer_active + h,
            executed=executed,
            flops_per_token=6 * executed + 6 * mean_document * query * steps,
            kv_values_per_token=2 * kv * steps,
        )
