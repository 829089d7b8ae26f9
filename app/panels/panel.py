"""Panel: one figure with its title, caption, table, exports and links; from a StatArray, a registered figure, or by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from visitlens.app.panels import plots
from visitlens.app.view.view import View
from visitlens.probe.drawing.drawing import HEAD_MARGIN
from visitlens.probe.drawing.series import INTERVAL, csv_rows
from visitlens.probe.drawing.stat_figure import label_text, stat_json
from visitlens.probe.drawing.theme import Theme
from visitlens.probe.gallery.write_figures import Drawing
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.two_visits import TwoVisits

_TOP = 28
"""Room above a chart whose title stands in the page, in pixels."""

_NARROW = 800
"""Figures that were designed wider than this take the whole width of the page."""


@dataclass(frozen=True)
class Panel:
    """`key` is unique on its page (a-z, 0-9, -). `draw` gives the picture with its title, as it is exported.

    `caption` are sentences: n, aggregation, interval, definition. `data` gives the JSON export, `rows` the CSV and the table: made
    when they are asked for. `code` are the notebook lines that draw it. `links`: what a click on a point or cell
    opens, `{"path": "/heads", "x": "head", "y": "layer"}` (the parameter takes the number that the label starts with) or
    `{"hrefs": [[...]]}` by row and column. `morph`: indices of two heat maps, the first of which a slider turns into the
    second. `linked`: hovering one heat map marks the same cell in all. `zoom`: of a pooled map, `factor` and the
    first cells of its blocks (`rows`, `columns`): zooming in fetches that part. `tools` are further components above the chart.
    """

    key: str
    title: str
    draw: Callable[[Theme], plots.Plot | go.Figure]
    caption: Sequence[str]
    data: Callable[[], Mapping[str, Any]]
    rows: Callable[[], Sequence[Mapping[str, Any]]]
    code: str
    links: Mapping[str, Any] | None = None
    morph: tuple[int, int] | None = None
    linked: bool = False
    zoom: Mapping[str, Any] | None = None
    tools: Sequence[Any] = field(default_factory=tuple)
    wide: bool = False
    height: int | None = None

    def chart(self, theme: Theme) -> dict[str, Any]:
        """The picture for the page, which has the title: as wide as its frame."""
        drawn = self.draw(theme)
        plot = drawn.to_plotly_json() if isinstance(drawn, go.Figure) else drawn
        layout, less = dict(plot["layout"]), 0
        if layout.get("title", {}).get("text"):
            less = min(HEAD_MARGIN - _TOP, max(layout.get("margin", {}).get("t", HEAD_MARGIN) - _TOP, 0))
            layout["margin"] = {**layout.get("margin", {}), "t": layout.get("margin", {}).get("t", HEAD_MARGIN) - less}
        layout.pop("title", None)
        layout.pop("width", None)
        layout["height"] = self.height or layout.get("height", 420) - less
        layout["autosize"] = True
        return {"data": plot["data"], "layout": layout}


def stat_panel(view: View, key: str, stat: StatArray, code: str, *, title: str = "", **options: Any) -> Panel:
    """A statistic of one or two axes, as its `plot()` draws it."""
    return Panel(
        key=key,
        title=title or stat.measure.title,
        draw=lambda theme: stat_json(stat, theme),
        caption=stat_caption(stat),
        data=stat.to_dict,
        rows=lambda: stat_rows(stat),
        code=notebook(view, code),
        **options,
    )


def lines_panel(
    view: View,
    key: str,
    title: str,
    drawn: Sequence[plots.Line],
    code: str,
    *,
    levels: Sequence[plots.Level] = (),
    unit: str = "",
    x_title: str = "",
    notes: Sequence[str] = (),
    **options: Any,
) -> Panel:
    """Several one-axis series over the same axis."""
    stats = {item.label: item.stat for item in drawn}
    first = drawn[0].stat
    return Panel(
        key=key,
        title=title,
        draw=lambda theme: plots.lines(theme, drawn, unit or first.measure.unit, levels=levels, x_title=x_title),
        caption=[*notes, *many_captions(stats, levels)],
        data=lambda: plots.all_json(stats) | {level.label: level.value for level in levels},
        rows=lambda: many_rows(stats),
        code=notebook(view, code),
        **options,
    )


def maps_panel(
    view: View,
    key: str,
    title: str,
    two: TwoVisits,
    code: str,
    *,
    selected: tuple[int, int] | None = None,
    **options: Any,
) -> Panel:
    """A two-axis measure: earlier | later | difference, or of a measure that compares visits the one map.

    `selected` is a layer and a label of the other axis, outlined."""
    stat = two.between if two.between is not None else two.later
    assert stat is not None and len(stat.axes) == 2
    rows, columns = (plots.stat_labels(stat, axis) for axis in stat.axes)
    row_title, column_title = "layer", stat.axes[1].replace("_", " ")
    cell = _cell(stat, selected)
    stats = two.present | ({"difference": two.difference} if two.difference is not None else {})
    names = {"rows": rows, "columns": columns, "row_title": row_title, "column_title": column_title}
    unit = stat.measure.unit

    def draw(theme: Theme) -> plots.Plot:
        if two.earlier is None or two.later is None:
            return plots.one_map(theme, stat.values, **names, unit=unit, selected=cell)
        titles = (
            f"visit {two.visits[0]}",
            f"visit {two.visits[1]}",
            f"difference: visit {two.visits[1]} − {two.visits[0]}",
        )
        pictures = two.earlier.values, two.later.values
        return plots.visit_maps(
            theme, *pictures, titles=titles, **names, unit=unit, selected=cell, cosine=unit == "cosine"
        )

    return Panel(
        key=key,
        title=title,
        draw=draw,
        caption=many_captions(stats),
        data=lambda: plots.all_json(stats),
        rows=lambda: many_rows(stats),
        code=notebook(view, code),
        linked=True,
        morph=(0, 1) if two.earlier is not None else None,
        wide=two.earlier is not None,
        **options,
    )


def many_captions(stats: Mapping[str, StatArray], levels: Sequence[plots.Level] = ()) -> list[str]:
    """One for all series: counts and aggregations once, each definition once."""
    # Backwards, so that the title of a definition is the plain one, not the difference's.
    firsts = {stat.measure.definition: stat for stat in reversed(list(stats.values()))}
    ns = dict.fromkeys(f"{s.documents:,} documents, {s.tokens:,} tokens" for s in stats.values())
    aggregations = {stat.aggregation: label for label, stat in stats.items()}
    if len(aggregations) > 1:
        aggregations = {f"{label}: {stat.aggregation}": label for label, stat in stats.items()}
    units = dict.fromkeys(s.measure.unit for s in stats.values())
    missing = [s.no_interval for s in stats.values()]
    dashed = f" Dashed: {', '.join(level.label for level in levels)}." if levels else ""
    interval = f"No interval: {missing[0]}." if missing and all(missing) else f"Interval: {INTERVAL}."
    return [
        f"n = {' and '.join(ns)}; {'; '.join(aggregations)}; unit: {', '.join(units)}.{dashed} {interval}",
        *(f"{s.measure.title}: {s.measure.definition} ({s.measure.paper})" for s in reversed(list(firsts.values()))),
    ]


def many_rows(stats: Mapping[str, StatArray]) -> list[dict[str, Any]]:
    """Rows of all series, with the series' name first."""
    return [{"series": label, **row} for label, stat in stats.items() for row in stat_rows(stat)]


def _cell(stat: StatArray, selected: tuple[int, int] | None) -> tuple[int, int] | None:
    """Row and column of a layer and a label."""
    if selected is None:
        return None
    rows, columns = (list(stat.labels[axis]) for axis in stat.axes)
    known = selected[0] in rows and selected[1] in columns
    return (rows.index(selected[0]), columns.index(selected[1])) if known else None


def figure_panel(view: View, drawing: Drawing, **options: Any) -> Panel:
    """One of the registered figures."""
    data = drawing.data
    entries = list(data["series"].values())
    counts = "; ".join(
        f"{m['name']}: {m['documents']:,} documents, {m['tokens']:,} tokens"
        for m in (data["models"][side] for side in data["sides"])
        if m
    )
    aggregations = "; ".join(dict.fromkeys(e["aggregation"] for e in entries if e["role"] != "chance"))
    code = f'vl.figure("{data["slug"]}", rec).show()'
    options.setdefault("wide", int(drawing.plot(view.theme).layout.width or 0) > _NARROW)
    return Panel(
        key=data["slug"],
        title=data["title"],
        draw=drawing.plot,
        caption=[data["question"], *data["notes"], f"n = {counts}. {aggregations}. Bars: {data['interval']}."],
        data=lambda: data,
        rows=lambda: csv_rows(data),
        code=notebook(view, code),
        **options,
    )


def stat_caption(stat: StatArray) -> list[str]:
    """Counts, aggregation and interval; the definition and where the paper has it."""
    measure = stat.measure
    interval = f"No interval: {why}." if (why := stat.no_interval) else f"Interval: {INTERVAL}."
    return [
        f"n = {stat.documents:,} documents, {stat.tokens:,} tokens; {stat.aggregation}; unit: {measure.unit}. {interval}",
        f"Definition: {measure.definition} ({measure.paper})",
    ]


def stat_rows(stat: StatArray) -> list[dict[str, Any]]:
    """One row an element: its labels, value, low, high."""
    import itertools

    low, high = stat.interval()
    rows = []
    for index in itertools.product(*(range(n) for n in stat.values.shape)):
        places = {axis: label_text(stat.labels[axis][i]) for axis, i in zip(stat.axes, index, strict=True)}
        numbers = {"value": stat.values[index], "low": low[index], "high": high[index]}
        rows.append({**places, **{name: _number(value) for name, value in numbers.items()}, "unit": stat.measure.unit})
    return rows


def notebook(view: View, code: str) -> str:
    """The lines before it that open the recording."""
    place = view.entry.place if view.entry else "run.vlens"
    return f"import visitlens as vl\n\nrec = vl.open({str(place)!r})\n{code}\n"


def _number(value: Any) -> float | None:
    return float(value) if value == value and abs(value) != float("inf") else None  # NaN differs from itself
