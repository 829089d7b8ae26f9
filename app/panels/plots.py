"""What the pages draw beside the registered figures: lines a series, and maps of two visits with their difference. No torch."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from visitlens.hooks.core.loop_plan import Step
from visitlens.probe.drawing.drawing import LAYER_AXIS, diverging, every, line_trace, sequential
from visitlens.probe.drawing.series import series
from visitlens.probe.drawing.stat_figure import label_text
from visitlens.probe.drawing.theme import DIVERGING, ORANGE, SEQUENTIAL, Style, Theme, escape
from visitlens.probe.live.figures import spread
from visitlens.probe.measures.measure import StatArray, json_numbers

Plot = dict[str, Any]
"""`data` and `layout` as Plotly.js takes them. Built without Plotly's Python objects, whose checks take 20 ms a figure."""
_HEIGHT = 300
_LONG_LABEL = 16
_TICKS = 9  # below each of three maps side by side
_DOMAINS = ((0.0, 0.285), (0.31, 0.595), (0.685, 0.97))
"""Of the maps of two visits and their difference, each pair with room for its colour bar."""


@dataclass(frozen=True)
class Line:
    """One series over an axis. `look` is a visit's number, "baseline", "control", "chance", "plain" (of both visits at once),
    "steps" (each step marked as its visit), or "part 1", "part 2" ... of what is no visit."""

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
) -> Plot:
    """One-axis series with their intervals, markers and dashes by visit, over a common axis."""
    names: list[str] = []
    traces: list[dict[str, Any]] = []
    for item in drawn:
        (axis,) = item.stat.axes
        labels = [escape(label_text(label)) for label in item.stat.labels[axis]]
        names = names if len(names) >= len(labels) else labels
        entry = {**series(item.stat, "", "observed", item.label), "axes": {axis: labels}}
        traces.append(line_trace(entry, _style(theme, item.look), width=1.6))
        if item.look == "steps":
            traces += _mark_steps(theme, traces[-1], item.stat.labels[axis])
    if levels and drawn:  # a shape doesn't stretch the axis
        unseen = {"mode": "markers", "marker": {"opacity": 0}, "showlegend": False, "hoverinfo": "skip"}
        values = [level.value for level in levels]
        traces.append({"type": "scatter", "x": [names[0]] * len(levels), "y": values, **unseen})
    dashed = {
        "type": "line",
        "xref": "x domain",
        "x0": 0,
        "x1": 1,
        "line": {"color": theme.chance, "dash": "dash", "width": 1.4},
    }
    beside = [_beside(escape(level.label)) for level in levels]
    widest = max((len(part) for label in beside for part in label.split("<br>")), default=0)
    layout = {
        "xaxis": {"type": "category", "tickvals": every(names, 20), "title": {"text": x_title or LAYER_AXIS}},
        "yaxis": {"title": {"text": escape(unit)}, **_flat(traces)},
        "shapes": [{**dashed, "y0": level.value, "y1": level.value} for level in levels],
        "annotations": [
            {
                "xref": "x domain",
                "x": 1,
                "xanchor": "left",
                "xshift": 4,
                "y": level.value,
                "yanchor": "middle",
                "align": "left",
                "showarrow": False,
                "text": label,
                "font": {"size": 11, "color": theme.chance},
            }
            for level, label in zip(levels, beside, strict=True)
        ],
        "margin": {"t": 34, "l": 60, "r": 16 + 6 * widest, "b": 46},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        "showlegend": len(drawn) > 1 or any(item.look == "steps" for item in drawn),
    }
    return plot(theme, traces, layout, height)


def _flat(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The y axis of values that are one but for rounding: Plotly finds no end of ticks in a span of 1e-17."""
    values = [y for trace in traces for y in trace["y"] if y is not None]
    bars = [b for t in traces for side in ("array", "arrayminus") for b in t.get("error_y", {}).get(side) or () if b]
    reach = max(map(abs, values), default=0.0)
    if not values or max(values) - min(values) + max(bars, default=0.0) > 1e-9 * max(reach, 1e-3):
        return {}
    room = 0.1 * reach if reach > 1e-9 else 1.0
    return {"range": [values[0] - room, values[0] + room]}


def _mark_steps(theme: Theme, trace: dict[str, Any], steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Gives each point of a line over steps the look of its visit; returns what names the looks in the legend."""
    repeated = {step.layer for step in steps if step.visit > 1}
    once = Style(theme.ink, "triangle-down-open", "solid")
    looks = {step: theme.visit(step.visit) if step.layer in repeated else once for step in steps}
    trace["line"] |= {"color": theme.muted, "dash": "solid"}
    trace["marker"] |= {
        "symbol": [looks[step].symbol for step in steps],
        "color": [looks[step].colour for step in steps],
        "line": {"width": [2 if "open" in looks[step].symbol else 0 for step in steps]},
    }
    trace["showlegend"] = False
    if "error_y" in trace:
        trace["error_y"] |= {"color": theme.muted}
    names = {f"visit {visit}": theme.visit(visit) for visit in sorted({s.visit for s in steps if s.layer in repeated})}
    names |= {"layers run once": once} if any(step.layer not in repeated for step in steps) else {}
    nothing = {"type": "scatter", "x": trace["x"][:1], "y": [None], "mode": "markers", "hoverinfo": "skip"}
    return [
        {**nothing, "name": name, "marker": {"symbol": look.symbol, "color": look.colour, "size": 9}}
        for name, look in names.items()
    ]


def _beside(label: str) -> str:
    """A label for the margin: a long one in two lines."""
    middle = min(
        (at for at, sign in enumerate(label) if sign == " "), key=lambda at: abs(at - len(label) / 2), default=0
    )
    return label if len(label) <= _LONG_LABEL or not middle else f"{label[:middle]}<br>{label[middle + 1 :]}"


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
    selected: tuple[int, int] | None = None,
    cosine: bool = False,
    column_ticks: Sequence[str] | None = None,
    root: bool = False,
) -> Plot:
    """Earlier | later | difference [row, column] (theirs, if not given): the first two on one scale, the third symmetric about zero.

    `rows` and `columns` are labels, escaped already. `selected` is a cell to outline; `column_ticks` are shorter labels for
    the axis; with `root` colours follow the square root of the value, for maps of a few bright cells. Text is the same in all
    three, so that linked hover can mark one cell everywhere.
    """
    difference = later - earlier if difference is None else difference
    traces, titled = [], []
    layout: dict[str, Any] = {"annotations": titled}
    for at, values in enumerate((earlier, later, difference), 1):
        trace = map_trace(values, rows, columns, "coloraxis2" if at == 3 else "coloraxis", row_title, column_title)
        traces.append(trace | {"xaxis": _axis("x", at), "yaxis": _axis("y", at)})
        vertical = {**_cells(rows, 20), "anchor": _axis("x", at), "autorange": "reversed"}
        vertical |= {"title": {"text": escape(row_title)}} if at == 1 else {"matches": "y", "showticklabels": False}
        across = {**_cells(columns, _TICKS), "title": {"text": escape(column_title)}}
        across |= {"domain": _DOMAINS[at - 1], "anchor": _axis("y", at)} | ({} if at == 1 else {"matches": "x"})
        across |= {} if column_ticks is None else {"ticktext": every(column_ticks, _TICKS), "tickangle": 0}
        number = "" if at == 1 else str(at)
        layout |= {f"xaxis{number}": across, f"yaxis{number}": vertical}
        middle = {"x": sum(_DOMAINS[at - 1]) / 2, "y": 1, "xref": "paper", "yref": "paper", "showarrow": False}
        text = {"text": escape(titles[at - 1]), "font": {"size": 13, "color": theme.ink}}
        titled.append(middle | text | {"xanchor": "center", "yanchor": "bottom"})
    reach = float(np.nanmax(np.abs(difference), initial=0.0))
    top = float(np.nanmax(np.abs([earlier, later]), initial=0.0))
    negative = bool(np.nanmin([earlier, later], initial=0.0) < 0)
    both = diverging(1.0 if cosine else top, unit) if negative else sequential(top, unit)
    second = diverging(reach, "difference")
    if root:
        both["colorscale"], second["colorscale"] = spread(SEQUENTIAL), spread(DIVERGING, True)
    for axis, x in ((both, _DOMAINS[1][1]), (second, _DOMAINS[2][1])):
        axis["colorbar"] = {**axis["colorbar"], "title": None, "x": x, "xanchor": "left", "xpad": 6, "thickness": 9}
    layout |= {"coloraxis": both, "coloraxis2": second, "margin": {"t": 30, "l": 60, "r": 62, "b": 50}}
    if selected is not None:
        layout["shapes"] = [_outline(*selected, at) for at in (1, 2, 3)]
    return plot(theme, traces, layout, height or int(min(max(120 + 26 * len(rows), 230), 580)))


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
) -> Plot:
    """One heat map [row, column]; `difference` gets a scale symmetric about zero."""
    top = float(np.nanmax(np.abs(values), initial=0.0))
    negative = difference or bool(np.nanmin(values, initial=0.0) < 0)
    layout = {
        "xaxis": {**_cells(columns, 20), "title": {"text": escape(column_title)}},
        "yaxis": {**_cells(rows, 20), "title": {"text": escape(row_title)}, "autorange": "reversed"},
        "coloraxis": diverging(top, unit) if negative else sequential(top, unit),
        "shapes": [] if selected is None else [_outline(*selected, 1)],
        "margin": {"t": 24, "l": 60, "r": 16, "b": 50},
    }
    trace = map_trace(values, rows, columns, "coloraxis", row_title, column_title)
    return plot(theme, [trace], layout, height or int(min(max(140 + 22 * len(rows), 260), 560)))


def plot(theme: Theme, traces: list[dict[str, Any]], layout: dict[str, Any], height: int) -> Plot:
    """Traces and layout with the theme's defaults."""
    return {"data": traces, "layout": {**layout, "template": _template(theme), "height": height}}


@cache
def _template(theme: Theme) -> dict[str, Any]:
    return theme.template().to_plotly_json()


def map_trace(
    values: np.ndarray, rows: Sequence[str], columns: Sequence[str], coloraxis: str, row_title: str, column_title: str
) -> dict[str, Any]:
    """Cells are set apart where there are few; hover says the place and the value."""
    few = max(len(rows), len(columns)) <= 24
    return {
        "type": "heatmap",
        "z": json_numbers(values) if values.size <= 4096 else _packed(values),
        "x": list(columns),
        "y": list(rows),
        "coloraxis": coloraxis,
        "xgap": 1 if few else 0,
        "ygap": 1 if few else 0,
        "hovertemplate": f"{escape(row_title)} %{{y}}, {escape(column_title)} %{{x}}: %{{z}}<extra></extra>",
        "zhoverformat": ".4f",
    }


def _packed(values: np.ndarray) -> dict[str, str]:
    """As Plotly.js takes typed arrays: a third of the digits' size, and nothing to parse."""
    data = np.ascontiguousarray(values, dtype="<f4")
    return {"dtype": "f4", "bdata": b64encode(data.tobytes()).decode(), "shape": ", ".join(map(str, data.shape))}


def _axis(letter: str, at: int) -> str:
    """Plotly's name of the first, second ... axis."""
    return letter if at == 1 else f"{letter}{at}"


def _cells(labels: Sequence[str], most: int) -> dict[str, Any]:
    """An axis of a heat map: a category a cell, ticks thinned, no grid behind the cells."""
    return {"type": "category", "tickvals": every(labels, most), "showgrid": False}


def _style(theme: Theme, look: int | str) -> Style:
    if isinstance(look, int):
        return theme.visit(look)
    if look.startswith("part "):
        return theme.part(int(look.removeprefix("part ")))
    return {
        "baseline": theme.baseline,
        "control": Style(theme.muted, "triangle-down-open", "dash"),
        "chance": Style(theme.chance, "triangle-up-open", "dot"),
        "plain": Style(theme.same_head, "circle", "solid"),
        "steps": Style(theme.muted, "circle", "solid"),
    }[look]


def _outline(row: int, column: int, at: int) -> dict[str, Any]:
    """A box around a cell of the first, second ... map."""
    box = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
    place = {"type": "rect", "xref": _axis("x", at), "yref": _axis("y", at)}
    return place | box | {"line": {"color": ORANGE, "width": 2.5}}


def stat_labels(stat: StatArray, axis: str) -> list[str]:
    """Escaped labels of an axis."""
    return [escape(label_text(label)) for label in stat.labels[axis]]


def all_json(parts: Mapping[str, StatArray | None]) -> dict[str, Any]:
    """The JSON export of several statistics."""
    return {name: stat.to_dict() for name, stat in parts.items() if stat is not None}
