"""The figures: what they draw, and that a saved JSON draws the same."""

from __future__ import annotations

import json
import re
import shutil
from math import comb
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from visitlens.errors import InputError
from visitlens.hooks.core.loop_plan import ExecutionPlan, LoopSpec
from visitlens.probe.drawing.drawing import told
from visitlens.probe.drawing.series import aligned, csv_rows, digits, span, with_interval
from visitlens.probe.drawing.theme import DARK, LIGHT, PAPER, THEMES, Theme, escape, find_theme, token_text
from visitlens.probe.figures.dyck_map import key_labels
from visitlens.probe.figures.expert_overlap import hypergeometric, uniform_chance
from visitlens.probe.figures.update_cosine import block_edges
from visitlens.probe.gallery.figure import Figure, find, registered
from visitlens.probe.gallery.write_figures import write_figures
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun, open_recording

FIGURES = registered()
SLUGS = [figure.slug for figure in FIGURES]
every_figure = pytest.mark.parametrize("figure", FIGURES, ids=SLUGS)


@pytest.fixture(scope="module")
def pair(looped_recording: RecordedRun, baseline_recording: RecordedRun) -> Pair:
    return Pair(looped_recording, baseline_recording)


@pytest.fixture(scope="module")
def three(three_visit_recording: RecordedRun, baseline_recording: RecordedRun) -> Pair:
    return Pair(three_visit_recording, baseline_recording)


@pytest.fixture(scope="module")
def alone(looped_recording: RecordedRun) -> Pair:
    return Pair(looped_recording)


def text_of(figure: go.Figure) -> str:
    return figure.to_json()


# The register


def test_figures_are_found_by_slug_and_by_both_of_the_papers_numberings() -> None:
    places = [int(re.sub(r"\D", "", figure.html)) if figure.html else None for figure in FIGURES]
    numbered = [place for place in places if place is not None]
    assert numbered == sorted(numbered) and places[: len(numbered)] == numbered, "the paper's order, others after"
    assert len(set(SLUGS)) == len(SLUGS) and {"sink-heads", "dyck-map"} <= set(SLUGS)
    for figure in FIGURES:
        names = [figure.slug, *(f"{k}:{v}" for k, v in (("html", figure.html), ("pdf", figure.pdf)) if v)]
        assert all(find(name) is figure for name in names)
    assert find("html:22").slug == "residual-flow"
    assert find("pdf:19a").slug == "sink-heads"


@pytest.mark.parametrize("number", ["22", "25", "19a"])
def test_a_bare_number_is_refused_with_the_reason(number: str) -> None:
    with pytest.raises(InputError, match=f"html:{number} or pdf:{number}"):
        find(number)


def test_an_unknown_slug_lists_what_there_is() -> None:
    with pytest.raises(InputError, match=r"did you mean 'sink-profile'.*expert-overlap \(html:21, pdf:12\)"):
        find("sink-profil")


# Pairs


def test_a_recording_on_the_wrong_side_is_refused(
    looped_recording: RecordedRun, baseline_recording: RecordedRun
) -> None:
    with pytest.raises(InputError, match="give it as the Baseline"):
        Pair(baseline_recording)
    with pytest.raises(InputError, match="give it as the looped model"):
        Pair(looped_recording, looped_recording)
    with pytest.raises(InputError, match="got neither"):
        Pair(None)


@every_figure
def test_an_unlooped_recording_alone_is_refused(figure: Figure, baseline_recording: RecordedRun) -> None:
    with pytest.raises(InputError, match=f"{figure.slug}.*needs a looped model"):
        figure.data(Pair(None, baseline_recording))


def test_warnings_say_random_weights_other_data_and_a_missing_baseline(
    pair: Pair, alone: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum("weights are random" in warning for warning in pair.warnings()) == 2
    assert any("No Baseline's recording" in warning for warning in alone.warnings())
    assert pair.baseline is not None
    monkeypatch.setitem(pair.baseline.recording.run["config"], "data_sha256", "another")
    pair.baseline.recording.totals["sink_mass"].non_finite[0, 0] += 3
    try:
        assert any("different documents" in warning for warning in pair.warnings())
        assert any("3 values of sink_mass" in warning for warning in pair.warnings())
    finally:
        pair.baseline.recording.totals["sink_mass"].non_finite[0, 0] -= 3


def test_span_in_words() -> None:
    assert span({"looped_layers": [1, 2], "visits": 2}) == "layers 1 to 2 run 2 times"
    assert span({"looped_layers": [1, 3], "visits": 3}) == "layers 1, 3 run 3 times"
    assert span({"looped_layers": [4], "visits": 2}) == "layer 4 run 2 times"
    assert span({"looped_layers": [], "visits": 1}) == "no layer is run twice"


# Data


@every_figure
@pytest.mark.parametrize(("which", "theme"), [("pair", "light"), ("three", "paper-dark"), ("alone", "dark")])
def test_a_saved_json_draws_the_same_figure(
    figure: Figure, which: str, theme: str, request: pytest.FixtureRequest
) -> None:
    data = figure.data(request.getfixturevalue(which))
    saved = json.loads(json.dumps(data, allow_nan=False))
    assert text_of(figure.draw(saved, find_theme(theme))) == text_of(figure.draw(data, find_theme(theme)))


@every_figure
def test_data_hold_what_the_caption_needs(figure: Figure, pair: Pair, looped_recording: RecordedRun) -> None:
    data = figure.data(pair)
    assert data["paper"] == {"source": "arXiv 2609.01343 v3", "html": figure.html, "pdf": figure.pdf}
    assert data["models"]["looped"]["recording"] == looped_recording.provenance["recording"]
    assert data["models"]["looped"]["weights_sha256"] == "0" * 64
    for entry in data["series"].values():
        assert entry["role"] in ("observed", "control", "chance", "summary")
        assert entry["measure"]["definition"] and entry["measure"]["unit"] and entry["measure"]["paper"]
        assert entry["aggregation"]
        if figure.slug == "dyck-map":
            assert entry["documents"] in (1, 12)  # of the study's prompts, not of the recording
        elif entry["role"] != "chance":
            run = pair.looped if entry["model"] == "looped" else pair.baseline
            assert run is not None
            assert entry["documents"] == run.recording.documents and entry["tokens"] == run.recording.tokens
            assert entry["provenance"] == run.provenance


def test_expert_overlap_draws_the_recordings_histogram_and_both_chances(
    pair: Pair, looped_recording: RecordedRun
) -> None:
    drawn = find("expert-overlap").data(pair)["series"]
    histogram = looped_recording.shared_experts().mean("layer")
    low, high = histogram.interval()
    np.testing.assert_allclose(drawn["observed"]["values"], histogram.values)
    np.testing.assert_allclose(drawn["observed"]["low"], low)
    np.testing.assert_allclose(drawn["observed"]["high"], high)
    assert drawn["observed"]["axes"] == {"shared": list(range(9))}
    assert drawn["uniform_chance"]["values"] == 8 * 8 / 16
    by_load = looped_recording.expert_overlap_chance_by_load().mean("layer").values * 8
    assert drawn["load_aware_chance"]["values"] == pytest.approx(float(by_load))
    mean = np.dot(drawn["observed"]["values"], range(9))
    assert drawn["observed_mean"]["values"] == pytest.approx(mean)
    assert drawn["uniform_distribution"]["role"] == "chance"


@pytest.mark.parametrize(("experts", "k"), [(16, 8), (96, 8), (504, 8), (10, 3), (8, 8)])
def test_hypergeometric_sums_to_one_and_has_mean_k_squared_over_e(experts: int, k: int) -> None:
    distribution = hypergeometric(experts, k)
    assert sum(distribution) == pytest.approx(1)
    assert np.dot(distribution, range(k + 1)) == pytest.approx(k * k / experts) == uniform_chance(experts, k)


def test_hypergeometric_by_hand() -> None:
    assert hypergeometric(4, 2) == pytest.approx([1 / 6, 4 / 6, 1 / 6])
    assert hypergeometric(16, 8)[4] == pytest.approx(comb(8, 4) ** 2 / comb(16, 8))


def test_residual_flow_has_a_series_a_visit_and_the_baselines_same_layers(
    three: Pair, three_visit_recording: RecordedRun, baseline_recording: RecordedRun
) -> None:
    data = find("residual-flow").data(three)
    assert data["visits"] == [1, 2, 3] and data["layers"] == [1, 2]
    for name in ("resid_rms", "update_rms", "relative_update"):
        for visit in (1, 2, 3):
            expected = three_visit_recording.at_visit(name, visit)
            np.testing.assert_allclose(data["series"][f"{name}.visit_{visit}"]["values"], expected.values)
        baseline = data["series"][f"{name}.baseline"]
        assert baseline["axes"] == {"layer": [1, 2]}
        np.testing.assert_allclose(baseline["values"], baseline_recording.stat(name).values[1:3])
    names = [trace.name for trace in find("residual-flow").draw(data, LIGHT).data if trace.showlegend]
    assert names == ["Baseline, same layer", "visit 1", "visit 2", "visit 3"]


def test_update_cosine_is_in_execution_order_with_its_summaries(pair: Pair, looped_recording: RecordedRun) -> None:
    data = find("update-cosine").data(pair)
    np.testing.assert_allclose(data["series"]["looped"]["values"], looped_recording.update_cosine().values)
    assert np.shape(data["series"]["baseline"]["values"]) == (4, 4)
    assert data["series"]["looped"]["axes"] == {"step": list(range(6)), "later_step": list(range(6))}
    same = looped_recording.update_cosine_same_layer().mean("layer")
    assert data["series"]["same_layer_mean"]["values"] == pytest.approx(float(same.values))
    assert with_interval(data["series"]["same_layer_mean"]) in data["notes"][0]
    figure = find("update-cosine").draw(data, LIGHT)
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-1, 1)
    assert list(figure.data[0].x) == ["0·1", "1·1", "2·1", "1·2", "2·2", "3·1"]


def test_block_edges_surround_every_visit() -> None:
    assert block_edges(LoopSpec(4, range(1, 3), 2).plan()) == [0.5, 2.5, 4.5]
    assert block_edges(LoopSpec(4, range(1, 3), 3).plan()) == [0.5, 2.5, 4.5, 6.5]
    assert block_edges(LoopSpec(2, range(2), 2).plan()) == [1.5]
    assert block_edges(LoopSpec(3, range(0), 1).plan()) == []
    assert block_edges(ExecutionPlan.from_layers([0, 1, 1, 2])) == [0.5, 1.5, 2.5]


def test_stage_cosine_draws_the_mean_and_each_layer(pair: Pair, looped_recording: RecordedRun) -> None:
    drawn = find("stage-cosine").data(pair)["series"]
    stages = looped_recording.stage_cosine()
    assert drawn["mean"]["axes"] == {"stage": ["X", "Q", "K", "V", "PV", "O"]}
    np.testing.assert_allclose(drawn["mean"]["values"], stages.mean("layer").values)
    np.testing.assert_allclose(drawn["layer_2"]["values"], stages.sel(layer=2).values)


def test_token_overlap_carries_its_control_and_what_is_left_out(
    three: Pair, three_visit_recording: RecordedRun
) -> None:
    data = find("token-overlap").data(three)
    assert data["visits"] == [1, 3]
    for name in ("top1_match", "top8_overlap", "mass_overlap"):
        same = three_visit_recording.attended(name).mean("head")
        control = three_visit_recording.attended_control(name).mean("head")
        np.testing.assert_allclose(data["series"][name]["values"], same.values)
        np.testing.assert_allclose(data["series"][f"{name}_control"]["values"], control.values)
    left_out = int(three_visit_recording.recording.totals["top8_overlap"].left_out[0, 0])
    assert left_out > 0 and f"{left_out:,} queries" in data["notes"][0]


def test_sink_heads_share_one_scale(three: Pair, three_visit_recording: RecordedRun) -> None:
    data = find("sink-heads").data(three)
    for visit in (1, 2, 3):
        expected = three_visit_recording.at_visit("sink_mass", visit).values
        np.testing.assert_allclose(data["series"][f"visit_{visit}"]["values"], expected)
    figure = find("sink-heads").draw(data, LIGHT)
    assert {trace.coloraxis for trace in figure.data} == {"coloraxis"}
    top = max(np.max(entry["values"]) for entry in data["series"].values())
    assert figure.layout.coloraxis.cmin == 0 and figure.layout.coloraxis.cmax == pytest.approx(top)
    assert [a.text for a in figure.layout.annotations] == ["visit 1", "visit 2", "visit 3"]


def test_sink_profile_has_both_axes_and_every_step_once(pair: Pair, looped_recording: RecordedRun) -> None:
    data = find("sink-profile").data(pair)
    steps = [step for name, e in data["series"].items() if name != "baseline" for step in e["axes"]["step"]]
    assert sorted(steps) == list(range(6))
    expected = looped_recording.sink_mass().mean("head").values
    np.testing.assert_allclose(data["series"]["visit_2"]["values"], expected[3:5])
    figure = find("sink-profile").draw(data, LIGHT)
    assert figure.layout.xaxis2.side == "top" and "Baseline" in figure.layout.xaxis.title.text
    symbols = {trace.name: trace.marker.symbol for trace in figure.data if trace.name}
    assert symbols["Baseline"] == "circle"
    assert symbols["looped model, visit 1"] == "square-open"
    assert symbols["looped model, visit 2"] == "diamond"


@pytest.mark.parametrize("slug", ["residual-flow", "update-cosine", "sink-profile"])
def test_a_missing_baseline_is_said_in_the_picture(slug: str, alone: Pair) -> None:
    data = find(slug).data(alone)
    assert data["models"]["baseline"] is None
    assert "Baseline not drawn: no Baseline recording was given" in text_of(find(slug).draw(data, LIGHT))


def test_a_baseline_without_the_measure_is_said_in_the_picture(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.baseline is not None
    monkeypatch.delitem(pair.baseline.recording.totals, "update_cosine")
    figure = find("update-cosine").draw(find("update-cosine").data(pair), LIGHT)
    assert "doesn't hold this measure" in " ".join(a.text for a in figure.layout.annotations)


@every_figure
def test_no_interval_is_no_bar(figure: Figure, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatArray, "interval", lambda self: (np.full(self.values.shape, np.nan),) * 2)
    data = figure.data(pair)
    assert json.dumps(data, allow_nan=False)
    for trace in figure.draw(data, LIGHT).data:
        assert not re.search(r"\d \[", str(trace.customdata))


def test_what_a_hover_label_says_by_hand() -> None:
    assert told(-0.25, -0.5, 0.00001) == "−0.2500 [−0.5000, 0.0000]" and told(0.5) == "0.5000" and told(None) == ""
    assert told(-0.00001) == "0.0000"


@every_figure
def test_csv_has_one_row_a_drawn_number(figure: Figure, pair: Pair) -> None:
    data = figure.data(pair)
    rows = csv_rows(data)
    assert len(rows) == sum(np.size(entry["values"]) for entry in data["series"].values())
    assert len({tuple(row) for row in rows}) == 1  # the same columns in each


# Themes and text


def test_theme_colours() -> None:
    assert [LIGHT.visit(v).colour for v in (1, 2)] == ["#2166AC", "#B2182B"]
    assert [DARK.visit(v).colour for v in (1, 2)] == ["#67A9CF", "#EF8A62"]
    assert PAPER.baseline.colour == LIGHT.visit(1).colour != LIGHT.baseline.colour
    assert PAPER.profile_visit(1).colour == PAPER.profile_visit(2).colour == "#B2182B"
    assert LIGHT.profile_visit(1).colour == "#2166AC"
    assert {t.name for t in PAPER.by_scheme.values()} == {"paper", "paper-dark"}
    with pytest.raises(InputError, match="light, dark, paper"):
        find_theme("sepia")


@pytest.mark.parametrize("theme", THEMES.values(), ids=list(THEMES))
def test_visits_differ_in_colour_marker_and_dash(theme: Theme) -> None:
    styles = [theme.visit(v) for v in range(1, 7)]
    for field in ("colour", "symbol", "dash"):
        assert len({getattr(style, field) for style in styles}) == 6
    assert len({(s.colour, s.symbol) for s in map(theme.visit, range(1, 43))}) == 42


def test_text_is_escaped_before_plotly_reads_it() -> None:
    assert escape("<s> & &lt;") == "&lt;s&gt; &amp; &amp;lt;"
    assert token_text("<b> a\n") == "&lt;b&gt;␣a↵"


def test_numbers_as_text() -> None:
    assert [digits(x) for x in (0.5, -0.1234, 0.0, 1.94e-5, -2e-4)] == [
        "0.500",
        "−0.123",
        "0.000",
        "1.9e−05",
        "−2.0e−04",
    ]
    assert with_interval({"values": None, "low": None, "high": None}) == "not measured"
    assert with_interval({"values": 0.5, "low": None, "high": None}) == "0.500"


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ((0.876, 0.506, 1.315), ("0.876", "0.506", "1.315")),
        ((0.0008, -0.000001, 0.0026), ("0.0008", "0.0000", "0.0026")),
        ((-1.9e-5, -2.8e-5, -1.2e-5), ("−0.000019", "−0.000028", "−0.000012")),
        ((5.0, 5.0, 5.0), ("5.000", "5.000", "5.000")),
    ],
)
def test_a_value_has_its_intervals_decimals(numbers: tuple[float, ...], texts: tuple[str, ...]) -> None:
    assert aligned(*numbers) == texts


def test_what_is_no_visit_looks_like_none() -> None:
    for theme in (LIGHT, DARK):
        visits = [theme.visit(number) for number in (1, 2)]
        parts = [theme.part(number) for number in range(1, 7)]
        assert len({(part.colour, part.symbol) for part in parts}) == 6
        assert not {p.colour for p in parts} & {v.colour for v in visits}
        assert not {p.symbol for p in parts} & {v.symbol for v in visits}


def test_keys_of_the_dyck_map_are_labelled_upright() -> None:
    pieces = ["BOS", "In", "put", ":", " ", "[", " <", "\n", "O", "utput", ":"]
    assert key_labels(pieces) == {0: "<br>BOS", 2: "Input:", 4: "␣", 5: "[", 6: "&lt;", 7: "↵", 9: "Output:"}


def test_a_names_length_is_limited_in_the_picture(pair: Pair) -> None:
    figure = find("sink-heads")
    data = figure.data(pair)
    data["models"]["looped"]["name"] = "n" * 300
    assert "n" * 41 not in text_of(figure.draw(data, LIGHT))


@pytest.fixture
def hostile(looped_recording: RecordedRun, tmp_path: Path) -> Pair:
    """A recording whose name is markup."""
    path = tmp_path / "<img src=x> & %{x} <b>bold<.vlens"
    shutil.copytree(looped_recording.recording.path, path)
    return Pair(open_recording(path))


@every_figure
def test_markup_in_a_runs_name_is_shown_not_read(figure: Figure, hostile: Pair, tmp_path: Path) -> None:
    text = text_of(figure.draw(figure.data(hostile), LIGHT))
    assert "<img" not in text and "\\u003cimg" not in text
    (page,) = write_figures(hostile, tmp_path / "out", [figure.slug], ["html"])
    assert "<img" not in page.read_text(encoding="utf-8")
