"""Routing: the experts that two visits share against chance, who is used how much, and from which expert to which."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dash import html

from visitlens.app.panels.components import card, table
from visitlens.app.panels.panel import Panel, lines_panel, maps_panel, notebook
from visitlens.app.panels.paper_figures import registered_panel
from visitlens.app.panels.plots import Level, Line, one_map
from visitlens.app.view.view import View
from visitlens.probe.drawing.theme import escape
from visitlens.probe.reading.two_visits import mean_over, two_visits

PATH, TITLE, ORDER = "/routing", "Routing", 20
NEEDS = ("looped", "routing")
CONTROLS = ("visits", "layer")
_PAIRS = 15


def layout(view: View) -> list[Any]:
    run = view.recorded
    panels: list[Any] = [registered_panel(view, "expert-overlap"), _by_layer(view)]
    panels += _profiles(view)
    if "expert_transitions" in run.measures:
        transitions = _transitions(view)
        panels += [transitions, _pairs(view, transitions)]
    loads = two_visits(run, "expert_load", view.visits)
    code = f"earlier, later = rec.both_visits('expert_load', visits={view.visits})\nearlier.plot(), later.plot()"
    panels.append(
        maps_panel(
            view,
            "expert-load",
            "Share of tokens that use each expert",
            loads,
            code,
            links={"path": "/routing", "y": "layer"},
        )
    )
    return panels


def _by_layer(view: View) -> Panel:
    run, visits = view.recorded, view.visits
    k, experts = run.recording.config["experts_per_token"], run.recording.config["num_experts"]
    overlap = run.expert_overlap(visits)
    drawn = [
        Line("overlap", overlap, "plain"),
        Line("load-aware chance", run.expert_overlap_chance_by_load(visits), "chance"),
    ]
    if "gate_overlap" in run.measures:
        drawn.insert(1, Line("gate mass", run.between_visits("gate_overlap", visits), "part 2"))
    return lines_panel(
        view,
        "overlap-by-layer",
        "Expert overlap by layer",
        drawn,
        f"rec.expert_overlap(visits={visits}).plot()",
        levels=[Level(f"uniform chance {k / experts:.3f}", k / experts)],
        unit="share of k",
        links={"path": "/routing", "x": "layer"},
    )


def _transitions(view: View) -> Panel:
    """[expert, later expert] of one layer, less what independent choices by the two loads would give."""
    run, layer = (
        view.recorded,
        view.layer if view.layer in view.recorded.plan.looped_layers else view.recorded.plan.looped_layers[0],
    )
    table = run.between_visits("expert_transitions", view.visits).sel(layer=layer)
    earlier, later = (stat.sel(layer=layer).values for stat in run.both_visits("expert_load", view.visits))
    excess = table.values - np.outer(earlier, later)
    names = [escape(n) for n in range(len(earlier))]
    a, b = view.visits

    def rows() -> list[dict[str, Any]]:
        order = np.argsort(-np.abs(excess), axis=None)[:2000]
        return [
            {
                f"expert at visit {a}": int(i),
                f"expert at visit {b}": int(j),
                "share of tokens": float(table.values[i, j]),
                "excess over independence": float(excess[i, j]),
            }
            for i, j in zip(*np.unravel_index(order, excess.shape), strict=True)
        ]

    measure = table.measure
    return Panel(
        key="transitions",
        title=f"From expert to expert, layer {layer}",
        draw=lambda theme: one_map(
            theme,
            excess,
            rows=names,
            columns=names,
            row_title=f"expert at visit {a}",
            column_title=f"expert at visit {b}",
            unit="excess share of tokens",
            difference=True,
            height=470,
        ),
        caption=[
            f"n = {table.documents:,} documents, {table.tokens:,} tokens. Share of tokens that use the row's expert at visit {a} and the column's at visit {b}, minus the product of the two loads: red pairs go together more often than independent choices would. No interval: one total for all documents.",
            f"Definition: {measure.definition} ({measure.paper})",
        ],
        data=lambda: {"transitions": table.to_dict(), "excess": excess.tolist()},
        rows=rows,
        code=notebook(
            view, f"rec.between_visits('expert_transitions', visits={view.visits}).sel(layer={layer}).plot()"
        ),
    )


def _pairs(view: View, transitions: Panel) -> html.Section:
    """The pairs of different experts that go together most."""
    found = transitions.rows()
    first, second, share, excess = found[0]
    rows = [
        {"pair": f"{row[first]} → {row[second]}", "share": row[share], "excess": row[excess]}
        for row in found
        if row[first] != row[second] and row[excess] > 0
    ][:_PAIRS]
    columns = [("pair", "experts"), ("share", "share of tokens"), ("excess", "excess")]
    a, b = view.visits
    caption = (
        f"{len(rows)} pairs by excess over independent choices: expert at visit {a} → another expert at visit {b}."
    )
    return card("Experts that hand over most", [table(columns, rows, caption)], key="pairs")


def _profiles(view: View) -> list[Panel]:
    """Load imbalance and router entropy of every step, each against what even use of all experts would give."""
    run = view.recorded
    experts = run.recording.config["num_experts"]
    found = [("balance", "Load imbalance", run.load_imbalance(), "load_imbalance()", Level("balanced", 1.0))]
    if "router_entropy" in run.measures:
        entropy = mean_over(run.stat("router_entropy"), ())
        assert entropy is not None
        even = Level(f"ln E = {math.log(experts):.2f}", math.log(experts))
        found.append(("entropy", "Router entropy", entropy, "stat('router_entropy')", even))
    return [
        lines_panel(
            view,
            key,
            title,
            [Line(title, stat, "steps")],
            f"rec.{code}.plot()",
            levels=[level],
            x_title="execution step, as layer·visit",
            links={"path": "/routing", "x": "layer"},
        )
        for key, title, stat, code, level in found
    ]
