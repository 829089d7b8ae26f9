"""The three budgets that a looped model and its Baseline share: parameters, training FLOPs per token, KV cache. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from visitlens.hooks.models.config import LoopedMoEConfig

PAPER_DOCUMENT = 780
"""Mean document of the paper's FLOPs, in tokens: inferred, the printed ratios allow 777 to 788."""


@dataclass(frozen=True)
class Budget:
    """Counts of one configuration; embeddings and the output head are left out of all but `embeddings`, as in the paper.

    `total` parameters are stored = `attention` + `router` + `experts` (always-on ones included) + `norms`. `active` are
    those of one traversal of each physical layer with k experts (router included); `executed` counts a looped layer
    once a visit. `flops_per_token` is for training (forward and backward).
    """

    attention: int
    router: int
    experts: int
    norms: int
    embeddings: int
    active: int
    executed: int
    flops_per_token: float
    kv_values_per_token: int

    @property
    def total(self) -> int:
        return self.attention + self.router + self.experts + self.norms

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """At bfloat16 unless told; every (layer, visit) keeps keys and values of its own."""
        return self.kv_values_per_token * bytes_per_value

    @classmethod
    def of(cls, config: LoopedMoEConfig, mean_document: float) -> Budget:
        """`mean_document`: tokens; a query sees half of them on average.

        FLOPs = 6 x executed parameters + 6 x mean document x query width, a step: the rule that reproduces the paper's
        published ratios.
        """
        h, d, layers = config.hidden_size, config.head_dim, config.num_layers
        query, kv = config.num_heads * d, config.num_kv_heads * d
        attention, qk_norm = 2 * h * (query + kv), 2 * d if config.qk_norm else 0
        router, norms = h * config.num_experts, 2 * h + qk_norm
        expert, shared = 3 * h * config.expert_dim, 3 * h * config.shared_expert_dim
        layer_active = attention + router + norms + shared + config.experts_per_token * expert
        spec = config.loop_spec
        steps = layers + (spec.visits - 1) * len(spec.span)
        executed = steps * layer_active + h
        return cls(
            attention=layers * attention,
            router=layers * router,
            experts=layers * (shared + config.num_experts * expert),
            norms=layers * norms + h,
            embeddings=config.vocab_size * h * (1 if config.tie_embeddings else 2),
            active=layers * layer_active + h,
            executed=executed,
            flops_per_token=6 * executed + 6 * mean_document * query * steps,
            kv_values_per_token=2 * kv * steps,
        )


def sparsity(budget: Budget, control: Budget) -> float:
    """Compute-equivalent sparsity S = 1 - (F / F0) (N0 / N) against a dense control (SMELT, Eq. 1).

    The text names an unlooped Baseline as the control of every row; what the paper prints for looped rows fits the S = 0
    row of the *same* architecture instead (12 of 12 values, against 0 of 12). The caller says which by what it passes.
    """
    return 1 - (budget.flops_per_token / control.flops_per_token) * (control.total / budget.total)


class Ratios(NamedTuple):
    """A looped model over its Baseline."""

    flops: float
    total: float
    kv: float

    @classmethod
    def of(cls, looped: Budget, baseline: Budget) -> Ratios:
        return cls(
            looped.flops_per_token / baseline.flops_per_token,
            looped.total / baseline.total,
            looped.kv_values_per_token / baseline.kv_values_per_token,
        )


PAPER_TOLERANCE = Ratios(flops=0.039, total=0.010, kv=0.036)
"""How far the paper's sparse pairs are from 1 at most."""


def dense_control(config: LoopedMoEConfig) -> LoopedMoEConfig:
    """The configuration's own S = 0 control where no other is at hand: the same, with only the k experts it uses."""
    return replace(config, num_experts=config.experts_per_token)
