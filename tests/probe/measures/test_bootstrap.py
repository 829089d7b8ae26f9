"""Document-level intervals: paired weights, ratio of sums, and the coverage that a 95% interval promises."""

from __future__ import annotations

import numpy as np
import pytest

from visitlens.probe.measures.bootstrap import mean_and_replicates, resampling_weights


def test_each_replicate_draws_as_many_groups_as_there_are() -> None:
    weights = resampling_weights(12, 500)
    assert weights.shape == (500, 12)
    assert (weights.sum(1) == 12).all() and (weights >= 0).all() and (weights == weights.round()).all()
    np.testing.assert_allclose(weights.mean(0), 1, atol=0.2)


def test_weights_are_the_seeds_so_that_every_measure_has_the_same() -> None:
    assert np.array_equal(resampling_weights(7), resampling_weights(7))
    assert not np.array_equal(resampling_weights(7), resampling_weights(7, seed=1))


def test_the_mean_is_a_ratio_of_sums_and_replicates_reweight_groups() -> None:
    """Groups of 1, 3 and 0 tokens. Drawing the first twice and the second once: (2 * 5 + 1 * 3) / (2 * 1 + 1 * 3)."""
    total, count = np.array([[5.0], [3.0], [0.0]]), np.array([[1.0], [3.0], [0.0]])
    mean, replicates = mean_and_replicates(total, count, np.array([[2.0, 1, 0], [0, 0, 3], [1, 1, 1]]))
    assert mean.tolist() == [8 / 4]
    assert replicates[0, 0] == 13 / 5 and np.isnan(replicates[1, 0]) and replicates[2, 0] == 2


def test_what_was_never_measured_is_nan_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    mean, replicates = mean_and_replicates(np.zeros((4, 2)), np.zeros((4, 2)), resampling_weights(4))
    assert np.isnan(mean).all() and np.isnan(replicates).all() and not recwarn.list


@pytest.mark.parametrize("groups", [1, 5])
def test_one_group_or_no_weights_give_no_replicates(groups: int) -> None:
    total, count = np.ones((groups, 3)), np.full((groups, 3), 2.0)
    weights = resampling_weights(groups) if groups == 1 else None
    mean, replicates = mean_and_replicates(total, count, weights)
    assert mean.tolist() == [0.5] * 3 and replicates is None


def test_one_group_with_documents_among_empty_ones_has_no_interval() -> None:
    """Every replicate without it is undefined, and all others are the same: no spread to be told."""
    total, count = np.zeros((10, 1)), np.zeros((10, 1))
    total[3], count[3] = 6, 2
    mean, replicates = mean_and_replicates(total, count, resampling_weights(10))
    assert mean.tolist() == [3] and np.isnan(np.quantile(replicates, [0.025, 0.975], axis=0)).all()


@pytest.mark.parametrize("trend", [0.0, 0.05], ids=["sizes don't matter", "longer documents score higher"])
def test_the_95_percent_interval_covers_the_truth_as_often_as_it_says(trend: float) -> None:
    """60 documents of 5 to 49 tokens whose tokens are alike (a document's own mean has deviation 1, as a token has).

    The truth is the mean over tokens, E[n mu(n)] / E[n]. An interval that took tokens for independent would cover it
    far less often: that the test could tell is checked as well.
    """
    rng, sizes = np.random.default_rng(1), np.arange(5, 50)
    truth = trend * (sizes.astype(float) ** 2).mean() / sizes.mean()
    weights = resampling_weights(60)
    covered, covered_by_tokens = [], []
    for _ in range(400):
        n = rng.choice(sizes, 60).astype(float)
        totals = n * (trend * n + rng.normal(size=60)) + np.sqrt(n) * rng.normal(size=60)
        mean, replicates = mean_and_replicates(totals[:, None], n[:, None], weights)
        low, high = np.quantile(replicates[:, 0], [0.025, 0.975])
        covered.append(low <= truth <= high)
        spread = 1.96 * np.sqrt((2 + (trend * n).var()) / n.sum())
        covered_by_tokens.append(abs(mean[0] - truth) <= spread)
    assert 0.90 <= np.mean(covered) <= 0.98
    assert np.mean(covered_by_tokens) < 0.6
