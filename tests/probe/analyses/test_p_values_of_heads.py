"""The p values of heads whose effects on eight prompts are known, so that every flip of signs can be counted on paper."""

from __future__ import annotations

import numpy as np
import pytest

from visitlens.probe.analyses.ablation.ablate_recording import head_ablation
from visitlens.probe.analyses.ablation.heads import AblationSums
from visitlens.probe.analyses.results.head_ablation import HeadAblation

HURTS, HELPS, NOTHING, LITTLE = range(4)


@pytest.fixture(scope="module")
def ablation() -> HeadAblation:
    """One layer run once, four heads: 1 to 8 more loss, as much less, none at all, and changes of either sign."""
    prompts = np.arange(1.0, 9)
    change = np.zeros((8, 1, 1, 4))
    change[:, 0, 0, HURTS], change[:, 0, 0, HELPS] = prompts, -prompts
    change[:, 0, 0, LITTLE] = [1, -1, 2, -2, 3, -3, 4, -3.5]
    sums = AblationSums(((1,),), (0,), (0, 1, 2, 3), np.ones(8), change, np.ones(8))
    about = {"documents": 8, "tokens": 80, "provenance": {}}
    return head_ablation(sums, name="x", metric="loss", mode="zero", about=about)


def test_a_p_value_is_two_sided_and_counts_flips_of_either_sign(ablation: HeadAblation) -> None:
    """Eight changes of one sign: of the 256 flips only they and their opposite are as large, whichever sign they have."""
    p = ablation.p_values()[0]
    assert p[HURTS] == p[HELPS] == 2 / 256
    assert p[NOTHING] == 1
    assert 0.5 < p[LITTLE] < 1


def test_the_corrected_p_is_no_smaller_and_only_the_heads_with_an_effect_are_found(ablation: HeadAblation) -> None:
    p, corrected = ablation.p_values()[0], ablation.p_family()[0]
    assert (corrected >= p).all() and corrected[HURTS] == corrected[HELPS] < 0.05
    assert ablation.found()[0].tolist() == [True, True, False, False]
    assert (ablation.top().layer, ablation.top().head) == (0, HURTS)


def test_the_interval_of_a_heads_effect_spans_what_its_prompts_allow(ablation: HeadAblation) -> None:
    """The mean of 1 to 8 is 4.5 with a standard error of sqrt(6 / 8) = 0.87: the interval is a few of these wide, not a thousandth
    of one and not thirty."""
    low, high = (bound.ravel() for bound in ablation.effect.interval())
    half = (high - low) / 2
    assert 1.5 * np.sqrt(6 / 8) < half[HURTS] < 4 * np.sqrt(6 / 8)
    assert low[HURTS] < 4.5 < high[HURTS] and low[LITTLE] < 0 < high[LITTLE]
    np.testing.assert_allclose([low[HELPS], high[HELPS]], [-high[HURTS], -low[HURTS]], rtol=1e-12)


def test_a_head_whose_interval_holds_0_is_not_found_however_small_its_p() -> None:
    """Seven prompts change by 0.1 and one by 10: no other flip is as large, but the mean of 1.3 has a standard error of 1.2."""
    change = np.full((8, 1, 1, 1), 0.1)
    change[0] = 10
    sums = AblationSums(((1,),), (0,), (0,), np.ones(8), change, np.ones(8))
    one = head_ablation(sums, name="x", metric="loss", mode="zero", about={"documents": 8, "tokens": 8})
    low, high = one.effect.interval()
    assert one.p_family()[0, 0] <= 0.05 and low.item() < 0 < high.item()
    assert not one.found()[0, 0] and not one.top().found
