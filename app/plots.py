"""What the pages draw beside the registered figures: lines a series, and maps of two visits with their difference. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go

from visitlens.probe.figures.drawing import LAYER_AXIS, diverging, every, line, sequential
from visitlens.probe.figures.generic import label_text
from visitlens.probe.figures.series import series
from visitlens.probe.figures.theme import ORANGE, Style, Theme, escape
from visitlens.probe.measure import StatArray, json_numbers

_HEIGHT = 300
_DOMAINS = ((0.0, 0.285), (0.31, 0.595), (0.685, 0.97))
"""Of the maps of two visits and their difference, each pair with room for its colour bar."""


@dataclass(frozen=True)
class Line:
    """One series over an axis; `look` is a visit's number, "baseline", "control", "chance" or "plain"."""

    label: str
    stat: StatArray
    look: int | str


@dataclass(frozen=True)
class Level:
    """A dashed line at a value: chance, zero, one."""

    label: str
    value: float


def lines(
    theme: Theme,
    drawn: Sequence[Line],
    unit: str,
    *,
    levels: Sequence[Level] = (),
    x_title: str = "",
    height: int = _HEIGHT,
) -> go.Figure:
    """One-axis series with their intervals, markers and dashes by visit, over a common axis."""
    figure = go.Figure()
    names: list[str] = []
    for item in drawn:
        (axis,) = item.stat.axes
        labels = [escape(label_text(label)) for label in item.stat.labels[axis]]
        names = names if len(names) >= len(labels) else labels
        entry = {**series(item.stat, "", "observed", item.label), "axes": {axis: labels}}
        trace = line(entry, _style(theme, item.look), width=1.6)
        figure.add_trace(trace)
    lowest = min((float(np.nanmin(item.stat.values, initial=np.inf)) for item in drawn), default=0.0)
    for level in levels:
        figure.add_hline(
            y=level.value,
            line={"color": theme.chance, "dash": "dash", "width": 1.4},
            annotation={"text": escape(level.label), "font": {"size": 11, "color": theme.chance}},
            annotation_position="bottom right" if level.value <= lowest else "top right",
        )
    if levels and drawn:  # a shape doesn't stretch the axis
        figure.add_scatter(
            x=[names[0]] * len(levels),
            y=[level.value for level in levels],
            mode="markers",
            marker={"opacity": 0},
            showlegend=False,
            hoverinfo="skip",
        )
    figure.update_xaxes(type="category", tickvals=every(names, 20), title_text=x_title or LAYER_AXIS)
    figure.update_yaxes(title_text=escape(unit))
    return figure.update_layout(
        template=theme.template(),
        height=height,
        margin={"t": 34, "l": 60, "r": 16, "b": 46},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        showlegend=len(drawn) > 1,
    )


def visit_maps(
    theme: Theme,
    earlier: np.ndarray,
    later: np.ndarray,
    difference: np.ndarray | None = None,
    *,
    titles: tuple[str, str, str],
    rows: Sequence[str],
    columns: Sequence[str],
    row_title: str,
    column_title: str,
    unit: str,
    height: int | None = None,
    marks: Mapping[str, Sequence[int]] | None = None,
    selected: tuple[int, int] | None = None,
    cosine: bool = False,
    column_ticks: Sequence[str] | None = None,
) -> go.Figure:
    """Earlier | later | difference [row, column] (theirs, if not given): the first two on one scale, the third symmetric about zero.

    `rows` and `columns` are labels, escaped already. `marks` outlines columns in orange, with a text each; `selected` is a
    cell to outline; `column_ticks` are shorter labels for the axis. Text is the same in all three, so that linked hover can mark one cell everywhere.
    """
    difference = later - earlier if difference is None else difference
    figure = go.Figure()
    for at, values in enumerate((earlier, later, difference), 1):
        trace = map_trace(values, rows, columns, "coloraxis2" if at == 3 else "coloraxis", row_title, column_title)
        figure.add_trace(trace.update(xaxis=_axis("x", at), yaxis=_axis("y", at)))
        first = {} if at == 1 else {"matches": "y", "showticklabels": False}
        title = {"title": {"text": escape(row_title)}} if at == 1 else {}
        figure.layout[f"yaxis{at}"] = {
            **_cells(rows, 20),
            **first,
            **title,
            "anchor": _axis("x", at),
            "autorange": "reversed",
        }
        matches = {} if at == 1 else {"matches": "x"}
        short = {} if column_ticks is None else {"ticktext": every(column_ticks, 12), "tickangle": 0}
        title = {"title": {"text": escape(column_title)}}
        place = {"domain": _DOMAINS[at - 1], "anchor": _axis("y", at)}
        figure.layout[f"xaxis{at}"] = {**_cells(columns, 12), **matches, **short, **title, **place}
        middle = {"x": sum(_DOMAINS[at - 1]) / 2, "y": 1, "xref": "paper", "yref": "paper"}
        text = {"text": escape(titles[at - 1]), "font": {"size": 13, "color": theme.ink}, "showarrow": False}
        figure.add_annotation(**middle, **text, xanchor="center", yanchor="bottom")
    reach = float(np.nanmax(np.abs(difference), initial=0.0))
    top = float(np.nanmax(np.abs([earlier, later]), initial=0.0))
    negative = bool(np.nanmin([earlier, later], initial=0.0) < 0)
    both = diverging(1.0 if cosine else top, unit) if negative else sequential(top, unit)
    second = diverging(reach, "difference")
    for axis, x in ((both, _DOMAINS[1][1]), (second, _DOMAINS[2][1])):
        axis["colorbar"] = {**axis["colorbar"], "title": None, "x": x, "xanchor": "left", "xpad": 6, "thickness": 9}
    figure.update_layout(coloraxis=both, coloraxis2=second)
    for text, places in (marks or {}).items():
        for at, place in product((1, 2, 3), places):
            figure.add_shape(
                type="rect",
                xref=_axis("x", at),
                yref=f"{_axis('y', at)} domain",
                x0=place - 0.5,
                x1=place + 0.5,
                y0=0,
                y1=1,
                line={"color": ORANGE, "width": 1.5},
                name=escape(text),
            )
    if selected is not None:
        for at in (1, 2, 3):
            _outline(figure, *selected, at)
    tall = height or int(min(max(120 + 26 * len(rows), 230), 580))
    return figure.update_layout(template=theme.template(), height=tall, margin={"t": 30, "l": 60, "r": 62, "b": 50})


def one_map(
    theme: Theme,
    values: np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    row_title: str,
    column_title: str,
    unit: str,
    selected: tuple[int, int] | None = None,
    difference: bool = False,
    height: int | None = None,
) -> go.Figure:
    """One heat map [row, column]; `difference` gets a scale symmetric about zero."""
    figure = go.Figure()
    figure.add_trace(map_trace(values, rows, columns, "coloraxis", row_title, column_title))
    top = float(np.nanmax(np.abs(values), initial=0.0))
    negative = difference or bool(np.nanmin(values, initial=0.0) < 0)
    figure.update_xaxes(type="category", tickvals=every(columns, 20), title_text=escape(column_title), showgrid=False)
    figure.update_yaxes(
        type="category", tickvals=every(rows, 20), title_text=escape(row_title), autorange="reversed", showgrid=False
    )
    if selected is not None:
        _outline(figure, *selected, 1)
    return figure.update_layout(
        template=theme.template(),
        coloraxis=diverging(top, unit) if negative else sequential(top, unit),
        height=height or int(min(max(140 + 22 * len(rows), 260), 560)),
        margin={"t": 24, "l": 60, "r": 16, "b": 50},
    )


def map_trace(
    values: np.ndarray, rows: Sequence[str], columns: Sequence[str], coloraxis: str, row_title: str, column_title: str
) -> go.Heatmap:
    """Cells are written where there are few; hover says the place and the value."""
    few = max(len(rows), len(columns)) <= 24
    return go.Heatmap(
        z=json_numbers(values) if values.size <= 4096 else values.astype(np.float32),
        x=list(columns),
        y=list(rows),
        coloraxis=coloraxis,
        xgap=1 if few else 0,
        ygap=1 if few else 0,
        hovertemplate=f"{escape(row_title)} %{{y}}, {escape(column_title)} %{{x}}: %{{z:.4f}}<extra></extra>",
    )


def _axis(letter: str, at: int) -> str:
    """Plotly's name of the first, second ... axis."""
    return letter if at == 1 else f"{letter}{at}"


def _cells(labels: Sequence[str], most: int) -> dict[str, Any]:
    """An axis of a heat map: a category a cell, ticks thinned, no grid behind the cells."""
    return {"type": "category", "tickvals": every(labels, most), "showgrid": False}


def _style(theme: Theme, look: int | str) -> Style:
    if isinstance(look, int):
        return theme.visit(look)
    return {
        "baseline": theme.baseline,
        "control": Style(theme.muted, "triangle-down-open", "dash"),
        "chance": Style(theme.chance, "triangle-up-open", "dot"),
        "plain": Style(theme.same_head, "circle", "solid"),
    }[look]


def _outline(figure: go.Figure, row: int, column: int, at: int) -> None:
    figure.add_shape(
        type="rect",
        xref=_axis("x", at),
        yref=_axis("y", at),
        x0=column - 0.5,
        x1=column + 0.5,
        y0=row - 0.5,
        y1=row + 0.5,
        line={"color": ORANGE, "width": 2.5},
    )


def stat_labels(stat: StatArray, axis: str) -> list[str]:
    """Escaped labels of an axis."""
    return [escape(label_text(label)) for label in stat.labels[axis]]


def all_json(parts: Mapping[str, StatArray | None]) -> dict[str, Any]:
    """The JSON export of several statistics."""
    return {name: stat.to_dict() for name, stat in parts.items() if stat is not None}
