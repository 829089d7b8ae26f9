"""Matched pairs: the published ones again, and what no shape can match."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visitlens.errors import InputError
from visitlens.hooks.models.checkpoint import load_config
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.probe.ladder.budget import PAPER_TOLERANCE, Budget, Ratios
from visitlens.probe.ladder.match import Steps, match
from visitlens.probe.ladder.mini_grid import MINI, NANO, plan_named
from visitlens.probe.ladder.paper_grid import LEVELS, SCALES, paper_cell
from visitlens.probe.model.bundled import PAIR

BASELINE = LoopedMoEConfig(
    vocab_size=50, hidden_size=64, num_layers=8, num_heads=6, num_kv_heads=3, head_dim=12, num_experts=64, expert_dim=12
)
# The largest deviations as the paper prints them, rounded: half a printed unit more.
PRINTED_TOLERANCE = Ratios(flops=0.0395, total=0.0105, kv=0.0365)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("level", LEVELS[1:])
def test_published_sparse_pairs_are_found_again(scale: str, level: str) -> None:
    """Each published looped model is among the few shapes within the paper's tolerance."""
    baseline, looped = paper_cell("baseline", scale, level).config, paper_cell("smelt", scale, level).config
    found = match(
        baseline,
        loop_start=looped.loop_start,
        loop_stop=looped.loop_stop,
        experts=[looped.num_experts],
        full_width=True,
        tolerance=PRINTED_TOLERANCE,
        limit=None,
    )
    assert looped in [c.config for c in found]
    assert len(found) <= 7
    assert found[0].residual <= max(0.5, next(c.residual for c in found if c.config == looped))


def test_the_bundled_looped_model_is_the_match_of_its_baseline() -> None:
    """Searched over the Baseline's expert count and up to twice that."""
    baseline, looped = load_config(PAIR["baseline"]), load_config(PAIR["looped"])
    best, *_ = match(
        baseline, loop_start=2, loop_stop=6, mean_document=350, steps=Steps(4, 2, 4), experts=range(64, 129, 2)
    )
    assert best.config == looped


@given(
    hidden=st.integers(4, 12),
    layers=st.sampled_from([4, 6, 8]),
    experts=st.sampled_from([8, 32, 64]),
    visits=st.integers(2, 3),
)
@settings(max_examples=25)
def test_candidates_are_within_tolerance_aligned_and_in_order(
    hidden: int, layers: int, experts: int, visits: int
) -> None:
    baseline = replace(BASELINE, hidden_size=8 * hidden, num_layers=layers, num_experts=experts)
    steps = Steps(hidden=4, head_dim=2, expert_dim=4, experts=2)
    try:
        found = match(baseline, loop_start=1, loop_stop=layers - 1, visits=visits, steps=steps, limit=None)
    except InputError as error:
        assert "steps" in str(error)
        return
    ranks = [max(round(c.residual, 1), 0.5) for c in found]
    assert ranks == sorted(ranks)
    target = Budget.of(baseline, 780)
    for c in found:
        assert (
            c.config.hidden_size % 4
            == c.config.expert_dim % 4
            == c.config.num_experts % 2
            == c.config.head_dim % 2
            == 0
        )
        assert c.config.num_heads % 2 == 0 and c.config.visits == visits
        ratios = Ratios.of(Budget.of(c.config, 780), target)
        assert c.ratios == ratios
        assert all(abs(r - 1) <= allowed for r, allowed in zip(ratios, PAPER_TOLERANCE, strict=True))


def test_the_number_of_candidates_can_be_limited() -> None:
    every = match(BASELINE, loop_start=2, loop_stop=6, steps=Steps(4, 2, 4, 2), limit=None)
    assert match(BASELINE, loop_start=2, loop_stop=6, steps=Steps(4, 2, 4, 2), limit=2) == every[:2]
    assert len(every) > 2


def test_what_cannot_be_matched_is_said_with_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"no shape .* has all three budgets within .* the nearest has ratios \(.*smaller steps"
    ):
        match(BASELINE, loop_start=2, loop_stop=6, steps=Steps(hidden=32, expert_dim=32, experts=32))
    with pytest.raises(InputError, match="comes near the Baseline's KV cache"):
        match(BASELINE, loop_start=2, loop_stop=6, kv_heads=[50])
    with pytest.raises(InputError, match="expected an unlooped Baseline"):
        match(replace(BASELINE, loop_start=2, loop_stop=6, visits=2), loop_start=2, loop_stop=6)


@pytest.mark.parametrize("plan", [MINI, NANO], ids=lambda p: p.name)
def test_every_cell_of_the_trainable_grids_is_matched(plan) -> None:
    assert len(plan.cells) == len(plan.scales) * len(plan.levels) == len({c.name for c in plan.cells})
    for cell in plan.cells:
        ratios = Ratios.of(*(Budget.of(c, plan.mean_document) for c in (cell.looped, cell.baseline)))
        assert all(abs(r - 1) <= allowed for r, allowed in zip(ratios, PAPER_TOLERANCE, strict=True)), cell.name
        span = cell.looped.loop_stop - cell.looped.loop_start
        assert span * 2 == cell.looped.num_layers and cell.looped.visits == 2
        assert cell.looped.context_length == cell.baseline.context_length == plan.context


def test_the_bundled_pair_is_the_largest_cell_of_the_minis_column() -> None:
    cell = MINI.cell(MINI.scales[-1], "85")
    for side, folder in PAIR.items():
        assert replace(getattr(cell, side), context_length=1024) == load_config(folder)


def test_a_grid_of_another_name_is_refused() -> None:
    with pytest.raises(InputError, match="among mini, nano, got 'micro'"):
        plan_named("micro")
