"""Attention: a head's map at two visits and their difference where maps are recorded; else what the summary says of each head."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from dash import html

from visitlens.app.attention import ContextMap, Pooled, context_map, context_of, key_changes, pooled_difference
from visitlens.app.components import selector, state
from visitlens.app.context import View
from visitlens.app.figures import registered_panel
from visitlens.app.panels import Panel, lines_panel, maps_panel, notebook, stat_panel
from visitlens.app.plots import Line, visit_maps
from visitlens.probe.cross_visit import two_visits
from visitlens.probe.figures.theme import Theme, token_text

PATH, TITLE, ORDER = "/attention", "Attention", 22
NEEDS = ("looped",)
CONTROLS = ("visits", "layer", "head")
PARAMETERS = ("context", "zoom")
_FULL_LABELS = 64


def layout(view: View) -> list[Any]:
    panels: list[Any] = []
    if view.recorded.recording.level == "maps":
        panels.append(map_panel(view))
        if view.selection.token is not None:
            panels.append(key_changes(view, view.selection.token))
    else:
        panels.append(
            state(
                "No attention maps in this recording",
                [
                    f"{view.recorded.name} is of level {view.recorded.recording.level}; maps of single contexts need --level maps (contexts of at most 256 tokens). "
                    "What follows are each head's statistics over all tokens."
                ],
                "note wide",
            )
        )
    panels += [_sink(view), *_attended(view), _stages(view), registered_panel(view, "sink-profile", wide=True)]
    return [panel for panel in panels if panel is not None]


def map_panel(view: View) -> Panel:
    """Earlier | later | difference of one context, pooled where it is larger than a browser draws at ease."""
    extra = view.selection.extra
    token = view.selection.token
    asked = extra.get("context", "")
    context = int(asked) if asked.isdigit() else context_of(view, token)[0] if token is not None else 0
    maps = context_map(view, context)
    region = parse_zoom(extra.get("zoom", ""), maps.tokens)
    ids = view.recorded.recording.token_table(tokens=(maps.start, maps.start + maps.tokens))["id"]
    texts = view.context.texts.texts(view.recorded, ids)
    a, b = view.visits
    earlier, later, difference = pooled_difference(
        maps.earlier, maps.later, rows=region.get("rows"), columns=region.get("columns")
    )

    def draw(theme: Theme) -> go.Figure:
        rows = [_label(maps.start + int(i), texts[int(i)], earlier.factor) for i in earlier.row_starts]
        columns = [_label(maps.start + int(i), texts[int(i)], earlier.factor) for i in earlier.column_starts]
        titles = (f"visit {a}", f"visit {b}", f"difference: visit {b} − visit {a}")
        figure = visit_maps(
            theme,
            earlier.values.astype(np.float32),
            later.values.astype(np.float32),
            titles=titles,
            rows=rows,
            columns=columns,
            row_title="query",
            column_title="key",
            unit="share of mass",
            column_ticks=[str(maps.start + int(i)) for i in earlier.column_starts],
            height=470,
            selected=_cell(maps, token, region) if earlier.factor == 1 else None,
        )
        figure.data[2].z = difference.values
        return figure

    def rows() -> list[dict[str, Any]]:
        change = maps.later.astype(np.float32) - maps.earlier
        order = np.argsort(-np.abs(change), axis=None)[:1000]
        return [
            {
                "query": maps.start + int(i),
                "query text": texts[i],
                "key": maps.start + int(j),
                "key text": texts[j],
                f"visit {a}": float(maps.earlier[i, j]),
                f"visit {b}": float(maps.later[i, j]),
                "difference": float(change[i, j]),
            }
            for i, j in zip(*np.unravel_index(order, change.shape), strict=True)
        ]

    pooled = (
        f" Pooled {earlier.factor}x: each cell is the largest of {earlier.factor} x {earlier.factor}; drag to zoom in."
        if earlier.factor > 1
        else ""
    )
    contexts = selector(
        "context", "context", [(str(n), str(n + 1)) for n in range(min(maps.contexts, 500))], str(maps.context)
    )
    return Panel(
        key="map",
        title=f"Attention of layer {view.layer}, head {view.head}",
        draw=draw,
        caption=[
            f"Context {maps.context + 1} of {maps.contexts}, tokens {maps.start:,} to {maps.start + maps.tokens - 1:,}. Rows are queries, columns keys; both visits share one scale, the difference is symmetric about zero.{pooled} No interval: single attention weights.",
        ],
        data={
            "context": maps.context,
            "layer": view.layer,
            "head": view.head,
            "visits": [a, b],
            "tokens": texts,
            "earlier": maps.earlier.round(4).tolist(),
            "later": maps.later.round(4).tolist(),
        },
        rows=rows,
        code=notebook(
            view,
            f"maps = rec.recording.attention_maps(layer={view.layer}, visit={b})  # [context, head, query, key]\nmaps[{maps.context}, {view.head}]",
        ),
        links={"path": "/attention", "y": "token", "keep": {"context": str(maps.context)}},
        linked=True,
        morph=(0, 1),
        zoom=_zoom(earlier) if earlier.factor > 1 else None,
        wide=True,
        tools=[
            contexts,
            *([html.A("whole map", href=view.href(zoom=None), className="text-button")] if region else []),
        ],
    )


def parse_zoom(text: str, size: int) -> dict[str, tuple[int, int]]:
    """`r0-r1-c0-c1` as the part of a map to draw; nothing where it isn't that."""
    parts = text.split("-")
    if len(parts) != 4 or not all(part.isdigit() and len(part) < 8 for part in parts):
        return {}
    r0, r1, c0, c1 = (min(int(part), size) for part in parts)
    return {"rows": (r0, r1), "columns": (c0, c1)} if r0 < r1 and c0 < c1 else {}


def _zoom(pooled: Pooled) -> dict[str, Any]:
    return {"factor": pooled.factor, "rows": pooled.row_starts.tolist(), "columns": pooled.column_starts.tolist()}


def _label(token: int, text: str, factor: int) -> str:
    """Unique, so that equal tokens are different places of the axis."""
    return f"{token} {token_text(text[:14])}" if factor == 1 else f"{token}+"


def _cell(maps: ContextMap, token: int | None, region: dict[str, tuple[int, int]]) -> tuple[int, int] | None:
    if token is None or region or not maps.start <= token < maps.start + maps.tokens:
        return None
    at = token - maps.start
    return at, int(np.abs(maps.later[at].astype(np.float32) - maps.earlier[at]).argmax())


def _sink(view: View) -> Panel:
    two = two_visits(view.recorded, "sink_mass", view.visits)
    selected = (view.layer, view.head) if view.selection.layer is not None else None
    code = f"earlier, later = rec.both_visits('sink_mass', visits={view.visits})\nearlier.plot(), later.plot()"
    links = {"path": "/attention", "x": "head", "y": "layer"}
    return maps_panel(
        view, "sink", "Attention on the segment start, by head", two, code, links=links, selected=selected
    )


def _attended(view: View) -> list[Panel]:
    """What a head attends to at both visits, against another head at one visit; for the selected layer."""
    run, panels = view.recorded, []
    layer = view.layer if view.layer in run.plan.looped_layers else run.plan.looped_layers[0]
    for name in ("top1_match", "top8_overlap", "mass_overlap"):
        if name not in run.measures:
            continue
        two = two_visits(run, name, view.visits)
        drawn = [
            Line(label, stat.sel(layer=layer), "plain" if stat is two.between else "control")
            for label, stat in two.present.items()
        ]
        panels.append(
            lines_panel(
                view,
                name.replace("_", "-"),
                f"{drawn[0].stat.measure.title}, layer {layer}",
                drawn,
                f"rec.attended({name!r}, visits={view.visits}).sel(layer={layer}).plot()",
                x_title="head",
                links={"path": "/attention", "x": "head"},
            )
        )
    return panels


def _stages(view: View) -> Panel | None:
    if "stage_cosine" not in view.recorded.measures:
        return None
    stat = view.recorded.stage_cosine(view.visits)
    return stat_panel(
        view, "stages", stat, f"rec.stage_cosine(visits={view.visits}).plot()", links={"path": "/heads", "y": "layer"}
    )
