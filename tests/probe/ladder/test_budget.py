"""Budgets against the real module and against the paper's published pair."""

from __future__ import annotations

import pytest
import torch

from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.bundled import PAIR
from visitlens.probe.ladder.budget import Budget

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 4, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loop_start": 1, "loop_stop": 3, "visits": 3},
        {"qk_norm": True, "shared_expert_dim": 12},
        {"tie_embeddings": False},
    ],
)
def test_total_is_the_modules_parameter_count_without_embeddings(options) -> None:
    config = LoopedMoEConfig(**SIZES, num_experts=10, expert_dim=8, **options)
    with torch.device("meta"):
        model = LoopedMoE(config)
    counted = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    assert Budget.of(config, 100).total == counted


def test_looping_runs_the_span_again_and_stores_nothing_more() -> None:
    plain = LoopedMoEConfig(**SIZES, num_experts=10, expert_dim=8)
    looped = LoopedMoEConfig(**SIZES, num_experts=10, expert_dim=8, loop_start=1, loop_stop=3, visits=2)
    a, b = Budget.of(plain, 0), Budget.of(looped, 0)
    assert (a.total, a.active) == (b.total, b.active)
    assert b.executed - 16 == (a.executed - 16) * 6 // 4
    assert b.kv_values_per_token * 4 == a.kv_values_per_token * 6


def test_the_published_200M_pair() -> None:
    """SMELT 3.2, S = 95 %: 1.33e9 and 1.37e9 FLOPs per token, 3.87e9 and 3.89e9 parameters, KV within 4 %."""
    sizes = {"vocab_size": 50, "num_layers": 12, "num_kv_heads": 4}
    baseline = LoopedMoEConfig(**sizes, hidden_size=1280, num_heads=20, head_dim=64, num_experts=192, expert_dim=432)
    looped = LoopedMoEConfig(
        **sizes,
        hidden_size=1056,
        num_heads=24,
        head_dim=44,
        num_experts=288,
        expert_dim=352,
        loop_start=3,
        loop_stop=9,
        visits=2,
    )
    a, b = Budget.of(baseline, 780), Budget.of(looped, 780)
    assert round(a.flops_per_token / 1e9, 2) == 1.33
    assert round(b.flops_per_token / 1e9, 2) == 1.37
    assert round(a.total / 1e9, 2) == 3.87
    assert round(b.total / 1e9, 2) == 3.89
    assert b.kv_values_per_token / a.kv_values_per_token == pytest.approx(1, abs=0.04)


def test_the_bundled_pair_is_matched_within_the_papers_tolerances() -> None:
    from visitlens.hooks.models.checkpoint import load_config

    a, b = (Budget.of(load_config(PAIR[name]), 330) for name in ("baseline", "looped"))
    assert b.flops_per_token / a.flops_per_token == pytest.approx(1, abs=0.039)
    assert b.total / a.total == pytest.approx(1, abs=0.01)
    assert b.kv_values_per_token == a.kv_values_per_token
