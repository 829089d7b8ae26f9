"""`StatArray.plot`: what is drawn for each number of axes."""

from __future__ import annotations

import numpy as np
import plotly.io as pio
import pytest

from visitlens.errors import InputError
from visitlens.probe.drawing.stat_figure import label_text, plot_stat
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.reading.recorded_run import RecordedRun


def stat(values: np.ndarray, axes: tuple[str, ...], unit: str = "ratio", **labels: list) -> StatArray:
    measure = Measure("thing", "A <thing>", axes, unit, "What it is.", "ours")
    names = {axis: labels.get(axis, list(range(size))) for axis, size in zip(axes, values.shape, strict=True)}
    replicates = values + np.random.default_rng(0).normal(0, 0.1, (50, *values.shape))
    return StatArray(measure, values, names, replicates, documents=5, tokens=100)


def test_one_axis_is_a_line_with_intervals(looped_recording: RecordedRun) -> None:
    overlap = looped_recording.expert_overlap()
    figure = overlap.plot()
    low, high = overlap.interval()
    (trace,) = figure.data
    assert list(trace.x) == ["1", "2"] and trace.mode == "lines+markers"
    np.testing.assert_allclose(trace.y, overlap.values)
    np.testing.assert_allclose(trace.error_y.array, high - overlap.values)
    np.testing.assert_allclose(trace.error_y.arrayminus, overlap.values - low)


def test_no_axis_is_a_point_with_its_interval(looped_recording: RecordedRun) -> None:
    (trace,) = looped_recording.expert_overlap().mean("layer").plot().data
    assert trace.mode == "markers" and len(trace.y) == 1 and trace.error_y.array[0] > 0


def test_two_axes_are_a_map_with_the_scale_that_fits() -> None:
    figure = plot_stat(stat(np.array([[0.1, 0.2], [0.3, np.nan]]), ("layer", "head")))
    assert figure.layout.coloraxis.cmin == 0 and figure.layout.coloraxis.cmax == pytest.approx(0.3)
    assert figure.data[0].z[1][1] is None
    figure = plot_stat(stat(np.array([[0.1, -0.4]]), ("layer", "head")))
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-0.4, 0.4)
    figure = plot_stat(stat(np.array([[0.9, 0.8]]), ("layer", "head"), "cosine"))
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-1, 1)
    assert "A &lt;thing&gt;" in figure.layout.title.text


def test_more_axes_and_nothing_are_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match=r"\.sel\(pair=\.\.\.\).*\.mean\('head'\)"):
        plot_stat(stat(np.zeros((2, 2, 2)), ("pair", "q_stage", "head")))
    with pytest.raises(InputError, match="nothing to draw"):
        plot_stat(stat(np.zeros(0), ("layer",)))


def test_labels_of_steps_and_pairs(looped_recording: RecordedRun) -> None:
    plan = looped_recording.plan
    assert label_text(plan.steps[3]) == "1·2"
    assert label_text(plan.pairs[0]) == "1: 1→2"
    assert label_text((1, 2)) == "1 → 2"
    (trace,) = looped_recording.stat("shared_expert_count").plot().data
    assert list(trace.x) == ["1: 1→2", "2: 1→2"]


def test_a_notebook_shows_a_plot_without_the_upload_button(looped_recording: RecordedRun, monkeypatch) -> None:
    figure = looped_recording.sink_mass().mean("head").plot()
    monkeypatch.setattr(pio.renderers, "default", "plotly_mimetype")
    (bundle,) = figure._repr_mimebundle_().values()
    assert bundle["config"]["showSendToCloud"] is False
    shown: list[dict] = []
    monkeypatch.setattr(pio, "show", lambda *_, **options: shown.append(options))
    figure.show(config={"scrollZoom": True})
    figure._ipython_display_()
    assert [options["config"]["showSendToCloud"] for options in shown] == [False, False]
    assert shown[0]["config"]["scrollZoom"] is True
