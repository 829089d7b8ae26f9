"""Intervals, p values and products over documents: against values by hand, and the error rates that they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.support.jackknife import T_99, replicates_within

from visitlens.probe.measures import intervals
from visitlens.probe.measures.estimate import mean_of, product_of
from visitlens.probe.measures.intervals import (
    FEWEST,
    SKEW,
    holm,
    interval,
    mean_and_replicates,
    product_and_replicates,
    support_of,
    t_quantile,
    t_tails,
)
from visitlens.probe.measures.measure import Measure, StatArray

RUNS = Measure("x", "X", ("run",), "units", "", "ours")


def runs_of(total: np.ndarray, count: np.ndarray, groups: str = "documents") -> StatArray:
    """Sums [document, run]."""
    return mean_of(RUNS, (total, count), {"run": range(total.shape[1])}, groups)


# By hand


def test_a_replicate_is_the_mean_without_one_group() -> None:
    """Groups of 1, 3 and 0 tokens with sums 5, 3 and 0: 8 / 4; without each 3 / 3, 5 / 1 and 8 / 4."""
    total, count = np.array([[5.0], [3.0], [0.0]]), np.array([[1.0], [3.0], [0.0]])
    mean, replicates = mean_and_replicates(total, count)
    assert replicates is not None
    assert mean.tolist() == [2.0] and replicates.tolist() == [[1.0], [5.0], [2.0]]
    assert support_of(count).tolist() == [[2.0], [16 / 10]]  # two groups, worth (1 + 3)² / (1² + 3²)


def test_what_was_never_measured_is_nan_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    mean, replicates = mean_and_replicates(np.zeros((4, 2)), np.zeros((4, 2)))
    assert replicates is not None and np.isnan(mean).all() and np.isnan(replicates).all() and not recwarn.list


def test_one_group_gives_no_replicates_and_one_among_empty_ones_no_interval() -> None:
    mean, replicates = mean_and_replicates(np.ones((1, 3)), np.full((1, 3), 2.0))
    assert mean.tolist() == [0.5] * 3 and replicates is None
    total, count = np.zeros((10, 1)), np.zeros((10, 1))
    total[3], count[3] = 6, 2
    stat = runs_of(total, count)
    assert stat.values.tolist() == [3] and np.isnan(stat.interval()).all()


def test_an_even_sample_has_students_interval() -> None:
    """-3.5 to 3.5 in steps of 1: mean 0, deviation √6, t of 7 degrees 2.3646, and no skewness to correct."""
    x = np.arange(8.0)[:, None] - 3.5
    low, high = runs_of(x, np.ones_like(x)).interval()
    half = 2.364624 * math.sqrt(6) / math.sqrt(8)
    np.testing.assert_allclose([low[0], high[0]], [-half, half], rtol=1e-6)


def test_a_skewed_sample_has_the_further_bound_on_each_side() -> None:
    """Nine documents at 0 and one at 10: by hand from the definitions of Student and of Hall."""
    x = np.zeros((10, 1))
    x[0] = 10
    low, high = runs_of(x, np.ones_like(x)).interval()
    error = math.sqrt(90 / 9) / math.sqrt(10)  # deviation √10
    skewness = (9**3 - 9 * 1**3) / 10 / (90 / 10) ** 1.5 * math.sqrt(10 * 9) / 8
    q = SKEW * skewness / math.sqrt(10)

    def unbent(x: float) -> float:
        inner = 1 + q * (x - q / 6)
        return 3 / q * (math.copysign(abs(inner) ** (1 / 3), inner) - 1)

    t = 2.262157
    assert low[0] == pytest.approx(1 - error * t, rel=1e-5)  # Hall's bound, 1 - 0.9 errors, is nearer
    assert high[0] == pytest.approx(1 - error * unbent(-t), rel=1e-5)
    assert high[0] - 1 > 1.5 * (1 - low[0])


def test_unequal_lengths_take_degrees_of_freedom() -> None:
    """A document of 30 tokens and 19 of 10 are worth (30 + 190)² / (900 + 1900) = 17.3: 16.25 degrees, not 19."""
    count = np.array([30.0, *[10.0] * 19])
    assert support_of(count).tolist() == [20.0, pytest.approx(220**2 / 2800)]
    values = np.array(5.0)
    replicates = replicates_within(values, 1.0)  # not skewed: Student's t is all there is
    for worth, t in ((17.0, 2.119905), (100.0, T_99)):
        low, high = interval(values, replicates, np.array([100.0, worth]))
        assert [float(low), float(high)] == pytest.approx([5 - t / T_99, 5 + t / T_99], rel=1e-6)


@pytest.mark.parametrize("documents", [2, FEWEST - 1, FEWEST])
def test_below_eight_documents_there_is_no_interval_and_the_reason_is_said(documents: int) -> None:
    x = np.arange(float(documents))[:, None]
    stat = runs_of(x, np.full_like(x, 3.0))
    known = documents == FEWEST
    assert np.isfinite(stat.interval()).all() == np.isfinite(stat.p_values()).all() == known
    assert stat.no_interval == ("" if known else f"too few documents: {documents}; an interval takes 8")


def test_documents_of_uneven_length_are_fewer_than_they_look() -> None:
    count = np.array([1000.0, *[1.0] * 30])[:, None]
    stat = runs_of(count * 2, count)
    assert np.isnan(stat.interval()).all()
    assert stat.no_interval.startswith("too few documents: 31, which are as uneven as 1.1")
    assert replace_none(stat).no_interval == "one total for all documents"


def replace_none(stat: StatArray) -> StatArray:
    from dataclasses import replace

    return replace(stat, replicates=None, support=None)


def test_p_is_below_a_level_exactly_where_the_interval_leaves_0_out() -> None:
    rng = np.random.default_rng(0)
    x = rng.lognormal(0, 1, (20, 400)) - rng.uniform(0.5, 2.5, 400)
    stat = runs_of(x, np.ones_like(x))
    for level in (0.5, 0.95, 0.99):
        low, high = stat.interval(level)
        apart = (low > 0) | (high < 0)
        assert 0.05 < apart.mean() < 0.95
        np.testing.assert_array_equal(stat.p_values() < 1 - level, apart)


def test_a_value_of_nothing_but_zeros_has_p_1_and_a_constant_p_0() -> None:
    x = np.stack([np.zeros(9), np.ones(9)], 1)
    assert runs_of(x, np.ones_like(x)).p_values().tolist() == [1.0, 0.0]


# Tables of Student's t and the normal; Holm's example


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (4, 2.776445), (7, 2.364624), (29, 2.045230), (1e4, 1.960201)]
)
def test_quantiles_of_students_t_are_those_of_tables(degrees: float, expected: float) -> None:
    assert float(t_quantile(0.975, degrees)) == pytest.approx(expected, rel=1e-6)
    assert float(t_tails(expected, degrees)) == pytest.approx(0.05, rel=1e-5)
    assert float(t_quantile(0.025, degrees)) == pytest.approx(-expected, rel=1e-6)
    assert float(t_quantile(0.5, degrees)) == 0


def test_holm_by_hand() -> None:
    p = np.array([[0.01, 0.04], [0.03, np.nan]])
    np.testing.assert_allclose(holm(p), [[0.03, 0.06], [0.06, np.nan]])  # 3 * 0.01, 2 * 0.03, then at least that
    np.testing.assert_allclose(holm([0.5, 0.9]), [1.0, 1.0])
    assert holm([]).shape == (0,)


# Products over pairs of documents


def test_a_product_is_over_pairs_of_different_documents() -> None:
    """Sums 1, 2, 3 and 2, 0, 1 of one token each: (1*0 + 1*1 + 2*2 + 2*1 + 3*2 + 3*0) / 6; without the last 2*2 + 1*0 over 2."""
    ones = np.ones((3, 1))
    first, second = np.array([[1.0], [2.0], [3.0]]), np.array([[2.0], [0.0], [1.0]])
    product, replicates = product_and_replicates((first, ones), (second, ones))
    assert product.tolist() == [13 / 6] and replicates is not None
    assert replicates[2, 0] == pytest.approx((1 * 0 + 2 * 2) / 2)


def test_of_one_document_the_product_is_the_plug_in() -> None:
    product, replicates = product_and_replicates(
        (np.array([[6.0]]), np.array([[2.0]])), (np.array([[4.0]]), np.array([[2.0]]))
    )
    assert product.tolist() == [6.0] and replicates is None
    empty = np.zeros((3, 1))
    one, two = empty.copy(), empty.copy()
    one[1], two[1] = 6, 2
    product, replicates = product_and_replicates((one, two), (one, two))
    assert product.tolist() == [9.0]


@pytest.mark.parametrize("experts", [96, 504])
def test_squares_of_many_small_shares_have_no_bias_and_intervals_that_hold(experts: int) -> None:
    """30 documents whose shares vary about the text's, as much as makes the plug-in of 504 experts a third too large."""
    rng = np.random.default_rng(experts)
    popular = rng.dirichlet(np.full(experts, 3.0))
    truth = float((popular**2).sum())
    gamma = rng.standard_gamma(26 * popular, (30, 200, experts))
    shares = gamma / gamma.sum(-1, keepdims=True)
    measure = Measure("x", "X", ("run", "expert"), "units", "", "ours")
    sums = shares, np.ones_like(shares)
    stat = product_of(measure, sums, sums, {"run": range(200), "expert": range(experts)}).mean("expert")
    stat = stat.combine(experts, np.multiply, stat.measure)
    low, high = stat.interval()
    plug_in = (shares.mean(0) ** 2).sum(-1)
    assert plug_in.mean() / truth > 1.05  # else the test couldn't tell
    # The standard error of a mean of 200 runs is a fourteenth of the runs' spread.
    assert abs(stat.values.mean() - truth) < 4 * stat.values.std() / math.sqrt(200)
    assert ((low <= truth) & (truth <= high)).mean() > 0.9


# Different documents


def test_arrays_of_the_same_documents_are_paired_and_of_others_independent() -> None:
    rng = np.random.default_rng(3)
    common = rng.normal(size=(30, 50))
    first, second = common + 0.1 * rng.normal(size=(30, 50)), common
    ones = np.ones_like(common)
    measure = RUNS
    paired = runs_of(first, ones).combine(runs_of(second, ones), np.subtract, measure)
    apart = runs_of(first, ones, "a").combine(runs_of(second, ones, "b"), np.subtract, measure)
    np.testing.assert_allclose(paired.values, apart.values)
    widths = [np.mean(np.subtract(*stat.interval()[::-1])) for stat in (paired, apart)]
    assert widths[1] > 8 * widths[0]
    assert apart.units == (("a", 30), ("b", 30)) and apart.replicates is not None and len(apart.replicates) == 60
    # Two independent means of deviation 1: √(2 / 30) each side times t of 29 degrees, and a little for skewness.
    assert widths[1] / 2 == pytest.approx(2.045 * math.sqrt(2 / 30), rel=0.1)
    twice = apart.combine(
        runs_of(first, ones, "a"), np.subtract, measure
    )  # minus what is in it: the second alone is left
    np.testing.assert_allclose(np.ptp(twice.replicates[:30], axis=0), 0, atol=1e-12)


# What 95 % means: of the same cases benchmarks/coverage.py has the whole table, in docs/uncertainty.md


@pytest.mark.parametrize("trend", [0.0, 0.05], ids=["sizes don't matter", "longer documents score higher"])
def test_the_95_percent_interval_covers_the_truth_as_often_as_it_says(trend: float) -> None:
    """60 documents of 5 to 49 tokens whose tokens are alike (a document's own mean has deviation 1, as a token has).

    The truth is the mean over tokens, E[n mu(n)] / E[n]. An interval that took tokens for independent would cover it
    far less often: that the test could tell is checked as well.
    """
    rng, sizes = np.random.default_rng(1), np.arange(5, 50)
    truth = trend * (sizes.astype(float) ** 2).mean() / sizes.mean()
    n = rng.choice(sizes, (60, 1000)).astype(float)
    totals = n * (trend * n + rng.normal(size=n.shape)) + np.sqrt(n) * rng.normal(size=n.shape)
    stat = runs_of(totals, n)
    low, high = stat.interval()
    spread = 1.96 * np.sqrt((2 + (trend * n).var(0)) / n.sum(0))
    assert 0.93 <= ((low <= truth) & (truth <= high)).mean() <= 0.97
    assert (np.abs(stat.values - truth) <= spread).mean() < 0.6


def test_breaking_the_formula_breaks_the_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of the guard: without the correction for skewness the intervals of a long tail cover less."""
    rng = np.random.default_rng(5)
    x = rng.lognormal(0, 1, (30, 2000))
    stat = runs_of(x, np.ones_like(x))

    def covered() -> float:
        low, high = interval(stat.values, stat.replicates, support_of(np.ones_like(x)))
        return float(((low <= math.exp(0.5)) & (math.exp(0.5) <= high)).mean())

    whole = covered()
    monkeypatch.setattr(intervals, "SKEW", 0.0)
    assert whole > 0.91 and whole - covered() > 0.015
