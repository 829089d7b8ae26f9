"""Small parts of the Live probe's cards: a button, a badge, a bar, a token as text. No torch."""

from __future__ import annotations

from typing import Any

from dash import html

from visitlens.probe.drawing.series import digits
from visitlens.probe.drawing.theme import isolated

_STATUS_BADGES = {
    "kept": "badge muted",
    "dropped": "badge visit-1",
    "lost": "badge visit-1",
    "new": "badge visit-2",
    "gained": "badge visit-2",
}


def button(what: str, text: str, label: str, *, primary: bool = False, hidden: bool = False) -> html.Button:
    """A button of the page's one callback."""
    return html.Button(
        text,
        id={"type": "live-do", "what": what},
        type="button",
        className="primary" if primary else "live-button",
        title=label,
        hidden=hidden,
    )


def badge(status: str) -> html.Span:
    return html.Span(status, className=_STATUS_BADGES[status])


def bar(value: float | None, look: int, most: float = 1.0) -> Any:
    """A share as digits on a bar of its length, `most` being the longest."""
    if value is None:
        return None
    share = min(max(value / (most or 1.0), 0.0), 1.0)
    return html.Span(digits(value), className=f"live-bar-cell look-{look}", style={"--share": f"{share:.3f}"})


def attribute(name: str, value: str) -> Any:
    """An attribute whose name is no Python name, such as aria-label."""
    return {name: value}


def visible(text: str) -> str:
    """Spaces and line ends as signs, so that a token's edges show."""
    return isolated(text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍"))
