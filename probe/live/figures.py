"""Pictures of a live run: a head's maps at two visits, heads by change, the lens by step, a scan of heads. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from visitlens.errors import InputError
from visitlens.hooks.core.loop_plan import Step
from visitlens.probe.drawing.drawing import LAYER_AXIS, STEP_AXIS, every, title_block
from visitlens.probe.drawing.theme import DIVERGING, ORANGE, SEQUENTIAL, Style, Theme, escape, token_text
from visitlens.probe.live.head_scan import HeadScan
from visitlens.probe.live.live_run import LiveRun

_HEAD, _FOOT = 92, 54
"""Margins above and below a plot, in pixels: title and subtitle; tick labels and the axis' title."""
_SLANTED = 40
"""More room below for tick labels that stand upright."""
_MOST_TICKS = 56
_MOST_WRITTEN = 28
"""Columns up to which each cell's value is written in it."""
_GAP = 0.02


def attention_maps(
    run: LiveRun,
    layer: int,
    head: int,
    visits: tuple[int, int] | None,
    theme: Theme,
    *,
    query: int | None = None,
    marks: Iterable[tuple[int, int]] = (),
) -> go.Figure:
    """Queries downwards, keys across: earlier and later visit on one scale, and their difference about zero.

    Colours follow the square root of the weight, so that small weights show; the bar beside them says which is which. A
    layer with one visit has one map. What a query can't see is blank. `query` is pointed out; `marks` are key spans
    [start, stop) to mark in orange.
    """
    pair = run.pair(layer, visits)
    steps = (pair.earlier, pair.later) if pair else (run.plan.step(layer, 1),)
    maps = [run.pattern(layer, step.visit, head) for step in steps]
    names = [f"visit {step.visit}" for step in steps]
    top, share = max(float(weights.max()) for weights in maps), 0.47 if pair else 1.0
    layout: dict[str, Any] = {
        "coloraxis": _colours(spread(SEQUENTIAL), 0.0, top, "weight", 1 - share / 2, share),
        "annotations": [],
        "shapes": [],
    }
    if pair:
        maps.append(maps[1] - maps[0])
        names.append(f"visit {pair.later.visit} − visit {pair.earlier.visit}")
        reach = float(np.abs(maps[2]).max()) or 1.0
        layout["coloraxis2"] = _colours(spread(DIVERGING, True), -reach, reach, "difference", share / 2, share)
    labels, marks = run.labels, tuple(marks)
    foot = len(run) - 0.5
    strip = max(1.0, len(run) / 60) if marks else 0.0  # room for the marks, below the last row
    width = (1 - _GAP * (len(maps) - 1)) / len(maps)
    traces = []
    for at, (name, weights) in enumerate(zip(names, maps, strict=True)):
        values = weights.astype(np.float32)  # a copy
        if run.causal:
            values[np.triu_indices(len(run), 1)] = np.nan
        number, left = "" if at == 0 else str(at + 1), at * (width + _GAP)
        axes = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        traces.append(
            {
                "type": "heatmap",
                "z": values,
                "x": labels,
                "y": labels,
                "name": name,
                "coloraxis": "coloraxis2" if at == 2 else "coloraxis",
                "hovertemplate": f"{name}: %{{z}}<br>query %{{y}}<br>key %{{x}}<extra></extra>",
                "zhoverformat": ".4f",
                "hoverongaps": False,
                **axes,
            }
        )
        layout[f"xaxis{number}"] = _cells(labels, "key", _MOST_TICKS // 2, slant=True) | {
            "domain": [left, left + width],
            "anchor": axes["yaxis"],
            "range": [-0.5, foot],
            "matches": "x" if at else None,
        }
        layout[f"yaxis{number}"] = _cells(labels, "" if at else "query", _MOST_TICKS // 2) | {
            "anchor": axes["xaxis"],
            "range": [foot + strip, -0.5],
            "matches": "y" if at else None,
            "showticklabels": not at,
            "ticks": "" if at else "outside",
        }
        layout["annotations"].append(_above(name, left + width / 2))
        boxes = [(start - 0.5, stop - 0.5, foot, foot + strip, True) for start, stop in marks]
        if query is not None:
            boxes.append((-0.5, (query if run.causal else len(run) - 1) + 0.5, query - 0.5, query + 0.5, False))
        layout["shapes"] += [_box(*box) | {"xref": axes["xaxis"], "yref": axes["yaxis"]} for box in boxes]
    size = (1280 if pair else 640, _HEAD + 480 + _FOOT + _SLANTED)
    return _figure(traces, layout, theme, f"Layer {layer}, head {head}", _about(run), *size, named=True, slanted=True)


def head_grid(run: LiveRun, visits: tuple[int, int] | None, theme: Theme) -> go.Figure:
    """Looped layer x head: mean mass overlap between two visits of this prompt; low is a head that looks elsewhere.

    Raises:
        InputError: nothing is looped.
    """
    layers, overlap = run.head_overlap(visits)
    if not layers:
        raise InputError(f"{run.model['name']} runs every layer once: there are no visits to compare")
    rows = list(map(str, layers))
    layout = {"coloraxis": _colours(SEQUENTIAL, 0.0, 1.0, "mass overlap")}
    trace = _grid(overlap, rows, "layer %{y}, head %{x}: %{z}", ".3f", "{:.2f}".format, layout, "head", LAYER_AXIS)
    height = _HEAD + _FOOT + max(120, 34 * len(layers))
    return _figure([trace], layout, theme, "Attention mass shared by the visits", _about(run), 560, height)


def lens_map(run: LiveRun, theme: Theme, *, coda: bool = False, query: int | None = None) -> go.Figure:
    """Step x token: KL from the final distribution to the lens's; the most likely token is written or hovered.

    Raises:
        InputError: `coda`, and the model has no layers after a loop.
    """
    lens = run.coda_lens if coda else run.lens
    if lens is None:
        raise InputError(run.lacks("lens") or "this model has no layers after a loop, so no coda lens")
    steps = [step for step in run.plan.steps if not np.isnan(lens.kl[step.index]).all()]
    at = [step.index for step in steps]
    words = [[token_text(run.text_of(token)) for token in lens.tokens[index, :, 0]] for index in at]
    hovered = [
        [f"{word} at {p:.3f}, entropy {h:.2f} nats" for word, p, h in zip(*row, strict=True)]
        for row in zip(words, lens.probability[at, :, 0].tolist(), lens.entropy[at].tolist(), strict=True)
    ]
    trace = {
        "type": "heatmap",
        "z": lens.kl[at],
        "x": run.labels,
        "y": step_labels(steps),
        "coloraxis": "coloraxis",
        "customdata": hovered,
        "zhoverformat": ".3f",
        "hovertemplate": "%{y}, %{x}: KL %{z} nats<br>most likely %{customdata}<extra></extra>",
    }
    if len(run) <= _MOST_WRITTEN:
        trace |= {"text": words, "texttemplate": "%{text}", "textfont": {"size": 11}}
    layout: dict[str, Any] = {
        "xaxis": _cells(
            run.labels, "after token" if run.predicts_next else "in place of token", _MOST_TICKS, slant=True
        ),
        "yaxis": _cells(step_labels(steps), STEP_AXIS, _MOST_TICKS) | {"autorange": "reversed"},
        "coloraxis": _colours("Cividis", 0.0, float(np.nanmax(lens.kl)), "KL, nats") | {"reversescale": True},
    }
    if query is not None:
        layout["shapes"] = [_box(query - 0.5, query + 0.5, -0.5, len(steps) - 0.5, False)]
    height = _HEAD + _FOOT + _SLANTED + 22 * len(steps)
    title = "What each step would say, through the layers after the loop" if coda else "What each step would say"
    return _figure([trace], layout, theme, title, _about(run), 1280, height, slanted=True)


def norm_lines(run: LiveRun, position: int, theme: Theme) -> go.Figure:
    """What each step writes at one token: attention, MoE (or feed-forward) and both together, in RMS; dotted lines where the loop turns."""
    at, labels = run.at(position), step_labels(run.plan.steps)
    written = {
        "attention write": run.attn_write_rms,
        f"{run.feed_forward} write": run.moe_write_rms,
        "update": run.update_rms,
    }
    looks = (theme.part(1), theme.part(2), Style(theme.muted, "square", "dot"))
    traces = [
        {
            "type": "scatter",
            "x": labels,
            "y": [None if np.isnan(value) else value for value in values[:, at].tolist()],
            "name": name,
            "mode": "lines+markers",
            "line": {"color": look.colour, "dash": look.dash, "width": 1.6},
            "marker": {"symbol": look.symbol, "size": 7, "color": look.colour},
            "hovertemplate": "%{x}: %{y}",
            "yhoverformat": ".4f",
        }
        for (name, values), look in zip(written.items(), looks, strict=True)
    ]
    turns = [
        {"type": "line", "x0": step.index - 0.5, "x1": step.index - 0.5, "yref": "paper", "y0": 0, "y1": 1}
        | {"line": {"color": theme.muted, "width": 1, "dash": "dot"}}
        for before, step in pairwise(run.plan.steps)
        if step.visit > before.visit
    ]
    layout = {
        "xaxis": {"title": {"text": STEP_AXIS}, "type": "category"},
        "yaxis": {"title": {"text": "RMS"}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        "shapes": turns,
    }
    title = f"What each step writes at token {run.texts[at]}"
    return _figure(traces, layout, theme, title, _about(run), 560, _HEAD + 250 + _FOOT, named=True)


def scan_map(scan: HeadScan, theme: Theme) -> go.Figure:
    """Layer and visit x head: change of the target's log-probability when the head is silenced there."""
    run = scan.run
    target, after = token_text(run.text_of(scan.target)), run.labels[scan.position]
    reach = float(np.abs(scan.change).max()) or 1.0
    places = [place_label(layer, visits, run.plan.visits[layer]) for layer, visits in scan.places]
    layout = {"coloraxis": _colours(spread(DIVERGING, True), -reach, reach, "change, nats")}
    trace = _grid(scan.change, places, "%{y}, head %{x}: %{z} nats", "+.4f", signed, layout, "head silenced", "")
    below = f"change of log P({target}) after {after}, each head {scan.kind}-ablated alone<br>{_about(run)}"
    height = _HEAD + _FOOT + 22 * len(places)
    return _figure([trace], layout, theme, "Which heads the target needs", below, 760, height)


def place_label(layer: int, visits: Sequence[int], of: int) -> str:
    """`layer 3, visit 2`; `layer 3, visits 1+2`; `layer 0` where it has one."""
    if of == 1:
        return f"layer {layer}"
    return f"layer {layer}, visit{'s' if len(visits) > 1 else ''} {'+'.join(map(str, visits))}"


def step_labels(steps: Iterable[Step]) -> list[str]:
    """`3·2` is layer 3 at visit 2."""
    return [f"{step.layer}·{step.visit}" for step in steps]


@cache
def spread(name: str, diverging: bool = False) -> tuple[tuple[float, str], ...]:
    """A named colour scale that follows the square root of the value (of its size, about the middle)."""
    at = np.linspace(0, 1, 33)
    places = 0.5 + np.sign(at - 0.5) * 2 * (at - 0.5) ** 2 if diverging else at**2
    return tuple(zip(places.tolist(), map(str, sample_colorscale(name, at.tolist())), strict=True))


def signed(value: float) -> str:
    """`+0.12`, `−3.40`; nothing for what would show as zero."""
    return f"{value:+.2f}".replace("-", "−") if abs(value) >= 0.005 else ""


def _about(run: LiveRun) -> str:
    weights = run.model["weights_sha256"]
    known = weights[:8] if weights else "unknown"
    return escape(f"{run.model['name']}, weights {known}; one prompt of {len(run)} tokens")


def _grid(
    values: np.ndarray,
    rows: list[str],
    hover: str,
    form: str,
    written: Callable[[float], str],
    layout: dict[str, Any],
    x_title: str,
    y_title: str,
) -> dict[str, Any]:
    """A map over heads, with its axes put into the layout."""
    heads = list(map(str, range(values.shape[1])))
    layout["xaxis"] = _cells(heads, x_title, _MOST_TICKS // 2)
    layout["yaxis"] = _cells(rows, y_title, _MOST_TICKS) | {"autorange": "reversed"}
    trace = {"type": "heatmap", "z": values, "x": heads, "y": rows, "coloraxis": "coloraxis", "xgap": 1, "ygap": 1}
    trace |= {"hovertemplate": f"{hover}<extra></extra>", "zhoverformat": form}
    if len(heads) <= 16:
        text = [[written(value) for value in row] for row in values.tolist()]
        trace |= {"text": text, "texttemplate": "%{text}", "textfont": {"size": 11}}
    return trace


def _cells(labels: Sequence[str], title: str, most: int, *, slant: bool = False) -> dict[str, Any]:
    """A category axis with its ticks thinned and no grid behind the cells."""
    axis = {"type": "category", "tickvals": every(labels, most), "showgrid": False, "title": {"text": title}}
    return axis | {"tickfont": {"size": 10}, **({"tickangle": -90} if slant else {})}


def _box(x0: float, x1: float, y0: float, y1: float, filled: bool) -> dict[str, Any]:
    look = {"fillcolor": ORANGE, "line": {"width": 0}} if filled else {"line": {"color": ORANGE, "width": 1.5}}
    return {"type": "rect", "x0": x0, "x1": x1, "y0": y0, "y1": y1, **look}


def _above(text: str, x: float) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "x": x, "y": 1, "xanchor": "center", "yanchor": "bottom"}
    return {"text": text, "showarrow": False, "font": {"size": 14}, **place}


def _colours(
    scale: str | tuple[tuple[float, str], ...], low: float, high: float, title: str, y: float = 0.5, length: float = 1.0
) -> dict[str, Any]:
    bar = {"thickness": 12, "outlinewidth": 0, "ypad": 0, "y": y, "len": length}
    bar["title"] = {"text": title, "side": "right", "font": {"size": 12}}
    return {"colorscale": scale, "cmin": low, "cmax": high or 1.0, "colorbar": bar}


def _figure(
    traces: list[dict[str, Any]],
    layout: dict[str, Any],
    theme: Theme,
    title: str,
    below: str,
    width: int,
    height: int,
    *,
    named: bool = False,
    slanted: bool = False,
) -> go.Figure:
    """Made in one go: each further change of a Plotly figure costs as much again. `named` leaves room above the plot."""
    extra = 24 if named else 0
    around = {
        "template": theme.template(),
        "width": width,
        "height": height + extra,
        "title": title_block(theme, title, below),
        "margin": {"t": _HEAD + extra, "l": 72, "r": 40, "b": _FOOT + (_SLANTED if slanted else 0)},
    }
    return go.Figure({"data": traces, "layout": layout | around})
