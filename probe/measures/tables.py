"""A StatArray as a table: of text for a terminal, of HTML for a notebook, the figure drawn in its cells. No torch."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

from visitlens.hooks.core.loop_plan import Step, VisitPair

if TYPE_CHECKING:
    from visitlens.probe.measures.measure import StatArray

_ROWS, _COLUMNS = 40, 24
"""What a notebook cell shows at most; `to_frame()` has everything."""
_COLUMNS_WITH_INTERVALS = 6
"""A grid of text shows intervals in so many columns; more don't fit a line, and only the first then has them."""
_WIDTH = 220
"""Of a drawn interval, in pixels."""


def label_text(label: Any) -> str:
    """A label for an axis: `3·2` is layer 3 at visit 2, `3: 1→2` its visits 1 and 2."""
    if isinstance(label, Step):
        return f"{label.layer}·{label.visit}"
    if isinstance(label, VisitPair):
        return f"{label.layer}: {label.earlier.visit}→{label.later.visit}"
    return " → ".join(map(str, label)) if isinstance(label, tuple) else str(label)


def as_text(stat: StatArray) -> str:
    """Title and rows with intervals for up to one axis, a grid of values for two, each slice of the first axis for three."""
    head = f"{stat.measure.title} [{stat.measure.unit}], {stat.aggregation}; {_counts(stat)}"
    if len(stat.axes) > 2:
        first = stat.axes[0]
        if len(stat.axes) > 3 or max(len(stat.labels[a]) for a in stat.axes) > _COLUMNS:
            return f"{head}: {sizes(stat)}; --json has the values"
        parts = [as_text(stat.sel(**{first: label})).split("\n", 1)[1] for label in stat.labels[first]]
        return "\n".join(
            [head, *(f"{first} {label_text(l)}\n{p}" for l, p in zip(stat.labels[first], parts, strict=True))]
        )
    low, high = stat.interval()
    if len(stat.axes) == 2:
        rows, columns = ([label_text(label) for label in stat.labels[a]] for a in stat.axes)
        if len(columns) > _COLUMNS:
            return f"{head}: {sizes(stat)}; --json has the values"
        bounded = len(columns) if len(columns) <= _COLUMNS_WITH_INTERVALS else 1
        texts = [
            [_number(v) + (_bounds(a, b) if i < bounded else "") for i, (v, a, b) in enumerate(zip(*row, strict=True))]
            for row in zip(stat.values, low, high, strict=True)
        ]
        cells = [["", *columns], *([row, *text] for row, text in zip(rows, texts, strict=True))]
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        aligned = [
            "  "
            + row[0].ljust(widths[0])
            + "  "
            + "  ".join(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))
            for row in cells
        ]
        return "\n".join([head, *(line.rstrip() for line in aligned)])
    names = [label_text(label) for label in stat.labels[stat.axes[0]]] if stat.axes else [""]
    width = max(map(len, names))
    columns = [np.atleast_1d(x) for x in (stat.values, low, high)]
    rows = zip(names, *columns, _each_n(stat), strict=True)
    return "\n".join([head, *(f"  {n.ljust(width)}  {_number(v)}{_bounds(a, b)}{c}" for n, v, a, b, c in rows)])


def _each_n(stat: StatArray) -> list[str]:
    """Of each value, where they differ."""
    if stat.counts is None or not stat.ragged:
        return [""] * stat.values.size
    return [f"  n = {count:,.0f}" for count in stat.counts.ravel()]


def _counts(stat: StatArray) -> str:
    interval = f"none ({why})" if (why := stat.no_interval) else "95% over documents"
    each = ""
    if stat.counts is not None and stat.ragged:
        measured = stat.counts[stat.counts > 0]
        each = f" (n = {measured.min():,.0f} to {measured.max():,.0f})"
    return f"{stat.documents:,} documents, {stat.tokens:,} tokens{each}; intervals: {interval}"


def as_html(stat: StatArray) -> str:
    """Rows with drawn intervals for up to one axis, a coloured grid for two, else what to choose."""
    measure = stat.measure
    head = (
        f"<b>{html.escape(measure.title)}</b> <span style='opacity:.7'>[{html.escape(measure.unit)}] "
        f"{html.escape(stat.aggregation)}; {_counts(stat)}</span>"
    )
    tail = f"<div style='opacity:.7;max-width:60em'>{html.escape(measure.definition)}</div>"
    if len(stat.axes) > 2:
        hint = f"{sizes(stat)}: choose with <code>.sel({stat.axes[0]}=...)</code> or average with <code>.mean({stat.axes[-1]!r})</code>"
        return f"<div>{head}<div>{hint}</div>{tail}</div>"
    body = _grid(stat) if len(stat.axes) == 2 else _rows(stat)
    return f"<div>{head}{body}{tail}</div>"


def sizes(stat: StatArray) -> str:
    """`3 layer x 12 head`."""
    return " x ".join(f"{len(stat.labels[axis])} {axis}" for axis in stat.axes) or "one number"


def _rows(stat: StatArray) -> str:
    names = [label_text(label) for label in stat.labels[stat.axes[0]]] if stat.axes else [""]
    values = np.atleast_1d(stat.values)
    low, high = (np.atleast_1d(bound) for bound in stat.interval())
    known = np.concatenate([x[np.isfinite(x)] for x in (values, low, high)] + [np.zeros(1)])
    start, stop = float(known.min()), float(known.max())
    scale = (_WIDTH - 10) / ((stop - start) or 1.0)

    def at(value: float) -> float:
        return round(5 + (value - start) * scale, 1)

    rows = []
    for name, value, a, b, n in list(zip(names, values, low, high, _each_n(stat), strict=True))[:_ROWS]:
        drawn = f"<line x1='{at(0)}' x2='{at(0)}' y1='0' y2='14' stroke='#9AA5B1'/>"
        if np.isfinite(a) and np.isfinite(b):
            drawn += f"<line x1='{at(a)}' x2='{at(b)}' y1='7' y2='7' stroke='#2166AC' stroke-width='2'/>"
        if np.isfinite(value):
            drawn += f"<circle cx='{at(value)}' cy='7' r='3.5' fill='#2166AC'/>"
        picture = f"<svg width='{_WIDTH}' height='14' role='img' aria-label='{_number(value)}'>{drawn}</svg>"
        cells = (html.escape(name), _number(value), f"{_bounds(a, b)}{n}".strip(), picture)
        rows.append(
            f"<tr><td style='text-align:left'>{cells[0]}</td><td>{cells[1]}</td><td>{cells[2]}</td><td>{cells[3]}</td></tr>"
        )
    axis = html.escape(stat.axes[0]) if stat.axes else ""
    return _table(f"<tr><th>{axis}</th><th>value</th><th>95%</th><th></th></tr>", rows, len(names) - _ROWS)


def _grid(stat: StatArray) -> str:
    rows, columns = ([label_text(label) for label in stat.labels[a]] for a in stat.axes)
    finite = np.abs(stat.values[np.isfinite(stat.values)])
    reach = float(finite.max()) if finite.size and finite.max() else 1.0
    low, high = stat.interval()
    each = np.array(_each_n(stat)).reshape(stat.values.shape)
    body = []
    for i, name in enumerate(rows[:_ROWS]):
        cells = "".join(
            f"<td style='{_shade(stat.values[i, j] / reach)}' title='{html.escape(name)}, {html.escape(column)}: {_number(stat.values[i, j])}"
            f"{_bounds(low[i, j], high[i, j])}{each[i, j]}'>{_number(stat.values[i, j], 3)}</td>"
            for j, column in enumerate(columns[:_COLUMNS])
        )
        body.append(f"<tr><th style='text-align:left'>{html.escape(name)}</th>{cells}</tr>")
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns[:_COLUMNS])
    corner = f"{html.escape(stat.axes[0])} \\ {html.escape(stat.axes[1])}"
    note = "" if len(columns) <= _COLUMNS else f"<div>... {len(columns) - _COLUMNS} more columns</div>"
    return _table(f"<tr><th>{corner}</th>{head}</tr>", body, len(rows) - _ROWS) + note


def _table(head: str, rows: list[str], more: int) -> str:
    note = f"<div>... {more} more rows in <code>.to_frame()</code></div>" if more > 0 else ""
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>{note}"


def _shade(share: float) -> str:
    """Red for positive, blue for negative, by size; the text stays readable on light and dark pages."""
    if not np.isfinite(share):
        return ""
    red, green, blue = (178, 24, 43) if share > 0 else (33, 102, 172)
    return f"background:rgba({red},{green},{blue},{0.55 * min(abs(share), 1.0):.2f})"


def _number(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if np.isfinite(value) else "-"


def _bounds(low: float, high: float) -> str:
    return f"  [{low:.4f}, {high:.4f}]" if np.isfinite(low) and np.isfinite(high) else ""
