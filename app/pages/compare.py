"""Compare: two runs by execution step or physical layer, with their difference; or one run's layers against its partner's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from dash import html

from visitlens.app.panels.components import attrs, card, state, table, with_bounds
from visitlens.app.panels.controls import layered, measures
from visitlens.app.panels.panel import Panel, lines_panel
from visitlens.app.panels.plots import Level, Line
from visitlens.app.view.view import View
from visitlens.errors import VisitlensError
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.reading.pairing import pair
from visitlens.probe.reading.recorded_run import RecordedRun
from visitlens.probe.reading.two_visits import mean_over

PATH, TITLE, ORDER = "/compare", "Compare", 40
NEEDS = ("recording",)
CONTROLS = ("other", "metric")
PARAMETERS = ("by",)
_WAYS = {"step": "execution step", "layer": "physical layer, mean over its visits"}


def METRICS(view: View) -> list[Measure]:
    """Those with one value a step that both runs hold."""
    other = other_run(view)
    return [m for m in measures(view) if m.axes[0] == "step" and (other is None or m.name in other.measures)]


def metric(view: View) -> str:
    names = [measure.name for measure in METRICS(view)]
    return next((n for n in (view.selection.metric, "sink_mass") if n in names), names[0] if names else "")


def other_run(view: View) -> RecordedRun | None:
    registry = view.context.registry
    if view.selection.other and view.selection.other in registry:
        return registry[view.selection.other].run
    assert view.entry is not None
    mate = registry.partner(view.entry.id) or next(
        (e for e in registry.entries() if e.run and e.id != view.entry.id), None
    )
    return mate.run if mate else None


def layout(view: View) -> list[Any]:
    other, run = other_run(view), view.recorded
    if other is None:
        return [
            state(
                "One recording alone",
                ["To compare, open two or more: visitlens app RUN.vlens OTHER.vlens, or a folder of recordings."],
                "note wide",
            )
        ]
    name, way = metric(view), view.selection.extra.get("by", "step")
    way = way if way in _WAYS else "step"
    names = _distinct(run.name, other.name)
    pairing = pair(run, other)
    run, other = pairing.a, pairing.b
    first, second = (by(r, name, way) for r in (run, other))
    looks = [f"part {at}" if r.looped else "baseline" for at, r in ((1, run), (2, other))]
    chips = html.Nav(
        [
            html.A(text, href=view.href(by=key), **attrs({"aria-current": "true"} if key == way else {}))
            for key, text in _WAYS.items()
        ],
        className="chips",
        **attrs({"aria-label": "Compare by", "data-parameter": "by", "data-value": way}),
    )
    drawn = [Line(names[0], first, looks[0]), Line(names[1], second, looks[1])]
    x_title = _WAYS[way] + (", numbered in order" if way == "step" else "")
    code = f"other = vl.open({other.recording.place!r})\nrec.stat({name!r}).plot(), other.stat({name!r}).plot()"
    items: list[Any] = [
        lines_panel(view, "both", first.measure.title, drawn, code, x_title=x_title, tools=[chips], wide=True)
    ]
    difference = difference_of(first, second)
    if difference is not None:
        items.append(_difference(view, difference, names, x_title, code))
    items.append(html.P(f"Intervals of differences are {pairing.words}.", className="note wide"))
    return [*items, _table(first, second, difference, names, way), _all(view, run, other, names)]


def by(run: RecordedRun, name: str, way: str) -> StatArray:
    """[step] or [layer] of a step measure: heads averaged, and a layer's visits where `way` is layer."""
    full = run.stat(name)
    stat = mean_over(full, full.axes[1:])
    assert stat is not None
    if way == "step":
        return replace(stat, labels={"step": list(range(len(run.plan)))})
    layers = sorted(run.plan.visits)
    parts = [stat.sel(step=lambda step, layer=layer: step.layer == layer).mean("step") for layer in layers]
    return replace(StatArray.stacked(parts, "layer", layers), aggregation=f"{stat.aggregation}, mean over visits")


def difference_of(first: StatArray, second: StatArray) -> StatArray | None:
    """Second minus first where both have the place; paired where both are of the same documents."""
    (axis,) = first.axes
    common = [label for label in first.labels[axis] if label in second.labels[axis]]
    if not common:
        return None
    a, b = first.sel(**{axis: common}), second.sel(**{axis: common})
    return b.combine(a, np.subtract, replace(a.measure, title=f"{a.measure.title}: difference"))


def _difference(view: View, difference: StatArray, names: tuple[str, str], x_title: str, code: str) -> Panel:
    drawn = [Line(f"{names[1]} minus {names[0]}", difference, "plain")]
    return lines_panel(
        view,
        "difference",
        f"{names[1]} minus {names[0]}",
        drawn,
        code,
        levels=[Level("no difference", 0.0)],
        x_title=x_title,
    )


def _table(
    first: StatArray, second: StatArray, difference: StatArray | None, names: tuple[str, str], way: str
) -> html.Section:
    (axis,) = first.axes
    places = list(dict.fromkeys([*first.labels[axis], *second.labels[axis]]))

    def at(stat: StatArray | None, place: Any) -> StatArray | None:
        return stat.sel(**{axis: place}) if stat is not None and place in stat.labels[axis] else None

    rows = []
    for place in places:
        one, two, change = (at(stat, place) for stat in (first, second, difference))
        row = {"place": str(place), "first": _value(one), "second": _value(two)}
        rows.append(row | (with_bounds(change) if change is not None else {}))
    columns = [
        ("place", way),
        ("first", names[0]),
        ("second", names[1]),
        ("difference", "difference"),
        ("interval", "95% interval"),
    ]
    return card("Side by side", [table(columns, rows, f"{first.measure.title}, {first.measure.unit}.")])


def _all(view: View, run: RecordedRun, other: RecordedRun, names: tuple[str, str]) -> html.Section:
    rows = []
    for measure in METRICS(view):
        if set(measure.axes) & {"expert", "later_expert"} or not layered(other, measure.name):
            continue
        try:
            a, b = (by(r, measure.name, "layer").mean("layer") for r in (run, other))
        except VisitlensError:
            continue
        difference = b.combine(a, np.subtract, a.measure)
        rows.append(
            {
                "name": measure.name,
                "measure": html.A(measure.title, href=view.href(metric=measure.name)),
                "first": float(a.values),
                "second": float(b.values),
                **with_bounds(difference),
                "unit": measure.unit,
            }
        )
    columns = [
        ("measure", "measure"),
        ("first", names[0]),
        ("second", names[1]),
        ("difference", "difference"),
        ("interval", "95% interval"),
        ("unit", "unit"),
    ]
    return card(
        "All measures, mean over physical layers",
        [table(columns, rows, "Choose a measure to draw it above.", key="name", current=metric(view))],
        wide=True,
    )


def _value(stat: StatArray | None) -> float | None:
    return None if stat is None else float(stat.values)


def _distinct(first: str, second: str) -> tuple[str, str]:
    return (first, second) if first != second else (f"{first} (this)", f"{second} (other)")
