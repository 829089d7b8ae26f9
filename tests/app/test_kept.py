"""What stays in a person's hands while the page under them is drawn anew: the focus, what is open, where they scrolled and zoomed."""

from __future__ import annotations

import pytest

from visitlens.app.server import layout


@pytest.fixture
def mark():
    """`mark(page, ...selectors)` marks nodes; the function it returns says which of them still stand where they stood."""

    def marked(page, *selectors):
        page.evaluate("(all) => all.forEach((s) => { document.querySelector(s).marked = true; })", selectors)
        return lambda: [page.evaluate("(s) => Boolean(document.querySelector(s)?.marked)", s) for s in selectors]

    return marked


def test_a_selector_is_walked_by_the_arrow_keys_and_nothing_closes(visit, mark) -> None:
    page = visit.page
    visit.open("layers?run=looped&metric=sink_mass")
    visit.charted("by-layer")
    page.click("#panel-by-layer .table-twin summary")
    page.locator("#panel-by-layer .twin table").wait_for()
    page.click("#panel-by-layer [data-action=maximise]")
    kept = mark(page, "select[name=metric]", "#panel-by-layer", "#panel-by-layer .graph")
    page.focus("select[name=metric]")
    seen = [visit.value("metric")]
    for _ in range(3):  # the third changes between one and two axes, so the panel's classes change too
        page.keyboard.press("ArrowDown")
        page.wait_for_function("(before) => !location.search.endsWith(before)", arg=seen[-1])
        visit.settled()
        seen.append(visit.value("metric"))
        assert visit.query["metric"] == seen[-1]
    assert len(set(seen)) == 4
    assert page.evaluate("document.activeElement.name") == "metric" and kept() == [True] * 3
    assert page.locator("#panel-by-layer[data-maximised] .table-twin[open]").count() == 1
    page.keyboard.press("Escape")
    visit.charted("by-layer")
    assert page.evaluate("getComputedStyle(document.body).overflow") == "visible"


def test_a_maximised_panel_fills_its_frame_with_the_next_head_and_the_cursor_says_its_value(visit) -> None:
    page = visit.page
    visit.open("attention?run=maps&layer=1&head=1")
    chart = visit.charted("map")
    page.focus("#morph-map")
    page.keyboard.press("End")
    page.wait_for_function("() => document.querySelector('#panel-map .scrubber-at').textContent === 'later visit'")
    page.click("#panel-map [data-action=maximise]")
    page.mouse.move(0, 0)  # not over a cell, whose value would be read out
    chart.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    before, height = (
        page.inner_text("#panel-map .readout"),
        "() => document.querySelector('#panel-map svg').clientHeight",
    )
    page.wait_for_function(f"() => ({height})() > 500")
    tall = page.evaluate(height)
    visit.open("attention?run=maps&layer=1&head=2")
    visit.charted("map")
    after = page.inner_text("#panel-map .readout")
    assert after != before and after.split(":")[0] == before.split(":")[0] and visit.said() == after
    page.wait_for_function(f"(tall) => ({height})() === tall", arg=tall)
    assert page.input_value("#morph-map") == "0" and page.inner_text("#panel-map .scrubber-at") == "earlier visit"
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.wait_for_function(f"(tall) => ({height})() < tall", arg=tall)


def test_a_growing_recording_takes_nothing_out_of_ones_hands(
    meet, serve, shard_by_shard, tmp_path, mark, monkeypatch
) -> None:
    monkeypatch.setattr(layout, "WATCH_MS", 200)
    visitor = meet(serve(tmp_path))
    page = visitor.page
    visitor.open("layers?run=growing", load=True)
    visitor.charted("by-layer")
    page.click("#panel-by-layer .table-twin summary")
    page.locator("#panel-by-layer .twin table").wait_for()
    zoom = "document.querySelector('#panel-by-layer .js-plotly-plot')._fullLayout.yaxis.range.join()"
    page.evaluate(
        "Plotly.relayout(document.querySelector('#panel-by-layer .js-plotly-plot'), {'yaxis.range': [0.1, 0.2]})"
    )
    page.focus("select[name=metric]")
    kept = mark(page, "select[name=metric]", "#panel-by-layer", "#panel-by-layer .graph")
    page.evaluate(
        "() => new MutationObserver(() => { window.touched = true; })"
        ".observe(document.querySelector('select[name=metric]'), { subtree: true, childList: true, attributes: true })"
    )
    shard_by_shard()
    page.wait_for_function("() => !document.querySelector('.notices')")
    visitor.settled()
    visitor.charted("by-layer")
    assert page.evaluate("document.activeElement.name") == "metric" and kept() == [True] * 3
    assert page.evaluate("window.touched") is None, "an open list would close"
    assert page.locator("#panel-by-layer .table-twin[open] table").count() == 1
    assert page.evaluate(zoom) == "0.1,0.2"
    assert not visitor.errors and not visitor.outside
