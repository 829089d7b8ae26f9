"""Downstream residuals: a planted sigmoid with an offset, wins, chance and what is warned of."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.run_tables import EXCESS, TASKS, full_rows, full_table

from visitlens.errors import InputError
from visitlens.probe.scaling.chance import CHANCE, CORE, centred
from visitlens.probe.scaling.downstream import (
    Sigmoid,
    downstream,
    fit_sigmoid,
    mean_of,
    residuals_by,
    scores_of,
    tasks_of,
    wins,
)
from visitlens.probe.scaling.paper import synthetic_runs
from visitlens.probe.scaling.table import table_of


@pytest.fixture(scope="module")
def table():
    return full_table()


def test_a_sigmoid_comes_back_from_its_own_points() -> None:
    truth = Sigmoid(0.25, 0.6, 5.0, 2.1, -1)
    loss = np.linspace(1.5, 2.8, 40)
    found = fit_sigmoid(loss, truth(loss), lower_is_better=False)
    for name in ("floor", "height", "steepness", "middle"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-4)
    assert found.r2 == pytest.approx(1, abs=1e-9)
    rising = Sigmoid(1.0, 3.0, 4.0, 2.0, 1)
    again = fit_sigmoid(loss, rising(loss), lower_is_better=True)
    np.testing.assert_allclose(again(loss), rising(loss), atol=1e-6)


def test_a_sigmoid_by_hand() -> None:
    assert Sigmoid(0.1, 0.8, 2.0, 2.0, -1)(2.0) == pytest.approx(0.5)
    assert Sigmoid(0.1, 0.8, 2.0, 2.0, -1)(3.0) == pytest.approx(0.1 + 0.8 / (1 + np.e**2))
    assert Sigmoid(0.1, 0.8, 2.0, 2.0, 1)(3.0) == pytest.approx(0.1 + 0.8 / (1 + np.e**-2))


@pytest.mark.parametrize("task", TASKS)
def test_a_planted_excess_is_the_residual_at_every_scale(table, task: str) -> None:
    found = downstream(scores_of(table, task), "SMELT", "Baseline")
    np.testing.assert_allclose(found.residuals, EXCESS, atol=1e-4)
    assert found.curve.r2 > 0.9999
    groups = residuals_by(found, "scale", draws=30)
    assert groups.labels["group"] == ["100M", "200M", "600M", "1.6B", "all"]
    np.testing.assert_allclose(groups.values, EXCESS, atol=1e-4)
    low, high = groups.interval()
    assert (low <= EXCESS + 1e-3).all() and (high >= EXCESS - 1e-3).all() and (high - low < 0.01).all()


def test_a_score_that_is_a_loss_counts_downwards() -> None:
    rows = []
    for row in full_rows(1):
        if row.get("task") == "arc_easy":
            rows.append({**row, "task": "completion", "score": 3 - row["score"], "chance": None})
        elif not row.get("task"):
            rows.append(row)
    table = table_of(rows, "losses")
    scores = scores_of(table, "completion", lower_is_better=True)
    found = downstream(scores, "SMELT", "Baseline")
    np.testing.assert_allclose(found.residuals, EXCESS, atol=1e-4)
    assert found.curve.direction == 1 and wins(scores, "SMELT", "Baseline").wins == 72


def test_a_target_below_the_references_losses_is_warned_of(table) -> None:
    warning = downstream(scores_of(table, "arc_easy"), "SMELT", "Baseline").warnings[0]
    assert "1 of SMELT's 72 endpoints" in warning and "SMELT 1.6B 97% at 2.156e+11 tokens" in warning


def test_wins_count_pairs_and_the_filter_leaves_out_those_near_chance() -> None:
    rows = [r for r in full_rows(1) if not r.get("source") and not r.get("bucket") and r.get("task") in (None, "copa")]
    scores = scores_of(table_of(rows, "t"), "copa")
    every = wins(scores, "SMELT", "Baseline")
    assert (every.wins, every.pairs, every.left_out) == (72, 72, 0)
    baseline = scores.score[scores.of("Baseline")]
    counted = wins(scores, "SMELT", "Baseline", above_chance=0.1)
    assert (
        counted.pairs == int((baseline >= 0.6).sum())
        and counted.pairs + counted.left_out == 72
        and counted.left_out > 0
    )
    assert wins(scores, "Baseline", "SMELT").wins == 0


def test_ties_are_no_wins() -> None:
    ends = [
        {**dict(zip(("arch", "scale", "level", "D", "loss"), row, strict=True))}
        for row in (("B", "s", "l", 1.0, 2.0), ("T", "s", "l", 1.0, 2.0))
    ]
    rows = [*ends, *({**end, "loss": None, "task": "t", "score": 0.5, "chance": 0.25} for end in ends)]
    scores = scores_of(table_of(rows, "t", ("arch",)), "t")
    assert wins(scores, "T", "B").wins == 0
    with pytest.raises(InputError, match="no scale, level and D has both"):
        wins(scores, "T", "other")


def test_centred_accuracy_is_nought_at_chance_and_one_where_all_is_right(table) -> None:
    assert centred(0.62, CHANCE["boolq"]) == 0 and centred(1.0, CHANCE["commonsense_qa"]) == 1
    plain, middle = scores_of(table, "copa"), scores_of(table, "copa", centre=True)
    np.testing.assert_allclose(middle.score, (plain.score - 0.5) / 0.5)
    assert (middle.chance == 0).all()


def test_dclm_core_has_22_tasks_in_five_categories_of_3_4_4_6_5() -> None:
    sizes = [sum(task.category == name for task in CORE) for name in dict.fromkeys(t.category for t in CORE)]
    assert len(CORE) == 22 and sizes == [3, 4, 4, 6, 5]
    assert sum(task.shots == 0 for task in CORE) == 7


def test_the_mean_of_tasks_is_unweighted(table) -> None:
    parts = [scores_of(table, task, centre=True) for task in TASKS]
    core = mean_of(parts, "core")
    np.testing.assert_allclose(core.score, np.mean([p.score for p in parts], 0))
    with pytest.raises(InputError, match="don't have the same endpoints"):
        mean_of(
            [
                parts[0],
                scores_of(table_of([r for r in full_rows(1) if r["scale"] != "100M"], "t"), "copa", centre=True),
            ],
            "core",
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: scores_of(t, "none"), "no scores of task 'none'; it has arc_easy, copa, answers"),
        (lambda t: downstream(scores_of(t, "copa"), "other", "Baseline"), "no endpoint of other"),
        (lambda t: fit_sigmoid(np.arange(4.0), np.arange(4.0), False), "five endpoints or more, got 4"),
        (lambda t: fit_sigmoid(np.ones(6), np.arange(6.0), False), "all endpoints have the loss 1"),
    ],
)
def test_what_is_missing_is_said(table, change, message: str) -> None:
    with pytest.raises(InputError, match=message):
        change(table)


def test_scores_without_a_validation_loss_name_the_endpoint() -> None:
    rows = [r for r in full_rows(1) if r.get("task") or r["scale"] != "100M"]
    with pytest.raises(
        InputError, match=r"Baseline 100M 85% at 2\.049e\+10 tokens has a score of arc_easy but no validation loss"
    ):
        scores_of(table_of(rows, "t"), "arc_easy")


def test_a_task_without_chance_accuracy_is_named() -> None:
    rows = [{**r, "chance": None} for r in full_rows(1)]
    with pytest.raises(InputError, match="no chance accuracy of answers"):
        scores_of(table_of(rows, "t"), "answers", centre=True)
    assert tasks_of(full_table()) == list(TASKS) and len(synthetic_runs()) == 144
