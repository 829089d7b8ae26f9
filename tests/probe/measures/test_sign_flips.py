"""Sign-flip tests: exact where all flips are tried, corrected for the number of effects, and never below what the draws allow."""

from __future__ import annotations

import numpy as np
import pytest

from visitlens.probe.measures.estimate import mean_of
from visitlens.probe.measures.intervals import t_tails
from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.sign_flips import DRAWS, _signs, _statistics, flip_test


def test_few_documents_have_all_their_flips_counted() -> None:
    """1 to 8, all positive: no other flip than theirs and its opposite gives as large a statistic, 2 of 256."""
    x = np.arange(1.0, 9)[:, None]
    test = flip_test(x, np.ones_like(x))
    assert test.p.tolist() == test.p_family.tolist() == [2 / 256]


def test_no_p_is_below_what_the_draws_allow() -> None:
    x = np.random.default_rng(0).normal(50, 1, (200, 3))
    test = flip_test(x, np.ones_like(x))
    assert (test.p == 1 / DRAWS).all() and (test.p_family == 1 / DRAWS).all()


@pytest.mark.parametrize("documents", [12, 40, 3000])
def test_the_flips_that_are_tried_are_a_group(documents: int) -> None:
    """Of which the product of two is one, as exactness takes; each document is flipped in half of them, and no flip comes twice."""
    (signs,) = _signs(documents, DRAWS, 0)
    assert signs.shape == (DRAWS, documents) and (signs[0] == 1).all() and not signs.sum(0).any()
    known = {row.tobytes() for row in signs}
    rng = np.random.default_rng(1)
    assert len(known) == DRAWS
    assert all((signs[a] * signs[b]).tobytes() in known for a, b in rng.integers(0, DRAWS, (50, 2)))


def test_an_effect_that_is_nothing_has_p_1_and_too_few_documents_none() -> None:
    x = np.random.default_rng(1).normal(size=(9, 2))
    x[:, 1] = 0
    test = flip_test(x, np.ones_like(x))
    assert test.p[1] == test.p_family[1] == 1
    few = flip_test(x[:7], np.ones((7, 2)))
    assert np.isnan(few.p).all() and np.isnan(few.p_family).all()
    assert np.isnan(flip_test(x[:1], np.ones((1, 2))).p).all()


def test_documents_that_hold_nothing_change_nothing() -> None:
    x = np.random.default_rng(2).normal(0.5, 1, (10, 4))
    padded = np.concatenate([x, np.zeros((5, 4))])
    counts = np.concatenate([np.ones((10, 4)), np.zeros((5, 4))])
    np.testing.assert_array_equal(flip_test(x, np.ones_like(x)).p, flip_test(padded, counts).p)


def test_the_correction_is_for_all_effects_and_takes_in_that_they_go_together() -> None:
    rng = np.random.default_rng(3)
    one = rng.normal(0.6, 1, (16, 1))
    same = flip_test(np.repeat(one, 24, axis=1), np.ones((16, 24)))
    np.testing.assert_array_equal(same.p_family, same.p)  # 24 times the same effect is one
    apart = flip_test(np.concatenate([one, rng.normal(size=(16, 23))], axis=1), np.ones((16, 24)))
    assert apart.p_family[0] > 3 * apart.p[0]
    assert (apart.p_family >= apart.p).all()


def test_the_corrected_p_steps_down_by_hand() -> None:
    """Two effects on 8 documents: the larger is compared with the larger of both, the smaller with itself alone."""
    x = np.stack([np.arange(1.0, 9), [1.0, -1.5, 2, -2.5, 3, -3.5, 4, -4.5]], 1)
    signs = 1.0 - 2.0 * (np.arange(256)[:, None] >> np.arange(8) & 1)
    found = _statistics(signs, x / np.sqrt((x**2).sum(0)))
    larger, smaller = found[0]
    assert larger > smaller
    test = flip_test(x, np.ones_like(x))
    below = 1 - 1e-7
    assert test.p_family[0] == (found.max(1) >= larger * below).mean()
    assert test.p_family[1] == max(test.p_family[0], (found[:, 1] >= smaller * below).mean())


def test_the_statistic_is_that_of_the_interval() -> None:
    x = np.random.default_rng(4).lognormal(0, 1, (32, 50)) - 1.2
    measure = Measure("x", "X", ("run",), "units", "", "ours")
    stat = mean_of(measure, (x, np.ones_like(x)), {"run": range(50)})
    statistic = _statistics(np.ones((1, 32)), x / np.sqrt((x**2).sum(0)))[0]
    np.testing.assert_allclose(t_tails(statistic, 31), stat.p_values(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["normal", "lognormal with either sign"])
def test_with_no_effect_one_search_in_twenty_finds_a_head_at_most(name: str) -> None:
    """300 searches among 24 heads, 16 prompts: 0.05, and 0.09 is more than three standard errors above it. The heads of a prompt go
    together, and their effects have a long tail with a sign of its own."""
    rng, wrong = np.random.default_rng(5), 0
    for _ in range(300):
        x = rng.normal(size=(16, 24))
        if name != "normal":
            x = np.exp(x + rng.normal(size=(16, 1))) * rng.choice([-1, 1], (16, 1))
        wrong += (flip_test(x, np.ones_like(x)).p_family <= 0.05).any()
    assert wrong / 300 < 0.09


def test_a_mean_of_0_under_a_long_tail_is_seldom_taken_for_an_effect() -> None:
    """Of 24 heads with lognormal(1) effects less their mean, on 32 prompts: Student's t alone finds one in six searches of ten."""
    rng, wrong, by_t = np.random.default_rng(6), 0, 0
    for _ in range(150):
        x = rng.lognormal(0, 1, (32, 24)) - np.exp(0.5)
        wrong += (flip_test(x, np.ones_like(x)).p_family <= 0.05).any()
        t = x.mean(0) / x.std(0, ddof=1) * np.sqrt(32)
        by_t += (t_tails(t, 31) <= 0.05 / 24).any()
    assert wrong / 150 < 0.19 and by_t / 150 > 0.4  # 0.10, three standard errors of 150 searches above it
