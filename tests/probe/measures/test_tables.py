"""StatArrays as text and HTML tables."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.jackknife import replicates_within

from visitlens.hooks.core.loop_plan import LoopSpec
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.measures.tables import as_html, as_text, label_text, sizes

PLAN = LoopSpec(2, range(2), 2).plan()


def stat(shape: dict[str, list], replicated: bool = True) -> StatArray:
    values = np.arange(np.prod([len(x) for x in shape.values()], dtype=int), dtype=float)
    values = values.reshape([len(x) for x in shape.values()]) - 1
    measure = Measure("m", "A <title>", tuple(shape), "nats", "The definition & more.", "ours")
    replicates = replicates_within(values, 0.475) if replicated else None
    return StatArray(measure, values, shape, replicates, 7, 1000)


def test_one_number_and_a_row_an_element_with_their_intervals() -> None:
    assert as_text(stat({})).splitlines()[1].split() == ["-1.0000", "[-1.4750,", "-0.5250]"]
    lines = as_text(stat({"step": list(PLAN.steps)})).splitlines()
    counts = "7 documents, 1,000 tokens; intervals: 95% over documents"
    assert lines[0] == f"A <title> [nats], mean over tokens; {counts}"
    assert [line.split()[:2] for line in lines[1:]] == [
        ["0·1", "-1.0000"],
        ["1·1", "0.0000"],
        ["0·2", "1.0000"],
        ["1·2", "2.0000"],
    ]
    assert "[" not in "".join(as_text(stat({"head": [0, 1]}, False)).splitlines()[1:])


def test_two_axes_are_a_grid_and_three_a_grid_a_label() -> None:
    grid = as_text(stat({"form": ["a", "b"], "head": [0, 1]})).splitlines()
    assert [line.split() for line in grid[1:]] == [
        ["0", "1"],
        ["a", "-1.0000", "[-1.4750,", "-0.5250]", "0.0000", "[-0.4750,", "0.4750]"],
        ["b", "1.0000", "[0.5250,", "1.4750]", "2.0000", "[1.5250,", "2.4750]"],
    ]
    wide = as_text(stat({"form": ["a"], "head": list(range(7))})).splitlines()
    assert wide[2].split() == ["a", "-1.0000", "[-1.4750,", "-0.5250]", *(f"{n}.0000" for n in range(6))]
    three = as_text(stat({"form": ["a", "b"], "x": [0, 1], "y": [0, 1]}))
    assert three.count("form a") == 1 and "form b" in three and "6.0000" in three
    assert "--json" in as_text(stat({"form": ["a"], "expert": list(range(96))}))
    assert "--json" in as_text(stat({"a": [0], "b": [0], "c": [0], "d": [0]}))


def test_html_is_escaped_and_draws_each_interval() -> None:
    page = as_html(stat({"step": list(PLAN.steps)}))
    assert "A &lt;title&gt;" in page and "&amp; more" in page and page.count("<circle") == 4
    assert page.count("stroke-width='2'") == 4 and "95% over documents" in page
    assert "intervals: none" in as_html(stat({"head": [0]}, False))
    assert page == stat({"step": list(PLAN.steps)})._repr_html_()


def test_a_grid_is_shaded_by_value_and_cut_where_it_is_large() -> None:
    page = as_html(stat({"a": ["<x>", "y"], "b": [0, 1]}))
    assert "rgba(33,102,172" in page and "rgba(178,24,43" in page and "&lt;x&gt;" in page
    wide = as_html(stat({"a": list(range(60)), "b": list(range(30))}))
    assert "20 more rows" in wide and "6 more columns" in wide
    three = as_html(stat({"a": [0], "b": [0], "c": [0, 1]}))
    assert "1 a x 1 b x 2 c" in three and ".sel(a=...)" in three


def test_what_was_never_measured_is_a_dash() -> None:
    hole = stat({"a": [0, 1]})
    values = hole.values.copy()
    values[0] = np.nan
    hole = StatArray(hole.measure, values, hole.labels)
    assert as_text(hole).splitlines()[1].split() == ["0", "-"] and "<td>-</td>" in as_html(hole)


@pytest.mark.parametrize(
    ("label", "text"),
    [(PLAN.steps[2], "0·2"), (PLAN.pairs[1], "1: 1→2"), ((1, 2), "1 → 2"), ("code", "code"), (3, "3")],
)
def test_labels(label: object, text: str) -> None:
    assert label_text(label) == text
    assert sizes(stat({})) == "one number"
