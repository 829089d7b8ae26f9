"""Accessibility by axe on every page, light and dark; nothing critical or serious. And no shift of the layout."""

from __future__ import annotations

import pytest
from tests.support.answers import FRAMES

from visitlens.app.pages import pages

QUERIES = {"/tokens": "?run=looped&token=5&layer=1", "/attention": "?run=maps&layer=1&head=1&token=20"}


def test_axe_finds_nothing_serious_on_any_page_light_and_dark(meet, site) -> None:
    person = meet(site, stay=True)
    found = []
    for page in pages():
        person.open(page.PATH.strip("/") + QUERIES.get(page.PATH, "?run=looped"))
        person.all_charted()
        found += [f"{page.PATH}: {violation}" for violation in person.grave_violations()]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("link", "panel", "width"),
    [
        ("layers?run=looped", "by-layer", 1280),
        ("tokens?run=looped&token=5", "by-token", 1280),
        ("tokens?run=looped&token=5&layer=1&head=2", "by-token", 400),
    ],
)
def test_nothing_moves_while_a_page_loads(meet, site, link: str, panel: str, width: int) -> None:
    visit = meet(site)
    visit.page.set_viewport_size({"width": width, "height": 800})
    visit.page.add_init_script(
        "window.shift = 0; window.moved = (all) => { for (const e of all) if (!e.hadRecentInput) window.shift += e.value; };"
        "window.shifts = new PerformanceObserver((list) => moved(list.getEntries()));"
        "window.shifts.observe({ type: 'layout-shift', buffered: true });"
    )
    visit.open(link, load=True)
    visit.charted(panel)
    visit.all_charted()
    visit.page.evaluate(FRAMES)
    assert visit.page.evaluate("moved(shifts.takeRecords()), window.shift") < 0.05
