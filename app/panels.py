"""Panel: one figure with its title, caption, table, exports and links; from a StatArray, a registered figure, or by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from visitlens.app.context import View
from visitlens.probe.figures.drawing import HEAD_MARGIN
from visitlens.probe.figures.export import Drawing
from visitlens.probe.figures.generic import label_text, plot_stat
from visitlens.probe.figures.series import INTERVAL, csv_rows
from visitlens.probe.figures.theme import Theme
from visitlens.probe.measure import StatArray

_TOP = 28
"""Room above a chart whose title stands in the page, in pixels."""


@dataclass(frozen=True)
class Panel:
    """`key` is unique on its page (a-z, 0-9, -). `draw` gives the picture with its title, as it is exported.

    `caption` are sentences: n, aggregation, interval, definition. `data` is the JSON export, `rows` the CSV and the table
    (a function, called when asked). `code` are the notebook lines that draw it. `links`: what a click on a point or cell
    opens, `{"path": "/heads", "x": "head", "y": "layer"}` (the parameter takes the number that the label starts with) or
    `{"hrefs": [[...]]}` by row and column. `morph`: indices of two heat maps, the first of which a slider turns into the
    second. `linked`: hovering one heat map marks the same cell in all. `tools` are further components above the chart.
    """

    key: str
    title: str
    draw: Callable[[Theme], go.Figure]
    caption: Sequence[str]
    data: Mapping[str, Any]
    rows: Callable[[], Sequence[Mapping[str, Any]]]
    code: str
    links: Mapping[str, Any] | None = None
    morph: tuple[int, int] | None = None
    linked: bool = False
    tools: Sequence[Any] = field(default_factory=tuple)
    wide: bool = False
    height: int | None = None

    def untitled(self, theme: Theme) -> go.Figure:
        """For the page, which has the title: as wide as its frame."""
        figure = go.Figure(self.draw(theme))
        layout = figure.to_plotly_json()["layout"]
        top = layout.get("margin", {}).get("t", HEAD_MARGIN)
        height = self.height or layout.get("height", 420)
        less = min(HEAD_MARGIN - _TOP, max(top - _TOP, 0)) if layout.get("title", {}).get("text") else 0
        figure.update_layout(
            title=None, width=None, height=height if self.height else height - less, margin_t=top - less, autosize=True
        )
        return figure


def stat_panel(view: View, key: str, stat: StatArray, code: str, *, title: str = "", **options: Any) -> Panel:
    """A statistic of one or two axes, as its `plot()` draws it."""
    return Panel(
        key=key,
        title=title or stat.measure.title,
        draw=lambda theme: plot_stat(stat, theme),
        caption=stat_caption(stat),
        data=stat.to_dict(),
        rows=lambda: stat_rows(stat),
        code=notebook(view, code),
        **options,
    )


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
    code = f'from visitlens.probe.figures.base import find\nfrom visitlens.probe.figures.pair import Pair\nfrom visitlens.probe.figures.theme import LIGHT\nfigure = find("{data["slug"]}")\nfigure.draw(figure.data(Pair(rec)), LIGHT).show()'
    return Panel(
        key=data["slug"],
        title=data["title"],
        draw=drawing.plot,
        caption=[data["question"], *data["notes"], f"n = {counts}. {aggregations}. Bars: {data['interval']}."],
        data=data,
        rows=lambda: csv_rows(data),
        code=notebook(view, code),
        **options,
    )


def stat_caption(stat: StatArray) -> list[str]:
    """Counts, aggregation and interval; the definition and where the paper has it."""
    measure = stat.measure
    interval = f"Interval: {INTERVAL}." if stat.replicates is not None else "No interval: one total for all documents."
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
    path = view.entry.path if view.entry else "run.vlens"
    return f"import visitlens as vl\n\nrec = vl.open({str(path)!r})\n{code}\n"


def _number(value: Any) -> float | None:
    return float(value) if value == value and abs(value) != float("inf") else None  # NaN differs from itself
