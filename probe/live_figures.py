"""Pictures of a live run: a head's maps at two visits, heads by change, the lens by step, a scan of heads. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from visitlens.hooks.loop_plan import Step
from visitlens.kernels.errors import InputError
from visitlens.probe.figures.drawing import LAYER_AXIS, STEP_AXIS, cell_axes, title_block
from visitlens.probe.figures.theme import DIVERGING, ORANGE, SEQUENTIAL, Style, Theme, escape, token_text
from visitlens.probe.live_ablation import HeadScan
from visitlens.probe.live_run import LiveRun

_HEAD = 92
_MOST_LABELS = 56
_MOST_WRITTEN = 28
"""Columns up to which each cell's value is written in it."""


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
    top = max(float(weights.max()) for weights in maps)
    reach = 1.0
    if pair:
        maps.append(maps[1] - maps[0])
        names.append(f"visit {pair.later.visit} − visit {pair.earlier.visit}")
        reach = float(np.abs(maps[2]).max()) or 1.0
    figure = make_subplots(rows=1, cols=len(maps), shared_yaxes=True, subplot_titles=names, horizontal_spacing=0.02)
    labels, unseen = run.labels, np.triu_indices(len(run), 1)
    for at, (name, weights) in enumerate(zip(names, maps, strict=True)):
        values = weights.astype(np.float32)
        values[unseen] = np.nan
        figure.add_trace(
            go.Heatmap(
                z=values,
                x=labels,
                y=labels,
                name=name,
                coloraxis="coloraxis2" if at == 2 else "coloraxis",
                hovertemplate=f"{name}: %{{z:.4f}}<br>query %{{y}}<br>key %{{x}}<extra></extra>",
                hoverongaps=False,
            ),
            row=1,
            col=at + 1,
        )
    cell_axes(figure, labels, labels, _MOST_LABELS // 2)
    strip = max(1.0, len(run) / 60) if (marks := tuple(marks)) else 0.0  # room for the marks, below the last row
    figure.update_xaxes(title_text="key", tickangle=-90, tickfont_size=10, range=[-0.5, len(run) - 0.5])
    figure.update_yaxes(tickfont_size=10, autorange=False, range=[len(run) - 0.5 + strip, -0.5])
    figure.update_yaxes(title_text="query", col=1)
    for col in range(2, len(maps) + 1):
        figure.update_yaxes(ticks="", row=1, col=col)
    for start, stop in marks:
        foot = len(run) - 0.5
        box = {"x0": start - 0.5, "x1": stop - 0.5, "y0": foot, "y1": foot + strip}
        figure.add_shape(type="rect", fillcolor=ORANGE, line_width=0, row="all", col="all", **box)
    if query is not None:
        box = {"x0": -0.5, "x1": query + 0.5, "y0": query - 0.5, "y1": query + 0.5}
        figure.add_shape(type="rect", line={"color": ORANGE, "width": 1.5}, row="all", col="all", **box)
    share = 0.47 if pair else 1.0
    figure.update_layout(coloraxis=_colours(spread(SEQUENTIAL), 0.0, top, "weight", 1 - share / 2, share))
    if pair:
        figure.update_layout(
            coloraxis2=_colours(spread(DIVERGING, True), -reach, reach, "difference", share / 2, share)
        )
    width = 1280 if pair else 640
    return _framed(figure, theme, f"Layer {layer}, head {head}", _about(run), width, _HEAD + 520, named=True)


def head_grid(run: LiveRun, visits: tuple[int, int] | None, theme: Theme) -> go.Figure:
    """Looped layer x head: mean mass overlap between two visits of this prompt; low is a head that looks elsewhere.

    Raises:
        InputError: nothing is looped.
    """
    layers, overlap = run.head_overlap(visits)
    if not layers:
        raise InputError(f"{run.model['name']} runs every layer once: there are no visits to compare")
    heads = list(map(str, range(run.heads)))
    figure = _grid(overlap, heads, list(map(str, layers)), "layer %{y}, head %{x}: %{z:.3f}", "{:.2f}".format)
    figure.update_layout(coloraxis=_colours(SEQUENTIAL, 0.0, 1.0, "mass overlap"))
    figure.update_xaxes(title_text="head")
    figure.update_yaxes(title_text=LAYER_AXIS)
    height = _HEAD + 110 + 34 * len(layers)
    return _framed(figure, theme, "Attention mass shared by the visits", _about(run), 560, height)


def lens_map(run: LiveRun, theme: Theme, *, coda: bool = False, query: int | None = None) -> go.Figure:
    """Step x token: KL from the final distribution to the lens's; the most likely token is written or hovered.

    Raises:
        InputError: `coda`, and the model has no layers after a loop.
    """
    lens = run.coda_lens if coda else run.lens
    if lens is None:
        raise InputError("this model has no layers after a loop, so no coda lens")
    steps = [step for step in run.plan.steps if not np.isnan(lens.kl[step.index]).all()]
    at = [step.index for step in steps]
    words = [[token_text(run.text_of(token)) for token in lens.tokens[index, :, 0]] for index in at]
    hovered = np.stack([np.array(words, dtype=object), lens.probability[at, :, 0], lens.entropy[at]], axis=-1)
    figure = go.Figure(
        go.Heatmap(
            z=lens.kl[at],
            x=run.labels,
            y=step_labels(steps),
            coloraxis="coloraxis",
            customdata=hovered,
            text=words,
            texttemplate="%{text}" if len(run) <= _MOST_WRITTEN else None,
            textfont_size=11,
            hovertemplate="%{y} after %{x}: KL %{z:.3f} nats<br>most likely %{customdata[0]} at %{customdata[1]:.3f}, "
            "entropy %{customdata[2]:.2f} nats<extra></extra>",
        )
    )
    cell_axes(figure, run.labels, step_labels(steps), _MOST_LABELS)
    figure.update_xaxes(title_text="after token", tickangle=-90, tickfont_size=10)
    figure.update_yaxes(title_text=STEP_AXIS)
    if query is not None:
        box = {"x0": query - 0.5, "x1": query + 0.5, "y0": -0.5, "y1": len(steps) - 0.5}
        figure.add_shape(type="rect", line={"color": ORANGE, "width": 1.5}, **box)
    figure.update_layout(coloraxis=_colours("Cividis", 0.0, float(np.nanmax(lens.kl)), "KL, nats", reverse=True))
    title = "What each step would say, through the layers after the loop" if coda else "What each step would say"
    return _framed(figure, theme, title, _about(run), 1280, _HEAD + 140 + 22 * len(steps))


def norm_lines(run: LiveRun, position: int, theme: Theme) -> go.Figure:
    """What each step writes at one token: attention, MoE and both together, in RMS; dotted lines where the loop turns."""
    at, labels = run.at(position), step_labels(run.plan.steps)
    figure = go.Figure()
    written = {"attention write": run.attn_write_rms, "MoE write": run.moe_write_rms, "update": run.update_rms}
    looks = (theme.visit(1), theme.visit(2), Style(theme.muted, "circle", "dot"))
    for (name, values), look in zip(written.items(), looks, strict=True):
        figure.add_scatter(
            x=labels,
            y=values[:, at].tolist(),
            name=name,
            mode="lines+markers",
            line={"color": look.colour, "dash": look.dash, "width": 1.6},
            marker={"symbol": look.symbol, "size": 7, "color": look.colour},
            hovertemplate="%{x}: %{y:.4f}",
        )
    for before, step in pairwise(run.plan.steps):
        if step.visit != before.visit and step.layer in run.plan.looped_layers:
            figure.add_vline(x=step.index - 0.5, line={"color": theme.muted, "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text=STEP_AXIS, type="category")
    figure.update_yaxes(title_text="RMS", rangemode="tozero")
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"})
    title = f"What each step writes at token {run.labels[at]}"
    return _framed(figure, theme, title, _about(run), 560, _HEAD + 270, named=True)


def scan_map(scan: HeadScan, run: LiveRun, theme: Theme) -> go.Figure:
    """Layer and visit x head: change of the target's log-probability when the head is silenced there."""
    target, after = token_text(run.text_of(scan.target)), run.labels[scan.position]
    reach = float(np.abs(scan.change).max()) or 1.0
    places = [place_label(layer, visits, run.plan.visits[layer]) for layer, visits in scan.places]
    heads = list(map(str, range(run.heads)))
    figure = _grid(scan.change, heads, places, "%{y}, head %{x}: %{z:+.4f} nats", signed)
    figure.update_layout(coloraxis=_colours(DIVERGING, -reach, reach, "change, nats"))
    figure.update_xaxes(title_text="head silenced")
    below = f"change of log P({target}) after {after}, each head {scan.kind}-ablated alone<br>{_about(run)}"
    return _framed(figure, theme, "Which heads the target needs", below, 760, _HEAD + 110 + 24 * len(places))


def place_label(layer: int, visits: Sequence[int], of: int) -> str:
    """`layer 3, visit 2`; `layer 3, all 2 visits`; `layer 0` where it has one."""
    if of == 1:
        return f"layer {layer}"
    return (
        f"layer {layer}, visit {visits[0]}"
        if len(visits) == 1
        else f"layer {layer}, visits {'+'.join(map(str, visits))}"
    )


def step_labels(steps: Iterable[Step]) -> list[str]:
    """`3·2` is layer 3 at visit 2."""
    return [f"{step.layer}·{step.visit}" for step in steps]


def spread(name: str, diverging: bool = False) -> list[tuple[float, str]]:
    """A named colour scale that follows the square root of the value (of its size, about the middle)."""
    at = np.linspace(0, 1, 33)
    places = 0.5 + np.sign(at - 0.5) * 2 * (at - 0.5) ** 2 if diverging else at**2
    return list(zip(places.tolist(), sample_colorscale(name, at.tolist()), strict=True))


def _about(run: LiveRun) -> str:
    weights = run.model["weights_sha256"]
    return escape(
        f"{run.model['name']}, weights {weights[:8] if weights else 'unknown'}; one prompt of {len(run)} tokens"
    )


def signed(value: float) -> str:
    """`+0.12`, `−3.40`; nothing for what would show as zero."""
    return f"{value:+.2f}".replace("-", "−") if abs(value) >= 0.005 else ""


def _grid(values: np.ndarray, x: list[str], y: list[str], hover: str, written: Callable[[float], str]) -> go.Figure:
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=x,
            y=y,
            coloraxis="coloraxis",
            hovertemplate=f"{hover}<extra></extra>",
            text=[[written(value) for value in row] for row in values.tolist()],
            texttemplate="%{text}" if len(x) <= 16 else None,
            textfont_size=11,
            xgap=1,
            ygap=1,
        )
    )
    cell_axes(figure, x, y, _MOST_LABELS)
    return figure


def _colours(
    scale: str | list[tuple[float, str]],
    low: float,
    high: float,
    title: str,
    y: float = 0.5,
    length: float = 1.0,
    *,
    reverse: bool = False,
) -> dict[str, Any]:
    bar = {
        "title": {"text": title, "side": "right"},
        "thickness": 12,
        "outlinewidth": 0,
        "ypad": 0,
        "y": y,
        "len": length,
    }
    return {"colorscale": scale, "cmin": low, "cmax": high or 1.0, "colorbar": bar, "reversescale": reverse}


def _framed(
    figure: go.Figure, theme: Theme, title: str, below: str, width: int, height: int, *, named: bool = False
) -> go.Figure:
    figure.update_annotations(font={"size": 14, "color": theme.ink})
    return figure.update_layout(
        template=theme.template(),
        width=width,
        height=height + (24 if named else 0),
        title=title_block(theme, title, below),
        margin={"t": _HEAD + (24 if named else 0), "l": 72, "r": 40, "b": 90},
    )
