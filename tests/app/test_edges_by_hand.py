"""Edges at which a page says something else: a pair of one visit, the bounds of the paper's ranges, blocks at a map's far side."""

from __future__ import annotations

import numpy as np
import pytest

from visitlens.app.panels.headlines import headlines, place_in_range
from visitlens.app.panels.pooling import pool
from visitlens.app.view.selection import fit, parse
from visitlens.probe.reading.recorded_run import RecordedRun


@pytest.mark.parametrize(
    ("pair", "kept"), [("1-2", (1, 2)), ("2-3", (2, 3)), ("2-2", None), ("2-1", None), ("0-1", None), ("1-4", None)]
)
def test_a_link_keeps_only_pairs_of_two_visits_the_earlier_first(
    pair: str, kept: tuple[int, int] | None, three_visit_recording: RecordedRun
) -> None:
    selection, warnings = fit(parse(f"?visits={pair}")[0], three_visit_recording)
    assert selection.visits == kept
    assert bool(warnings) == (kept is None) and all(pair in warning for warning in warnings)


def test_the_last_head_and_token_are_there_and_the_ones_after_are_not(looped_recording: RecordedRun) -> None:
    heads, tokens = looped_recording.recording.config["num_heads"], looped_recording.recording.tokens
    last, warnings = fit(parse(f"?head={heads - 1}&token={tokens - 1}")[0], looped_recording)
    assert (last.head, last.token, warnings) == (heads - 1, tokens - 1, [])
    beyond, warnings = fit(parse(f"?head={heads}&token={tokens}")[0], looped_recording)
    assert (beyond.head, beyond.token) == (None, None) and len(warnings) == 2


def test_the_bounds_of_the_papers_range_lie_in_it() -> None:
    ratio = next(item for item in headlines() if item.paper_range == (1.2, 3.5))
    said = [place_in_range(ratio, value) for value in (1.19, 1.2, 2.0, 3.5, 3.51, float("nan"))]
    assert said == ["below it", "in this range", "in this range", "in this range", "above it", ""]


def test_blocks_at_the_far_side_are_means_of_the_cells_they_have() -> None:
    """5 by 5 cells in blocks of 2: the last row and column of blocks hold 2, 2 and 1 cells, and keep their own mean and largest."""
    cells = np.arange(25, dtype=np.float32).reshape(5, 5)
    mean, largest = (pool(cells, how, most=3) for how in ("mean", "max"))
    assert mean.factor == largest.factor == 2
    np.testing.assert_allclose(mean.values, [[3, 5, 6.5], [13, 15, 16.5], [20.5, 22.5, 24]])
    np.testing.assert_allclose(largest.values, [[6, 8, 9], [16, 18, 19], [21, 23, 24]])
    assert mean.row_starts.tolist() == mean.column_starts.tolist() == [0, 2, 4]
