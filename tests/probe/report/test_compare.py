"""Two recordings side by side: the right places, the right differences, paired where the documents are the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from visitlens.errors import InputError
from visitlens.probe.drawing.theme import LIGHT
from visitlens.probe.measures.intervals import interval
from visitlens.probe.reading.recorded_run import RecordedRun
from visitlens.probe.report.compare import compare, comparison_data, draw_comparison, write_comparison


def test_a_recording_against_itself_differs_by_nothing(looped_recording: RecordedRun) -> None:
    for by in ("mean", "layer", "step"):
        for each in compare(looped_recording, looped_recording, by):
            known = ~np.isnan(np.atleast_1d(each.a.values))
            assert (np.atleast_1d(each.difference.values)[known] == 0).all()
            low, high = each.difference.interval()
            assert (np.atleast_1d(low)[known] == 0).all() and (np.atleast_1d(high)[known] == 0).all()


def test_layers_average_visits_and_steps_match_layer_and_visit(
    looped_recording: RecordedRun, baseline_recording: RecordedRun
) -> None:
    (by_layer,) = compare(looped_recording, baseline_recording, "layer", ["sink_mass"])
    ours, theirs = (run.sink_mass().mean("head") for run in (looped_recording, baseline_recording))
    assert by_layer.places == ["0", "1", "2", "3"]
    np.testing.assert_allclose(by_layer.a.values[1], ours.values[[1, 3]].mean())
    np.testing.assert_allclose(by_layer.difference.values[1], theirs.values[1] - ours.values[[1, 3]].mean())
    (by_step,) = compare(looped_recording, baseline_recording, "step", ["sink_mass"])
    assert by_step.places == ["0·1", "1·1", "2·1", "3·1"]  # visit 2 has no counterpart
    np.testing.assert_allclose(by_step.a.values, ours.values[[0, 1, 2, 5]])
    assert ours.replicates is not None and theirs.replicates is not None
    assert ours.support is not None
    differences = theirs.replicates[:, 1] - ours.replicates[:, 1]  # document by document
    expected = interval(theirs.values[1] - ours.values[1], differences, ours.support[:, 1])
    np.testing.assert_allclose([bound[1] for bound in by_step.difference.interval()], expected)


def test_stages_and_components_are_compared_one_by_one(
    looped_recording: RecordedRun, three_visit_recording: RecordedRun
) -> None:
    names = [each.name for each in compare(looped_recording, three_visit_recording)]
    assert {"stage_cosine.X", "stage_cosine.O", "token_norm_ratio.update", "shared_expert_count"} <= set(names)
    assert not {"expert_load", "update_cosine", "shared_experts"} & set(names)
    pairs = compare(looped_recording, three_visit_recording, "step", ["mass_overlap"])[0]
    assert pairs.places == ["1: 1→2", "2: 1→2"]


def test_other_documents_are_not_paired(
    looped_recording: RecordedRun, three_visit_recording: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def width(each) -> float:
        low, high = each.difference.interval()
        return float(high - low)

    (paired,) = compare(looped_recording, three_visit_recording, measures=["resid_rms"])
    monkeypatch.setitem(three_visit_recording.recording.run["config"], "data_sha256", "other")
    monkeypatch.setitem(three_visit_recording.recording.__dict__, "document_hashes", None)
    three_visit_recording._stats.clear()
    (apart,) = compare(looped_recording, three_visit_recording, measures=["resid_rms"])
    three_visit_recording._stats.clear()
    assert width(apart) > width(paired)
    data = comparison_data(looped_recording, three_visit_recording, [apart], "mean")
    assert "not paired" in data["interval"]


def test_json_rows_and_the_figure(
    looped_recording: RecordedRun, baseline_recording: RecordedRun, tmp_path: Path
) -> None:
    found = compare(looped_recording, baseline_recording, "layer", ["sink_mass", "resid_rms"])
    data = comparison_data(looped_recording, baseline_recording, found, "layer")
    assert json.loads(json.dumps(data, allow_nan=False)) == data and len(data["rows"]) == 8
    row = data["rows"][0]
    assert row["difference"] == pytest.approx(row["b"] - row["a"]) and row["low"] <= row["difference"] <= row["high"]
    figure = draw_comparison(data, LIGHT)
    assert [a.text for a in figure.layout.annotations] == ["sink_mass", "resid_rms"]
    assert [t.name for t in figure.data if t.showlegend] == ["looped", "baseline"]
    page = write_comparison(data, tmp_path / "c.html")
    assert "plotly.min.js" in page.read_text(encoding="utf-8") and (tmp_path / "plotly.min.js").is_file()
    mean = comparison_data(looped_recording, baseline_recording, compare(looped_recording, baseline_recording), "mean")
    assert draw_comparison(mean, LIGHT).to_json()
    with pytest.raises(InputError, match=r"\.html, \.png"):
        write_comparison(data, tmp_path / "c.gif")


def test_what_both_do_not_hold_is_refused(looped_recording: RecordedRun, baseline_recording: RecordedRun) -> None:
    with pytest.raises(InputError, match="stage_cosine can't be compared here; both recordings hold attention_entropy"):
        compare(looped_recording, baseline_recording, measures=["stage_cosine"])
