"""The dashboard as a person uses it: from the grid to a run, a layer, a head and a token, back again, by mouse and keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from visitlens.probe.reading.grid import Grid, GridCell


def test_overview_to_layer_to_head_to_token_by_clicking(visit) -> None:
    visit.open("?run=looped")
    assert visit.page.title() == "Overview · looped · visitlens"
    visit.page.click(".number-card >> text=sink mass change")
    visit.settled()
    assert visit.path == "heads"
    visit.click_cell("map", 2, 1, 3)  # layers 1 and 2 are looped: the second row is layer 2
    assert (visit.path, visit.query["layer"], visit.query["head"]) == ("attention", "2", "3")
    crumbs = visit.page.locator(".breadcrumb li").all_inner_texts()
    assert crumbs == ["Overview", "looped", "layer 2", "head 3"]
    visit.page.click("nav[aria-label=Pages] >> text=Tokens")
    visit.settled()
    assert visit.value("layer") == "2" and visit.value("head") == "3"  # the selection came along
    visit.page.locator("a.token").nth(5).click()
    visit.settled()
    said = visit.page.inner_text("#panel-by-token ~ section .figure-line")
    assert "experts kept" in said and "of 8" in said
    assert visit.page.locator(".breadcrumb li").last.inner_text() == f"token {visit.query['token']}"
    visit.page.click(".breadcrumb >> text=layer 2")
    visit.settled()
    assert visit.path == "heads" and "token" not in visit.query


def test_grid_cell_to_layer_to_head_to_token_and_back(meet, serve, folder: Path, tmp_path: Path) -> None:
    cells = (GridCell("small", "85", folder / "maps.vlens"), GridCell("large", "85", folder / "three.vlens"))
    Grid("test", ("small", "large"), ("0", "85"), cells).write(tmp_path)
    person = meet(serve(tmp_path))
    person.open("")
    person.click_cell("grid", 0, 1, 0)  # S = 85%, small
    assert (person.path, person.query) == ("layers", {"run": "maps"})
    person.click_point("by-layer", 0, 1)  # visit 1 of the second looped layer
    assert (person.path, person.query) == ("heads", {"run": "maps", "layer": "2"})
    person.click_cell("map", 1, 1, 3)
    assert (person.path, person.query) == ("attention", {"run": "maps", "layer": "2", "head": "3"})
    person.click_cell("map", 2, 9, 4)  # of the difference: query 9
    assert person.query["token"] == "9"
    assert "Keys gained and lost by token 9, layer 2, head 3" in person.page.inner_text("main")
    person.page.click(".breadcrumb >> text=token 9")
    person.settled()
    text = person.page.inner_text("main")
    assert person.path == "tokens" and "Experts of token 9" in text and "Keys gained and lost by token 9" in text
    crumbs = person.page.locator(".breadcrumb li").all_inner_texts()
    assert crumbs == ["Overview", "maps", "layer 2", "head 3", "token 9"]
    for path in ("attention", "attention", "heads", "layers", ""):
        person.page.go_back()
        person.settled()
        assert person.path == path
    assert not person.errors and not person.outside


def test_the_url_is_the_whole_state_on_reload_back_and_in_a_fresh_browser(visit, meet, site) -> None:
    visit.open("layers?run=three")
    visit.choose("metric", "update_rms")
    visit.choose("visits", "2-3")
    chosen = {"run": "three", "metric": "update_rms", "visits": "2-3"}
    assert visit.query == chosen
    assert visit.page.inner_text("#panel-difference h2") == "Change from visit 2 to visit 3"

    visit.page.reload()
    visit.settled()
    assert visit.query == chosen
    assert (visit.value("metric"), visit.value("visits")) == ("update_rms", "2-3")

    visit.page.go_back()
    visit.settled()
    assert visit.value("visits") == "1-3" and visit.value("metric") == "update_rms"
    visit.page.go_forward()
    visit.settled()
    assert visit.value("visits") == "2-3"

    visit.page.click("[data-action=copy-link]")
    link = visit.page.evaluate("navigator.clipboard.readText()")
    other = meet(site, fresh=True)
    other.page.goto(link)
    other.settled()
    assert other.value("visits") == "2-3"
    assert other.page.inner_text("#panel-difference h2") == "Change from visit 2 to visit 3"


def test_two_tabs_keep_their_own_selection(visit, meet, site) -> None:
    visit.open("layers?run=looped&metric=sink_mass")
    second = meet(site)
    second.open("layers?run=three&metric=update_rms")
    visit.choose("metric", "attention_entropy")
    assert second.value("metric") == "update_rms" and second.value("run") == "three"
    second.choose("visits", "1-2")
    assert visit.value("metric") == "attention_entropy" and visit.value("run") == "looped"


def test_keyboard_alone_reaches_a_cell_hears_its_value_and_opens_it(visit) -> None:
    visit.open("heads?run=looped", load=True)
    visit.charted("map")
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.className") == "skip"
    for _ in range(60):
        visit.page.keyboard.press("Tab")
        if "chart" in visit.page.evaluate("document.activeElement.className"):
            break
    else:
        pytest.fail("Tab never reached the chart")
    visit.page.keyboard.press("ArrowDown")  # the first cell
    visit.page.keyboard.press("ArrowDown")
    visit.page.keyboard.press("ArrowRight")
    said = visit.said()
    run = visit.site.context.registry["looped"].run
    earlier, later = run.both_visits("sink_mass")
    values = [earlier.values[1, 1], later.values[1, 1], later.values[1, 1] - earlier.values[1, 1]]
    assert said.startswith("layer 2, head 1:")
    for value in values:
        assert f"{value:.4f}".replace("-", "−") in said
    assert visit.page.locator("#panel-map .cell-cursor").count() == 3  # the same cell in all three maps
    visit.page.keyboard.press("Enter")
    visit.settled()
    assert visit.path == "attention" and (visit.query["layer"], visit.query["head"]) == ("2", "1")


def test_command_palette_finds_pages_layers_and_the_largest_change(visit) -> None:
    visit.open("?run=looped")
    visit.page.keyboard.press("Control+k")
    visit.page.keyboard.type("provenance")
    visit.page.keyboard.press("Enter")
    visit.settled()
    assert visit.path == "provenance"
    visit.page.keyboard.press("/")
    visit.page.keyboard.type("surprise")
    visit.page.keyboard.press("Enter")
    visit.settled()
    run = visit.site.context.registry["looped"].run
    earlier, later = run.both_visits("sink_mass")
    change = abs(later.values - earlier.values)
    layer, head = (int(visit.query[name]) for name in ("layer", "head"))
    assert change[list(later.labels["layer"]).index(layer), head] == change.max()


def test_arrows_walk_the_tokens_of_a_document(visit) -> None:
    visit.open("tokens?run=looped")
    first = visit.page.locator("a.token").first
    first.focus()
    visit.page.keyboard.press("ArrowRight")
    visit.page.keyboard.press("ArrowRight")
    place = visit.page.evaluate("[...document.querySelectorAll('a.token')].indexOf(document.activeElement)")
    assert place == 2
    visit.page.keyboard.press("Enter")
    visit.settled()
    assert "token" in visit.query


def test_visit_scrubber_turns_the_first_map_into_the_second(visit) -> None:
    visit.open("heads?run=looped")
    visit.charted("map")
    visit.page.focus("#morph-map")
    visit.page.keyboard.press("End")
    visit.page.locator("#panel-map .scrubber-at", has_text="later visit").wait_for()
    later = visit.site.context.registry["looped"].run.both_visits("sink_mass")[1].values[1, 2]
    shown = "document.querySelector('#panel-map .js-plotly-plot').calcdata[0][0].z[1][2]"
    visit.page.wait_for_function(f"(later) => Math.abs({shown} - later) <= 1e-6 * Math.abs(later)", arg=float(later))


def test_pin_keeps_a_panel_while_the_selection_changes_and_maximise_fills_the_window(visit) -> None:
    visit.open("layers?run=looped&metric=sink_mass")
    visit.charted("by-layer")
    visit.page.click("#panel-by-layer [data-action=pin]")
    visit.choose("metric", "update_rms")
    assert visit.page.locator("#tray .pinned .js-plotly-plot").count() == 1
    assert "sink_mass" in visit.page.inner_text("#tray figcaption")
    visit.page.click("#tray [data-action=unpin]")
    assert visit.page.locator("#tray .pinned").count() == 0
    visit.page.click("#panel-by-layer [data-action=maximise]")
    box = visit.page.locator("#panel-by-layer").bounding_box()
    assert box["width"] > 1200 and box["height"] > 700
    visit.page.keyboard.press("Escape")
    assert visit.page.locator("[data-maximised]").count() == 0


def test_theme_is_switched_kept_and_drawn_in_the_figures(visit) -> None:
    visit.open("layers?run=looped")
    assert visit.page.evaluate("document.documentElement.dataset.theme") == "light"
    visit.page.click("#theme")
    visit.settled()
    visit.charted("by-layer")
    ground = "document.querySelector('#panel-by-layer .js-plotly-plot')._fullLayout.paper_bgcolor.toLowerCase()"
    visit.page.wait_for_function(f"() => {ground} === '#14181d'")
    visit.page.reload()
    visit.settled()
    assert visit.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_click_on_a_row_of_the_sorted_table_opens_the_head(visit) -> None:
    visit.open("heads?run=looped")
    cell = visit.page.locator("#heads-table .ag-center-cols-container [row-index='3'] [col-id^='sink_mass']").first
    cell.scroll_into_view_if_needed()
    cell.click()
    visit.page.wait_for_url("**/attention?**")
    visit.settled()
    assert (visit.query["layer"], visit.query["head"]) == ("1", "3")


def test_grid_cell_opens_its_run_and_a_missing_cell_says_so(meet, serve, folder: Path, tmp_path: Path) -> None:
    cells = (
        GridCell("small", "85", folder / "looped.vlens", folder / "baseline.vlens"),
        GridCell("large", "85", folder / "three.vlens"),
    )
    Grid("test", ("small", "large"), ("0", "85"), cells).write(tmp_path)
    person = meet(serve(tmp_path))
    person.open("")
    text = person.page.inner_text("#panel-grid .caption")
    assert "2 of 4 cells" in text
    person.charted("grid").focus()
    person.page.keyboard.press("ArrowDown")
    person.page.keyboard.press("Enter")
    assert person.path == "" and "no recording" in person.said()
    person.click_cell("grid", 0, 1, 1)
    assert person.path == "layers" and person.query["run"] == "three"
    person.open("?show=update-cosine")
    assert "Update cosine" in person.page.inner_text("#panel-grid h2")


def test_the_table_under_a_chart_holds_its_numbers(visit) -> None:
    visit.open("layers?run=looped&metric=update_rms")
    visit.charted("by-layer")
    visit.page.click("#panel-by-layer .table-twin summary")
    visit.page.locator("#panel-by-layer .twin table").wait_for()
    run = visit.site.context.registry["looped"].run
    earlier, _ = run.both_visits("update_rms")
    cells = visit.page.locator("#panel-by-layer .twin tbody tr").first.locator("td").all_inner_texts()
    assert cells[:3] == ["visit 1", "1", f"{earlier.values[0]:.4f}"]


def test_kept_views_come_back_in_the_palette(visit) -> None:
    visit.open("layers?run=looped&metric=update_rms")
    visit.page.click("[data-action=keep]")
    visit.open("?run=looped")
    visit.page.keyboard.press("Control+k")
    visit.page.keyboard.type("kept update_rms")
    visit.page.keyboard.press("Enter")
    visit.settled()
    assert visit.query["metric"] == "update_rms"


def test_no_button_uploads_a_chart(visit) -> None:
    visit.open("figures?run=looped")
    visit.charted("sink-heads")
    visit.page.hover("#panel-sink-heads .chart")
    page = visit.page.content().lower()
    assert "share chart" not in page and "sendtocloud" not in page.replace("showsendtocloud", "")
    assert visit.page.locator(".modebar-btn").count() == 0
    configurations = visit.page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].map((p) => p._context.showSendToCloud)"
    )
    assert configurations and not any(configurations)


def test_behind_a_prefix_with_the_rest_of_the_machine_out_of_reach(meet, serve, folder: Path) -> None:
    person = meet(serve(folder / "looped.vlens", prefix="/user/me/visitlens/"))
    person.open("layers")
    person.page.click("nav[aria-label=Pages] >> text=Heads")
    person.settled()
    assert person.page.url.startswith(person.site.url) and person.path == "heads"
    person.charted("map")
    person.page.click("#panel-map .table-twin summary")
    person.page.locator("#panel-map .twin table").wait_for()
    assert all(url.startswith((person.site.url, "data:", "blob:")) for url in person.requests)
    assert not person.errors


def test_a_page_is_light_and_few_requests(visit) -> None:
    visit.open("?run=looped", load=True)
    visit.page.wait_for_function("() => window.Plotly")  # the last that it fetches, when the page rests
    assert len(visit.requests) < 45, len(visit.requests)
    weights = visit.page.evaluate(
        "performance.getEntriesByType('resource').filter((e) => e.name.includes('_dash-update')).map((e) => e.transferSize)"
    )
    assert 0 < max(weights) < 250_000
    before = len(visit.requests)
    visit.page.click("nav[aria-label=Pages] >> text=Provenance")
    visit.settled()
    assert len(visit.requests) - before <= 3
    assert json.dumps(visit.requests).count("https://") == 0
