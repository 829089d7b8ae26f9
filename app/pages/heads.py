"""Heads: every head of every layer at two visits and their difference, a sortable table, one head's own distribution."""

from __future__ import annotations

from typing import Any

import dash_ag_grid as dag
from dash import Input, Output, State, html

from visitlens.app.panels.components import attrs, card
from visitlens.app.panels.controls import measures
from visitlens.app.panels.panel import Panel, lines_panel, maps_panel, stat_panel
from visitlens.app.panels.plots import Line
from visitlens.app.view.view import Context, View
from visitlens.probe.measures.measure import Measure
from visitlens.probe.reading.two_visits import TwoVisits, by_layer_once, mean_over, two_visits

PATH, TITLE, ORDER = "/heads", "Heads", 11
NEEDS = ("recording",)
CONTROLS = ("metric", "visits", "layer", "head")


def METRICS(view: View) -> list[Measure]:
    """Those with a value a head."""
    return [measure for measure in measures(view) if "head" in measure.axes or "kv_head" in measure.axes]


def metric(view: View) -> str:
    names = [measure.name for measure in METRICS(view)]
    return next((n for n in (view.selection.metric, "sink_mass") if n in names), names[0])


def layout(view: View) -> list[Any]:
    name, run = metric(view), view.recorded
    axis = "head" if "head" in run.stat(name).axes else "kv_head"
    links = {"path": "/attention", "x": "head", "y": "layer"}
    selected = (view.layer, view.head) if view.selection.layer is not None else None
    if not run.looped:
        stat = by_layer_once(run, name)
        panel = stat_panel(view, "map", stat, f"rec.stat({name!r}).plot()", links=links, linked=True, wide=True)
        return [panel, _table_card(view)]
    full = two_visits(run, name, view.visits)
    two = full.mean(*(a for a in full.other_axes if a != axis))
    title = run.stat(name).measure.title
    code = (
        f"rec.between_visits({name!r}, visits={view.visits}).plot()"
        if two.between is not None
        else f"earlier, later = rec.both_visits({name!r}, visits={view.visits})\nearlier.plot(), later.plot()"
    )
    panels: list[Any] = [
        maps_panel(view, "map", title, two, code, links=links if axis == "head" else None, selected=selected)
    ]
    if two.control is not None and two.control.axes == ("layer", "head"):
        panels.append(
            stat_panel(
                view,
                "control",
                two.control,
                f"rec.attended_control({name!r}, visits={view.visits}).plot()",
                title=f"{title}: {two.control_is}",
                linked=True,
            )
        )
    panels.append(_layer_heads(view, two, axis))
    if "step" in run.stat(name).axes:
        panels.append(_head_profile(view, name, axis))
    return [*panels, _table_card(view)]


def callbacks(app: Any, context: Context) -> None:
    """A click or Enter on a row of the table opens the head."""
    from dash import ClientsideFunction

    app.clientside_callback(
        ClientsideFunction("visitlens", "openRow"),
        Output("heads-table", "className"),
        Input("heads-table", "cellClicked"),
        State("heads-table", "className"),
        prevent_initial_call=True,
    )


def head_rows(view: View) -> list[dict[str, Any]]:
    """One row a looped layer (or layer) and head: each head measure at both visits, its difference, or between them."""
    run = view.recorded
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for measure in METRICS(view):
        if measure.axes not in (("step", "head"), ("pair", "head")):
            continue
        if not run.looped:
            parts = {measure.name: by_layer_once(run, measure.name)}
        else:
            two = two_visits(run, measure.name, view.visits)
            a, b = view.visits
            parts = (
                {measure.name: two.between}
                if two.between is not None
                else {
                    f"{measure.name} {a}": two.earlier,
                    f"{measure.name} {b}": two.later,
                    f"{measure.name} Δ": two.difference,
                }
            )
        for column, stat in parts.items():
            if stat is None:
                continue
            for i, layer in enumerate(stat.labels["layer"]):
                for j, head in enumerate(stat.labels["head"]):
                    row = rows.setdefault((layer, head), {"layer": layer, "head": head})
                    value = float(stat.values[i, j])
                    row[column] = round(value, 4) if value == value else None
    return list(rows.values())


def _layer_heads(view: View, two: TwoVisits, axis: str) -> Panel:
    """Every head of the selected layer, with intervals."""
    layer = view.layer if view.layer in view.recorded.plan.looped_layers else view.recorded.plan.looped_layers[0]
    looks: dict[str, Any] = {f"visit {v}": v for v in two.visits} | {two.control_is: "control"}
    present = {label: stat for label, stat in two.present.items() if stat.axes == ("layer", axis)}
    drawn = [Line(label, stat.sel(layer=layer), looks.get(label, "plain")) for label, stat in present.items()]
    code = "rec.between_visits" if two.between is not None else "rec.both_visits"
    return lines_panel(
        view,
        "layer-heads",
        f"All heads of layer {layer}",
        drawn,
        f"{code}({two.name!r}, visits={two.visits})",
        x_title=axis.replace("_", " "),
        links={"path": "/attention", "x": "head"} if axis == "head" else None,
    )


def _head_profile(view: View, name: str, axis: str) -> Panel:
    run, stat = view.recorded, view.recorded.stat(name)
    stat = mean_over(stat, tuple(a for a in stat.axes[1:] if a != axis))
    assert stat is not None
    head = min(view.head, len(stat.labels[axis]) - 1)
    drawn = [
        Line(f"head {head}", stat.sel(**{axis: head}), "part 1"),
        Line("mean over heads", stat.mean(axis), "control"),
    ]
    return lines_panel(
        view,
        "head-profile",
        f"Head {head} through the forward",
        drawn,
        f"rec.stat({name!r}).sel({axis}={head}).plot()",
        x_title="execution step, as layer·visit",
        links={"path": "/heads", "x": "layer"},
        notes=[f"{run.stat(name).measure.title} of head {head} in every layer, against the mean of all heads."],
    )


def _table_card(view: View) -> html.Section:
    rows = head_rows(view)
    names = list(dict.fromkeys(name for row in rows for name in row))
    names.sort(key=lambda name: (name not in ("layer", "head"), not name.startswith("sink_mass")))
    columns = [
        {
            "field": name,
            "headerName": name.replace("_", " "),
            "wrapHeaderText": True,
            "autoHeaderHeight": True,
            "headerTooltip": name,
            "pinned": "left" if name in ("layer", "head") else None,
            "width": 78 if name in ("layer", "head") else 104,
            "type": "numericColumn",
            **({} if name in ("layer", "head") else {"valueFormatter": {"function": "d3.format('.3f')(params.value)"}}),
        }
        for name in names
    ]
    grid = dag.AgGrid(
        id="heads-table",
        rowData=rows,
        columnDefs=columns,
        dashGridOptions={
            "animateRows": False,
            "rowHeight": 28,
            "headerHeight": 34,
            "domLayout": "normal",
            "suppressFieldDotNotation": True,
        },
        defaultColDef={"sortable": True, "resizable": True},
        style={"height": "340px"},
    )
    note = html.P(
        "Sort by a column's heading; Δ is the later visit minus the earlier. A row opens the head.", className="caption"
    )
    return card(
        "All heads",
        [html.Div(grid, className="grid", **attrs({"data-ag-theme-mode": view.theme.name})), note],
        wide=True,
        key="all-heads",
    )
