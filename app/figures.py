"""The registered figures as panels: what probe/figures holds appears here without being named. No torch."""

from __future__ import annotations

from typing import Any

from visitlens.app.components import state
from visitlens.app.context import View
from visitlens.app.panels import Panel, figure_panel
from visitlens.kernels.errors import VisitlensError
from visitlens.probe.figures.base import Figure, registered
from visitlens.probe.figures.export import Drawing

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
    """Drawn once for as long as the recordings stay what they are.

    Raises:
        VisitlensError: the recordings don't allow it.
    """
    partner = view.pair.baseline if view.recorded.looped else view.pair.looped
    other = partner.recording.run["run_uuid"] if partner else ""
    drawing = view.remember(f"figure:{figure.slug}:{other}", lambda: Drawing(figure, figure.data(view.pair)))
    return figure_panel(view, drawing, **({"links": _LINKS.get(figure.slug)} | options))


def gallery(view: View) -> list[Any]:
    """Every registered figure, or why it can't be drawn."""
    items: list[Any] = []
    for figure in registered():
        try:
            items.append(panel_of(view, figure))
        except VisitlensError as error:
            items.append(state(figure.title, [figure.question, f"Not drawn: {error}"], "partial panel"))
    return items
