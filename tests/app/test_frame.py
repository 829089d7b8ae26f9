"""What the dashboard is made of, without a browser: the URL, the registry, pages as pure functions, pooling, exports."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import plotly
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from visitlens.app.commands.app import clean_prefix
from visitlens.app.pages import find_page, pages
from visitlens.app.pages.attention import parse_zoom
from visitlens.app.panels import plots
from visitlens.app.panels.attention_maps import changed_keys, context_starts
from visitlens.app.panels.components import shown
from visitlens.app.panels.panel import Panel
from visitlens.app.panels.pooling import pool, pooled_difference
from visitlens.app.server import export, layout
from visitlens.app.view.registry import Registry
from visitlens.app.view.selection import Selection, fit, parse
from visitlens.app.view.view import Context, view_of
from visitlens.errors import InputError
from visitlens.probe.drawing.theme import LIGHT
from visitlens.probe.measures.intervals import interval
from visitlens.probe.reading.grid import Grid, GridCell
from visitlens.probe.reading.token_window import Segments, compare_experts, stored_measures
from visitlens.probe.reading.two_visits import largest_change, two_visits


@pytest.fixture(scope="module")
def context(folder: Path) -> Context:
    return Context(Registry([folder]))


# The URL

SELECTIONS = st.builds(
    Selection,
    run=st.sampled_from(["", "looped", "a-b.c"]),
    layer=st.none() | st.integers(0, 99),
    visits=st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9)),
    head=st.none() | st.integers(0, 99),
    token=st.none() | st.integers(0, 10**9),
    metric=st.sampled_from(["", "sink_mass"]),
    agg=st.sampled_from(["", "each"]),
)


@given(SELECTIONS)
def test_a_selection_survives_its_url(selection: Selection) -> None:
    assert parse(selection.query()) == (selection, [])


def test_a_url_holds_only_what_is_chosen() -> None:
    assert Selection().query() == ""
    assert Selection(run="a", layer=0, visits=(1, 3)).query() == "?run=a&layer=0&visits=1-3"
    assert Selection(layer=3).change(layer=None, context="2", zoom=None).query() == "?context=2"


@pytest.mark.parametrize(
    "text", ["layer=-1", "layer=1e3", "visits=1", "visits=2-x", "agg=no", "run=../etc", "x=1", "head=" + "9" * 300]
)
def test_a_wrong_parameter_is_named_and_left_out(text: str) -> None:
    selection, warnings = parse("?" + text)
    assert selection == Selection() and len(warnings) == 1
    assert text.split("=")[0] in warnings[0] and len(warnings[0]) < 200


def test_fit_takes_back_what_the_run_lacks_and_keeps_the_rest(three_visit_recording) -> None:
    asked = Selection(layer=1, head=99, visits=(2, 3), token=10**9, metric="nothing")
    fitted, warnings = fit(asked, three_visit_recording)
    assert fitted == Selection(layer=1, visits=(2, 3)) and len(warnings) == 3
    assert fit(Selection(visits=(3, 2)), three_visit_recording)[0].visits is None


# The registry


def test_registry_names_opens_and_follows_recordings(folder: Path, tmp_path: Path) -> None:
    registry = Registry([folder])
    assert registry.ids() == ("baseline", "corrupt", "looped", "maps", "summary", "three")
    assert registry["corrupt"].run is None and "summary" in registry["corrupt"].error
    assert str(folder) not in registry["corrupt"].error
    assert registry["looped"].run is registry["looped"].run  # opened once
    assert registry.partner("looped").id == "baseline" and registry.partner("baseline").run.looped
    assert registry.pair("baseline").baseline.name == "baseline"
    copy = tmp_path / "looped.vlens"
    shutil.copytree(folder / "looped.vlens", copy)
    both = Registry([folder / "looped.vlens", copy, copy])
    assert both.ids() == ("looped", "looped-2")
    before = both["looped-2"]
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["run"]["tokens"] += 100
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert both["looped-2"].version != before.version and not both["looped-2"].run.recording.complete
    with pytest.raises(InputError, match="no such file"):
        Registry([tmp_path / "nowhere"])


def test_registry_of_a_grid_pairs_its_cells(folder: Path, tmp_path: Path) -> None:
    cells = (GridCell("s", "0", folder / "three.vlens", folder / "baseline.vlens"),)
    Grid("g", ("s",), ("0",), cells).write(tmp_path)
    registry = Registry([tmp_path])
    assert registry.ids() == ("three", "baseline") and registry.partner("three").id == "baseline"


# Pages


def test_every_page_keeps_the_contract() -> None:
    assert [page.TITLE for page in pages()][:4] == ["Overview", "Layers", "Heads", "Tokens"]
    orders = [page.ORDER for page in pages()]
    assert len(set(orders)) == len(orders), "two pages of one ORDER stand as their file names say"
    for page in pages():
        assert page.PATH.startswith("/") and isinstance(page.ORDER, int) and callable(page.layout)
        assert set(page.NEEDS) <= {"recording", "looped", "routing", "tokens", "model"}
        assert find_page(page.PATH + "/") is page
    assert len({page.PATH for page in pages()}) == len(pages())


@pytest.mark.parametrize("run", ["looped", "three", "baseline", "maps", "summary", "corrupt"])
def test_every_page_renders_for_every_recording(context: Context, run: str) -> None:
    for module in pages():
        page = layout.render(context, f"http://x{module.PATH}?run={run}&layer=1&head=1&token=3", "dark")
        text = json.dumps(page.content, cls=plotly.utils.PlotlyJSONEncoder)
        assert page.title.endswith("visitlens") and len(text) > 100
        assert "Traceback" not in text and "NaN" not in text


def test_a_new_measure_and_figure_appear_without_being_named(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from visitlens.app.panels import paper_figures as figures
    from visitlens.probe.gallery.figure import registered

    totals = context.registry["looped"].run.recording.totals
    attributes = {**totals["update_rms"].attributes, "title": "Brand-new measure"}
    monkeypatch.setitem(
        totals,
        "brand_new",
        type(totals["update_rms"])(
            attributes, *(getattr(totals["update_rms"], k) for k in ("total", "count", "left_out", "non_finite"))
        ),
    )
    assert "Brand-new measure" in str(layout.render(context, "http://x/layers?run=looped").bar)

    class Fresh(type(registered()[0])):
        slug, title = "fresh", "A fresh figure"

    monkeypatch.setattr(figures, "registered", lambda: (*registered(), Fresh()))
    assert "A fresh figure" in str(layout.render(context, "http://x/figures?run=looped").content)


def test_captions_say_n_interval_and_aggregation_and_exports_are_whole(context: Context) -> None:
    seen = 0
    for page in pages():
        if "model" in page.NEEDS:
            continue
        view = view_of(context, page.PATH, "?run=looped&layer=1&head=1&token=3")
        for panel in (item for item in page.layout(view) if isinstance(item, Panel)):
            seen += 1
            caption = " ".join(panel.caption)
            assert "n = " in caption or "Context" in caption, panel.key
            assert "nterval" in caption, panel.key
            assert panel.code.startswith("import visitlens as vl") and compile(panel.code, "code", "exec")
            json.dumps(panel.data(), allow_nan=False)
            text = export.csv_text(panel, view)
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            assert len(list(csv.DictReader(io.StringIO("\n".join(lines))))) == len(list(panel.rows())) > 0, panel.key
            assert view.run.provenance["recording"] in text
    assert seen > 20


def test_copied_python_runs_and_draws(context: Context) -> None:
    view = view_of(context, "/layers", "?run=looped&metric=sink_mass")
    for page in ("/layers", "/routing"):
        for panel in (item for item in find_page(page).layout(view) if isinstance(item, Panel)):
            exec(
                compile(panel.code.replace(".show()", ""), panel.key, "exec"), {}
            )  # what "Copy Python" puts into a notebook


def test_layers_shows_the_difference_and_its_interval(context: Context) -> None:
    view = view_of(context, "/layers", "?run=looped&metric=update_rms")
    panel = next(
        item for item in find_page("/layers").layout(view) if isinstance(item, Panel) and item.key == "difference"
    )
    earlier, later = view.run.both_visits("update_rms")
    assert [row["value"] for row in panel.rows()] == pytest.approx((later.values - earlier.values).tolist())
    differences = (later.replicates - earlier.replicates)[:, 0]  # document by document
    low, high = interval(later.values[0] - earlier.values[0], differences, later.support[:, 0])
    assert (panel.rows()[0]["low"], panel.rows()[0]["high"]) == (pytest.approx(low), pytest.approx(high))


def test_steps_look_like_their_visits(context: Context) -> None:
    view = view_of(context, "/layers", "?run=looped")
    panel = next(
        item for item in find_page("/layers").layout(view) if isinstance(item, Panel) and item.key == "profile"
    )
    profile, *legend = panel.draw(LIGHT)["data"]
    steps = view.run.plan.steps
    once = {layer for layer, visits in view.run.plan.visits.items() if visits == 1}
    for step, colour in zip(steps, profile["marker"]["color"], strict=True):
        assert colour == (LIGHT.ink if step.layer in once else LIGHT.visit(step.visit).colour)
    assert [trace["name"] for trace in legend] == ["visit 1", "visit 2", "layers run once"]
    assert shown(panel.draw(LIGHT)) == "lines (looped) by execution step, as layer·visit"
    assert shown(
        layout.find_panel(find_page("/heads"), view_of(context, "/heads", "?run=looped"), "map").chart(LIGHT)
    ).startswith("3 heat")


def test_two_visits_of_any_measure(looped_recording) -> None:
    sink = two_visits(looped_recording, "sink_mass")
    assert sink.difference.values == pytest.approx(sink.later.values - sink.earlier.values)
    assert two_visits(looped_recording, "top8_overlap").control_is == "other-head control"
    with pytest.raises(InputError, match="isn't one value"):
        two_visits(looped_recording, "update_cosine")
    layer, head, change = largest_change(looped_recording)
    assert abs(change) == np.abs(sink.difference.values).max()
    assert sink.difference.sel(layer=layer, head=head).values == change


# Tokens and maps


def test_experts_kept_dropped_and_new_by_hand() -> None:
    found = compare_experts(
        np.array([3, 5, 9]), np.array([0.5, 0.3, 0.2]), np.array([9, 5, 1]), np.array([0.6, 0.3, 0.1])
    )
    assert found.kept == {9: (0.2, 0.6), 5: (0.3, 0.3)} and list(found.kept) == [9, 5]
    assert found.dropped == {3: 0.5} and found.new == {1: 0.1}


def test_keys_gained_and_lost_by_hand() -> None:
    gained, lost = changed_keys(np.array([0.7, 0.1, 0.2, 0.0]), np.array([0.1, 0.4, 0.2, 0.3]))
    assert gained == [3, 1] or gained == [1, 3]
    assert lost == [0]


def test_documents_and_their_tokens(looped_recording) -> None:
    found, table = Segments(looped_recording), looped_recording.recording.token_table()
    assert len(found) == len(np.unique(table["segment"]))
    for segment in (0, 3, len(found) - 1):
        window = found.window(segment)
        assert set(window.table["segment"]) == {table["segment"][window.start]}
        assert window.table["pos"][0] == 0 and found.of_token(window.stop - 1) == segment
    with pytest.raises(InputError, match=f"among 0 to {len(found) - 1}, got 9999"):
        found.window(9999)
    assert {"sink_mass", "shared_expert_count"} <= set(stored_measures(looped_recording))
    assert "expert_load" not in stored_measures(looped_recording)


def test_documents_of_many_shards_are_found_by_opening_few(
    make_model: Callable[..., Any], make_text: Callable[..., Any], make_recording: Callable[..., Any], tmp_path: Path
) -> None:
    lengths = [int(n) for n in np.random.default_rng(1).integers(3, 30, 160)]
    text = make_text(seed=2, lengths=lengths, context=64)
    path = tmp_path / "sharded.vlens"
    run = make_recording(make_model(2), text, path, measures=["sink_mass"], shard_tokens=64, batch=1)
    shards, segment = len(run.recording.shards), run.recording.token_table()["segment"]
    assert shards > 20
    for number in range(0, int(segment[-1]) + 1, 7):
        found = Segments(run)
        tokens = np.flatnonzero(segment == number)
        assert found.span(number) == (tokens[0], tokens[-1] + 1)
        assert found.of_token(int(tokens[-1])) == number and dict(found.beside(number))[number] == len(tokens)
        assert len(found._known) <= 7, "shards opened for one document"
    assert len(Segments(run)) == segment[-1] + 1


def test_slices_of_tokens_are_those_of_the_whole(looped_recording) -> None:
    recording = looped_recording.recording
    whole, part = recording.token_stat("sink_mass"), recording.token_stat("sink_mass", tokens=(50, 90))
    np.testing.assert_array_equal(part, whole[:, 50:90])
    np.testing.assert_array_equal(recording.token_stat("sink_mass", (50, 90), 3), part[3])
    np.testing.assert_array_equal(recording.experts(1, 2, tokens=(7, 9))[0], recording.experts(1, 2)[0][7:9])


def test_contexts_start_where_a_piece_no_longer_fits() -> None:
    segment = np.repeat([0, 1, 2, 3], [3, 5, 8, 2])
    assert context_starts(segment, 8).tolist() == [0, 8, 16]


@given(
    arrays.arrays(np.float32, st.tuples(st.integers(1, 40), st.integers(1, 40)), elements=st.floats(0, 1, width=32)),
    st.integers(1, 12),
)
def test_pooling_keeps_every_cell(values: np.ndarray, most: int) -> None:
    pooled = pool(values, "max", most)
    assert max(pooled.values.shape) <= most and pooled.values.max() == values.max()
    assert pooled.values[-1, -1] == values[pooled.row_starts[-1] :, pooled.column_starts[-1] :].max()
    mean = pool(values, "mean", most)
    sizes = [np.diff(np.append(s, n)) for s, n in zip((mean.row_starts, mean.column_starts), values.shape, strict=True)]
    assert (mean.values * np.outer(*sizes)).sum() == pytest.approx(values.sum(), rel=1e-3, abs=1e-4)


def test_pooled_difference_keeps_the_sign_of_the_largest_change() -> None:
    earlier, later = np.zeros((4, 4), np.float32), np.zeros((4, 4), np.float32)
    earlier[3, 3], later[0, 1] = 0.9, 0.4
    _, _, difference = pooled_difference(earlier, later, 2)
    assert difference.factor == 2 and difference.values == pytest.approx(np.array([[0.4, 0], [0, -0.9]]))
    region = parse_zoom("2-4-2-4", 4)
    assert pool(earlier, "max", 2, **region).values.tolist() == earlier[2:, 2:].tolist()
    assert parse_zoom("4-2-0-9", 4) == parse_zoom("x", 4) == parse_zoom("0-1-2", 4) == {}


# Exports and links


def test_exports_carry_title_hash_and_settings(context: Context) -> None:
    view = view_of(context, "/heads", "?run=looped&layer=1&head=2")
    panel = layout.find_panel(find_page("/heads"), view, "map")
    figure = export.titled(panel, view).to_plotly_json()["layout"]["title"]
    text = figure["text"] + figure["subtitle"]["text"]
    assert panel.title in text and view.run.provenance["recording"][:8] in text and "layer 1; head 2" in text
    data = json.loads(export.panel_bytes(panel, view, "json"))
    assert data["selection"]["weights_sha256"] == "0" * 64 and data["data"]["visit 1"]["measure"]["name"] == "sink_mass"


def test_a_spreadsheet_runs_no_cell(context: Context) -> None:
    view = view_of(context, "/heads", "?run=looped")
    panel = layout.find_panel(find_page("/heads"), view, "map")
    rows = lambda: [{"text": "=HYPERLINK(1)", "value": -1.5}]  # noqa: E731 (one use)
    text = export.csv_text(Panel(panel.key, panel.title, panel.draw, panel.caption, dict, rows, ""), view)
    assert "'=HYPERLINK(1)" in text and ",-1.5" in text


def test_links_keep_the_prefix(context: Context) -> None:
    behind = Context(context.registry, None, "/p/q/")
    page = layout.render(behind, "http://x/p/q/heads?run=looped&layer=1")
    text = json.dumps([page.links, page.bar, page.content], cls=plotly.utils.PlotlyJSONEncoder)
    hrefs = [part.split('"')[0] for part in text.split('"href": "')[1:]]
    assert len(hrefs) > 20 and all(urlsplit(href).path.startswith("/p/q/") for href in hrefs)


def test_prefixes() -> None:
    assert clean_prefix("/") == clean_prefix("") == "/"
    assert clean_prefix("a/b") == clean_prefix("/a/b/") == "/a/b/"
    for bad in ("/a b/", "/../", "/<x>/"):
        with pytest.raises(InputError, match="prefix"):
            clean_prefix(bad)


def test_values_that_are_one_but_for_rounding_have_an_axis_with_ends(looped_recording) -> None:
    stat = looped_recording.both_visits("expert_load")[0].mean("expert")
    flat = plots.lines(LIGHT, [plots.Line("visit 1", stat, 1)], "share")["layout"]["yaxis"]["range"]
    share = stat.values[0]  # the chosen experts of all, in every layer
    assert np.ptp(stat.values) < 1e-6 and flat == pytest.approx([0.9 * share, 1.1 * share])
    assert plots._flat([{"y": [1e-17, -2e-17, None]}]) == {"range": pytest.approx([-1.0, 1.0])}
    assert plots._flat([{"y": [0.1, 0.2]}]) == {} == plots._flat([{"y": []}])


def test_a_file_says_what_its_panel_is_of(context: Context) -> None:
    view = view_of(context, "/tokens", "run=looped&token=5")
    panel = layout.find_panel(find_page("/tokens"), view, "by-token")
    below = export.titled(panel, view).layout.title.subtitle.text
    assert re.match(r"n = \d+ tokens of one document, layer \d<br>looped, recording", below), below
