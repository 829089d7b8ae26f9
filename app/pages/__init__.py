"""A page is one file of this folder; being there is being registered. It holds

    PATH = "/layers"            where it is; "/" is the Overview
    TITLE = "Layers"            in the navigation, which is sorted by ORDER
    ORDER = 20                  a number of its own; pages of the same tens stand in one group
    NEEDS = ("looped",)         of "recording", "looped", "routing", "tokens", "model": what isn't met is shown as one
                                sentence instead of the page (`context.describe_needs`)
    CONTROLS = ("layer",)       of "visits", "layer", "head", "metric", "agg", "segment", "other": the selectors above
                                the page; the run's is always there. Changing one changes the URL, and the page is drawn anew
    PARAMETERS = ("job",)       names of its own in the URL, if any; they arrive in `view.selection.extra`
    METRICS = callable          optional: `METRICS(view)` -> measures offered by the "metric" control

    def layout(view) -> list    Dash components and Panels (`app.panels`), drawn from the View alone. A Panel gets its
                                frame, caption, table, exports and keyboard by itself
    def panel(view, key)        optional: finds a Panel for the exports where `layout` doesn't hold it (drawn by a callback)
    def callbacks(app, context) optional: registers Dash callbacks, once

Links between pages are `view.href("/heads", layer=3)`; nothing is written to the URL otherwise. What a page keeps between
requests lies in `context.services[PATH]`. A page never reads a path from the URL.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from visitlens import plugins
from visitlens.errors import InputError


@plugins.once
def pages() -> tuple[ModuleType, ...]:
    """Every page of this folder, of other packages and of a notebook, in the navigation's order."""
    own = plugins.modules(__name__)
    others = plugins.added("pages", _path_of, [page.PATH for page in own])
    return tuple(sorted([*own, *others.values()], key=lambda page: (page.ORDER, page.TITLE)))


def _path_of(name: str, page: Any) -> list[str]:
    if lacking := [
        part for part in ("PATH", "TITLE", "ORDER", "NEEDS", "CONTROLS", "layout") if not hasattr(page, part)
    ]:
        raise InputError(f"expected a page's module, got {page!r:.80} without {', '.join(lacking)}")
    return [page.PATH]


def find_page(path: str) -> ModuleType | None:
    """By its path, below the prefix; a trailing slash is as good as none."""
    wanted = "/" + path.strip("/")
    return next((page for page in pages() if wanted == page.PATH), None)
