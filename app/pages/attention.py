"""Attention: a head's map at two visits and their difference where maps are recorded; else what the summary says of each head."""

from __future__ import annotations

from typing import Any

import numpy as np
from dash import html

from visitlens.app.panels.attention_maps import (
    Place,
    both_maps,
    key_changes,
    looped_layer,
    place_of,
    source,
    token_texts,
)
from visitlens.app.panels.components import selector, state
from visitlens.app.panels.panel import Panel, lines_panel, maps_panel, notebook, stat_panel
from visitlens.app.panels.paper_figures import registered_panel
from visitlens.app.panels.plots import Line, Plot, visit_maps
from visitlens.app.panels.pooling import Pooled, Region, pooled_by_tiles
from visitlens.app.view.segments import segment_choices
from visitlens.app.view.view import View
from visitlens.errors import RecordingError
from visitlens.probe.drawing.theme import Theme, token_text
from visitlens.probe.reading.two_visits import two_visits

PATH, TITLE, ORDER = "/attention", "Attention", 22
NEEDS = ("looped",)
CONTROLS = ("visits", "layer", "head")
PARAMETERS = ("context", "zoom", "pool")
_ROWS, _TILE = 1000, 512


def layout(view: View) -> list[Any]:
    panels: list[Any] = []
    if source(view):
        panels.append(_map_or_reason(view))
        if view.selection.token is not None:
            panels.append(key_changes(view, view.selection.token))
    else:
        level = view.recorded.recording.level
        panels.append(
            _note(
                f"{view.recorded.name} is of level {level}. Maps of single contexts need either Q and K, from which they are made "
                "(record again with ",
                html.Code("--level activations --sites Q,K", className="nowrap"),
                "), or stored maps of short contexts (",
                html.Code("--level maps --context 256", className="nowrap"),
                "). What follows are each head's statistics over all tokens.",
            )
        )
    panels += [_sink(view), *_attended(view), _stages(view), registered_panel(view, "sink-profile", wide=True)]
    return [panel for panel in panels if panel is not None]


def _note(*words: Any) -> Any:
    return state("No attention maps in this recording", [html.P(list(words))], "note wide")


def _map_or_reason(view: View) -> Any:
    try:
        return map_panel(view)
    except RecordingError as error:
        return _note(str(error))


def map_panel(view: View) -> Panel:
    """Earlier | later | difference of one context or document, pooled where it is larger than a browser draws at ease.

    Raises:
        RecordingError: no map can be made from this model's Q and K.
    """
    extra, token = view.selection.extra, view.selection.token
    asked = extra.get("context", "")
    place = place_of(view, token, int(asked) if asked.isdigit() and len(asked) < 10 else None)
    layer = looped_layer(view)
    zoomed = parse_zoom(extra.get("zoom", ""), place.tokens)
    region = Region.of((place.tokens, place.tokens), rows=zoomed.get("rows"), columns=zoomed.get("columns"))
    how = "mean" if extra.get("pool") == "mean" else "max"
    earlier, later, difference = pooled_by_tiles(lambda *rows: both_maps(view, place, rows), region, how)
    texts = token_texts(view, place)
    a, b = view.visits

    def draw(theme: Theme) -> Plot:
        rows = [_label(place.start + int(i), texts[int(i)], earlier.factor) for i in earlier.row_starts]
        columns = [_label(place.start + int(i), texts[int(i)], earlier.factor) for i in earlier.column_starts]
        titles = (f"visit {a}", f"visit {b}", f"difference: visit {b} − visit {a}")
        return visit_maps(
            theme,
            *(_seen(part) for part in (earlier, later, difference)),
            root=True,
            titles=titles,
            rows=rows,
            columns=columns,
            row_title="query",
            column_title="key",
            unit="share of mass",
            column_ticks=[str(place.start + int(i)) for i in earlier.column_starts],
            height=470,
            selected=None if earlier.factor > 1 or zoomed else _cell(place, token, difference.values),
        )

    def rows() -> list[dict[str, Any]]:
        """Of the whole map, where it changes most; a pooled one is gone through in tiles."""
        kept: list[tuple[float, int, int, float, float]] = []
        for low in range(0, place.tokens, _TILE):
            tile = both_maps(view, place, (low, min(low + _TILE, place.tokens)))
            before, after = (values.astype(np.float32) for values in tile)
            change = after - before
            order = np.argsort(-np.abs(change), axis=None, kind="stable")[:_ROWS]
            places = zip(*np.unravel_index(order, change.shape), strict=True)
            kept += [
                (float(change[i, j]), low + int(i), int(j), float(before[i, j]), float(after[i, j])) for i, j in places
            ]
        kept.sort(key=lambda cell: -abs(cell[0]))
        return [
            {
                "query": place.start + i,
                "query text": texts[i],
                "key": place.start + j,
                "key text": texts[j],
                f"visit {a}": before,
                f"visit {b}": after,
                "difference": change,
            }
            for change, i, j, before, after in kept[:_ROWS]
        ]

    pooled = (
        f" Pooled {region.factor}x: each cell is the {'mean' if how == 'mean' else 'largest'} of {region.factor} x {region.factor}; drag to zoom in, double-click for the whole."
        if earlier.factor > 1
        else ""
    )
    what = f"{place.kind[0].upper()}{place.kind[1:]} {place.index + 1:,} of {place.count:,}"
    cut = "" if place.whole else f" Its first {place.tokens:,} tokens."
    return Panel(
        key="map",
        title=f"Attention of layer {layer}, head {view.head}",
        draw=draw,
        caption=[
            f"{what}, n = {place.tokens:,} tokens from token {place.start:,}.{cut} Rows are queries, columns keys; both visits share one scale, the difference is symmetric about zero; colours follow the square root.{pooled} No interval: single attention weights.",
        ],
        data=lambda: {
            place.kind: place.index,
            "layer": layer,
            "head": view.head,
            "visits": [a, b],
            "pooled": region.factor,
            "pooled by": how,
            "queries": (place.start + earlier.row_starts).tolist(),
            "keys": (place.start + earlier.column_starts).tolist(),
            "tokens": texts,
            "earlier": earlier.values.astype(np.float64).round(4).tolist(),
            "later": later.values.astype(np.float64).round(4).tolist(),
        },
        rows=rows,
        code=notebook(view, _code(view, place, layer)),
        links={"path": "/attention", "y": "token", "keep": _kept(place)},
        linked=True,
        morph=(0, 1),
        zoom=_zoom(earlier, bool(zoomed)) if region.factor > 1 or zoomed else None,
        wide=True,
        tools=[
            _picker(view, place),
            *([_pooling(how)] if region.factor > 1 else []),
            *([html.A("whole map", href=view.href(zoom=None), className="text-button")] if zoomed else []),
        ],
    )


def _picker(view: View, place: Place) -> Any:
    if place.kind == "document":
        choices, _ = segment_choices(view)
        return selector("document", "segment", choices, str(place.index))
    return selector(
        "context", "context", [(str(n), str(n + 1)) for n in range(min(place.count, 500))], str(place.index)
    )


def _pooling(how: str) -> Any:
    return selector("pooled by", "pool", [("max", "largest"), ("mean", "mean")], how)


def _kept(place: Place) -> dict[str, str]:
    """What a click on a cell keeps beside the token."""
    return {"context" if place.kind == "context" else "segment": str(place.index)}


def _code(view: View, place: Place, layer: int) -> str:
    visit = view.visits[1]
    if place.kind == "context":
        return f"maps = rec.recording.attention_maps(layer={layer}, visit={visit})  # [context, head, query, key]\nmaps[{place.index}, {view.head}]"
    span = f"({place.start}, {place.start + place.tokens})"
    return (
        "from visitlens.probe.reading.attention_from_qk import attention_from_qk\n"
        f"attention_from_qk(rec, layer={layer}, visit={visit}, head={view.head}, tokens={span})  # [query, key]"
    )


def parse_zoom(text: str, size: int) -> dict[str, tuple[int, int]]:
    """`r0-r1-c0-c1` as the part of a map to draw; nothing where it isn't that."""
    parts = text.split("-")
    if len(parts) != 4 or not all(part.isdigit() and len(part) < 8 for part in parts):
        return {}
    r0, r1, c0, c1 = (min(int(part), size) for part in parts)
    return {"rows": (r0, r1), "columns": (c0, c1)} if r0 < r1 and c0 < c1 else {}


def _seen(pooled: Pooled) -> np.ndarray:
    """Blank where no query of a block sees any key of it: after the query, in a causal model."""
    last = pooled.row_starts[:, None] + pooled.factor - 1
    future = pooled.column_starts[None, :] > last
    return np.where(future, np.nan, pooled.values) if not pooled.values[future].any() else pooled.values


def _zoom(pooled: Pooled, part: bool) -> dict[str, Any]:
    rows, columns = pooled.row_starts.tolist(), pooled.column_starts.tolist()
    return {"factor": pooled.factor, "rows": rows, "columns": columns, "part": part}


def _label(token: int, text: str, factor: int) -> str:
    """Unique, so that equal tokens are different places of the axis."""
    return f"{token} {token_text(text[:14])}" if factor == 1 else f"{token}+"


def _cell(place: Place, token: int | None, change: np.ndarray) -> tuple[int, int] | None:
    """The chosen query and the key that changes most for it."""
    if token is None or token not in place:
        return None
    at = token - place.start
    return at, int(np.abs(change[at]).argmax())


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
    layer = looped_layer(view)
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
        view,
        "stages",
        stat,
        f"rec.stage_cosine(visits={view.visits}).plot()",
        links={"path": "/heads", "y": "layer"},
        height=min(180 + 36 * len(stat.labels["layer"]), 520),
    )
