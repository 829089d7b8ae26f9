"""Gains of parts of the text: planted ones come back; quartiles keep the mean."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.run_tables import SOURCES, full_table, rows_of

from visitlens.errors import InputError
from visitlens.probe.scaling.law import fit_laws
from visitlens.probe.scaling.paper import paper_surfaces, printed, synthetic_runs
from visitlens.probe.scaling.subset import fit_parts, quartile_sizes, quartiles
from visitlens.probe.scaling.surface import Surface, compute_gain
from visitlens.probe.scaling.table import table_of


def planted(sources: int) -> tuple[list[dict], dict[str, float]]:
    """Losses by source with E, A, K of their own, and the gain at 1e21 FLOPs and S 95 % that these mean."""
    rng, rows, gains = np.random.default_rng(0), [], {}
    shapes = {f"s{i:02}": (rng.uniform(0.7, 1.2, 3), rng.uniform(0.9, 0.99)) for i in range(sources)}
    for name, (factors, better) in shapes.items():
        own = {}
        for arch, x in paper_surfaces().items():
            E, A, K = np.array([x.E, x.A, x.K]) * factors
            own[arch] = Surface(E, A * (better if arch == "SMELT" else 1), K, x.a, x.b, x.c)
        gains[name] = float(compute_gain(own["SMELT"], own["Baseline"], 1e21, 0.95))
        rows += [
            {**r, "source": name, "category": name[:2], "loss": float(own[r["arch"]].loss(r["F"], r["S"], r["D"]))}
            for r in rows_of(synthetic_runs())
        ]
    return rows, gains


@pytest.fixture(scope="module")
def many() -> tuple:
    rows, gains = planted(39)
    table = table_of([*rows_of(synthetic_runs()), *rows], "sources")
    fits = fit_laws(table)
    found = fit_parts(table, fits, "source").gain("SMELT", "Baseline", 1e21, 0.95)
    return table, found, gains


def test_each_sources_planted_gain_comes_back(many) -> None:
    _, found, gains = many
    assert found.labels["part"] == list(gains)
    np.testing.assert_allclose(found.values, list(gains.values()), atol=1e-5)


def test_39_sources_fall_into_quartiles_of_10_10_10_9() -> None:
    assert quartile_sizes(39) == printed()["quartile_gain_percent"]["sizes"] == [10, 10, 10, 9]


def test_the_weighted_mean_of_quartiles_is_the_mean_of_sources(many) -> None:
    table, found, _ = many
    quarters = quartiles(table, found, "SMELT", "Baseline")
    weighted = np.average(quarters.values, weights=quartile_sizes(39))
    assert weighted == pytest.approx(found.values.mean(), rel=1e-12)
    assert "72 pairs" in quarters.aggregation


def test_quartiles_rank_by_the_references_loss_in_each_pair() -> None:
    """Eight sources whose loss rises with their number: Q1 holds the first two."""
    ends = rows_of(synthetic_runs())
    rows = [
        {**end, "source": f"s{i}", "loss": end["loss"] + 0.1 * i - 0.002 * i * (end["arch"] == "SMELT")}
        for end in ends
        for i in range(8)
    ]
    table = table_of([*ends, *rows], "ranked")
    gains = fit_parts(table, fit_laws(table), "source").gain("SMELT", "Baseline", 1e21, 0.95)
    found = quartiles(table, gains, "SMELT", "Baseline")
    assert (np.diff(gains.values) > 0.005).all(), "sources differ, or any ranking would do"
    np.testing.assert_allclose(found.values, gains.values.reshape(4, 2).mean(1))


def test_a_part_that_is_all_text_has_the_gain_of_all_text() -> None:
    ends = rows_of(synthetic_runs(noise=0.004))
    table = table_of([*ends, *({**end, "category": "all"} for end in ends)], "same")
    fits = fit_laws(table)
    gain = fit_parts(table, fits, "category").gain("SMELT", "Baseline", 1e21, 0.95)
    whole = compute_gain(fits["SMELT"].surface, fits["Baseline"].surface, 1e21, 0.95)
    assert gain.values == pytest.approx([float(whole)], abs=1e-6)


def test_parts_keep_the_exponents_of_all_text() -> None:
    table = full_table()
    fits = fit_laws(table)
    found = fit_parts(table, fits, "category", levels=["85%", "97%"])
    assert found.parts == tuple(dict.fromkeys(SOURCES.values()))
    for arch, fit in fits.items():
        for name in "abc":
            np.testing.assert_allclose(getattr(found.surfaces[arch], name), getattr(fit.surface, name), rtol=1e-12)


def test_what_quartiles_need_is_said(many) -> None:
    table, found, _ = many
    with pytest.raises(InputError, match="those of other parts"):
        quartiles(table, found.sel(part=lambda name: name < "s05"), "SMELT", "Baseline")
    with pytest.raises(InputError, match="has both other and Baseline"):
        quartiles(table, found, "other", "Baseline")
