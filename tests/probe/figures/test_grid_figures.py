"""Figures over a grid of pairs: rows, columns, maps, and cells that are missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from visitlens.errors import InputError
from visitlens.probe.drawing.drawing import cell_grid, subtitle, written
from visitlens.probe.drawing.series import csv_rows
from visitlens.probe.drawing.theme import LIGHT, PAPER
from visitlens.probe.gallery.figure import Figure, find, panel_series, registered
from visitlens.probe.reading.grid import Grid, GridCell
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.pair_grid import PairGrid, pair_grid
from visitlens.probe.reading.recorded_run import RecordedRun

FIGURES = registered()
every_figure = pytest.mark.parametrize("figure", FIGURES, ids=[figure.slug for figure in FIGURES])


@pytest.fixture(scope="module")
def grid(
    looped_recording: RecordedRun, baseline_recording: RecordedRun, three_visit_recording: RecordedRun
) -> PairGrid:
    """Two scales and three levels; `small` has no 97, `large` no 0, and its 97 has no Baseline."""
    pairs = {
        ("small", "0"): Pair(looped_recording, baseline_recording),
        ("small", "85"): Pair(looped_recording, baseline_recording),
        ("large", "85"): Pair(three_visit_recording, baseline_recording),
        ("large", "97"): Pair(looped_recording),
    }
    return PairGrid("tiny <grid>", ("small", "large"), ("0", "85", "97"), pairs, {("small", "97"): "damaged"})


def test_rows_columns_and_the_focus_are_the_papers(grid: PairGrid) -> None:
    assert [cell.name for cell in grid.row()] == ["small-S85", "large-S85"]
    assert [cell.name for cell in grid.column()] == ["large-S0", "large-S85", "large-S97"]
    assert grid.focus().title == "large, S = 85%"
    assert [cell.name for cell in grid.every_cell() if cell.pair is None] == ["large-S0", "small-S97"]
    assert grid.cell("small", "97").missing == "damaged"
    assert "small, S = 97% is missing: damaged." in grid.warnings()
    assert any(warning.startswith("large, S = 97%: No Baseline") for warning in grid.warnings())


@every_figure
def test_every_figure_draws_a_grid_from_saved_data_and_names_what_is_missing(figure: Figure, grid: PairGrid) -> None:
    data = figure.data(grid)
    saved = json.loads(json.dumps(data, allow_nan=False))
    assert figure.draw(saved, PAPER).to_json() == figure.draw(data, PAPER).to_json()
    assert "<grid" not in figure.draw(data, LIGHT).to_json()
    rows = csv_rows(data)
    assert len(rows) == sum(np.size(entry["values"]) for entry in data["series"].values())
    assert {row["recording"] for row in rows} <= {model["recording"] for model in data["models"].values() if model}
    if figure.over == "cell":
        assert data["cell"] == "large-S85" and "large, S = 85%" in data["notes"][0]
        return
    gone = [panel["title"] for panel in data["panels"] if panel["absent"]]
    assert gone == {"row": [], "column": ["large, S = 0%"], "grid": ["large, S = 0%", "small, S = 97%"]}[figure.over]
    for title in gone:
        assert any(title in note for note in data["notes"]) and title in subtitle(data, False)


def test_maps_hold_each_cells_mean_and_gaps_where_none_is(grid: PairGrid, looped_recording: RecordedRun) -> None:
    data = find("grid-diagnostics").data(grid)
    scales, levels, values, _ = cell_grid(data, "ratio_attn_write")
    assert (scales, levels) == (["small", "large"], ["0", "85", "97"])
    small = float(looped_recording.norm_ratio("attn_write").mean("layer").values)
    assert values[0] == [pytest.approx(small), None] and values[2] == [None, pytest.approx(small)]
    figure = find("grid-diagnostics").draw(data, LIGHT)
    maps = [trace for trace in figure.data if trace.type == "heatmap"]
    assert len(maps) == 8 and [a.text[:3] for a in figure.layout.annotations[:8]] == [f"({c})" for c in "abcdefgh"]
    assert figure.layout.coloraxis2.cmin + figure.layout.coloraxis2.cmax == pytest.approx(
        2
    )  # symmetric about no change
    crosses = [trace for trace in figure.data if trace.type == "scatter"]
    assert len(crosses) == 8 and set(zip(crosses[0].x, crosses[0].y, strict=True)) == {
        ("large", "0%"),
        ("small", "97%"),
    }
    assert {trace.z[0][0] is not None for trace in maps} == {True}


def test_each_map_of_the_eight_is_of_what_its_title_says(grid: PairGrid, looped_recording: RecordedRun) -> None:
    """(h) is the mean over the block's two norms of later / earlier; each map's numbers are worked out from step measures."""

    def norm_growth(measure: str) -> np.ndarray:
        first, last = (looped_recording.at_visit(measure, visit).values for visit in (1, 2))
        return last / first

    of_norms = (norm_growth("norm_output_attn_rms") + norm_growth("norm_output_moe_rms")) / 2
    assert np.abs(of_norms - norm_growth("norm_output_attn_rms")).max() > 1e-3  # one norm's alone is another number
    shared = looped_recording.between_visits("shared_expert_count").values
    expected = {
        "(a) top-8 attended tokens": looped_recording.between_visits("top8_overlap").mean("head").values,
        "(b) attention mass": looped_recording.between_visits("mass_overlap").mean("head").values,
        "(c) experts, of k": shared / looped_recording.recording.config["experts_per_token"],
        "(d) update cosine": looped_recording.update_cosine_same_layer().values,
        "(e) whole update": norm_growth("update_rms"),
        "(f) attention write": norm_growth("attn_write_rms"),
        "(g) MoE write": norm_growth("moe_write_rms"),
        "(h) RMSNorm output": of_norms,
    }
    figure = find("grid-diagnostics").draw(find("grid-diagnostics").data(grid), LIGHT)
    maps = [trace for trace in figure.data if trace.type == "heatmap"]
    titles = [annotation.text for annotation in figure.layout.annotations[:8]]
    assert titles == list(expected)
    for trace, (title, values) in zip(maps, expected.items(), strict=True):
        assert trace.z[0][0] == pytest.approx(values.mean(), rel=1e-9), title


def test_stages_over_the_grid_and_by_layer_for_a_pair(grid: PairGrid, looped_recording: RecordedRun) -> None:
    data = find("stage-cosine").data(grid)
    _, _, values, _ = cell_grid(data, "PV")
    expected = looped_recording.stage_cosine().mean("layer").sel(stage="PV").values
    assert values[1][0] == pytest.approx(float(expected))
    assert "panels" not in find("stage-cosine").data(Pair(looped_recording))


def test_scales_run_along_the_row(
    grid: PairGrid, looped_recording: RecordedRun, three_visit_recording: RecordedRun
) -> None:
    data = find("token-overlap").data(grid)
    figure = find("token-overlap").draw(data, LIGHT)
    trace = next(t for t in figure.data if t.name == "same head, two visits" and t.xaxis == "x2")
    expected = [
        float(run.attended("top8_overlap").mean("head").mean("layer").values)
        for run in (looped_recording, three_visit_recording)
    ]
    assert list(trace.x) == ["small", "large"]
    np.testing.assert_allclose(trace.y, expected)
    overlap = find("expert-overlap").data(grid)
    drawn = panel_series(overlap, overlap["panels"][1])
    np.testing.assert_allclose(drawn["observed"]["values"], three_visit_recording.shared_experts().mean("layer").values)


def test_a_profile_a_scale_each_with_both_axes(grid: PairGrid) -> None:
    figure = find("sink-profile-all").draw(find("sink-profile-all").data(grid), LIGHT)
    sides = [figure.layout[f"xaxis{n}"].side for n in ("", "2", "3", "4")]
    assert sides == [None, "top", None, "top"] and figure.layout.xaxis4.overlaying == "x3"
    assert figure.layout.xaxis.domain[1] < figure.layout.xaxis3.domain[0]


def test_the_dyck_map_marks_the_answers_and_shows_tokens_as_text(looped_recording: RecordedRun) -> None:
    data = find("dyck-map").data(Pair(looped_recording))
    study = looped_recording.dyck()["zero"]
    drawn = data["series"]
    np.testing.assert_allclose(drawn["difference"]["values"], study.examples[0].maps[1] - study.examples[0].maps[0])
    expected = study.mass.sel(heads="dyck head", visit=2, part="answers")
    np.testing.assert_allclose(drawn["answers.dyck_head.visit_2"]["values"], expected.values)
    np.testing.assert_allclose(drawn["answers.dyck_head.visit_2"]["low"], expected.interval()[0])
    figure = find("dyck-map").draw(data, LIGHT)
    marks = [t for t in figure.data if t.name == "demonstration answers"]
    assert len(marks) == 3 and list(marks[0].x) == [3, 4] and marks[0].marker.color == "#E69F00"
    assert figure.layout.xaxis.ticktext[1:5] == ("&lt;b&gt;", "␣", ")", "↵")
    assert figure.layout.coloraxis2.cmin == -figure.layout.coloraxis2.cmax
    assert "layer 2, head 3" in figure.layout.title.text
    assert any("sign flips over" in note for note in data["notes"])


# What paths are


def test_paths_become_a_pair_a_row_or_a_grid(
    looped_recording: RecordedRun, baseline_recording: RecordedRun, three_visit_recording: RecordedRun, tmp_path: Path
) -> None:
    looped, baseline, three = (r.recording.path for r in (looped_recording, baseline_recording, three_visit_recording))
    pair = pair_grid([baseline, looped])
    assert isinstance(pair, Pair) and pair.looped is not None and pair.baseline is not None
    row = pair_grid([looped, three, baseline, baseline])
    assert isinstance(row, PairGrid) and row.scales == ("looped", "three")
    assert all(cell.pair is not None and cell.pair.baseline is not None for cell in row.row())
    cells = (GridCell("a", "0", looped, baseline), GridCell("b", "0", tmp_path / "nothing"), GridCell("b", "85"))
    Grid("g", ("a", "b"), ("0", "85"), cells).write(tmp_path)
    found = pair_grid([tmp_path])
    assert isinstance(found, PairGrid) and found.cell("a", "0").pair is not None
    assert found.cell("b", "0").missing == found.cell("b", "85").missing == "no recording"
    (tmp_path / "broken.vlens").mkdir()
    Grid("g", ("a", "b"), ("0",), (cells[0], GridCell("b", "0", tmp_path / "broken.vlens"))).write(tmp_path)
    broken = pair_grid([tmp_path])
    assert isinstance(broken, PairGrid) and "no recording there" in broken.cell("b", "0").missing


def test_paths_that_make_no_grid_are_refused(
    looped_recording: RecordedRun, baseline_recording: RecordedRun, tmp_path: Path
) -> None:
    looped, baseline = looped_recording.recording.path, baseline_recording.recording.path
    with pytest.raises(InputError, match="name recordings"):
        pair_grid([])
    with pytest.raises(InputError, match="a Baseline for each of 2"):
        pair_grid([looped, looped, baseline])
    Grid("g", ("a",), ("0",), (GridCell("a", "0"),)).write(tmp_path)
    with pytest.raises(InputError, match="no cell has a looped model's recording"):
        pair_grid([tmp_path])
    with pytest.raises(InputError, match="one grid alone"):
        pair_grid([tmp_path, looped])


def test_cells_have_a_minus_sign_and_no_sign_at_zero() -> None:
    assert written([[-0.114, None], [-0.001, float("nan")]], 2)["text"] == [["−0.11", ""], ["0.00", ""]]
