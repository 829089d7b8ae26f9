"""A panel as a file (PNG, SVG, PDF, CSV, JSON), the rows of its table, and a page as one self-contained HTML file. No torch."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl, urlencode

import plotly.graph_objects as go
from flask import Response, jsonify
from plotly.offline import get_plotlyjs

from visitlens import __version__
from visitlens.app.pages import find_page
from visitlens.app.panels.panel import Panel
from visitlens.app.server import layout
from visitlens.app.view.view import Context, View, view_of
from visitlens.errors import UnavailableError, VisitlensError
from visitlens.probe.drawing import page as html_page
from visitlens.probe.drawing.drawing import HEAD_MARGIN, short, title_block
from visitlens.probe.drawing.images import render
from visitlens.probe.drawing.theme import LIGHT
from visitlens.probe.gallery.write_figures import json_text

_TYPES = {
    "png": "image/png",
    "svg": "image/svg+xml",
    "pdf": "application/pdf",
    "csv": "text/csv",
    "json": "application/json",
}
_MOST_ROWS = 1000
_WIDTH = 900
_LINE = 18
_COUNTS = re.compile(r"\bn = [^;.]+")
"""What a panel is of, in its caption: the recording's documents, or one of them, or a prompt."""
_one_browser = Lock()
"""Pictures are drawn by one Chromium at a time, whatever the number of people."""


def panel_file(context: Context, page: str, key: str, format_: str, query: str) -> Response:
    """The response to an export link; errors are plain text."""
    view, panel = _find(context, page, key, query)
    if panel is None or (format_ not in _TYPES and format_ not in ("rows", "figure")):
        return Response(f"There is no {key}.{format_} on this page for this selection.", 404, mimetype="text/plain")
    if format_ == "rows":
        return jsonify(table_rows(panel))
    if format_ == "figure":  # for the browser, which draws PNG and SVG without a second Chromium
        return Response(str(titled(panel, view).to_json()), mimetype="application/json")
    try:
        data = panel_bytes(panel, view, format_)
    except UnavailableError as error:
        return Response(str(error), 503, mimetype="text/plain")
    name = f"{key}-{view.entry.id}" if view.entry else key
    response = Response(data, mimetype=_TYPES[format_])
    response.headers["Content-Disposition"] = f'attachment; filename="{name}.{format_}"'
    response.headers["Content-Security-Policy"] = "default-src 'none'; sandbox"  # an SVG that is opened runs nothing
    return response


def panel_bytes(panel: Panel, view: View, format_: str) -> bytes:
    """The file's content.

    Raises:
        UnavailableError: a picture without Kaleido or a Chromium.
    """
    if format_ == "csv":
        return csv_text(panel, view).encode()
    if format_ == "json":
        about = {
            "panel": panel.title,
            "caption": list(panel.caption),
            "selection": settings(view),
            "visitlens": __version__,
        }
        return json_text({**about, "data": panel.data()}).encode()
    with _one_browser:
        return next(iter(render([(titled(panel, view), format_)])))


def csv_text(panel: Panel, view: View) -> str:
    """The rows, after comment lines that say what they are of."""
    buffer = io.StringIO()
    for name, value in {"panel": panel.title, **settings(view)}.items():
        buffer.write(f"# {name}: {' '.join(str(value).split())}\n")
    rows = list(panel.rows())
    columns = list(dict.fromkeys(column for row in rows for column in row))
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _inert(v) for k, v in row.items()} for row in rows)
    return buffer.getvalue()


def table_rows(panel: Panel) -> dict[str, Any]:
    """What the table under a panel shows: columns, the first rows, how many there are."""
    rows = list(panel.rows())
    columns = list(dict.fromkeys(column for row in rows for column in row))
    shown = [[row.get(column) for column in columns] for row in rows[:_MOST_ROWS]]
    return {"title": panel.title, "columns": columns, "rows": shown, "total": len(rows)}


def settings(view: View) -> dict[str, Any]:
    """What a file must carry to be traced: the recording, its hashes, and what was selected."""
    found: dict[str, Any] = {}
    if view.run is not None:
        recording = view.run.recording
        found = {
            "recording": view.run.name,
            **view.run.provenance,
            "documents": recording.documents,
            "tokens": recording.tokens,
        }
    return {key: value for key, value in found.items() if value is not None} | dict(
        parse_qsl(view.selection.query()[1:])
    )


def titled(panel: Panel, view: View) -> go.Figure:
    """The picture as it leaves the dashboard: title, counts, run hash and settings."""
    figure = go.Figure(panel.draw(view.theme))
    layout_ = figure.to_plotly_json()["layout"]
    chosen = [f"{k} {v}" for k, v in parse_qsl(view.selection.query()[1:]) if k not in ("run", "other")]
    run = [f"{view.run.name}, recording {short(view.run.provenance['recording'])}"] if view.run else []
    note = html.escape("; ".join([*run, *chosen]))
    below = (layout_.get("title", {}).get("subtitle") or {}).get("text", "")
    margin, height = layout_.get("margin", {}), layout_.get("height", 420)
    more = HEAD_MARGIN - margin.get("t", HEAD_MARGIN) + _LINE
    if not below and (counts := _COUNTS.search(" ".join(panel.caption))):
        below = html.escape(counts[0])
    return figure.update_layout(
        template=view.theme.template(),
        title=title_block(view.theme, panel.title, f"{below}<br>{note}"),
        width=layout_.get("width") or _WIDTH,
        height=height + more,
        margin_t=margin.get("t", HEAD_MARGIN) + more,
    )


def snapshot(context: Context, page: str, query: str) -> Response:
    """All panels of a page with their captions, in one HTML file with its own copy of plotly.js."""
    module = find_page("/" + ("" if page == "overview" else page))
    if module is None:
        return Response("There is no such page.", 404, mimetype="text/plain")
    view = _view(context, module, query)
    try:
        panels = (
            [item for item in layout.page_items(module, view) if isinstance(item, Panel)]
            if not layout.describe_needs(view, module.NEEDS)
            else []
        )
    except VisitlensError as error:
        return Response(str(error), 409, mimetype="text/plain")
    response = Response(
        snapshot_page(f"{module.TITLE}: {view.entry.name if view.entry else ''}", panels, view), mimetype="text/html"
    )
    response.headers["Content-Disposition"] = f'attachment; filename="{page}.html"'
    response.headers["Content-Security-Policy"] = "default-src 'none'; sandbox"
    return response


def snapshot_page(title: str, panels: Sequence[Panel], view: View) -> str:
    """The file."""
    rows = "".join(f"<dt>{html.escape(str(k))}</dt><dd>{html.escape(str(v))}</dd>" for k, v in settings(view).items())
    body = f"<h1>{html.escape(title)}</h1>\n<dl>{rows}</dl>\n" + "\n".join(_section(panel, view) for panel in panels)
    page = html_page.document(title, body, view.theme.scheme)
    return page.replace(f'<script src="{html_page.PLOTLY_JS}"></script>', f"<script>{get_plotlyjs()}</script>")


def _section(panel: Panel, view: View) -> str:
    figure = titled(panel, replace(view, theme=view.theme))
    data = {"slug": panel.key, "title": panel.title, "notes": list(panel.caption)}
    notes = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in panel.caption)
    return f"<h2>{html.escape(panel.title)}</h2>\n<figure>{html_page.chart(data, {'only': figure})}<figcaption>{notes}</figcaption></figure>"


def _find(context: Context, page: str, key: str, query: str) -> tuple[View, Panel | None]:
    module = find_page("/" + ("" if page == "overview" else page))
    if module is None:
        return View(context, "/", view_of(context, "/", "").selection), None
    view = _view(context, module, query)
    try:
        return view, layout.find_panel(module, view, key)
    except VisitlensError:
        return view, None


def _view(context: Context, module: Any, query: str) -> View:
    pairs = parse_qsl(query)
    theme = dict(pairs).get("theme", LIGHT.name)
    rest = urlencode([(k, v) for k, v in pairs if k != "theme"])
    return view_of(
        context, module.PATH, rest, theme, getattr(module, "PARAMETERS", ()), fitted=module.NEEDS != ("model",)
    )


def _inert(value: Any) -> Any:
    """A text that a spreadsheet would run as a formula gets a quote before it."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
