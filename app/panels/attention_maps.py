"""A head's attention maps, stored or made from Q and K; and which keys a query gains and loses. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from dash import html

from visitlens.app.panels.components import card, number, table
from visitlens.app.view.segments import segment_of, segments
from visitlens.app.view.view import View
from visitlens.errors import RecordingError
from visitlens.probe.reading.attention_from_qk import MOST_TOKENS, attention_from_qk, holds_qk
from visitlens.probe.reading.token_window import changed_keys


@dataclass(frozen=True)
class Place:
    """What a map is of: the `index`-th of `count` contexts (stored maps) or documents (maps made from Q and K), from token
    `start`, `tokens` long; `whole` is False where a longer document is cut."""

    kind: Literal["context", "document"]
    index: int
    count: int
    start: int
    tokens: int
    whole: bool = True

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and self.start <= token < self.start + self.tokens


def source(view: View) -> Literal["", "maps", "qk"]:
    """Where a head's map comes from: stored, made from recorded Q and K, or nowhere."""
    run = view.recorded
    return "maps" if run.recording.level == "maps" else "qk" if holds_qk(run) else ""


def place_of(view: View, token: int | None, context: int | None = None) -> Place:
    """The chosen context or document, else the token's, else the first."""
    run = view.recorded
    if source(view) == "qk":
        found = segments(view)
        at = found.of_token(token) if token is not None else segment_of(view, found)
        start, stop = found.span(at)
        size = min(stop - start, MOST_TOKENS)
        return Place("document", at, len(found), start, size, size == stop - start)
    length = run.recording.attention_maps(run.plan.looped_layers[0], 1, 0).shape[-1]
    starts = view.remember(
        f"contexts:{length}", lambda: context_starts(run.recording.token_table(names=("segment",))["segment"], length)
    )
    if context is None:
        context = 0 if token is None else int(np.searchsorted(starts, token, side="right")) - 1
    context = min(context, len(starts) - 1)
    bounds = np.append(starts, run.recording.tokens)
    start = int(bounds[context])
    return Place("context", context, len(starts), start, min(int(bounds[context + 1]) - start, length))


def both_maps(view: View, place: Place, rows: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Some rows of the selected head's maps [query, key] at both visits; queries are counted in the place.

    Raises:
        RecordingError: no map can be made from this model's Q and K.
    """
    run = view.recorded
    layer = looped_layer(view)
    if source(view) == "qk":
        span = place.start, place.start + place.tokens
        earlier, later = (attention_from_qk(run, layer, v, view.head, span, rows) for v in view.visits)
        return earlier, later
    earlier, later = (
        run.recording.attention_maps(layer, v, place.index)[view.head, slice(*rows), : place.tokens]
        for v in view.visits
    )
    return earlier, later


def looped_layer(view: View) -> int:
    """The chosen layer if it is looped, else the first that is."""
    looped = view.recorded.plan.looped_layers
    return view.layer if view.layer in looped else looped[0]


def token_texts(view: View, place: Place) -> list[str]:
    ids = view.recorded.recording.token_table((place.start, place.start + place.tokens), ("id",))["id"]
    return view.context.texts.texts(view.recorded, ids)


def context_starts(segment: np.ndarray, length: int) -> np.ndarray:
    """The first token of each packed context of `length`, from each token's segment: a context ends where the next piece
    doesn't fit in any more."""
    pieces = np.append(np.flatnonzero(np.diff(segment, prepend=segment[:1] ^ 1)), len(segment))
    starts = [0]
    for begin, end in pairwise(pieces):
        if end - starts[-1] > length:
            starts.append(int(begin))
    return np.array(starts)


def key_changes(view: View, token: int) -> html.Section:
    """Which keys a token's query gains and loses from visit to visit, and where the sink's mass went."""
    place = place_of(view, token)
    title = f"Keys gained and lost by token {token:,}, layer {looped_layer(view)}, head {view.head}"
    if token not in place:
        return card(
            title, [html.P(f"Maps of a document end after {MOST_TOKENS:,} tokens.", className="hint")], key="keys"
        )
    at = token - place.start
    try:
        earlier, later = (row[0, : at + 1] for row in both_maps(view, place, (at, at + 1)))
    except RecordingError as error:
        return card(title, [html.P(str(error), className="hint")], key="keys")
    a, b = view.visits
    texts = token_texts(view, place)
    gained, lost = changed_keys(earlier, later)
    rows: list[dict[str, Any]] = [
        {
            "key": f"{place.start + j} “{texts[j]}”",
            "earlier": float(earlier[j]),
            "later": float(later[j]),
            "change": html.Span(
                f"{'+' if j in gained else ''}{number(float(later[j]) - float(earlier[j]))}",
                className="badge visit-2" if j in gained else "badge visit-1",
            ),
        }
        for j in [*gained, *lost]
    ]
    columns = [("key", "key"), ("earlier", f"visit {a}"), ("later", f"visit {b}"), ("change", "change")]
    return card(
        title,
        [
            html.P(mass_ledger(earlier, later, texts), className="figure-line"),
            table(columns, rows, "The keys whose share of the attention changes most from visit to visit."),
        ],
        key="keys",
    )


def mass_ledger(earlier: np.ndarray, later: np.ndarray, texts: list[str]) -> str:
    """Where one query's attention [key] went, as a sentence: first token 0.63 → 0.05 (−0.58), “answer” +0.31, “)” +0.30."""
    change = (later.astype(np.float64) - earlier).round(4)
    others = [j for j in np.argsort(-np.abs(change)) if j and abs(change[j]) >= 0.005][:3]
    parts = [f"first token {earlier[0]:.2f} → {later[0]:.2f} ({change[0]:+.2f})"]
    parts += [f"“{texts[j]}” {change[j]:+.2f}" for j in others]
    rest = "" if others else "; no other key changes by 0.005"
    return f"From visit to visit: {', '.join(parts)}{rest}.".replace("-", "−")
