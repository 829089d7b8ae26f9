"""Attention maps of recordings of level `maps`: pooled where they are large, and which keys a query gains and loses. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from dash import html

from visitlens.app.components import card, number, table
from visitlens.app.context import View
from visitlens.probe.token_window import changed_keys

MOST_CELLS = 512
"""Rows or columns that a browser draws at ease; larger maps are pooled."""


@dataclass(frozen=True)
class Pooled:
    """`values` [row, column] of blocks of `factor` cells; `starts` are the first row and column of each block."""

    values: np.ndarray
    factor: int
    row_starts: np.ndarray
    column_starts: np.ndarray


def pool(
    values: np.ndarray,
    how: str = "max",
    most: int = MOST_CELLS,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
) -> Pooled:
    """A map, or the part of it that is zoomed to, in at most `most` x `most` blocks; the last row and column are kept.

    Args:
        how: "max" keeps single bright cells, "mean" keeps the mass.
        rows, columns: from and up to, in cells of the whole map; out of range is cut.
    """
    r0, r1 = _within(rows, values.shape[0])
    c0, c1 = _within(columns, values.shape[1])
    part = values[r0:r1, c0:c1]
    factor = max(1, -(-max(part.shape) // most))
    reduce = np.fmax.reduceat if how == "max" else np.add.reduceat
    row_starts, column_starts = np.arange(0, part.shape[0], factor), np.arange(0, part.shape[1], factor)
    wide = part if how == "max" else np.nan_to_num(part.astype(np.float32))
    pooled = reduce(reduce(wide, row_starts, axis=0), column_starts, axis=1)
    if how == "mean":
        heights, widths = (
            np.diff(np.append(starts, size)).astype(np.float64)
            for starts, size in zip((row_starts, column_starts), part.shape, strict=True)
        )
        pooled = pooled / (heights[:, None] * widths)
    return Pooled(pooled, factor, row_starts + r0, column_starts + c0)


def _within(part: tuple[int, int] | None, size: int) -> tuple[int, int]:
    low, high = part or (0, size)
    low = min(max(low, 0), size - 1)
    return low, min(max(high, low + 1), size)


def pooled_difference(
    earlier: np.ndarray,
    later: np.ndarray,
    most: int = MOST_CELLS,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
) -> tuple[Pooled, Pooled, Pooled]:
    """Both maps by their maxima, and of the difference the value that is largest in size in each block, with its sign."""
    difference = later.astype(np.float32) - earlier.astype(np.float32)
    highest, lowest = (pool(d, "max", most, rows, columns) for d in (difference, -difference))
    signed = np.where(highest.values >= lowest.values, highest.values, -lowest.values)
    kept = Pooled(signed, highest.factor, highest.row_starts, highest.column_starts)
    return pool(earlier, "max", most, rows, columns), pool(later, "max", most, rows, columns), kept


@dataclass(frozen=True)
class ContextMap:
    """One head's map at both visits for one packed context: `earlier`, `later` [query, key] over its `tokens` tokens."""

    context: int
    contexts: int
    start: int
    tokens: int
    earlier: np.ndarray
    later: np.ndarray


def context_map(view: View, context: int) -> ContextMap:
    """Reads the context's two maps of the selected layer and head."""
    run, (a, b) = view.recorded, view.visits
    layer = view.layer if view.layer in run.plan.looped_layers else run.plan.looped_layers[0]
    context = min(max(context, 0), run.recording.contexts - 1)
    earlier, later = (run.recording.attention_maps(layer, v, context)[view.head] for v in (a, b))
    starts = _starts(view, earlier.shape[-1])
    start = int(starts[context])
    stop = int(starts[context + 1]) if context + 1 < len(starts) else run.recording.tokens
    size = min(stop - start, earlier.shape[-1])
    return ContextMap(context, run.recording.contexts, start, size, earlier[:size, :size], later[:size, :size])


def context_starts(segment: np.ndarray, length: int) -> np.ndarray:
    """The first token of each packed context of `length`, from each token's segment: a context ends where the next piece
    doesn't fit in any more."""
    pieces = np.append(np.flatnonzero(np.diff(segment, prepend=segment[:1] ^ 1)), len(segment))
    starts = [0]
    for begin, end in pairwise(pieces):
        if end - starts[-1] > length:
            starts.append(int(begin))
    return np.array(starts)


def context_of(view: View, token: int) -> tuple[int, int]:
    """A token's context and its place in there."""
    run = view.recorded
    length = run.recording.attention_maps(run.plan.looped_layers[0], 1, 0).shape[-1]
    starts = _starts(view, length)
    at = int(np.searchsorted(starts, token, side="right")) - 1
    return at, token - int(starts[at])


def _starts(view: View, length: int) -> np.ndarray:
    recording = view.recorded.recording
    return view.remember(f"contexts:{length}", lambda: context_starts(recording.token_table()["segment"], length))


def key_changes(view: View, token: int) -> html.Section:
    """Which keys a token's query gains and loses from visit to visit, and where the sink's mass went."""
    context, at = context_of(view, token)
    maps = context_map(view, context)
    a, b = view.visits
    texts = view.context.texts.texts(
        view.recorded, view.recorded.recording.token_table(tokens=(maps.start, maps.start + maps.tokens))["id"]
    )
    gained, lost = changed_keys(maps.earlier[at, : at + 1], maps.later[at, : at + 1])
    rows: list[dict[str, Any]] = [
        {
            "key": f"{maps.start + j} “{texts[j]}”",
            "earlier": float(maps.earlier[at, j]),
            "later": float(maps.later[at, j]),
            "change": html.Span(
                f"{'+' if j in gained else ''}{number(float(maps.later[at, j] - maps.earlier[at, j]))}",
                className="badge visit-2" if j in gained else "badge visit-1",
            ),
        }
        for j in [*gained, *lost]
    ]
    columns = [("key", "key"), ("earlier", f"visit {a}"), ("later", f"visit {b}"), ("change", "change")]
    title = f"Keys gained and lost by token {token}, layer {view.layer}, head {view.head}"
    return card(
        title,
        [
            html.P(mass_ledger(maps, at, texts), className="figure-line"),
            table(columns, rows, "The keys whose share of the attention changes most from visit to visit."),
        ],
        key="keys",
    )


def mass_ledger(maps: ContextMap, at: int, texts: list[str]) -> str:
    """Where one query's attention went, as a sentence: `first token -0.58, “answer” +0.31`."""
    change = (maps.later[at, : at + 1].astype(np.float64) - maps.earlier[at, : at + 1]).round(4)
    order = np.argsort(-np.abs(change))[:4]
    parts = [f"“{texts[j]}” {change[j]:+.2f}".replace("-", "−") for j in order if abs(change[j]) >= 0.005]
    return f"From visit to visit: {', '.join(parts)}." if parts else "The attention hardly moves between these visits."
