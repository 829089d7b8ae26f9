"""A plain figure of any StatArray: what `StatArray.plot()` draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio

from visitlens.errors import InputError
from visitlens.probe.drawing.drawing import (
    HEAD_MARGIN,
    LAYER_AXIS,
    STEP_AXIS,
    diverging,
    every,
    heat_trace,
    largest,
    line_trace,
    sequential,
    title_block,
)
from visitlens.probe.drawing.page import CONFIG
from visitlens.probe.drawing.series import series
from visitlens.probe.drawing.theme import LIGHT, Style, Theme, escape
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.measures.tables import label_text

_AXIS_TITLES = {
    "layer": LAYER_AXIS,
    "step": STEP_AXIS,
    "later_step": STEP_AXIS,
    "pair": "layer and its two visits",
    "shared": "shared experts",
}

_ORDERED = ("layer", "step", "later_step", "shared")
"""Axes along which a line between points means something."""


class NotebookFigure(go.Figure):
    """A figure that shows without Plotly's upload button, in a notebook cell and by `.show()`."""

    def show(self, *args: Any, **kwargs: Any) -> None:
        pio.show(self, *args, config=CONFIG | kwargs.pop("config", {}), **kwargs)

    def _ipython_display_(self) -> None:
        if pio.renderers.render_on_display and pio.renderers.default:
            self.show()
        else:
            print(repr(self))

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> Any:
        return super()._repr_mimebundle_(*args, config=CONFIG, **kwargs)


def plot_stat(stat: StatArray, theme: Theme = LIGHT) -> NotebookFigure:
    """A point with its interval for no axis, a line with intervals for one, a heat map for two.

    Cosines and whatever has negative values get a diverging scale, symmetric about zero.

    Raises:
        InputError: three axes or more.
    """
    return NotebookFigure(stat_json(stat, theme))


def stat_json(stat: StatArray, theme: Theme) -> dict[str, Any]:
    """`plot_stat` as plain JSON, `data` and `layout`. Raises as it does."""
    if len(stat.axes) > 2:
        raise InputError(
            f"{stat.measure.name} has {len(stat.axes)} axes ({', '.join(stat.axes)}), a figure shows at most two; "
            f"choose with .sel({stat.axes[0]}=...) or average with .mean({stat.axes[-1]!r}) first"
        )
    if not stat.values.size:
        raise InputError(
            f"{stat.measure.name} holds no element, so there is nothing to draw; its axes have labels {dict(stat.labels)}"
        )
    entry = series(stat, "", "observed", stat.measure.title)
    trace, layout = _map(stat, entry) if len(stat.axes) == 2 else _points(stat, entry, theme)
    layout |= {
        "template": theme.template().to_plotly_json(),
        "width": 760 if len(stat.axes) < 2 else 820,
        "height": 480 if len(stat.axes) < 2 else 560,
        "margin": {"t": HEAD_MARGIN, "l": 72, "r": 28, "b": 70},
        "title": title_block(theme, stat.measure.title, _subtitle(stat)),
    }
    return {"data": [trace], "layout": layout}


def _points(stat: StatArray, entry: dict[str, Any], theme: Theme) -> tuple[dict[str, Any], dict[str, Any]]:
    axis = stat.axes[0] if stat.axes else None
    names = [escape(label_text(label)) for label in stat.labels[axis]] if axis else [""]
    values, low, high = ([entry[key]] if axis is None else entry[key] for key in ("values", "low", "high"))
    drawn = {**entry, "axes": {"": names}, "values": values, "low": low, "high": high}
    trace = line_trace(drawn, Style(theme.visits[0], "circle", "solid"), legend=False)
    trace["mode"] = "lines+markers" if axis in _ORDERED else "markers"
    trace["hovertemplate"] += "<extra></extra>"
    across = {"type": "category", "range": [-0.5, len(names) - 0.5], "tickvals": every(names)}
    across |= {"title": {"text": _axis_title(axis)}} if axis else {}
    return trace, {"xaxis": across, "yaxis": {"title": {"text": escape(stat.measure.unit)}}}


def _map(stat: StatArray, entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    rows, columns = ([label_text(label) for label in stat.labels[axis]] for axis in stat.axes)
    trace = heat_trace(entry, columns, rows, places=f"{escape(stat.axes[0])} %{{y}}, {escape(stat.axes[1])} %{{x}}")
    cells = {"type": "category", "showgrid": False}
    reach, unit = largest(entry["values"]), stat.measure.unit
    if unit == "cosine" or np.nanmin(stat.values, initial=0.0) < 0:
        colours = diverging(1.0 if unit == "cosine" and reach <= 1 else reach, unit)
    else:
        colours = sequential(reach, unit)
    down = {"autorange": "reversed", "title": {"text": _axis_title(stat.axes[0])}}
    layout = {
        "xaxis": {**cells, "tickvals": every(trace["x"], 16), "title": {"text": _axis_title(stat.axes[1])}},
        "yaxis": {**cells, "tickvals": every(trace["y"], 16), **down},
        "coloraxis": colours,
    }
    return trace, layout


def _axis_title(axis: str) -> str:
    return escape(_AXIS_TITLES.get(axis, axis.replace("_", " ")))


def _subtitle(stat: StatArray) -> str:
    interval = "no interval" if stat.no_interval else "bars: 95% intervals over documents"
    counts = f"n = {stat.documents:,} documents, {stat.tokens:,} tokens"
    if stat.counts is not None and stat.ragged:
        measured = stat.counts[stat.counts > 0]
        counts += f", {measured.min():,.0f} to {measured.max():,.0f} of them behind each value"
    return f"{counts}; {interval if len(stat.axes) < 2 else 'intervals on hover'}<br>{escape(stat.aggregation)}"
