"""The cell bootstrap: paired draws, coverage of planted gains, failed draws counted."""

from __future__ import annotations

import numpy as np
import pytest

from visitlens.errors import InputError
from visitlens.probe.scaling.bootstrap import Refit, bootstrap, cell_weights, common_cells
from visitlens.probe.scaling.law import coefficients, fit_law, fit_laws
from visitlens.probe.scaling.paper import paper_levels, paper_surfaces, synthetic_runs
from visitlens.probe.scaling.study import Study
from visitlens.probe.scaling.surface import compute_gain

NOISE = {"Baseline": 0.00554, "SMELT": 0.00952}
"""The printed RMSE of both fits, in nats."""


def test_a_draw_of_every_cell_once_is_the_fit_itself() -> None:
    fits = fit_laws(synthetic_runs(noise=0.005))
    cells = common_cells({arch: fit.endpoints for arch, fit in fits.items()})
    assert len(cells) == 12
    for fit in fits.values():
        again = Refit.of(fit, cells)(np.ones(12, dtype=int))
        np.testing.assert_allclose(again, fit.surface.as_array(), rtol=1e-4)


def test_a_draw_is_the_fit_of_the_rows_it_drew() -> None:
    """Weights are repeats: endpoints written as often as their cell was drawn give the same surface."""
    table = synthetic_runs(noise=0.005, seed=4)
    fits = fit_laws(table)
    found = bootstrap(fits, 1, seed=9)
    drawn = dict(zip(found.cells, found.weights[0], strict=True))
    times = [drawn[cell] for cell in zip(table["scale"], table["level"], strict=True)]
    repeated = table.where(np.repeat(np.arange(len(table)), times))
    for arch in fits:
        direct = fit_law(repeated, arch).surface.as_array()
        np.testing.assert_allclose(found.surfaces[arch].as_array()[0], direct, rtol=1e-3)


def test_both_architectures_see_the_same_cells_in_each_draw() -> None:
    """Errors that both share cancel in the gain, so its interval is far narrower than with errors of their own."""
    table = synthetic_runs()
    common = np.random.default_rng(0).standard_normal(12) * 0.01
    places = sorted(set(zip(table["scale"], table["level"], strict=True)))
    cells = dict(zip(places, common, strict=True))
    shared = np.array([cells[cell] for cell in zip(table["scale"], table["level"], strict=True)])
    own = np.where(table["arch"] == "SMELT", shared, np.roll(shared, 6))
    widths = []
    for errors in (shared, own):
        table.columns["loss"][:] = synthetic_runs()["loss"] + errors  # type: ignore[index]
        draws = bootstrap(fit_laws(table), 30)
        gains = compute_gain(draws.surfaces["SMELT"], draws.surfaces["Baseline"], 1e21, 0.95)
        widths.append(np.nanstd(gains))
    assert widths[0] < 0.6 * widths[1]


def test_intervals_cover_planted_gains_and_have_the_printed_order_of_width() -> None:
    """16 tables with noise of the printed RMSE, all nine gains: 0.85 to 1.0 of the intervals hold the planted value."""
    surfaces, trials, budgets = paper_surfaces(), 16, np.array([1e20, 1e21, 1e22])[:, None]
    sparsity = np.array([level.sparsity for level in paper_levels()])
    truth = compute_gain(surfaces["SMELT"], surfaces["Baseline"], budgets, sparsity)
    held, widths = [], []
    for trial in range(trials):
        draws = bootstrap(fit_laws(synthetic_runs(noise=NOISE, seed=100 + trial)), 40, seed=trial)
        gains = np.stack(
            [
                compute_gain(*(_at(draws.surfaces[a], i) for a in ("SMELT", "Baseline")), budgets, sparsity)
                for i in range(40)
            ]
        )
        low, high = np.nanquantile(gains, [0.025, 0.975], axis=0)
        held.append((low <= truth) & (truth <= high))
        widths.append(high - low)
    assert 0.85 <= np.mean(held) <= 1.0
    inside = np.median(widths, 0)[:2]
    assert inside.min() > 0.05 and inside.max() < 0.35, "the printed brackets are 0.11 to 0.21 wide at 1e20 and 1e21"


def _at(surface, index: int):
    return type(surface).from_array(surface.as_array()[index])


def test_draws_that_cannot_be_fitted_are_counted_and_left_out() -> None:
    """Of four cells (two scales, two levels), draws often hold one scale or one level alone."""
    table = synthetic_runs(noise=0.003)
    keep = np.isin(table["scale"], ["100M", "1.6B"]) & np.isin(table["level"], ["85%", "97%"])
    study = Study.of(table.where(keep), draws=200)
    draws = study.resampled
    assert draws is not None
    alone = [
        len({scale for (scale, _), n in zip(draws.cells, row, strict=True) if n}) < 2
        or len({level for (_, level), n in zip(draws.cells, row, strict=True) if n}) < 2
        for row in draws.weights
    ]
    assert 0 < sum(alone) <= draws.failed["SMELT"] < 200
    assert np.isnan(draws.surfaces["SMELT"].as_array()[np.array(alone)]).all()
    low, high = study.laws.gain([1e20]).stat.interval()
    assert np.isfinite(low).all() and (low <= high).all()
    assert f"SMELT {draws.failed['SMELT']}" in draws.describe()


def test_replicates_of_coefficients_travel_with_their_values() -> None:
    fits = fit_laws(synthetic_runs(noise=0.005))
    draws = bootstrap(fits, 50)
    stat = coefficients(fits, draws.surfaces)
    low, high = stat.sel(arch="SMELT", coefficient="a").interval()
    assert low < stat.sel(arch="SMELT", coefficient="a").values < high


def test_architectures_with_other_cells_are_refused() -> None:
    table = synthetic_runs()
    gone = (table["arch"] == "SMELT") & (table["scale"] == "600M") & (table["level"] == "97%")
    with pytest.raises(InputError, match="SMELT lacks 600M 97%"):
        bootstrap(fit_laws(table.where(~gone)), 10)
    with pytest.raises(InputError, match="at least one draw"):
        bootstrap(fit_laws(table), 0)
    few = table.where((table["scale"] == "100M") & (table["level"] != "97%"))
    with pytest.raises(InputError, match="needs three or more, got 2"):
        common_cells({"SMELT": few})


def test_weights_count_a_draw_with_replacement() -> None:
    weights = cell_weights(12, 5000, 0)
    assert (weights.sum(1) == 12).all()
    assert weights.mean(0) == pytest.approx(1, abs=0.06)  # four standard errors of a multinomial count
    assert (weights == 0).mean() == pytest.approx((11 / 12) ** 12, abs=0.01)
