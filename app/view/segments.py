"""The packed documents of a recording as a page chooses among them: which one is shown, which are offered. No torch."""

from __future__ import annotations

from visitlens.app.view.view import View
from visitlens.probe.reading.token_window import Segments

_PICKED = 200
_LONG = 16


def segments(view: View) -> Segments:
    """Read once for as long as the recording stays what it is."""
    return view.remember("segments", lambda: Segments(view.recorded))


def segment_of(view: View, found: Segments) -> int:
    """Chosen, else the token's, else the first document with something to read in it."""
    token, chosen = view.selection.token, view.selection.segment
    if chosen is not None and chosen < len(found):
        return chosen
    return found.of_token(token) if token is not None else _first_long(found)


def segment_choices(view: View) -> tuple[list[tuple[str, str]], str]:
    """For the picker: those around the one shown."""
    found = segments(view)
    here = segment_of(view, found)
    beside = found.beside(here)
    first = max(0, min(here - beside[0][0] - _PICKED // 2, len(beside) - _PICKED))
    return [(str(n), f"{n + 1:,} ({size} tokens)") for n, size in beside[first : first + _PICKED]], str(here)


def _first_long(found: Segments) -> int:
    """The first with something to read in it."""
    beside = found.beside(0)
    return next((n for n, size in beside if size >= _LONG), max(beside, key=lambda item: item[1])[0])
