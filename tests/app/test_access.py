"""Accessibility by axe on every page, light and dark; nothing critical or serious. And no shift of the layout."""

from __future__ import annotations

import pytest

from visitlens.app.pages import pages

QUERIES = {"/tokens": "?run=looped&token=5&layer=1", "/attention": "?run=maps&layer=1&head=1&token=20"}


def test_axe_finds_nothing_serious_on_any_page_light_and_dark(meet, site) -> None:
    person = meet(site, stay=True)
    found = []
    for page in pages():
        person.open(page.PATH.strip("/") + QUERIES.get(page.PATH, "?run=looped"))
        charts = person.page.locator("main .chart")
        for i in range(charts.count()):
            charts.nth(i).locator(".graph[data-drawn]").wait_for(state="attached")
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
        "window.shift = 0; new PerformanceObserver((l) => { for (const e of l.getEntries()) if (!e.hadRecentInput) window.shift += e.value; })"
        ".observe({ type: 'layout-shift', buffered: true });"
    )
    visit.open(link, load=True)
    visit.charted(panel)
    visit.page.wait_for_timeout(300)
    assert visit.page.evaluate("window.shift") < 0.05
