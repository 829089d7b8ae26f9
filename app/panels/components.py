"""Dash components of the dashboard: a panel's card, selectors, tables, and the sentence that stands for what isn't there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import unescape
from typing import Any

from dash import dcc, html
from plotly.io.json import to_json_plotly

from visitlens.app.panels.panel import Panel
from visitlens.app.view.view import View
from visitlens.probe.drawing.page import CONFIG
from visitlens.probe.drawing.series import aligned, digits
from visitlens.probe.measures.measure import StatArray

GRAPH_CONFIG: Any = {**CONFIG, "displayModeBar": False}
"""Without Plotly's buttons, among them the one that uploads the chart: a panel has its own."""
_FORMATS = ("png", "svg", "pdf", "csv", "json")


def attrs(found: Mapping[str, str]) -> Any:
    """`aria-` and `data-` attributes, whose names Python's keywords can't have."""
    return found


def panel_card(panel: Panel, view: View) -> html.Section:
    """The panel as a landmark: title, actions, chart under the keyboard, caption, table.

    A script draws the chart (charts.js), those in sight first: a `dcc.Graph` would draw all of a page before anything shows.
    """
    plot = panel.chart(view.theme)
    height = plot["layout"]["height"]
    options = {"links": panel.links, "linked": panel.linked, "morph": panel.morph, "zoom": panel.zoom}
    graph = html.Div(
        className="graph",
        style={"height": f"{height}px"},
        **attrs({"data-figure": str(to_json_plotly(plot)), "data-config": json.dumps(GRAPH_CONFIG)}),
    )
    title, caption = f"title-{panel.key}", f"caption-{panel.key}"
    keys = "Arrow keys move between its values" + (", Enter opens one." if panel.links else ".")
    return html.Section(
        className="panel wide" if panel.wide else "panel",
        id=f"panel-{panel.key}",
        **attrs({"aria-labelledby": title}),
        children=[
            html.Header(
                [html.H2(panel.title, id=title), html.Div(list(panel.tools), className="tools"), _actions(panel, view)]
            ),
            _morph(panel) if panel.morph else None,
            html.Div(
                graph,
                className="chart",
                tabIndex=0,
                role="application",
                style={"minHeight": f"{height}px"},
                **attrs(
                    {
                        "aria-label": f"{panel.title}: {shown(plot)}. {keys}",
                        "aria-describedby": caption,
                        "data-options": json.dumps(options),
                    }
                ),
            ),
            html.P("\u00a0", className="readout", **attrs({"aria-hidden": "true"})),
            html.Div([html.P(sentence) for sentence in panel.caption], className="caption", id=caption),
            html.Details(
                [
                    html.Summary("Table"),
                    html.Div(className="twin", **attrs({"data-source": export_href(view, panel.key, "rows")})),
                ],
                className="table-twin",
            ),
        ],
    )


def shown(plot: Mapping[str, Any]) -> str:
    """What a chart shows, for who doesn't see it: `lines (visit 1, visit 2) by physical layer`; `3 heat maps of 4 by 6`."""
    maps = [trace for trace in plot["data"] if trace["type"] == "heatmap"]
    if maps:
        rows, columns = len(maps[0]["y"]), len(maps[0]["x"])
        return f"{len(maps)} heat map{'s' if len(maps) > 1 else ''} of {rows} by {columns}"
    names = [unescape(t["name"]) for t in plot["data"] if t.get("name") and t.get("hoverinfo") != "skip"]
    kinds = {trace["type"] for trace in plot["data"]}
    what = "bars" if kinds == {"bar"} else "lines" if kinds == {"scatter"} else "series"
    axis = unescape(plot["layout"].get("xaxis", {}).get("title", {}).get("text") or "")
    named = f" ({', '.join(dict.fromkeys(names))})" if names else ""
    return what + named + (f" by {axis}" if axis else "")


def export_href(view: View, key: str, format_: str) -> str:
    """Where a panel's file is; `rows` is what its table shows."""
    name = view.path.strip("/") or "overview"
    theme = f"{'&' if view.selection.query() else '?'}theme={view.theme.name}"
    return f"{view.context.prefix}export/{name}/{key}.{format_}{view.selection.query()}{theme}"


def _actions(panel: Panel, view: View) -> html.Div:
    formats = [
        html.A(
            name.upper(),
            href=export_href(view, panel.key, name),
            download=f"{panel.key}.{name}",
            **attrs({"data-export": name}),
        )
        for name in _FORMATS
    ]
    copy = html.Button("Copy Python", type="button", **attrs({"data-action": "copy", "data-text": panel.code}))
    return html.Div(
        className="actions",
        children=[
            icon_button("pin", f"Pin {panel.title}", "pin"),
            html.Details(
                [
                    html.Summary(icon("export"), title="Export", **attrs({"aria-label": f"Export {panel.title}"})),
                    html.Div([*formats, copy], className="menu"),
                ],
                className="dropdown",
            ),
            icon_button("maximise", f"Maximise {panel.title}", "maximise"),
        ],
    )


def _morph(panel: Panel) -> html.Div:
    """The visit scrubber: a browser-side slider from the first heat map to the second."""
    name = f"morph-{panel.key}"
    return html.Div(
        [
            html.Label("visit scrubber", htmlFor=name),
            dcc.Input(id=name, type="range", min=0, max=100, value=0, className="scrubber"),
            html.Output("earlier visit", className="scrubber-at"),
        ],
        className="morph",
    )


def icon(name: str) -> html.Span:
    return html.Span(className=f"icon icon-{name}", **attrs({"aria-hidden": "true"}))


def icon_button(name: str, label: str, action: str, **options: Any) -> html.Button:
    return html.Button(
        icon(name),
        type="button",
        className="icon-button",
        title=label,
        **attrs({"aria-label": label, "data-action": action}),
        **options,
    )


def selector(label: str, parameter: str, choices: Iterable[tuple[str, str]], value: str) -> html.Label:
    """A native select; a script puts what is chosen into the URL, and `data-value` is what the server chose."""
    options = [html.Option(text, value=key, selected=key == value) for key, text in choices]
    return html.Label(
        [
            html.Span(label),
            html.Select(options, name=parameter, **attrs({"data-parameter": parameter, "data-value": value})),
        ],
        className="selector",
        id=f"select-{parameter}",
    )


def state(title: str, sentences: Sequence[Any], kind: str = "empty") -> html.Section:
    """What stands where a page would: empty, partial, corrupt."""
    return html.Section(
        [html.H2(title), *(html.P(s) if isinstance(s, str) else s for s in sentences)], className=f"state {kind}"
    )


def command(text: str) -> html.Pre:
    """A line to type."""
    return html.Pre(html.Code(text), tabIndex=0)


def table(
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Mapping[str, Any]],
    caption: str,
    *,
    key: str = "",
    current: Any = None,
) -> html.Div:
    """`columns` are (name, heading); a cell is text, a number, a component. The row whose `key` is `current` is marked."""
    head = html.Tr([html.Th(heading, scope="col") for _, heading in columns])
    body = [
        html.Tr(
            [
                html.Th(_cell(row.get(name)), scope="row")
                if at == 0
                else html.Td(_cell(row.get(name)), className=_kind(row.get(name)))
                for at, (name, _) in enumerate(columns)
            ],
            className="current" if key and row.get(key) == current else "",
        )
        for row in rows
    ]
    return html.Div(
        html.Table([html.Caption(caption), html.Thead(head), html.Tbody(body)]),
        className="scroll",
        tabIndex=0,
        role="region",
        **attrs({"aria-label": caption}),
    )


def card(title: str, children: Sequence[Any], *, wide: bool = False, key: str = "") -> html.Section:
    """A titled box that is no panel: a table, a list. A table can be saved as CSV."""
    name = f"title-{key or title.lower().replace(' ', '-')}"
    tabled = any(getattr(child, "className", "") in ("scroll", "grid") for child in children)
    save = (
        [html.Div(icon_button("export", f"Save {title} as CSV", "save-table"), className="actions")] if tabled else []
    )
    return html.Section(
        [html.Header([html.H2(title, id=name), *save]), *children],
        className="panel wide" if wide else "panel",
        **attrs({"aria-labelledby": name}),
    )


def badge(text: str, kind: str, title: str = "") -> html.Span:
    """A verdict: `kind` is holds, fails, open or muted."""
    return html.Span(text, className=f"badge {kind}", title=title or None)


def number(value: float | None) -> str:
    """Three decimals, tabular, four where three would be lost; a dash for what wasn't measured."""
    if value is None or value != value:
        return "–"
    return f"{value:.4f}".replace("-", "−") if 0.00005 <= abs(value) < 0.001 else digits(value)


def with_bounds(stat: StatArray) -> dict[str, str | None]:
    """Cells `difference` and `interval` of a scalar, with the same decimals."""
    value, low, high = (float(part) for part in (stat.values, *stat.interval()))
    if not all(map(math.isfinite, (value, low, high))):
        return {"difference": number(value), "interval": None}
    text, *bounds = aligned(value, low, high)
    return {"difference": text, "interval": " to ".join(bounds)}


def _cell(value: Any) -> Any:
    return number(value) if isinstance(value, float) else "–" if value is None else value


def _kind(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else ""
