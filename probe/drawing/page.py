"""The HTML around interactive figures: one file's skeleton, charts and captions. Nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import HEAD_MARGIN
from visitlens.probe.drawing.series import span

PLOTLY_JS = "plotly.min.js"
# Plotly.js 4 offers by default to upload the chart ("Share chart...").
CONFIG = {
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d"],
}
_POLICY = (
    "default-src 'none'; script-src 'self' file: 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' file: data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
)
escape = html.escape


def document(title: str, body: str, scheme: str) -> str:
    """A whole page. `scheme` is light, dark, or auto (what the reader's system prefers); `body` is HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="{"light dark" if scheme == "auto" else scheme}">
<meta name="generator" content="visitlens">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_asset("page.css")}</style>
</head>
<body class="{scheme}">
<main>
{body}
</main>
{_json_script("config", json.dumps(CONFIG))}
<script src="{PLOTLY_JS}"></script>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""


def chart(data: Mapping[str, Any], figures: Mapping[str, go.Figure], fallback: str | None = None) -> str:
    """An interactive figure; `figures` by scheme (light and dark, or only). The page has the title, so the chart drops it.

    `fallback` is a picture's file name, shown where scripts are off.
    """
    slug, label = data["slug"], f"{data['title']}. {' '.join(data['notes'])}"
    height = max(_layout(figure)["height"] for figure in figures.values()) - HEAD_MARGIN + _TOP
    sources = "\n".join(_json_script(f"{slug}-{scheme}", _untitled(figure)) for scheme, figure in figures.items())
    image = (
        f'<noscript><img src="{escape(fallback)}" alt="{escape(label)}" width="100%"></noscript>' if fallback else ""
    )
    return (
        f'<div class="frame"><div class="chart" id="{slug}" role="img" aria-label="{escape(label)}" '
        f'style="height:{height}px"></div></div>\n{image}\n{sources}'
    )


def caption(data: Mapping[str, Any], files: Sequence[str] = ()) -> str:
    """A figure's caption: what it answers, counts, aggregation, interval, definitions, hashes and downloads."""
    entries = list(data["series"].values())
    models = [(side, data["models"][side]) for side in data["sides"] if data["models"][side]]
    notes = "".join(f"<p>{escape(note)}</p>" for note in data["notes"])
    counts = escape(data.get("counts", "")) or "; ".join(
        f"{escape(model['name'])}: {model['documents']:,} documents, {model['tokens']:,} tokens" for _, model in models
    )
    aggregations = "; ".join(dict.fromkeys(e["aggregation"] for e in entries if e["role"] != "chance"))
    measures = {e["measure"]["name"]: e["measure"] for e in entries}
    definitions = "".join(
        f"<li><b>{escape(m['title'])}</b> ({escape(m['unit'])}): {escape(m['definition'])} <span class='muted'>{escape(_place(m['paper']))}</span></li>"
        for m in measures.values()
    )
    hashes = "<br>".join(
        f"{escape(model['name'])} ({escape(side)}; {escape(span(model))}): recording <code>{escape(str(model['recording']))}</code>, "
        f"weights <code>{escape(str(model['weights_sha256']))}</code>"
        for side, model in models
    )
    links = " ".join(f'<a href="{escape(file)}" download>{escape(Path(file).suffix[1:].upper())}</a>' for file in files)
    downloads = f'<p class="downloads">Download: {links}</p>' if links else ""
    return f"""<figcaption>
{notes}
<dl>
<dt>n</dt><dd>{counts}</dd>
<dt>Aggregation</dt><dd>{escape(aggregations)}</dd>
<dt>Interval</dt><dd>{escape(data["interval"])}</dd>
{_in_the_paper(data)}</dl>
<details><summary>Definitions and recordings</summary><ul>{definitions}</ul><p>{hashes}</p></details>
{downloads}
</figcaption>"""


def single(data: Mapping[str, Any], figure: go.Figure, scheme: str) -> str:
    """The page of one figure."""
    body = f"<h1>{escape(data['title'])}</h1>\n<p class='lead'>{escape(data['question'])}</p>\n<figure>{chart(data, {'only': figure})}\n{caption(data)}</figure>"
    return document(data["title"], body, scheme)


_TOP = 24
"""Room above a chart without title, in pixels."""


def _untitled(figure: go.Figure) -> str:
    """The chart's JSON without its title, as wide as the page."""
    bare, layout = go.Figure(figure), _layout(figure)
    less = HEAD_MARGIN - _TOP
    bare.update_layout(title=None, width=None, height=layout["height"] - less, margin_t=layout["margin"]["t"] - less)
    return str(bare.to_json())


def _layout(figure: go.Figure) -> dict[str, Any]:
    return figure.to_plotly_json()["layout"]


def _json_script(name: str, text: str) -> str:
    """Data for a script; no text in it can end the element."""
    safe = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{safe}</script>'


def _in_the_paper(data: Mapping[str, Any]) -> str:
    if (paper := data.get("paper")) is None:
        return ""
    if "html" not in paper:  # a figure of a table of runs says its place whole
        return f"<dt>In the paper</dt><dd>{escape(paper['place'])} ({escape(paper['source'])})</dd>\n"
    where = f"Figure {escape(paper['html'])} of the HTML, {escape(paper['pdf'])} of the PDF ({escape(paper['source'])})"
    return f"<dt>In the paper</dt><dd>{where}</dd>\n"


def _place(paper: str) -> str:
    return "visitlens's own" if paper == "ours" else f"SMELT {paper}"


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
