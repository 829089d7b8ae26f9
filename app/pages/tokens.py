"""Tokens: a document's text coloured by a value of each token, and one token's experts kept, dropped and new."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from dash import html

from visitlens.app.panels.attention_maps import key_changes, looped_layer, source
from visitlens.app.panels.components import attrs, card, number, table
from visitlens.app.panels.controls import measures
from visitlens.app.panels.panel import Panel, notebook
from visitlens.app.panels.plots import Plot, plot
from visitlens.app.view.segments import segment_of, segments
from visitlens.app.view.view import View, routed
from visitlens.probe.drawing.theme import Theme, escape, token_text
from visitlens.probe.measures.measure import Measure, json_numbers
from visitlens.probe.reading.token_window import Experts, TokenWindow, stored_measures
from visitlens.probe.reading.two_visits import mean_over

PATH, TITLE, ORDER = "/tokens", "Tokens", 12
NEEDS = ("tokens", "looped")
CONTROLS = ("metric", "visits", "layer", "head", "agg", "segment")
AGGREGATIONS = {"mean": "mean over heads", "each": "this head"}


def METRICS(view: View) -> list[Measure]:
    """Those whose values the recording keeps for each token."""
    kept = view.remember("stored", lambda: stored_measures(view.recorded))
    return [measure for measure in measures(view) if measure.name in kept]


def metric(view: View) -> str:
    names = [measure.name for measure in METRICS(view)]
    return next((n for n in (view.selection.metric, "shared_expert_count", "sink_mass") if n in names), names[0])


def layout(view: View) -> list[Any]:
    found = segments(view)
    segment = segment_of(view, found)
    window = found.window(segment, view.selection.token)
    window = view.remember(f"window:{window.start}", lambda: window)
    name = metric(view)
    pairs = view.recorded.plan.visit_pairs(*view.visits)
    pair = next(pair for pair in pairs if pair.layer == looped_layer(view))
    head = view.head if view.selection.agg == "each" and "head" in view.recorded.stat(name).axes else None
    values = window.values(name, pair, head)
    texts = view.context.texts.texts(view.recorded, window.table["id"])
    items: list[Any] = [
        _text(view, window, segment, found.span(segment), len(found), name, values, texts),
        _line(view, window, name, values, texts, head),
    ]
    token = view.selection.token
    if token is not None and window.start <= token < window.stop:
        at = token - window.start
        if routed(view.recorded):
            items.append(
                _experts(view, TokenWindow(view.recorded, token, token + 1).experts(pair)[0], token, texts[at])
            )
        items.append(_values(view, window, at, pair, texts[at]))
        if source(view):
            items.append(key_changes(view, token))
    else:
        items.append(
            card(
                "One token",
                [html.P("Choose a token to see which experts it keeps, drops and takes anew.", className="hint")],
                key="token",
            )
        )
    return items


def _text(
    view: View,
    window: TokenWindow,
    segment: int,
    span: tuple[int, int],
    count: int,
    name: str,
    values: dict[str, np.ndarray],
    texts: Sequence[str],
) -> html.Section:
    """A script makes the tokens' links (text.js): as components, hundreds of them would take most of the page's time."""
    shown = values.get("difference", values.get("between"))
    assert shown is not None
    diverges = "difference" in values
    strengths = _strengths(shown, diverges)
    chosen = view.selection.token
    drawn = {
        "start": window.start,
        "chosen": chosen,
        "href": view.href(token=window.start, segment=segment),
        "texts": [_visible(text) for text in texts],
        "strengths": strengths.round(3).tolist(),
        "values": [number(float(value)) for value in shown],
        "positions": window.table["pos"].tolist(),
        "lines": [at for at, text in enumerate(texts) if "\n" in text],
    }
    measure = view.recorded.stat(name).measure
    what = f"{measure.title}: {'later visit minus earlier' if diverges else 'between the visits'}, layer {looped_layer(view)}"
    steps = [
        html.A("← previous document", href=view.href(segment=segment - 1, token=None))
        if segment
        else html.Span("← previous document"),
        html.Span(f"document {segment + 1:,} of {count:,}, tokens {window.start:,} to {window.stop - 1:,}"),
        *_parts(view, window, segment, span),
        html.A("next document →", href=view.href(segment=segment + 1, token=None))
        if segment + 1 < count
        else html.Span("next document →"),
    ]
    notes = [what]
    if view.context.texts.of(view.recorded) is None:
        notes.append("Tokens are shown by number: start with --model CHECKPOINT to read them as text.")
    legend = html.Div(
        [
            html.Span("lower at the later visit", className="token down", style={"--strength": "0.8"}),
            html.Span("higher", className="token up", style={"--strength": "0.8"}),
        ]
        if diverges
        else [
            html.Span("low", className="token up", style={"--strength": "0.1"}),
            html.Span("high", className="token up", style={"--strength": "0.8"}),
        ],
        className="legend",
        **attrs({"aria-hidden": "true"}),
    )
    return card(
        "Text",
        [
            html.Nav(steps, className="pager", **attrs({"aria-label": "Documents"})),
            html.Div(className="text", **attrs({"data-tokens": json.dumps(drawn, ensure_ascii=False)})),
            html.Div([html.Div([html.P(n) for n in notes]), legend], className="caption split"),
        ],
        wide=True,
        key="text",
    )


def _parts(view: View, window: TokenWindow, segment: int, span: tuple[int, int]) -> list[html.A]:
    """Of a document that is too long for one window: its part before and after this one."""
    parts = []
    if window.start > span[0]:
        parts.append(html.A("part before", href=view.href(segment=segment, token=window.start - 1)))
    if window.stop < span[1]:
        parts.append(html.A("part after", href=view.href(segment=segment, token=window.stop)))
    return parts


def _line(
    view: View, window: TokenWindow, name: str, values: dict[str, np.ndarray], texts: Sequence[str], head: int | None
) -> Panel:
    measure, (a, b) = view.recorded.stat(name).measure, view.visits
    labels = {"earlier": f"visit {a}", "later": f"visit {b}", "between": f"visits {a} and {b}"}
    places = list(range(window.start, window.stop))

    def draw(theme: Theme) -> Plot:
        traces = []
        for key, label in labels.items():
            if key not in values:
                continue
            style = theme.visit({"earlier": a, "later": b, "between": 1}[key])
            traces.append(
                {
                    "type": "scatter",
                    "x": places,
                    "y": json_numbers(values[key]),
                    "name": label,
                    "mode": "lines",
                    "line": {"color": style.colour, "dash": style.dash, "width": 1.4},
                    "customdata": [token_text(text) for text in texts],
                    "hovertemplate": "token %{x} “%{customdata}”: %{y}",
                    "yhoverformat": ".4f",
                }
            )
        layout: dict[str, Any] = {
            "xaxis": {"title": {"text": "token"}},
            "yaxis": {"title": {"text": escape(measure.unit)}},
            "margin": {"t": 34, "l": 60, "r": 16, "b": 46},
            "showlegend": "between" not in values,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        }
        if (token := view.selection.token) is not None:
            upright = {"type": "line", "x0": token, "x1": token, "yref": "y domain", "y0": 0, "y1": 1}
            layout["shapes"] = [{**upright, "line": {"color": theme.muted, "width": 1}}]
        return plot(theme, traces, layout, 280)

    def rows() -> list[dict[str, Any]]:
        return [
            {"token": place, "text": text, **{labels.get(k, k): _finite(v[i]) for k, v in values.items()}}
            for i, (place, text) in enumerate(zip(places, texts, strict=True))
        ]

    over = (
        f"head {head}"
        if head is not None
        else "mean over heads"
        if "head" in view.recorded.stat(name).axes
        else "one value a token"
    )
    return Panel(
        key="by-token",
        title=f"{measure.title}, token by token",
        draw=draw,
        caption=[
            f"n = {len(places):,} tokens of one document, layer {looped_layer(view)}; {over}; unit: {measure.unit}. No interval: each token's own value.",
            f"Definition: {measure.definition} ({measure.paper})",
        ],
        data=lambda: {
            "measure": measure.name,
            "layer": looped_layer(view),
            "tokens": places,
            **{k: json_numbers(v) for k, v in values.items()},
        },
        rows=rows,
        code=notebook(
            view,
            f"values = rec.recording.token_stat({name!r})  # [step or pair, token, ...]\nvalues[:, {window.start}:{window.stop}]",
        ),
        links={"path": "/tokens", "x": "token"},
        wide=True,
    )


def _experts(view: View, experts: Experts, token: int, text: str) -> html.Section:
    a, b = view.visits
    k = len(experts.kept) + len(experts.dropped)
    columns = [
        ("expert", "expert"),
        ("change", "change"),
        ("earlier", f"gate at visit {a}"),
        ("later", f"gate at visit {b}"),
    ]
    rows = [
        {"expert": str(e), "change": html.Span("kept", className="badge muted"), "earlier": g[0], "later": g[1]}
        for e, g in experts.kept.items()
    ]
    rows += [
        {"expert": str(e), "change": html.Span("dropped", className="badge visit-1"), "earlier": g}
        for e, g in experts.dropped.items()
    ]
    rows += [
        {"expert": str(e), "change": html.Span("new", className="badge visit-2"), "later": g}
        for e, g in experts.new.items()
    ]
    chance = k * k / view.recorded.recording.config["num_experts"]
    said = f"{len(experts.kept)} of {k} experts kept, {len(experts.dropped)} dropped, {len(experts.new)} new; uniform chance keeps {chance:.2f}."
    return card(
        f"Experts of token {token} “{_visible(text)}”, layer {looped_layer(view)}",
        [
            html.P(said, className="figure-line"),
            table(columns, rows, "Experts of one token at two visits, with their gates."),
        ],
        key="experts",
    )


def _values(view: View, window: TokenWindow, at: int, pair: Any, text: str) -> html.Section:
    a, b = view.visits
    rows = []
    for measure in METRICS(view):
        values = window.values(measure.name, pair)
        overall = mean_over(view.recorded.stat(measure.name), view.recorded.stat(measure.name).axes)
        row = {
            "name": measure.name,
            "measure": html.A(measure.title, href=view.href(metric=measure.name)),
            "mean": float(overall.values) if overall else None,
        }
        rows.append(row | {key: float(v[at]) for key, v in values.items()})
    columns = [
        ("measure", "measure"),
        ("earlier", f"visit {a}"),
        ("later", f"visit {b}"),
        ("difference", "difference"),
        ("between", "between"),
        ("mean", "mean of all"),
    ]
    note = "Values of this token, mean over heads; the last column is the mean over all tokens and layers."
    return card(
        f"Values of token {window.start + at} “{_visible(text)}”, layer {looped_layer(view)}",
        [table(columns, rows, note, key="name", current=metric(view))],
        key="values",
    )


def _strengths(values: np.ndarray, diverges: bool) -> np.ndarray:
    """-1..1 about zero, or 0..1 from the low values to the high; by percentiles, so that one token doesn't pale the rest."""
    known = values[np.isfinite(values)]
    if not known.size:
        return np.zeros(values.shape)
    if diverges:
        return np.clip(np.nan_to_num(values / (float(np.quantile(np.abs(known), 0.98)) or 1.0)), -1, 1)
    low, high = np.quantile(known, [0.02, 0.98])
    return np.clip(np.nan_to_num((values - low) / ((high - low) or 1.0)), 0, 1)


def _visible(text: str) -> str:
    """Space and newline as signs, so that a token's edges show."""
    return text.replace("\n", "↵").replace("\t", "⇥") if text.strip(" ") else text.replace(" ", "␣") or "∅"


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
