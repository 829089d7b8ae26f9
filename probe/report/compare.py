"""Any two recordings side by side: every measure that both hold, with the difference and its interval. No torch.

Places are matched by (layer, visit), or by physical layer with its visits averaged. Where both recordings are of the same
documents, or share some, the difference is paired, otherwise the two are independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from visitlens.errors import InputError, RecordingError
from visitlens.hooks.core.loop_plan import Step
from visitlens.probe.drawing import page
from visitlens.probe.drawing.drawing import LAYER_AXIS, STEP_AXIS, every, frame, line
from visitlens.probe.drawing.images import IMAGE_FORMATS, render
from visitlens.probe.drawing.series import INTERVAL, series
from visitlens.probe.drawing.theme import Style, Theme, escape, find_theme
from visitlens.probe.gallery.write_figures import write_file, write_plotly_js
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.reading.pair import describe
from visitlens.probe.reading.pairing import pair
from visitlens.probe.reading.recorded_run import RecordedRun, step_label

By = Literal["mean", "layer", "step"]
_PLACES = ("step", "pair")
_NEVER_AVERAGED = ("expert", "later_expert", "later_step", "shared")
"""Axes whose mean is the same for every model."""
_KINDS = ("stage", "component", "q_stage", "kv_stage")
"""Axes whose elements are different things: each is compared on its own."""
_COLUMNS = 3


@dataclass(frozen=True)
class Comparison:
    """One measure in both recordings over the places that they share ([place], or none for the mean over them)."""

    name: str
    measure: Measure
    a: StatArray
    b: StatArray
    difference: StatArray

    @property
    def places(self) -> list[str]:
        """Labels of the rows."""
        return list(self.a.labels["place"]) if self.a.axes else ["mean"]

    def rows(self) -> list[dict[str, Any]]:
        """One a place: values, difference (b - a) and its interval; NaN as None."""
        low, high = self.difference.interval()
        columns = (self.a.values, self.b.values, self.difference.values, low, high)
        keys = ("a", "b", "difference", "low", "high")
        values = zip(*(np.atleast_1d(column) for column in columns), strict=True)
        return [
            {"measure": self.name, "place": place, "unit": self.measure.unit}
            | {key: float(v) if np.isfinite(v) else None for key, v in zip(keys, row, strict=True)}
            for place, row in zip(self.places, values, strict=True)
        ]


def compare(a: RecordedRun, b: RecordedRun, by: By = "mean", measures: Iterable[str] = ()) -> list[Comparison]:
    """Every measure that both hold, or those named; b minus a.

    Raises:
        InputError: a named measure that one of them doesn't hold, or that has no step or visit pair.
        RecordingError: they share no layer, or hold no measure in common.

    Examples:
        >>> rec = vl.open("run.vlens")
        >>> [(c.name, float(c.difference.values)) for c in vl.compare(rec, rec, measures=["sink_mass"])]
        [('sink_mass', 0.0)]
    """
    pairing = pair(a, b)
    a, b = pairing.a, pairing.b
    common = [name for name in a.measures if name in b.measures and _comparable(a.stat(name))]
    wanted = list(measures)
    if unknown := [name for name in wanted if name not in common]:
        raise InputError(f"{', '.join(unknown)} can't be compared here; both recordings hold {', '.join(common)}")
    found: list[Comparison] = []
    for name in wanted or common:
        ours, theirs = (_by_kind(_placed(run.stat(name), by)) for run in (a, b))
        for kind in ours:
            found += _compared(f"{name}.{kind}" if kind else name, ours[kind], theirs[kind], by)
    if not found:
        raise RecordingError(f"{a.name} and {b.name} share no layer and no measure to compare")
    return found


def comparison_data(a: RecordedRun, b: RecordedRun, found: list[Comparison], by: By) -> dict[str, Any]:
    """JSON-ready: rows, and what a figure draws."""
    drawn = {}
    for each in found:
        for side, stat in (("a", each.a), ("b", each.b), ("difference", each.difference)):
            drawn[f"{each.name}.{side}"] = series(stat, "b" if side == "b" else "a", "observed", each.name)
    return {
        "slug": "compare",
        "title": f"{b.name} against {a.name}",
        "question": "What is the same and what differs between two recordings, place by place?",
        "by": by,
        "interval": f"{INTERVAL}; {pair(a, b).words}",
        "sides": ["a", "b"],
        "models": {"a": describe(a), "b": describe(b)},
        "rows": [row for each in found for row in each.rows()],
        "series": drawn,
        "notes": [f"Differences are {b.name} minus {a.name}."],
    }


def draw_comparison(data: Mapping[str, Any], theme: Theme) -> go.Figure:
    """A panel a measure: both recordings over the places that they share."""
    names = list(dict.fromkeys(key.rpartition(".")[0] for key in data["series"]))
    columns = min(_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    panels = {
        "rows": rows,
        "cols": columns,
        "subplot_titles": [escape(name) for name in names],
        "vertical_spacing": 0.35 / max(rows, 2),
        "horizontal_spacing": 0.08,
    }
    figure = frame(data, theme, width=max(760, 380 * columns), height=220 + 230 * rows, panels=panels)
    styles = {"a": Style(theme.baseline_colour, "circle", "dot"), "b": Style(theme.visits[0], "diamond", "solid")}
    places: list[str] = []
    for at, name in enumerate(names):
        row, col = at // columns + 1, at % columns + 1
        for side, style in styles.items():
            entry = data["series"][f"{name}.{side}"]
            if not entry["axes"]:
                entry = {
                    **entry,
                    "axes": {"place": ["mean"]},
                    **{key: [entry[key]] for key in ("values", "low", "high")},
                }
            model = data["models"][side]["name"]
            figure.add_trace(line(entry, style, name=model, legend=at == 0), row=row, col=col)
            places, unit = entry["axes"]["place"], entry["measure"]["unit"]
            figure.update_yaxes(title_text=escape(unit), row=row, col=col)
        figure.update_xaxes(type="category", tickvals=every(places, 10), row=row, col=col)
    titles = {"layer": LAYER_AXIS, "step": STEP_AXIS, "mean": ""}
    figure.update_xaxes(title_text=titles[data["by"]], row=rows)
    return figure


def write_comparison(data: Mapping[str, Any], path: Path, theme: str = "light") -> Path:
    """The figure as .html (with plotly.min.js beside it), .png, .svg or .pdf.

    Raises:
        InputError: another ending, or an unknown theme.
        UnavailableError: a picture without a Chromium.
    """
    ending, chosen = path.suffix.removeprefix("."), find_theme(theme)
    figure = draw_comparison(data, chosen)
    if ending == "html":
        write_plotly_js(path.parent)
        return write_file(path, page.single(data, figure, chosen.scheme))
    if ending not in IMAGE_FORMATS:
        raise InputError(f"expected a figure ending in .html, .{', .'.join(IMAGE_FORMATS)}, got {path.name!r}")
    return write_file(path, next(iter(render([(figure, ending)]))))


def _comparable(stat: StatArray) -> bool:
    axes = stat.axes
    return any(axis in axes for axis in _PLACES) and not any(axis in axes for axis in _NEVER_AVERAGED)


def _placed(stat: StatArray, by: By) -> StatArray:
    """With one axis `place` of labels that mean the same in both recordings; heads are averaged, kinds kept."""
    for axis in [axis for axis in stat.axes if axis not in (*_PLACES, *_KINDS)]:
        stat = stat.mean(axis)
    (axis,) = (axis for axis in stat.axes if axis in _PLACES)
    places = list(stat.labels[axis])
    if by == "step":
        names = [
            step_label(p) if isinstance(p, Step) else f"{p.layer}: {p.earlier.visit}→{p.later.visit}" for p in places
        ]
        return _relabelled(stat, axis, names)
    layers = sorted({place.layer for place in places})
    parts = [stat.sel(**{axis: lambda place, layer=layer: place.layer == layer}).mean(axis) for layer in layers]
    return StatArray.stacked(parts, "place", [str(layer) for layer in layers])


def _relabelled(stat: StatArray, axis: str, names: list[str]) -> StatArray:
    axes = tuple("place" if each == axis else each for each in stat.axes)
    labels = {("place" if each == axis else each): names if each == axis else stat.labels[each] for each in stat.axes}
    return replace(stat, measure=replace(stat.measure, axes=axes), labels=labels)


def _by_kind(stat: StatArray) -> dict[str, StatArray]:
    """Each stage or component on its own; `""` where there is none."""
    for axis in _KINDS:
        if axis in stat.axes:
            return {str(label): stat.sel(**{axis: label}) for label in stat.labels[axis]}
    return {"": stat}


def _compared(name: str, a: StatArray, b: StatArray, by: By) -> list[Comparison]:
    shared = [place for place in a.labels["place"] if place in b.labels["place"]]
    if not shared:
        return []
    a, b = (stat.sel(place=shared) for stat in (a, b))
    if by == "mean":
        a, b = a.mean("place"), b.mean("place")
    measure = replace(b.measure, name=f"{name}_difference", title=f"{b.measure.title}: difference")
    return [Comparison(name, b.measure, a, b, b.combine(a, np.subtract, measure))]
