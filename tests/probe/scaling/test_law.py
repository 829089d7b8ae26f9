"""The fit of Eq. 2: round trips from the printed surfaces, what is refused, and what is warned of."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.run_tables import rows_of

from visitlens.errors import InputError
from visitlens.probe.ladder.mini_grid import MINI
from visitlens.probe.ladder.tables import plan_budgets
from visitlens.probe.model.bundled import LADDER
from visitlens.probe.scaling.law import DELTA, ILL_CONDITIONED, Problem, chosen, coefficients, fit_law, fit_laws
from visitlens.probe.scaling.paper import paper_surfaces, synthetic_runs
from visitlens.probe.scaling.surface import COEFFICIENTS
from visitlens.probe.scaling.table import RunTable, read_table, table_of

EXPONENTS = [COEFFICIENTS.index(name) for name in "abc"]


@pytest.fixture(scope="module")
def exact() -> dict:
    return fit_laws(synthetic_runs())


def test_72_endpoints_of_the_printed_surfaces_give_their_coefficients_back(exact: dict) -> None:
    """Relative; the fit stops where float64 ends, about 1e-10 in K, the coefficient that is determined worst."""
    for arch, surface in paper_surfaces().items():
        np.testing.assert_allclose(exact[arch].surface.as_array(), surface.as_array(), rtol=1e-8)
        assert exact[arch].rmse < 1e-10 and len(exact[arch].endpoints) == 72 and not exact[arch].warnings


def test_losses_at_four_decimals_give_exponents_within_2e_4() -> None:
    for arch, fit in fit_laws(synthetic_runs(decimals=4)).items():
        error = np.abs(fit.surface.as_array() - paper_surfaces()[arch].as_array())[EXPONENTS]
        assert error.max() < 2e-4, arch


def test_the_order_of_rows_changes_nothing() -> None:
    table = synthetic_runs(noise=0.005)
    order = np.random.default_rng(1).permutation(len(table))
    mixed = table_of([rows_of(table)[i] for i in order], "mixed")
    for arch, fit in fit_laws(table).items():
        np.testing.assert_allclose(fit_law(mixed, arch).surface.as_array(), fit.surface.as_array(), rtol=1e-5)


def test_a_common_factor_of_all_losses_scales_the_terms_alone() -> None:
    table = synthetic_runs(noise=0.005)
    doubled = RunTable({**table.columns, "loss": 2 * table["loss"]}, table.rows)
    one, two = fit_law(table, "SMELT").surface, fit_law(doubled, "SMELT").surface
    np.testing.assert_allclose(two.as_array(), one.as_array() * [2, 2, 2, 1, 1, 1], rtol=1e-5)


def test_the_gradient_is_that_of_the_objective() -> None:
    problem = Problem.of(chosen(synthetic_runs(noise=0.004), "SMELT"))
    at = problem.parameters(paper_surfaces()["SMELT"])
    weights = np.random.default_rng(0).integers(0, 3, len(problem.f)).astype(float)
    _, slope = problem.objective(at, weights)
    for i in range(6):
        step = np.zeros(6)
        step[i] = 1e-6
        numeric = (problem.objective(at + step, weights)[0] - problem.objective(at - step, weights)[0]) / 2e-6
        assert slope[i] == pytest.approx(numeric, rel=1e-4, abs=1e-3 * np.abs(slope).max())


def test_the_objective_is_huber_of_log_loss_by_hand() -> None:
    """Two endpoints off by 2 and half a delta: 1e6 (delta (2 delta - delta/2) + (delta/2)^2 / 2)."""
    table = synthetic_runs()
    mine = chosen(table, "Baseline").where(np.arange(72) < 2)
    factors = np.exp([2 * DELTA, DELTA / 2])
    problem = Problem.of(RunTable({**mine.columns, "loss": mine["loss"] * factors}, mine.rows))
    value, _ = problem.objective(problem.parameters(paper_surfaces()["Baseline"]), np.ones(2))
    assert value == pytest.approx(1e6 * (1.5 * DELTA**2 + DELTA**2 / 8), rel=1e-6)


def test_an_outlier_moves_a_huber_fit_less_than_its_share() -> None:
    table = synthetic_runs(noise=0.002, seed=3)
    losses = table["loss"].copy()
    losses[40] *= 1.3
    fit = fit_law(RunTable({**table.columns, "loss": losses}, table.rows), table["arch"][40])
    assert np.abs(np.delete(fit.residuals, np.argmax(np.abs(fit.residuals)))).max() < 0.02


def test_the_mini_grid_is_refused_because_tokens_are_fixed_by_scale() -> None:
    with pytest.raises(InputError, match="D is fixed by scale"):
        fit_laws(read_table(LADDER))
    tokens = {scale.name: scale.tokens for scale in MINI.scales}
    rows = [
        {
            "arch": row["arch"],
            "scale": row["scale"],
            "level": row["level"],
            "F": row["flops_per_token"],
            "S": row["S_percent"] / 100,
            "D": tokens[row["scale"]],
            "loss": 3.0,
        }
        for row in plan_budgets(MINI)
    ]
    with pytest.raises(InputError, match="D is fixed by scale"):
        fit_laws(table_of(rows, "mini"))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda t: t["D"] < 5e10, "each scale needs 3 token counts"),
        (lambda t: t["level"] == "85%", "all runs have S = 0.8"),
        (lambda t: t["scale"] == "100M", "there is only the scale 100M"),
        (lambda t: (t["D"] > 1.6e11) | (t["scale"] == "100M"), "1.6B has 2"),
    ],
)
def test_a_design_that_cannot_carry_the_fit_is_refused_with_the_reason(keep, message: str) -> None:
    table = synthetic_runs()
    mine = table.where((table["arch"] == "Baseline") & keep(table))
    if message.startswith("all runs"):
        mine = RunTable({**mine.columns, "S": np.full(len(mine), 0.86)}, mine.rows)
    with pytest.raises(InputError, match=message):
        fit_law(mine, "Baseline")


def test_a_badly_conditioned_design_is_warned_of() -> None:
    """Scales within 5 % of each other can't tell A, a and E apart."""
    table = synthetic_runs()
    mine = chosen(table, "Baseline")
    squeezed = mine["F"].mean() * (mine["F"] / mine["F"].mean()) ** 0.02
    loss = paper_surfaces()["Baseline"].loss(squeezed, mine["S"], mine["D"])
    fit = fit_law(RunTable({**mine.columns, "F": squeezed, "loss": loss}, mine.rows), "Baseline")
    assert fit.condition > ILL_CONDITIONED and "condition number" in fit.warnings[0]


def test_the_condition_number_of_the_papers_design_is_below_the_warning(exact: dict) -> None:
    assert all(5e3 < fit.condition < ILL_CONDITIONED for fit in exact.values())


def test_dense_runs_among_sparse_ones_are_warned_of() -> None:
    table = synthetic_runs()
    S = np.where(table["level"] == "85%", 0.0, table["S"])
    surface = paper_surfaces()["SMELT"]
    loss = np.asarray(surface.loss(table["F"], S, table["D"]))
    fit = fit_law(RunTable({**table.columns, "S": S, "loss": loss}, table.rows), "SMELT")
    assert any("S = 0" in warning for warning in fit.warnings)


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match="no architecture 'smelt'; it has Baseline, SMELT"):
        fit_law(synthetic_runs(), "smelt")
    with pytest.raises(InputError, match="no level 90%; it has 85%, 95%, 97%"):
        fit_law(synthetic_runs(), "SMELT", ["90%"])


def test_coefficients_and_residuals_are_labelled_arrays(exact: dict) -> None:
    stat = coefficients(exact)
    assert float(stat.sel(arch="SMELT", coefficient="c").values) == pytest.approx(0.7011, abs=1e-6)
    assert exact["SMELT"].residual_stat().labels["endpoint"][0] == "SMELT 100M 85% at 2.049e+10 tokens"
