"""The Ablation page's parts: maps by visit, the heads that matter most with their intervals, the finding in words. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from dash import html

from visitlens.app.panels.components import card, number, selector, table
from visitlens.app.panels.live_parts import attribute
from visitlens.app.panels.panel import Panel, notebook, stat_rows
from visitlens.app.view.view import View
from visitlens.probe.analyses.results.store import HeadAblation
from visitlens.probe.drawing.drawing import LAYER_AXIS, diverging, every, largest, title_block
from visitlens.probe.drawing.series import aligned
from visitlens.probe.drawing.theme import DIVERGING, Style, Theme, escape
from visitlens.probe.live.figures import spread
from visitlens.probe.measures.intervals import over
from visitlens.probe.measures.measure import json_numbers

_MOST_HEADS = 20


@dataclass(frozen=True)
class Ranked:
    """A head and what its ablation changes at each choice of visits: value, low, high; `p` is corrected for all heads, at the chosen one,
    and `found` whether that and the interval tell it apart from no effect."""

    layer: int
    head: int
    effects: Mapping[str, tuple[float, float, float]]
    p: float
    found: bool


def ranked(ablation: HeadAblation, when: str) -> list[Ranked]:
    """All heads, those whose ablation at `when` raises the metric most first."""
    effect = ablation.effect
    low, high = effect.interval()
    visits, layers, heads = (list(effect.labels[axis]) for axis in ("visits", "layer", "head"))
    at, p, sure = visits.index(when), ablation.p_family(when), ablation.found(when)
    order = np.argsort(-effect.values[at], axis=None, kind="stable")
    found = []
    for i, j in zip(*np.unravel_index(order, effect.values[at].shape), strict=True):
        effects = {
            v: (float(effect.values[k, i, j]), float(low[k, i, j]), float(high[k, i, j])) for k, v in enumerate(visits)
        }
        found.append(Ranked(layers[i], heads[j], effects, float(p[i, j]), bool(sure[i, j])))
    return found


def when_label(visits: str) -> str:
    """`visit 1`; `visits 1+2`."""
    return f"visit{'s' if '+' in visits else ''} {visits}"


def finding_card(view: View, stored: Mapping[str, HeadAblation], ablation: HeadAblation, when: str) -> html.Section:
    """Which analysis, what it found, how sure that is."""
    visits = list(ablation.effect.labels["visits"])
    names = [(name, _title(found)) for name, found in stored.items()]
    pickers = [selector("analysis", "analysis", names, ablation.name)]
    if len(visits) > 1:
        pickers.append(selector("ranked by", "when", [(_key(v), when_label(v)) for v in visits], _key(when)))
    heads, sure = ablation.effect.values[0].size, int(ablation.found(when).sum())
    found = (
        f"At {when_label(when)}, {sure} of {heads} heads differ from no effect: p is at most 5% after correction for all {heads}, by "
        f"sign flips over {ablation.units}, and the interval leaves 0 out."
        if not ablation.effect.no_interval
        else f"No head is called different from no effect ({ablation.effect.no_interval})."
    )
    made = ablation.about.get("created")
    made_on = f" Made {str(made)[:10]}." if made else ""
    return card(
        "What was found",
        [
            html.Div(pickers, className="live-pick"),
            html.P(ablation.note(), className="figure-line"),
            html.Div([html.P(found), html.P(_counts(ablation) + made_on)], className="caption"),
        ],
        wide=True,
        key="finding",
    )


def _counts(ablation: HeadAblation) -> str:
    targets = ablation.about.get("targets")
    of_targets = f", {targets:,} targets" if isinstance(targets, int) else ""
    return f"n = {ablation.effect.documents:,} {ablation.units}{of_targets}."


def _interval_of(ablation: HeadAblation) -> str:
    return over(ablation.units)


def maps_panel(view: View, ablation: HeadAblation) -> Panel:
    """Layer x head: the change of the metric, one map a choice of visits, all on one scale about zero."""
    effect = ablation.effect
    visits = list(effect.labels["visits"])
    return Panel(
        key="map",
        title=f"Change of {ablation.metric} with one head ablated",
        draw=lambda theme: effect_maps(ablation, theme),
        caption=[
            f"Mode {ablation.mode}; red: the metric rises without the head. All maps share one scale, symmetric about zero; colours follow the square root. Unit: {effect.measure.unit}. A cell opens its head.",
            f"{_counts(ablation)} Intervals, {_interval_of(ablation)}, are in the table.",
            f"Definition: {effect.measure.definition} ({effect.measure.paper})",
        ],
        data=effect.to_dict,
        rows=lambda: stat_rows(effect),
        code=notebook(view, f"rec.ablations()[{ablation.name!r}].effect"),
        links={"path": "/attention" if view.recorded.looped else "/heads", "x": "head", "y": "layer"},
        linked=len(visits) > 1,
        wide=True,
    )


def effect_maps(ablation: HeadAblation, theme: Theme) -> go.Figure:
    """The maps of `maps_panel`."""
    effect = ablation.effect
    visits, layers, heads = (list(map(str, effect.labels[axis])) for axis in ("visits", "layer", "head"))
    width = (1 - 0.03 * (len(visits) - 1)) / len(visits)
    layout: dict[str, Any] = {"annotations": []}
    traces = []
    for at, (label, values) in enumerate(zip(visits, effect.values, strict=True)):
        n, left = "" if at == 0 else str(at + 1), at * (width + 0.03)
        traces.append(
            {
                "type": "heatmap",
                "z": json_numbers(values),
                "x": heads,
                "y": layers,
                "coloraxis": "coloraxis",
                "xaxis": f"x{n}",
                "yaxis": f"y{n}",
                "xgap": 1,
                "ygap": 1,
                "hovertemplate": "layer %{y}, head %{x}: %{z}<extra></extra>",
                "zhoverformat": "+.4f",
            }
        )
        cells = {"type": "category", "showgrid": False}
        layout[f"xaxis{n}"] = cells | {
            "domain": [left, left + width],
            "anchor": f"y{n}",
            "tickvals": every(heads),
            "title": {"text": "head"},
        }
        layout[f"yaxis{n}"] = cells | {
            "anchor": f"x{n}",
            "tickvals": every(layers, 24),
            "autorange": "reversed",
            "showticklabels": not at,
            "title": {"text": "" if at else LAYER_AXIS},
        }
        place = {
            "x": left + width / 2,
            "y": 1,
            "xref": "paper",
            "yref": "paper",
            "xanchor": "center",
            "yanchor": "bottom",
            "showarrow": False,
        }
        layout["annotations"].append({"text": escape(f"ablated at {when_label(label)}"), "font": {"size": 13}, **place})
    colours = diverging(largest(*effect.values.tolist()), f"change, {effect.measure.unit}")
    layout["coloraxis"] = colours | {"colorscale": spread(DIVERGING, True)}
    return _figure(
        traces, layout, theme, ablation, f"Change of {ablation.metric}", 1180, 190 + max(120, 30 * len(layers))
    )


def ranked_panel(view: View, ablation: HeadAblation, when: str) -> Panel:
    """The heads that matter most, with intervals at each choice of visits."""
    found = ranked(ablation, when)
    shown = found[:_MOST_HEADS]
    rows = [
        {
            "layer": head.layer,
            "head": head.head,
            **{
                f"{part} at {when_label(v)}": values[i]
                for v, values in head.effects.items()
                for i, part in enumerate(("change", "low", "high"))
            },
            f"p, corrected for all heads, at {when_label(when)}": head.p,
            "differs from no effect": head.found,
        }
        for head in found
    ]
    return Panel(
        key="ranked",
        title=f"The {len(shown)} heads whose ablation at {when_label(when)} raises {ablation.metric} most"
        if len(ablation.effect.labels["visits"]) > 1
        else f"The {len(shown)} heads whose ablation raises {ablation.metric} most",
        draw=lambda theme: ranked_bars(ablation, shown, theme),
        caption=[
            f"{_counts(ablation)} Bars: {_interval_of(ablation)}. Unit: {ablation.effect.measure.unit}. The table has all {len(found)} heads."
        ],
        data=lambda: {"when": when, "heads": rows},
        rows=lambda: rows,
        code=notebook(view, f"rec.ablations()[{ablation.name!r}].top(visits={when!r})"),
        wide=True,
    )


def ranked_bars(ablation: HeadAblation, heads: list[Ranked], theme: Theme) -> go.Figure:
    """A row a head, a point with its interval for each choice of visits."""
    names = [f"layer {h.layer}, head {h.head}" for h in heads]
    visits = list(ablation.effect.labels["visits"])
    traces = []
    for at, label in enumerate(visits):
        look = theme.visit(at + 1) if "+" not in label else Style(theme.ink, "circle", "solid")
        values, low, high = (np.array([h.effects[label][i] for h in heads]) for i in range(3))
        known = np.isfinite(low).all()
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": values.tolist(),
                "y": names,
                "name": escape(when_label(label)),
                "marker": {"symbol": look.symbol, "color": look.colour, "size": 8},
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": (high - values).tolist(),
                    "arrayminus": (values - low).tolist(),
                    "thickness": 1.2,
                    "width": 0,
                    "color": look.colour,
                }
                if known
                else None,
                "customdata": [f"{value:+.4f}".replace("-", "−") for value in values.tolist()],
                "hovertemplate": "%{y}: %{customdata}",
            }
        )
    layout = {
        "xaxis": {
            "title": {"text": escape(f"change of {ablation.metric}, {ablation.effect.measure.unit}")},
            "zeroline": True,
            "zerolinecolor": theme.muted,
        },
        "yaxis": {"type": "category", "autorange": "reversed", "tickfont": {"size": 11}},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    }
    return _figure(traces, layout, theme, ablation, "Heads by change", 1180, 190 + 18 * len(heads), left=130)


def ranked_card(view: View, ablation: HeadAblation, when: str) -> html.Section:
    """The ranking as a table whose heads are links to their maps."""
    path = "/attention" if view.recorded.looped else "/heads"
    columns = [
        ("head", "head"),
        *((v, when_label(v)) for v in ablation.effect.labels["visits"]),
        ("p", "p, of all heads"),
    ]
    live = view.context.checkpoint is not None
    rows = []
    for head in ranked(ablation, when)[:_MOST_HEADS]:
        place = {"layer": head.layer, "head": head.head, "analysis": None, "when": None}
        name = f"layer {head.layer}, head {head.head}"
        row = {v: _interval(*values) for v, values in head.effects.items()}
        row |= {"head": html.A(name, href=view.href(path, **place)), "p": _p(head.p)}
        if live:
            row["live"] = html.A(
                "probe", href=view.href("/live", **place), **attribute("aria-label", f"Probe {name} live")
            )
        rows.append(row)
    columns += [("live", "on a prompt")] if live else []
    return card(
        "Open a head",
        [
            table(
                columns, rows, f"Change of {ablation.metric}, {ablation.effect.measure.unit}; p at {when_label(when)}."
            )
        ],
        wide=True,
        key="ranked-table",
    )


def _interval(value: float, low: float, high: float) -> html.Span:
    if low != low:
        return html.Span(number(value))
    text, *bounds = aligned(value, low, high)
    return html.Span([text, html.Small(f" [{', '.join(bounds)}]")])


def _p(p: float) -> str:
    return "–" if p != p else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _title(ablation: HeadAblation) -> str:
    return f"{ablation.metric}, {ablation.mode}"


def _key(visits: str) -> str:
    """For the URL, where a plus sign means a space."""
    return visits.replace("+", "-")


def _figure(
    traces: list[dict[str, Any]],
    layout: dict[str, Any],
    theme: Theme,
    ablation: HeadAblation,
    title: str,
    width: int,
    height: int,
    *,
    left: int = 72,
) -> go.Figure:
    about = ablation.effect
    below = escape(f"{ablation.mode} ablation; {about.documents:,} {ablation.units}, {about.tokens:,} tokens")
    around = {"template": theme.template(), "width": width, "height": height, "title": title_block(theme, title, below)}
    return go.Figure({"data": traces, "layout": layout | around | {"margin": {"t": 116, "l": left, "r": 28, "b": 54}}})
