"""Sweeps over a loop's design: matched, in proportion, and never wider where more layers run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from visitlens.errors import InputError
from visitlens.probe.drawing.theme import find_theme
from visitlens.probe.ladder.budget import PAPER_TOLERANCE
from visitlens.probe.ladder.paper_grid import paper_cell
from visitlens.probe.ladder.sweep import Point, centred_span, sweep, write_sweep
from visitlens.probe.scaling.figure import find
from visitlens.probe.scaling.study import Study
from visitlens.probe.scaling.table import read_table

BASELINE = paper_cell("baseline", "200M", "85%").config


@pytest.fixture(scope="module")
def counts() -> list[Point]:
    return sweep(BASELINE, "count", [1, 2, 3])


def test_two_visits_of_the_middle_half_are_the_papers_own_shape(counts: list[Point]) -> None:
    smelt = paper_cell("smelt", "200M", "85%").config
    found = next(p for p in counts if p.value == 2).config
    assert (found.hidden_size, found.expert_dim, found.num_experts) == (
        smelt.hidden_size,
        smelt.expert_dim,
        smelt.num_experts,
    )
    assert (found.loop_start, found.loop_stop) == (3, 9)
    assert counts[0].config == BASELINE


def test_points_are_matched_in_proportion_and_narrow_with_depth(counts: list[Point]) -> None:
    ratio = BASELINE.expert_dim / BASELINE.hidden_size
    for before, after in pairwise(counts):
        assert after.executed > before.executed and after.config.hidden_size <= before.config.hidden_size
    for point in counts:
        assert all(abs(r - 1) <= t + 1e-9 for r, t in zip(point.ratios, PAPER_TOLERANCE, strict=True))
        # Expert dims are multiples of 8: half a step over the smallest hidden size here is 0.5 %.
        assert abs(point.config.expert_dim / point.config.hidden_size / ratio - 1) < 0.03


def test_depth_changes_the_layer_count_of_both_kinds() -> None:
    small = sweep(BASELINE, "depth", [9])
    assert [(p.config.num_layers, p.looped, p.executed) for p in small] == [(9, 0, 9), (9, 4, 13)]
    assert small[0].config.hidden_size > BASELINE.hidden_size
    assert {p.name for p in small} == {"depth-9", "depth-9-looped"}


@pytest.mark.parametrize(
    ("layers", "looped", "span"), [(12, 6, (3, 9)), (10, 5, (2, 7)), (30, 15, (7, 22)), (4, 4, (0, 4))]
)
def test_the_middle_has_the_smaller_half_before_it(layers: int, looped: int, span: tuple[int, int]) -> None:
    assert centred_span(layers, looped) == span


@pytest.mark.parametrize(
    ("axis", "values", "message"),
    [("width", [], "axis among span, count, depth"), ("span", [13], "from 0 to 12"), ("count", [0], "from 1 to 64")],
)
def test_what_cannot_be_swept_is_said(axis: str, values: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sweep(BASELINE, axis, values)


def test_a_trained_sweep_is_drawn_beside_the_printed_table(counts: list[Point], tmp_path: Path) -> None:
    write_sweep(counts, tmp_path)
    with pytest.raises(InputError, match="no point of the sweep is trained yet"):
        read_table(tmp_path)
    for point, loss in zip(counts, (3.0, 2.9, 2.95), strict=True):
        run = tmp_path / point.name / "tokens-1000"
        run.mkdir()
        (run / "config.json").write_text(json.dumps(point.config.to_dict()))
        report = {"tokens": 1000, "recipe": {"seed": 0}, "validation_loss": {"text": loss}}
        (run / "training.json").write_text(json.dumps(report))
    study = Study.of(read_table(tmp_path), draws=0)
    figure = find("sweeps")
    data = figure.data(study)
    ours, theirs = data["series"].values()
    assert ours["values"] == pytest.approx([0, -0.1, -0.05]) and ours["x"] == [1, 2, 3]
    assert theirs["values"] == pytest.approx([0, 1.9257 - 1.9445, 1.9385 - 1.9445, 1.936 - 1.9445])
    assert any("can't rank neighbours" in note for note in data["notes"])
    assert figure.draw(json.loads(json.dumps(data)), find_theme("light")).to_json()
