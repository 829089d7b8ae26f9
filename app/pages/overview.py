"""Overview: the grid of pairs where there is one, the recordings, key numbers, and the paper's findings for this pair."""

from __future__ import annotations

from typing import Any

import numpy as np
from dash import html

from visitlens.app.panels.components import attrs, badge, card, number, state, table
from visitlens.app.panels.headlines import Headline, headline, headlines, place_in_range, value_of
from visitlens.app.panels.panel import Panel
from visitlens.app.panels.plots import Plot, one_map
from visitlens.app.view.view import View, routed
from visitlens.probe.drawing.drawing import written
from visitlens.probe.drawing.series import span, with_interval
from visitlens.probe.drawing.theme import Theme, escape
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.pair import describe as describe_run
from visitlens.probe.report.finding import FAILS, HOLDS, OPEN, Finding, number_tested
from visitlens.probe.report.findings import findings

PATH, TITLE, ORDER = "/", "Overview", 0
NEEDS = ("recording",)
CONTROLS = ("visits",)
PARAMETERS = ("show",)
_KINDS = {HOLDS: "holds", FAILS: "fails", OPEN: "open"}
_SECTIONS = {"6.1": "/routing", "6.2": "/residual", "6.3": "/attention", "6.4": "/attention"}


def layout(view: View) -> list[Any]:
    items: list[Any] = []
    if view.context.registry.grid is not None:
        items.append(grid_panel(view))
    items.append(_identity(view))
    if view.recorded.looped:
        items += [_cards(view), _findings(view)]
    else:
        items.append(
            state(
                "An unlooped model",
                [
                    "It runs every layer once: there are no visits to compare. It is the Baseline that a looped model is compared with."
                ],
                "note wide",
            )
        )
    if len(view.context.registry.ids()) > 1:
        items.append(_runs(view))
    return items


def grid_panel(view: View) -> Panel:
    """[sparsity level, scale] of one headline number; a cell opens its run, a missing one says so."""
    registry = view.context.registry
    assert registry.grid is not None
    grid, chosen = registry.grid, headline(view.selection.extra.get("show", ""))
    values = np.full((len(grid.levels), len(grid.scales)), np.nan)
    hrefs: list[list[str | None]] = []
    rows: list[dict[str, Any]] = []
    for i, level in enumerate(grid.levels):
        hrefs.append([])
        for j, scale in enumerate(grid.scales):
            id_ = registry.id_of(grid.cell(scale, level).looped)
            entry = registry[id_] if id_ else None
            stat = value_of(chosen, entry.run) if entry and entry.run else None
            hrefs[-1].append(view.href("/layers", run=id_, layer=None, head=None, token=None) if id_ else None)
            row: dict[str, Any] = {"scale": scale, "S in percent": level, "recording": entry.name if entry else None}
            if stat is not None:
                values[i, j] = float(stat.values)
                low, high = stat.interval()
                row |= {"value": float(stat.values), "low": float(low), "high": float(high)}
            else:
                row["missing"] = entry.error or "not measured" if entry else "no recording"
            rows.append(row)

    def draw(theme: Theme) -> Plot:
        scales, levels = [escape(s) for s in grid.scales], [f"S = {escape(v)}%" for v in grid.levels]
        drawn = one_map(
            theme,
            values,
            rows=levels,
            columns=scales,
            row_title="sparsity",
            column_title="scale",
            unit=chosen.unit,
            height=150 + 44 * len(levels),
        )
        drawn["data"][0] |= written(values.tolist(), 3)
        pale = {"text": "missing", "showarrow": False, "font": {"size": 11, "color": theme.muted}}
        gone = zip(*np.nonzero(np.isnan(values)), strict=True)
        drawn["layout"]["annotations"] = [{**pale, "x": scales[j], "y": levels[i]} for i, j in gone]
        return drawn

    missing = sum("missing" in row for row in rows)
    links = [
        html.A(h.short, href=view.href(show=h.key), **attrs({"aria-current": "true"} if h.key == chosen.key else {}))
        for h in headlines()
    ]
    return Panel(
        key="grid",
        title=f"{chosen.title}, by scale and sparsity",
        draw=draw,
        caption=[
            f"{len(rows) - missing} of {len(rows)} cells; mean over looped layers; intervals in the table. In the paper: {chosen.paper}. A cell opens its run."
        ],
        data=lambda: {"headline": chosen.key, "cells": rows},
        rows=lambda: rows,
        code=f"import visitlens as vl\n\nrec = vl.open('run.vlens')\n{chosen.code}\n",
        links={"hrefs": hrefs},
        tools=[
            html.Nav(
                links,
                className="chips",
                **attrs({"aria-label": "Number shown", "data-parameter": "show", "data-value": chosen.key}),
            )
        ],
        wide=True,
    )


def _identity(view: View) -> html.Section:
    run = view.recorded
    recording, config = run.recording, run.recording.config
    model = describe_run(run)
    experts = "dense feed-forward"
    if routed(run):
        experts = f"{config['num_experts']} experts, {config['experts_per_token']} a token"
    facts = {
        "model": recording.provenance.get("checkpoint") or "unknown",
        "loop": span(model),
        "size": f"{len(run.plan.visits)} layers, {config.get('num_heads')} heads, {experts}",
        "text": f"{recording.tokens:,} tokens of {recording.documents:,} documents",
        "level": recording.level,
    }
    strip = html.Div([_plan_strip(view)], className="plan")
    terms = [html.Div([html.Dt(k), html.Dd(v)]) for k, v in facts.items()]
    warnings = view.pair.warnings()
    notes = (
        [
            html.Details(
                [
                    html.Summary(f"{len(warnings)} note{'s' if len(warnings) > 1 else ''} to read the numbers with"),
                    html.Ul([html.Li(w) for w in warnings]),
                ],
                className="warnings",
            )
        ]
        if warnings
        else []
    )
    return card(run.name, [html.Dl(terms, className="facts"), strip, *notes], wide=True, key="identity")


def _plan_strip(view: View) -> html.Ol:
    """The steps of one forward as boxes; the visits in their colours. Each opens its layer."""
    looped = set(view.recorded.plan.looped_layers)
    return html.Ol(
        [
            html.Li(
                html.A(
                    str(step.layer),
                    href=view.href("/heads", layer=step.layer, head=None, token=None),
                    className=f"step {f'visit-{min(step.visit, 6)}' if step.layer in looped else 'once'}",
                    title=f"layer {step.layer}, visit {step.visit}",
                    **attrs({"aria-label": f"layer {step.layer}, visit {step.visit}"}),
                )
            )
            for step in view.recorded.plan.steps
        ],
        **attrs({"aria-label": "Steps of one forward, in order"}),
    )


def _cards(view: View) -> html.Section:
    cards = []
    for item in headlines():
        stat = value_of(item, view.recorded, view.visits)
        if stat is None:
            continue
        low, high = stat.interval()
        against = item.against(view.recorded, view.visits)
        cards.append(
            html.A(
                [
                    html.Span(item.short, className="card-label"),
                    html.Span(number(float(stat.values)), className="card-value"),
                    html.Span(f"{number(float(low))} to {number(float(high))}", className="card-interval"),
                    html.Span(
                        f"{item.against_is} {number(against)}" if against is not None else "\u00a0",
                        className="card-against",
                    ),
                    html.Span(
                        [f"paper: {item.paper} ", _range_badge(item, float(stat.values))], className="card-paper"
                    ),
                ],
                href=view.href(item.page, metric=item.metric or None),
                className="number-card",
            )
        )
    a, b = view.visits
    note = html.P(
        f"Visits {a} and {b}, mean over looped layers, with 95% intervals over documents. The paper's models are far larger: compare directions.",
        className="caption",
    )
    return card("Key numbers", [html.Div(cards, className="number-cards"), note], wide=True)


def _range_badge(item: Headline, value: float) -> html.Span | None:
    place = place_in_range(item, value)
    return badge(place, "holds" if place == "in this range" else "muted") if place else None


def _findings(view: View) -> html.Section:
    partner = view.pair.baseline
    found: list[Finding] = view.remember(
        f"findings:{partner.recording.run['run_uuid'] if partner else ''}", lambda: findings(view.pair)
    )
    counts = {kind: sum(f.verdict == kind for f in found) for kind in (HOLDS, FAILS, OPEN)}
    rows = [
        {
            "claim": html.A(f.claim.statement, href=view.href(_SECTIONS.get(f.claim.section[:3], "/layers"))),
            "verdict": html.Span(
                [
                    badge(f.verdict, _KINDS.get(f.verdict, "muted"), ", ".join(filter(None, (f.reason, f.note)))),
                    *([html.Small(f" {f.family_verdict} among all")] if f.family_verdict != f.verdict else []),
                ]
            ),
            "ours": html.Span(_interval(f.ours), className="nowrap"),
            "against": html.Span(_interval(f.against), className="nowrap"),
            "layers": f"{f.layers[0]} of {f.layers[1]}" if f.layers else None,
            "paper": f.claim.paper,
        }
        for f in found
    ]
    columns = [
        ("claim", "the paper's finding"),
        ("verdict", "here"),
        ("ours", "ours"),
        ("against", "compared with"),
        ("layers", "layers"),
        ("paper", "in the paper"),
    ]
    rest = len(found) - sum(counts.values())
    said = f"{counts[HOLDS]} of {len(found)} directions hold, {counts[FAILS]} don't, {counts[OPEN]} aren't decided"
    said += f", {rest} aren't measured (first and last visit)." if rest else " (first and last visit)."
    said += f" Among all: corrected by Holm's method for the {number_tested(found)} that are tested."
    return card("Against the paper", [table(columns, rows, said)], wide=True, key="findings")


def _runs(view: View) -> html.Section:
    rows = []
    for entry in view.context.registry.entries():
        run = entry.run
        row: dict[str, Any] = {
            "id": entry.id,
            "name": html.A(entry.name, href=view.href(run=entry.id, layer=None, head=None, token=None)),
        }
        if run is None:
            row |= {"loop": badge("can't be read", "fails", entry.error), "tokens": None}
        else:
            row |= {
                "loop": span(describe_run(run)),
                "tokens": f"{run.recording.tokens:,}" + ("" if run.recording.complete else " so far"),
                "documents": f"{run.recording.documents:,}",
                "level": run.recording.level,
                "created": str(run.recording.provenance.get("created") or "")[:16].replace("T", " "),
            }
        rows.append(row)
    columns = [
        ("name", "recording"),
        ("loop", "loop"),
        ("tokens", "tokens"),
        ("documents", "documents"),
        ("level", "level"),
        ("created", "made"),
    ]
    return card(
        "Recordings",
        [
            table(
                columns,
                rows,
                f"{len(rows)} recordings; choose one to look at it.",
                key="id",
                current=view.entry.id if view.entry else "",
            )
        ],
        wide=True,
    )


def _interval(value: StatArray | float | None) -> str | None:
    if value is None or isinstance(value, float | int):
        return number(value)
    low, high = value.interval()
    return with_interval(
        {"values": float(value.values), "low": None if np.isnan(low) else float(low), "high": float(high)}
    )
