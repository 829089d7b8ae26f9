"""A person in a hurry: clicks before the page is there, Back at odd moments, odd links, a narrow window, Tab and nothing else."""

from __future__ import annotations

import pytest


def test_the_last_of_many_clicks_wins_and_back_still_knows_the_way(visit) -> None:
    visit.open("?run=looped")
    link = "nav[aria-label=Pages] >> text="
    for name in ("Layers", "Routing", "Figures", "Heads"):
        visit.page.locator(link + name).first.click(no_wait_after=True)
    visit.charted("map")
    visit.settled()
    assert visit.path == "heads" and visit.page.inner_text("h1") == "Heads"
    for _ in range(3):
        visit.page.evaluate("history.back()")
    visit.page.wait_for_url("**/layers?**")
    visit.charted("by-layer")
    visit.settled()
    assert visit.page.inner_text("h1") == "Layers"
    for value in ("update_rms", "resid_rms", "relative_update"):
        visit.page.select_option("select[name=metric]", value)
    visit.page.locator("#panel-by-layer h2", has_text="Relative update").wait_for()
    visit.settled()
    assert visit.value("metric") == visit.query["metric"] == "relative_update"


def test_a_press_on_a_link_that_the_page_s_arrival_interrupts_still_counts(visit) -> None:
    visit.open("?run=looped")
    where = visit.page.locator("nav[aria-label=Pages] >> text=Routing").bounding_box()
    visit.page.mouse.move(where["x"] + 5, where["y"] + 5)
    visit.page.evaluate("window.visitlens.go(window.visitlens.here({}, '/layers'))")
    visit.page.mouse.down()
    visit.settled()
    assert visit.path == "layers" and visit.page.get_attribute("nav [aria-current]", "href").endswith(
        "layers?run=looped"
    )
    visit.page.mouse.up()
    visit.page.wait_for_url("**/routing?**")
    visit.settled()
    assert visit.page.inner_text("h1") == "Routing"


def test_a_maximised_panel_and_the_palette_do_not_outlive_their_page(visit) -> None:
    visit.open("layers?run=looped")
    visit.charted("by-layer")
    visit.page.click("#panel-by-layer [data-action=maximise]")
    assert visit.page.evaluate("getComputedStyle(document.body).overflow") == "hidden"
    visit.open("provenance?run=looped")
    visit.page.wait_for_function("() => getComputedStyle(document.body).overflow === 'visible'")
    assert visit.page.locator("[data-maximised]").count() == 0
    visit.page.keyboard.press("Control+k")
    visit.page.go_back()
    visit.page.wait_for_url("**/layers?**")
    visit.settled()
    assert not visit.page.evaluate("document.getElementById('palette').open")


def test_tab_leaves_the_table_of_heads(visit) -> None:
    visit.open("heads?run=looped")
    cell = visit.page.locator("#heads-table .ag-center-cols-container [row-index='1'] .ag-cell").first
    cell.scroll_into_view_if_needed()
    cell.focus()
    visit.page.keyboard.press("ArrowDown")
    assert visit.page.evaluate("document.activeElement.closest('[row-index]').getAttribute('row-index')") == "2"
    for _ in range(3):
        visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.closest('.ag-cell')") is None


@pytest.mark.parametrize("width", [900, 400])
def test_a_narrow_window_scrolls_one_way_only(visit, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 900})
    try:
        for page in ("?run=looped", "heads?run=looped", "tokens?run=looped&token=3"):
            visit.open(page)
            sizes = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            scrolled, seen = visit.page.evaluate(sizes)
            assert scrolled <= seen, page
            assert visit.page.locator(".side").bounding_box()["height"] < 190, "the pages' links push the page away"
    finally:
        visit.page.set_viewport_size({"width": 1280, "height": 800})


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("heads?run=looped&metric=update_rms", "measure 'update_rms' isn't among what Heads offers; Attention on"),
        ("tokens?run=looped&segment=9999", "document '9999' isn't among what Tokens offers; "),
        ("routing?run=looped&layer=0", "layer '0' isn't among what Routing offers; 1 is shown"),
        ("compare?run=looped&other=baseline&by=evil", "by 'evil' isn't among what Compare offers; step is shown"),
        ("layers?run=looped&a=1&b=2&a=3", "parameters 'a', 'b' mean nothing here and are left out"),
    ],
)
def test_what_a_link_asks_for_in_vain_is_said(visit, link: str, said: str) -> None:
    visit.open(link)
    assert [said in notice for notice in visit.page.locator(".notices li").all_inner_texts()] == [True]
    visit.open("heads?run=looped&layer=1&metric=sink_mass")
    assert visit.page.locator(".notices").count() == 0
