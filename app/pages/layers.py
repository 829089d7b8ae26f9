"""Layers: one measure by physical layer at two visits, its difference, its control, and all measures in one table."""

from __future__ import annotations

from typing import Any

from dash import html

from visitlens.app.panels.components import card, table, with_bounds
from visitlens.app.panels.controls import measures
from visitlens.app.panels.panel import Panel, lines_panel
from visitlens.app.panels.plots import Level, Line
from visitlens.app.view.view import View
from visitlens.errors import VisitlensError
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.two_visits import TwoVisits, by_layer_once, mean_over, two_visits

PATH, TITLE, ORDER = "/layers", "Layers", 10
NEEDS = ("recording",)
CONTROLS = ("metric", "visits")


def metric(view: View) -> str:
    """Chosen, else the sink mass, else the first."""
    names = [measure.name for measure in measures(view)]
    return next((n for n in (view.selection.metric, "sink_mass") if n in names), names[0])


def layout(view: View) -> list[Any]:
    name = metric(view)
    if not view.recorded.looped:
        return [_once(view, name), _table_once(view)]
    full = two_visits(view.recorded, name, view.visits)
    two = full.mean(*full.other_axes)
    panels = [_by_layer(view, two)]
    if two.difference is not None:
        panels.append(_difference(view, two))
        panels.append(_profile(view, name))
    return [*panels, _table(view)]


def _by_layer(view: View, two: TwoVisits) -> Panel:
    looks: dict[str, Any] = {f"visit {v}": v for v in two.visits} | {two.control_is: "control"}
    drawn = [Line(label, stat, looks.get(label, "plain")) for label, stat in two.present.items()]
    title = drawn[0].stat.measure.title
    if two.between is not None:
        code = f"rec.between_visits({two.name!r}, visits={view.visits}){_means(view, two.name)}.plot()"
    else:
        code = f"earlier, later = rec.both_visits({two.name!r}, visits={view.visits})\nlater{_means(view, two.name)}.plot()"
    levels = _chance(view, two.name)
    return lines_panel(view, "by-layer", title, drawn, code, levels=levels, links={"path": "/heads", "x": "layer"})


def _difference(view: View, two: TwoVisits) -> Panel:
    assert two.difference is not None
    a, b = two.visits
    code = (
        f"earlier, later = rec.both_visits({two.name!r}, visits={view.visits})\n"
        f"later.combine(earlier, lambda x, y: x - y, later.measure){_means(view, two.name)}.plot()"
    )
    drawn = [Line(f"visit {b} minus visit {a}", two.difference, "plain")]
    return lines_panel(
        view,
        "difference",
        f"Change from visit {a} to visit {b}",
        drawn,
        code,
        levels=[Level("no change", 0.0)],
        links={"path": "/heads", "x": "layer"},
    )


def _profile(view: View, name: str) -> Panel:
    """Over the whole execution, the layers outside the loop included."""
    run = view.recorded
    stat = run.stat(name)
    stat = mean_over(stat, stat.axes[1:])
    assert stat is not None
    drawn = [Line(run.name, stat, "steps")]
    partner = view.pair.baseline
    notes = ["Every step of the forward, as layer·visit."]
    if partner is not None and name in partner.measures:
        notes.append(f"The Baseline, {partner.name}, is on the Compare page.")
    return lines_panel(
        view,
        "profile",
        f"{stat.measure.title}, in execution order",
        drawn,
        f"rec.stat({name!r}){_means(view, name)}.plot()",
        x_title="execution step, as layer·visit",
        notes=notes,
        links={"path": "/heads", "x": "layer"},
        wide=True,
    )


def _once(view: View, name: str) -> Panel:
    full = by_layer_once(view.recorded, name)
    stat = mean_over(full, full.axes[1:])
    assert stat is not None
    return lines_panel(
        view,
        "by-layer",
        stat.measure.title,
        [Line(view.recorded.name, stat, "baseline")],
        f"rec.stat({name!r}){_means(view, name)}.plot()",
        notes=["An unlooped model: every layer has one visit."],
        links={"path": "/heads", "x": "layer"},
        wide=True,
    )


def _table(view: View) -> html.Section:
    a, b = view.visits
    columns = [
        ("measure", "measure"),
        ("earlier", f"visit {a}"),
        ("later", f"visit {b}"),
        ("difference", "difference"),
        ("interval", "95% interval"),
        ("control", "control"),
        ("unit", "unit"),
    ]
    rows = []
    for measure in measures(view):
        try:
            full = two_visits(view.recorded, measure.name, view.visits)
        except VisitlensError:
            continue
        if set(full.other_axes) & {"expert", "shared", "later_expert"}:
            continue
        rows.append({"name": measure.name, "unit": measure.unit, **_row(view, full.mean(*full.other_axes, "layer"))})
    title = "All measures, mean over looped layers"
    return card(
        title, [table(columns, rows, "Choose a measure to draw it above.", key="name", current=metric(view))], wide=True
    )


def _row(view: View, mean: TwoVisits) -> dict[str, Any]:
    shown = mean.difference if mean.difference is not None else mean.between
    assert shown is not None
    title = (mean.between or mean.later or shown).measure.title
    cells = with_bounds(shown)
    return {
        "measure": html.A(title, href=view.href(metric=mean.name)),
        "earlier": _value(mean.earlier),
        "later": _value(mean.later) if mean.between is None else None,
        "difference": cells["difference"]
        if mean.between is None
        else html.Span([cells["difference"], html.Small(" between")]),
        "interval": cells["interval"],
        "control": _value(mean.control),
    }


def _table_once(view: View) -> html.Section:
    rows = []
    for measure in measures(view):
        full = by_layer_once(view.recorded, measure.name)
        if "expert" in full.axes:
            continue
        stat = mean_over(full, full.axes)
        link = html.A(measure.title, href=view.href(metric=measure.name))
        rows.append({"name": measure.name, "measure": link, "value": _value(stat), "unit": measure.unit})
    columns = [("measure", "measure"), ("value", "mean over layers"), ("unit", "unit")]
    title = "All measures, mean over layers"
    return card(
        title, [table(columns, rows, "Choose a measure to draw it above.", key="name", current=metric(view))], wide=True
    )


def _chance(view: View, name: str) -> list[Level]:
    config = view.recorded.recording.config
    if name == "shared_expert_count":
        k = config["experts_per_token"]
        return [Level("uniform chance", k * k / config["num_experts"])]
    return []


def _means(view: View, name: str) -> str:
    axes = view.recorded.stat(name).axes[1:]
    return "".join(f".mean({axis!r})" for axis in axes)


def _value(stat: StatArray | None) -> float | None:
    return None if stat is None else float(stat.values)
