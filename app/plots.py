"""What the pages draw beside the registered figures: lines a series, and maps of two visits with their difference. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from visitlens.probe.figures.drawing import LAYER_AXIS, diverging, every, largest, line, sequential
from visitlens.probe.figures.generic import label_text
from visitlens.probe.figures.series import series
from visitlens.probe.figures.theme import ORANGE, Style, Theme, escape
from visitlens.probe.measure import StatArray, json_numbers

_HEIGHT = 300
_FOOT = 98
"""Room under maps for their axis and colour bars, in pixels."""


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
    for level in levels:
        figure.add_hline(
            y=level.value,
            line={"color": theme.chance, "dash": "dash", "width": 1.4},
            annotation={"text": escape(level.label), "font": {"size": 11, "color": theme.chance}},
            annotation_position="top right",
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
) -> go.Figure:
    """Earlier | later | difference [row, column]: the first two on one scale, the third symmetric about zero.

    `rows` and `columns` are labels, escaped already. `marks` outlines columns in orange, with a text each; `selected` is a
    cell to outline. Text is the same in all three, so that linked hover can mark one cell everywhere.
    """
    difference = later - earlier
    tall = height or int(min(max(150 + 24 * len(rows), 270), 580))
    figure = make_subplots(
        rows=1, cols=3, shared_yaxes=True, horizontal_spacing=0.035, subplot_titles=[escape(t) for t in titles]
    )
    figure.update_annotations(font={"size": 13, "color": theme.ink})
    for at, (values, axis) in enumerate(((earlier, "coloraxis"), (later, "coloraxis"), (difference, "coloraxis2")), 1):
        figure.add_trace(map_trace(values, rows, columns, axis, row_title, column_title), row=1, col=at)
    reach = largest([difference.ravel().tolist()]) if np.isfinite(difference).any() else 0.0
    top = float(np.nanmax(np.abs([earlier, later]), initial=0.0))
    negative = bool(np.nanmin([earlier, later], initial=0.0) < 0)
    both = diverging(1.0 if cosine else top, unit) if negative else sequential(top, unit)
    second = diverging(reach, "difference")
    both["colorbar"] = _below(both["colorbar"], 0.32, 0.5, tall)
    second["colorbar"] = _below(second["colorbar"], 0.845, 0.31, tall)
    figure.update_layout(coloraxis=both, coloraxis2=second)
    figure.update_xaxes(
        type="category", tickvals=every(columns, 12), title_text=escape(column_title), showgrid=False, matches="x"
    )
    figure.update_yaxes(type="category", tickvals=every(rows, 20), autorange="reversed", showgrid=False, matches="y")
    figure.update_yaxes(title_text=escape(row_title), col=1)
    for text, places in (marks or {}).items():
        for place in places:
            figure.add_vrect(
                x0=place - 0.5,
                x1=place + 0.5,
                line={"color": ORANGE, "width": 1.5},
                fillcolor="rgba(0,0,0,0)",
                name=escape(text),
                row="all",
                col="all",
            )
    if selected is not None:
        _outline(figure, theme, *selected)
    tall = height or int(min(max(150 + 22 * len(rows), 260), 560))
    return figure.update_layout(template=theme.template(), height=tall, margin={"t": 40, "l": 60, "r": 120, "b": 50})


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
    figure = make_subplots(rows=1, cols=1)
    figure.add_trace(map_trace(values, rows, columns, "coloraxis", row_title, column_title))
    top = float(np.nanmax(np.abs(values), initial=0.0))
    negative = difference or bool(np.nanmin(values, initial=0.0) < 0)
    figure.update_xaxes(type="category", tickvals=every(columns, 20), title_text=escape(column_title), showgrid=False)
    figure.update_yaxes(
        type="category", tickvals=every(rows, 20), title_text=escape(row_title), autorange="reversed", showgrid=False
    )
    if selected is not None:
        _outline(figure, theme, *selected)
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


def _below(colour_bar: dict[str, Any], x: float, length: float, height: int) -> dict[str, Any]:
    """A colour bar under the maps that it belongs to, its title beside the numbers' middle."""
    title = {**colour_bar["title"], "side": "top", "font": {"size": 12}}
    place = {"orientation": "h", "x": x, "xanchor": "center", "yref": "container", "y": 4 / height, "yanchor": "bottom"}
    return {
        **colour_bar,
        **place,
        "title": title,
        "len": length,
        "thickness": 9,
        "ypad": 0,
        "xpad": 0,
        "ticklabelposition": "outside bottom",
    }


def _style(theme: Theme, look: int | str) -> Style:
    if isinstance(look, int):
        return theme.visit(look)
    return {
        "baseline": theme.baseline,
        "control": Style(theme.muted, "triangle-down-open", "dash"),
        "chance": Style(theme.chance, "triangle-up-open", "dot"),
        "plain": Style(theme.same_head, "circle", "solid"),
    }[look]


def _outline(figure: go.Figure, theme: Theme, row: int, column: int) -> None:
    figure.add_shape(
        type="rect",
        x0=column - 0.5,
        x1=column + 0.5,
        y0=row - 0.5,
        y1=row + 0.5,
        line={"color": ORANGE, "width": 2.5},
        row="all",
        col="all",
    )


def stat_labels(stat: StatArray, axis: str) -> list[str]:
    """Escaped labels of an axis."""
    return [escape(label_text(label)) for label in stat.labels[axis]]


def all_json(parts: Mapping[str, StatArray | None]) -> dict[str, Any]:
    """The JSON export of several statistics."""
    return {name: stat.to_dict() for name, stat in parts.items() if stat is not None}
