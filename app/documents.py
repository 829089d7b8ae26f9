"""The packed documents of a recording as a page chooses among them: which one is shown, which are offered. No torch."""

from __future__ import annotations

import numpy as np

from visitlens.app.context import View
from visitlens.probe.token_window import Segments

_PICKED = 200


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
    first = max(0, min(here - _PICKED // 2, len(found) - _PICKED))
    sizes = np.diff(found.bounds)
    around = range(first, min(first + _PICKED, len(found)))
    return [(str(n), f"{n + 1} ({sizes[n]} tokens)") for n in around], str(here)


def _first_long(found: Segments) -> int:
    sizes = np.diff(found.bounds)
    long = np.flatnonzero(sizes >= 16)
    return int(long[0]) if len(long) else int(sizes.argmax())
