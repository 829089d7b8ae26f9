"""The registered figures as panels: what probe/figures holds appears here without being named. No torch."""

from __future__ import annotations

from typing import Any

from visitlens.app.panels.components import state
from visitlens.app.panels.panel import Panel, figure_panel
from visitlens.app.view.view import View, said
from visitlens.errors import VisitlensError
from visitlens.probe.gallery.figure import Figure, registered
from visitlens.probe.gallery.write_figures import Drawing
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.pair_grid import PairGrid

_LINKS: dict[str, dict[str, Any]] = {
    "sink-heads": {"path": "/attention", "x": "head", "y": "layer"},
    "update-cosine": {"path": "/residual", "x": "layer"},
    "residual-flow": {"path": "/layers", "x": "layer"},
}
"""What a click on a figure's cell or point opens; a figure that isn't here opens nothing."""


def registered_panel(view: View, slug: str, **options: Any) -> Panel | None:
    """The figure's panel; None if there is no such figure, or the recording doesn't allow it."""
    figure = next((figure for figure in registered() if figure.slug == slug), None)
    if figure is None:
        return None
    try:
        return panel_of(view, figure, **options)
    except VisitlensError:
        return None


def panel_of(view: View, figure: Figure, **options: Any) -> Panel:
    """Drawn once for as long as the recordings stay what they are. Figures over cells take the whole grid, where there is one.

    Raises:
        VisitlensError: the recordings don't allow it.
    """
    grid = grid_of(view) if figure.over != "cell" else None
    if grid is not None:
        found = grid
        drawing = view.context.remember(
            f"grid-figure:{figure.slug}", _versions(view), lambda: Drawing(figure, figure.data(found))
        )
    else:
        partner = view.pair.baseline if view.recorded.looped else view.pair.looped
        other = partner.recording.run["run_uuid"] if partner else ""
        drawing = view.remember(f"figure:{figure.slug}:{other}", lambda: Drawing(figure, figure.data(view.pair)))
    return figure_panel(view, drawing, **({"links": _LINKS.get(figure.slug)} | options))


def grid_of(view: View) -> PairGrid | None:
    """The grid's pairs as they are opened already; None without a grid, or without a looped recording in it."""
    registry = view.context.registry
    grid = registry.grid
    if grid is None:
        return None
    pairs: dict[tuple[str, str], Pair] = {}
    reasons: dict[tuple[str, str], str] = {}
    for cell in grid.cells:
        at = cell.scale, cell.level
        id_ = registry.id_of(cell.looped)
        if id_ is None:
            continue
        if registry[id_].run is None:
            reasons[at] = registry[id_].error
        else:
            pairs[at] = registry.pair(id_)
    return PairGrid(grid.name, grid.scales, grid.levels, pairs, reasons) if pairs else None


def _versions(view: View) -> str:
    return "|".join(entry.version for entry in view.context.registry.entries())


def gallery(view: View) -> list[Any]:
    """Every registered figure, or why it can't be drawn."""
    items: list[Any] = []
    for figure in registered():
        try:
            items.append(panel_of(view, figure))
        except VisitlensError as error:
            items.append(state(figure.title, [figure.question, f"Not drawn: {said(error, view)}"], "partial panel"))
    return items
