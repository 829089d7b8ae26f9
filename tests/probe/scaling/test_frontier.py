"""Frontier, tokens per parameter and compute saved: closed forms against brute force, and against what the paper prints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from visitlens.errors import InputError
from visitlens.probe.ladder.paper_grid import PRINTED, budget_row, paper_cell, paper_grid, prints_as
from visitlens.probe.scaling.frontier import BUDGETS, Level, gain, levels_of, optimum
from visitlens.probe.scaling.law import fit_laws
from visitlens.probe.scaling.paper import paper_levels, paper_surfaces, paper_windows, printed, synthetic_runs
from visitlens.probe.scaling.report import paper_text
from visitlens.probe.scaling.study import Study, decades, paper_laws
from visitlens.probe.scaling.surface import compute_gain

LAWS = paper_laws()
GAINS = printed()["compute_gain"]["rows"]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("level", paper_levels())
@pytest.mark.parametrize("arch", paper_surfaces())
def test_the_closed_form_is_the_minimum_over_every_split(arch: str, level: Level, budget: float) -> None:
    """A grid of 400,001 sizes is within 1e-10 nats of the minimum it brackets: its spacing is 3e-5 in ln F."""
    surface = paper_surfaces()[arch]
    flops = np.exp(np.linspace(np.log(1e7), np.log(1e13), 400_001))
    losses = surface.loss(flops, level.sparsity, budget / flops)
    best = float(surface.frontier(budget, level.sparsity))
    assert best <= losses.min() + 1e-12
    assert losses.min() - best < 1e-10
    assert flops[losses.argmin()] == pytest.approx(float(surface.optimal_flops(budget, level.sparsity)), rel=1e-3)


@pytest.mark.parametrize("row", GAINS, ids=lambda r: f"{r['budget']:.0e}-{r['level']}")
def test_the_nine_printed_gains_come_back_within_015_points(row: dict) -> None:
    value = 100 * float(LAWS.gain().stat.sel(budget=row["budget"], level=row["level"]).values)
    assert value == pytest.approx(row["percent"], abs=0.15)


@pytest.mark.parametrize("row", printed()["tokens_per_parameter"]["rows"], ids=lambda r: f"{r['arch']}-{r['level']}")
def test_the_six_printed_tokens_per_parameter_come_back_exactly(row: dict) -> None:
    level = next(level for level in paper_levels() if level.name == row["level"])
    assert round(float(paper_surfaces()[row["arch"]].tokens_per_parameter(1e21, level.sparsity))) == row["value"]


def test_gamma_and_its_increase_print_as_published() -> None:
    surfaces, said = paper_surfaces(), printed()["gamma"]
    for arch, surface in surfaces.items():
        assert round(float(surface.gamma), 3) == said[arch]
    increase = 100 * (surfaces["SMELT"].gamma / surfaces["Baseline"].gamma - 1)
    assert round(float(increase), 2) == 5.54 and said["increase_percent"] == pytest.approx(increase, abs=0.05)


def test_the_data_terms_cross_at_the_printed_token_count() -> None:
    a, b = paper_surfaces().values()
    crossover = (b.K / a.K) ** (1 / (b.c - a.c))
    assert float(f"{crossover:.2g}") == printed()["crossover_tokens"]["value"]
    assert crossover == pytest.approx(1.62e10, rel=5e-3)


def test_the_ablation_losses_at_200M_follow_the_printed_surfaces() -> None:
    """Millinats, at the inferred F and S and the longest horizon: printed minus fitted is -2.3, +2.6, +1.6, +13.0 turned round."""
    tokens = printed()["horizons"]["tokens"][-1]
    assert tokens == pytest.approx(215.6e9, rel=1e-4)
    sweep = {(r["level"], r["looped"]): r["loss"] for r in printed()["sweeps"]["rows"] if r["axis"] == "span"}
    gaps = []
    for arch, name, looped in (("Baseline", "baseline", 0), ("SMELT", "smelt", 6)):
        for level in ("85%", "95%"):
            budget = budget_row(paper_cell(name, "200M", level))
            fitted = paper_surfaces()[arch].loss(budget["flops_per_token"], budget["S_percent"] / 100, tokens)
            gaps.append(round(1e3 * (float(fitted) - sweep[level, looped]), 1))
    assert gaps == [-2.3, 2.6, 1.6, 13.0]


def test_126_of_the_128_strings_of_appendix_a_print_as_published() -> None:
    strings = [(cell, name) for cell in paper_grid() for name in PRINTED if cell.printed[name] is not None]
    assert len(strings) == 128
    assert sum(prints_as(budget_row(c)[n], c.printed[n]) for c, n in strings) == 126


def test_the_runs_span_the_printed_compute() -> None:
    windows = paper_windows().values()
    low, high = min(w.compute[0] for w in windows), max(w.compute[1] for w in windows)
    assert [float(f"{low:.2g}"), float(f"{high:.2g}")] == printed()["window_flops"]["value"]


def test_a_gain_at_the_same_loss_takes_the_same_loss() -> None:
    target, reference = paper_surfaces()["SMELT"], paper_surfaces()["Baseline"]
    saved = compute_gain(target, reference, 1e21, 0.9)
    needed = 1e21 / (1 - saved)
    assert float(reference.frontier(needed, 0.9)) == pytest.approx(float(target.frontier(1e21, 0.9)), rel=1e-12)


def test_equal_surfaces_save_nothing() -> None:
    surface = paper_surfaces()["SMELT"]
    assert compute_gain(surface, surface, np.array(BUDGETS), 0.85) == pytest.approx(0, abs=1e-12)


def test_an_optimum_past_the_largest_model_is_said_although_the_budget_is_inside() -> None:
    found = optimum("SMELT", LAWS.surfaces["SMELT"], LAWS.levels, windows=LAWS.windows)
    assert found.mark(1e20, "85%") == ""
    assert found.mark(1e21, "85%") == "SMELT: F* = 1.03e+10 is just above the largest trained"
    assert "F* = 4.54e+10 is 4.41 times the largest trained" in found.mark(1e22, "85%")
    assert "C = 1e+22 is 4.5 times the largest trained" in found.mark(1e22, "85%")
    assert "smallest" in optimum(
        "SMELT", LAWS.surfaces["SMELT"], LAWS.levels, budgets=[1e18], windows=LAWS.windows
    ).mark(1e18, "97%")


def test_the_reference_is_marked_at_the_budget_that_it_would_need() -> None:
    mark = LAWS.gain().mark(1e22, "85%")
    assert "Baseline: C = 1.31e+22 is 5.92 times the largest trained" in mark and "SMELT: C = 1e+22" in mark


def test_a_loss_below_the_references_floor_is_nan_with_the_reason() -> None:
    surfaces = {**paper_surfaces(), "SMELT": replace(paper_surfaces()["SMELT"], E=1.0)}
    found = gain("SMELT", "Baseline", surfaces, paper_levels(), budgets=[1e20, 1e24])
    assert np.isnan(found.stat.values[1]).all() and not np.isnan(found.stat.values[0]).any()
    assert found.mark(1e24, "85%") == "SMELT's loss lies below E of Baseline, which no compute reaches"


@pytest.mark.parametrize("budgets", [[], [0.0], [-1e20]])
def test_budgets_must_be_positive(budgets: list[float]) -> None:
    with pytest.raises(InputError, match="compute budgets in FLOPs, greater than 0"):
        gain("SMELT", "Baseline", paper_surfaces(), paper_levels(), budgets=budgets)


def test_levels_named_as_percentages_are_taken_at_their_name() -> None:
    fits = fit_laws(synthetic_runs())
    assert [(level.name, level.sparsity) for level in levels_of(fits)] == [("85%", 0.85), ("95%", 0.95), ("97%", 0.97)]


def test_budgets_follow_the_runs() -> None:
    assert decades(*paper_windows().values()) == BUDGETS
    window = replace(next(iter(paper_windows().values())), compute=(2e15, 5e15))
    assert decades(window) == (pytest.approx(10**15.5),)


def test_a_study_of_fitted_runs_saves_what_the_printed_surfaces_save() -> None:
    study = Study.of(synthetic_runs(), draws=0)
    assert (study.target, study.reference) == ("SMELT", "Baseline")
    np.testing.assert_allclose(study.laws.gain().stat.values, LAWS.gain().stat.values, atol=1e-6)


def test_the_comparison_with_the_paper_lists_every_printed_number() -> None:
    lines = paper_text().splitlines()
    assert (
        len(lines) == 2 + len(GAINS) + 6 and "| gain at 1e+21, S 85%   |   18.0% |     17.94% |      -0.06 |" in lines
    )


def test_three_architectures_need_names() -> None:
    table = synthetic_runs()
    table.columns["arch"][0] = "other"  # type: ignore[index]
    with pytest.raises(InputError, match="say which is the target"):
        Study.of(table)
    with pytest.raises(InputError, match="two different architectures"):
        Study.of(synthetic_runs(), "SMELT", "SMELT")
