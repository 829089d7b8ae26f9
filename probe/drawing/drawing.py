"""What the figures draw with: the titled frame, lines with intervals, heat maps, and panels that say why they are empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import plotly.graph_objects as go
from plotly.colors import get_colorscale
from plotly.subplots import make_subplots

from visitlens.probe.drawing.theme import DIVERGING, SEQUENTIAL, Style, Theme, escape

LAYER_AXIS = "physical layer (0-based)"
STEP_AXIS = "execution step, as layer·visit"
HEAD_MARGIN = 92
"""Height of title and subtitle, in pixels."""
_LONGEST_NAME = 40
_PANEL_NAMES = 24


def frame(
    data: Mapping[str, Any],
    theme: Theme,
    *,
    width: int,
    height: int,
    panels: Mapping[str, Any] | None = None,
    lines: bool = True,
) -> go.Figure:
    """An empty figure with title and subtitle; with `lines`, room for a legend below. `panels` are `make_subplots` arguments.

    The subtitle is `data["subtitle"]`, escaped already, or says which recordings these are."""
    figure = make_subplots(**(panels or {}))
    figure.update_annotations(font={"size": 14, "color": theme.ink})
    named = 0 if panels is None or "subplot_titles" not in panels else _PANEL_NAMES
    figure.update_layout(
        template=theme.template(),
        width=width,
        height=height,
        title=title_block(theme, data["title"], data.get("subtitle") or subtitle(data, lines)),
        margin={"t": HEAD_MARGIN + named, "l": 72, "r": 28, "b": 110 if lines else 70},
        legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )
    return figure


def title_block(theme: Theme, title: str, below: str) -> dict[str, Any]:
    """Title and subtitle at the top left; `below` is escaped already and has at most two lines."""
    return {
        "text": f"<b>{escape(title)}</b>",
        "subtitle": {"text": below, "font": {"size": 12, "color": theme.muted}},
        "x": 0,
        "xref": "container",
        "xanchor": "left",
        "y": 1,
        "yref": "container",
        "yanchor": "top",
        "pad": {"t": 18, "l": 16},
    }


def subtitle(data: Mapping[str, Any], lines: bool) -> str:
    """Two short lines, escaped: which models, how much data, what the bars are, which hashes, what is missing."""
    models = [data["models"][side] for side in data["sides"] if data["models"][side] is not None]
    counts = data.get("n") or " and ".join(
        sorted({f"{model['documents']:,} documents, {model['tokens']:,} tokens" for model in models})
    )
    intervals = f"; bars: 95% intervals over {'prompts' if 'n' in data else 'documents'}" if lines else ""
    if data.get("grid"):
        gone = [panel["title"] for panel in data["panels"] if panel["absent"]]
        missing = (
            f"missing: {'; '.join(gone[:4])}{f'; and {len(gone) - 4} more' if len(gone) > 4 else ''}; " if gone else ""
        )
        cells = f"{len(data['panels']) - len(gone)} of {len(data['panels'])} cells"
        return f"grid {escape(_shorten(data['grid']))}, {cells}: n = {counts}{intervals}<br>{escape(missing)}hashes in the caption"
    names = " and ".join(escape(_shorten(model["name"])) for model in models)
    hashes = "; ".join(
        f"recording {short(model['recording'])}, weights {short(model['weights_sha256'])}" for model in models
    )
    absent = data.get("missing") or next((p["missing"] for p in data.get("panels", []) if p.get("missing")), "")
    missing = f"; Baseline not drawn: {escape(absent)}" if absent else ""
    return f"{names}: n = {escape(counts)}{intervals}<br>{hashes}{missing}"


def short(hash_: str | None) -> str:
    """The first eight characters, escaped."""
    return escape(hash_[:8]) if hash_ else "unknown"


def line(
    entry: Mapping[str, Any], style: Style, *, name: str = "", legend: bool = True, width: float = 2.0
) -> go.Scatter:
    """A one-axis series against its labels, with interval bars."""
    return go.Scatter(line_trace(entry, style, name=name, legend=legend, width=width))


def line_trace(
    entry: Mapping[str, Any], style: Style, *, name: str = "", legend: bool = True, width: float = 2.0
) -> dict[str, Any]:
    """`line` as plain JSON: many are built in little time."""
    (labels,) = entry["axes"].values()
    values = entry["values"]
    up, down = bars(entry)
    trace = {
        "type": "scatter",
        "x": labels,
        "y": values,
        "name": escape(name or entry["label"]),
        "mode": "lines+markers",
        "line": {"color": style.colour, "dash": style.dash, "width": width},
        "marker": {
            "symbol": style.symbol,
            "size": 9,
            "color": style.colour,
            "line": {"width": 2 if "open" in style.symbol else 0},
        },
        "customdata": list(map(told, values, entry["low"], entry["high"])),
        "hovertemplate": "%{x}: %{customdata}",
        "showlegend": legend,
    }
    if any(bar is not None for bar in up):
        trace["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down}
        trace["error_y"] |= {"width": 3, "thickness": 1.4}
    return trace


def bars(entry: Mapping[str, Any]) -> tuple[list[float | None], list[float | None]]:
    """Lengths of a one-axis series' interval bars above and below its values."""
    up: list[float | None] = []
    down: list[float | None] = []
    for value, low, high in zip(entry["values"], entry["low"], entry["high"], strict=True):
        if value is None or low is None or high is None:
            up.append(None)
            down.append(None)
        else:
            up.append(max(high - value, 0.0))
            down.append(max(value - low, 0.0))
    return up, down


def told(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A number for a hover label, with its interval where it has one. Plotly writes a minus sign on axes, but a hyphen where a template
    has a format (`%{y:.4f}`): templates have none. They show this, as `customdata`, or `%{z}` by the trace's `zhoverformat`."""
    if value is None:
        return ""
    interval = "" if low is None or high is None else f" [{low:z.4f}, {high:z.4f}]"
    return f"{value:z.4f}{interval}".replace("-", "−")


def heat(
    entry: Mapping[str, Any],
    x: Sequence[Any],
    y: Sequence[Any],
    *,
    coloraxis: str = "coloraxis",
    places: str = "%{y}, %{x}",
) -> go.Heatmap:
    """A two-axis series; rows downwards are set by the y axis. Cell values are written where there are few cells."""
    return go.Heatmap(heat_trace(entry, x, y, coloraxis=coloraxis, places=places))


def heat_trace(
    entry: Mapping[str, Any],
    x: Sequence[Any],
    y: Sequence[Any],
    *,
    coloraxis: str = "coloraxis",
    places: str = "%{y}, %{x}",
) -> dict[str, Any]:
    """`heat` as plain JSON."""
    texts = [list(map(told, *row)) for row in zip(entry["values"], entry["low"], entry["high"], strict=True)]
    most = max(len(x), len(y))
    trace = {
        "type": "heatmap",
        "z": entry["values"],
        "x": [escape(label) for label in x],
        "y": [escape(label) for label in y],
        "coloraxis": coloraxis,
        "customdata": texts,
        "hovertemplate": f"{places}: %{{customdata}}<extra></extra>",
        "xgap": 1 if most <= 24 else 0,
        "ygap": 1 if most <= 24 else 0,
    }
    if most <= 12:
        trace |= written(entry["values"], 2 if largest(entry["values"]) >= 0.2 else 3)
        trace["textfont"] = {"size": 11 if most <= 10 else 9}
    return trace


def written(values: Sequence[Sequence[float | None]], places: int) -> dict[str, Any]:
    """What writes a heat map's values in its cells: with a minus sign, where Plotly's own formats have a hyphen, and no sign at 0."""
    texts = [["" if v is None or v != v else f"{v:z.{places}f}".replace("-", "−") for v in row] for row in values]
    return {"text": texts, "texttemplate": "%{text}"}


@cache
def named_scale(name: str) -> list[list[Any]]:
    """A colour scale of Plotly's Python side, written out: its JavaScript has others of the same names."""
    return get_colorscale(name)


def sequential(top: float, title: str) -> dict[str, Any]:
    """A colour axis from 0."""
    return {"colorscale": named_scale(SEQUENTIAL), "cmin": 0, "cmax": top or 1.0, "colorbar": _colour_bar(title)}


def diverging(reach: float, title: str) -> dict[str, Any]:
    """A colour axis symmetric about 0: both bounds are set, because a middle alone is ignored once they are."""
    return {
        "colorscale": named_scale(DIVERGING),
        "cmin": -(reach or 1.0),
        "cmax": reach or 1.0,
        "colorbar": _colour_bar(title),
    }


def largest(*grids: Sequence[Sequence[float | None]]) -> float:
    """The largest absolute value of some two-axis series; 0 if there is none."""
    return max((abs(value) for grid in grids for row in grid for value in row if value is not None), default=0.0)


def cell_axes(
    figure: go.Figure, x: Sequence[str], y: Sequence[str], most: int, *, row: int | None = None, col: int | None = None
) -> None:
    """Category axes of a heat map: the first row on top, ticks thinned, no grid behind the cells."""
    figure.update_xaxes(type="category", tickvals=every(x, most), showgrid=False, row=row, col=col)
    figure.update_yaxes(
        type="category", tickvals=every(y, most), showgrid=False, autorange="reversed", row=row, col=col
    )


def every(labels: Sequence[Any], most: int = 16) -> list[Any]:
    """At most `most` of the labels, evenly spaced, the first among them: ticks that don't overlap."""
    return list(labels[:: -(-len(labels) // most)])


def empty_panel(figure: go.Figure, theme: Theme, reason: str, *, row: int, col: int, width: int = 260) -> None:
    """Says in a panel why it is empty, and hides its axes."""
    figure.update_xaxes(visible=False, range=[0, 1], row=row, col=col)
    figure.update_yaxes(visible=False, range=[0, 1], row=row, col=col)
    figure.add_annotation(
        text=escape(reason), x=0.5, y=0.5, showarrow=False, width=width, font={"color": theme.muted}, row=row, col=col
    )


def cell_grid(data: Mapping[str, Any], name: str) -> tuple[list[str], list[str], list[list[Any]], list[list[Any]]]:
    """A scalar series of every cell as a map: scales, levels, values (None where there is no cell), and what to hover."""
    scales = list(dict.fromkeys(panel["scale"] for panel in data["panels"]))
    levels = list(dict.fromkeys(panel["level"] for panel in data["panels"]))
    values: list[list[Any]] = [[None] * len(scales) for _ in levels]
    texts: list[list[Any]] = [[""] * len(scales) for _ in levels]
    for panel in data["panels"]:
        key = panel.get("series", {}).get(name)
        if key is not None:
            row, col = levels.index(panel["level"]), scales.index(panel["scale"])
            entry = data["series"][key]
            values[row][col], texts[row][col] = entry["values"], told(entry["values"], entry["low"], entry["high"])
    return scales, levels, values, texts


def cell_map(
    figure: go.Figure, data: Mapping[str, Any], name: str, theme: Theme, *, row: int, col: int, coloraxis: str
) -> None:
    """One map of a grid: scale across, sparsity level upwards, the value in each cell, a cross where there is none."""
    scales, levels, values, texts = cell_grid(data, name)
    x, y = (
        [escape(scale) or "this pair" for scale in scales],
        [f"{escape(level)}%" if level else "" for level in levels],
    )
    figure.add_trace(
        go.Heatmap(
            z=values,
            x=x,
            y=y,
            coloraxis=coloraxis,
            customdata=texts,
            **written(values, 2),
            textfont={"size": 12},
            hovertemplate="%{x}, S = %{y}: %{customdata}<extra></extra>",
            xgap=2,
            ygap=2,
        ),
        row=row,
        col=col,
    )
    gone = [(x[c], y[r]) for r in range(len(levels)) for c in range(len(scales)) if values[r][c] is None]
    if gone:
        figure.add_scatter(
            x=[at for at, _ in gone],
            y=[at for _, at in gone],
            mode="markers+text",
            marker={"symbol": "x-thin", "size": 12, "line": {"width": 2, "color": theme.muted}},
            text=["missing"] * len(gone),
            textposition="bottom center",
            textfont={"size": 10, "color": theme.muted},
            hovertemplate="%{x}, S = %{y}: missing<extra></extra>",
            showlegend=False,
            row=row,
            col=col,
        )
    figure.update_xaxes(type="category", showgrid=False, categoryorder="array", categoryarray=x, row=row, col=col)
    figure.update_yaxes(type="category", showgrid=False, categoryorder="array", categoryarray=y, row=row, col=col)


def _colour_bar(title: str) -> dict[str, Any]:
    return {
        "title": {"text": escape(title), "side": "right", "font": {"size": 13}},
        "thickness": 14,
        "outlinewidth": 0,
        "ypad": 0,
    }


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
