"""Gaps by number of demonstrations, and the exact sign-flip test."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tests.support.run_tables import shots_rows

from visitlens.errors import InputError
from visitlens.probe.scaling.shots import seed_test, shots_gap, sign_flip
from visitlens.probe.scaling.table import table_of

GAPS = {0: 0.009, 1: 0.019, 2: 0.02, 4: 0.018}


@pytest.fixture(scope="module")
def table():
    return table_of(shots_rows(GAPS), "shots", ("arch",))


def test_planted_gaps_come_back_over_the_tasks_above_chance(table) -> None:
    found = shots_gap(table, "SMELT", "Baseline")
    assert found.tasks == ("arc_easy", "answers")
    assert found.left_out == {"copa": "not above its chance accuracy of 0.5 for both"}
    np.testing.assert_allclose(found.gap.values, [gap + 0.0045 for gap in GAPS.values()])  # seeds 0..9 add their mean
    assert found.gap.labels["k"] == list(GAPS)
    np.testing.assert_allclose(found.accuracy.sel(arch="Baseline").values, [0.35 + 0.01 * k for k in GAPS])


def test_2_to_the_10_sign_flips_enumerated_by_hand() -> None:
    values = np.random.default_rng(0).standard_normal(10) + 0.6
    means = np.array([np.mean(values * signs) for signs in product((-1, 1), repeat=10)])
    by_hand = np.mean(np.abs(means) >= abs(values.mean()) - 1e-12)
    assert len(means) == 1024
    assert sign_flip(values).p == pytest.approx(by_hand, abs=1e-12)


def test_ten_seeds_of_one_sign_have_the_smallest_p_there_is() -> None:
    assert round(sign_flip(np.full(10, 0.02)).p, 5) == 0.00195
    assert sign_flip(-np.arange(1.0, 11)).p == pytest.approx(2 / 1024)
    assert sign_flip([1.0, -1.0]).p == 1 and sign_flip([0.3]).p == 1


def test_the_seeds_of_a_task_are_paired(table) -> None:
    found = seed_test(table, "SMELT", "Baseline", "arc_easy", 1)
    assert (found.seeds, found.p) == (10, pytest.approx(2 / 1024))
    assert found.difference == pytest.approx(0.019 + 0.0045)
    gone = table.where(~((table["arch"] == "SMELT") & (table["seed"] == 3)))
    with pytest.raises(InputError, match="doesn't have the same seeds"):
        seed_test(gone, "SMELT", "Baseline", "arc_easy", 1)


def test_a_task_that_lacks_a_k_is_left_out_with_the_reason(table) -> None:
    gone = table.where(~((table["task"] == "answers") & (table["k"] == 4)))
    assert shots_gap(gone, "SMELT", "Baseline", [0, 4]).left_out["answers"] == "no score of both at k = 4"
    with pytest.raises(InputError, match="no task is left"):
        shots_gap(table, "SMELT", "Baseline", [64])
    with pytest.raises(InputError, match="no scores by k of 'other'"):
        shots_gap(table, "other", "Baseline")


@pytest.mark.parametrize("values", [[], [float("nan"), 1.0], [0.1] * 21])
def test_differences_that_cannot_be_tested_are_refused(values: list[float]) -> None:
    with pytest.raises(InputError, match="1 to 20 finite paired differences"):
        sign_flip(values)
