"""Answers and scripts that come late or out of turn: what a person did meanwhile holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.answers import FRAMES

PAGE = "main.children"
ARRIVED = "performance.getEntriesByType('resource').filter((e) => e.name.includes('_dash-update')).length"


@pytest.fixture
def answers(site: Any) -> Iterator[Any]:
    yield site.answers
    site.answers.pass_on()


def test_a_page_whose_answer_comes_after_the_next_ones_is_not_shown(visit, answers) -> None:
    visit.open("?run=looped")
    answers.keep(PAGE)
    visit.page.click("nav[aria-label=Pages] >> text=Layers")
    answers.come(PAGE)
    answers.leave(PAGE)
    visit.page.click("nav[aria-label=Pages] >> text=Provenance")
    visit.settled()
    before = visit.page.evaluate(ARRIVED)
    answers.pass_on(PAGE)
    visit.page.wait_for_function(f"(before) => {ARRIVED} > before", arg=before)
    visit.page.evaluate(FRAMES)
    assert visit.page.inner_text("h1") == "Provenance" and visit.page.title().startswith("Provenance")


def test_a_page_left_before_it_is_seen_takes_no_focus_and_says_nothing(visit) -> None:
    """A click that falls between a page's nodes and the next frame."""
    visit.open("?run=looped")
    visit.page.evaluate(
        """() => {
            const frame = window.requestAnimationFrame;
            window.requestAnimationFrame = (call) => frame((at) => {
                if (document.querySelector("h1").textContent === "Heads" && location.pathname.endsWith("heads")) {
                    window.requestAnimationFrame = frame;
                    visitlens.go(visitlens.here({}, "/provenance"));
                }
                call(at);
            });
            visitlens.go(visitlens.here({}, "/heads"));
        }"""
    )
    visit.page.wait_for_url("**/provenance?**")
    visit.settled()
    assert visit.page.inner_text("h1") == "Provenance" and visit.said().startswith("Provenance")
    assert visit.page.evaluate("document.activeElement.id") == "main"


def test_a_duplicated_tab_takes_a_name_of_its_own(visit, site) -> None:
    """By which it would end what the other one runs."""
    visit.open("?run=looped")
    mine = visit.page.evaluate("visitlens.tab")
    copy = visit.page.context.new_page()
    try:
        copy.add_init_script(
            f"sessionStorage.getItem('visitlens:tab') || sessionStorage.setItem('visitlens:tab', '{mine}')"
        )
        copy.goto(f"{site.url}?run=looped")
        copy.wait_for_function("(mine) => visitlens.tab !== mine", arg=mine)
        theirs = copy.evaluate("visitlens.tab")
        copy.reload()
        assert copy.evaluate("visitlens.tab") == theirs == copy.evaluate("sessionStorage.getItem('visitlens:tab')")
    finally:
        copy.close()
    visit.open("?run=looped", load=True)
    assert visit.page.evaluate("visitlens.tab") == mine
    assert not visit.errors


def test_a_panel_is_pinned_and_a_table_saved_before_their_scripts_are_there(meet, site, tmp_path) -> None:
    person, kept = meet(site), []
    person.open("?run=looped")
    person.page.wait_for_function("() => window.Plotly")
    person.page.route("**/dash_ag_grid*", lambda route: kept.append(route))
    person.page.evaluate(
        """() => {
            const { react } = Plotly, wait = new Promise((go) => { window.draw = go; });
            Plotly.react = (...parts) => wait.then(() => react(...parts));
        }"""
    )
    person.open("heads?run=looped")
    person.page.click("#panel-map [data-action=pin]")
    person.page.locator("#tray .pinned .main-svg").first.wait_for()
    with person.page.expect_download() as waiting:
        person.page.get_by_role("button", name="Save All heads as CSV").click()
        while not kept:
            person.page.wait_for_timeout(50)
        for route in kept:
            route.continue_()
    waiting.value.save_as(tmp_path / "heads.csv")
    lines = (tmp_path / "heads.csv").read_text("utf-8-sig").splitlines()
    assert len([line for line in lines if line and not line.startswith("#")]) == 1 + 2 * 4
    person.page.evaluate("draw()")
    person.charted("map")
    assert not person.errors and not person.outside


def test_a_table_that_could_not_be_had_is_asked_for_again_and_an_old_one_is_not_shown(visit) -> None:
    page, kept, refused = visit.page, [], []

    def rows(route) -> None:
        if "sink_mass" in route.request.url:
            kept.append(route)
        elif "resid_rms" in route.request.url and not refused:
            refused.append(route)
            route.fulfill(status=500, body="locked")
        else:
            route.continue_()

    visit.open("layers?run=looped&metric=sink_mass")
    page.route("**/by-layer.rows*", rows)
    table = page.locator("#panel-by-layer .table-twin")
    table.locator("summary").click()
    while not kept:
        page.wait_for_timeout(50)
    visit.choose("metric", "update_rms")
    table.locator("table").wait_for()
    shown = table.inner_text()
    with page.expect_response("**/by-layer.rows*"):
        kept[0].fulfill(status=500, body="locked")
    page.evaluate(FRAMES)
    assert table.inner_text() == shown
    visit.choose("metric", "resid_rms")
    table.get_by_text("locked").wait_for()
    table.locator("summary").click()
    table.locator("summary").click()
    table.locator("table").wait_for()
    page.unroute("**/by-layer.rows*")
    assert len(visit.errors) == 2 and all("500" in error for error in visit.errors)  # the browser's own
    visit.errors.clear()
