"""Pictures for a notebook cell, in plain HTML, SVG and PNG: a model's loop, and maps side by side with linked hover. No torch.

They need no library on the page. Where scripts don't run (GitHub, nbconvert) the maps are still there as pictures.
"""

from __future__ import annotations

import base64
import html
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.core.loop_plan import ExecutionPlan

if TYPE_CHECKING:
    from visitlens.probe.reading.recorded_run import RecordedRun

_BOX, _GAP = 34, 6
_RED, _BLUE, _WHITE = np.array([178, 24, 43]), np.array([33, 102, 172]), np.array([255, 255, 255])
_SIDE = 300
"""Of one map, in pixels."""
_MOST = 1024
"""Rows or columns of a map; beyond that a cell is no pixel any more."""


def loop_svg(plan: ExecutionPlan) -> str:
    """The layers in a row, those that run more than once in a frame that says how often."""
    layers, looped = sorted(plan.visits), set(plan.looped_layers)
    width = len(layers) * (_BOX + _GAP) + _GAP
    parts = []
    for place, layer in enumerate(layers):
        x = _GAP + place * (_BOX + _GAP)
        colour = "#B2182B" if layer in looped else "#5B6770"
        parts.append(
            f"<rect x='{x}' y='34' width='{_BOX}' height='26' rx='4' fill='none' stroke='{colour}' stroke-width='1.6'/>"
            f"<text x='{x + _BOX / 2}' y='52' text-anchor='middle' fill='{colour}'>{layer}</text>"
        )
    if looped:
        first, last = layers.index(min(looped)), layers.index(max(looped))
        x1, x2 = (_GAP + place * (_BOX + _GAP) + _BOX / 2 for place in (first, last))
        parts.append(
            f"<path d='M{x2},30 C{x2},8 {x1},8 {x1},30' fill='none' stroke='#B2182B' stroke-width='1.6' stroke-dasharray='4 3'/>"
            f"<path d='M{x1 - 4},23 L{x1},31 L{x1 + 4},23' fill='none' stroke='#B2182B' stroke-width='1.6'/>"
            f"<text x='{(x1 + x2) / 2}' y='11' text-anchor='middle' fill='#B2182B'>{max(plan.visits.values())} visits</text>"
        )
    label = f"{len(layers)} layers, {len(plan)} steps"
    return (
        f"<svg width='{width}' height='66' viewBox='0 0 {width} 66' role='img' aria-label='{label}' "
        f"font-family='sans-serif' font-size='12'>{''.join(parts)}</svg>"
    )


def recording_html(rec: RecordedRun) -> str:
    """What a recording holds: its model's loop and its measures, each with its definition on a click."""
    rows = []
    for name in rec.measures:
        measure = rec.stat(name).measure
        rows.append(
            f"<tr><td style='text-align:left'><code>{html.escape(name)}</code></td><td style='text-align:left'>{html.escape(', '.join(measure.axes))}</td>"
            f"<td style='text-align:left'>{html.escape(measure.unit)}</td><td style='text-align:left'>{html.escape(measure.definition)}</td></tr>"
        )
    head = "<tr><th>measure</th><th>axes</th><th>unit</th><th>definition</th></tr>"
    return (
        f"<div>{html.escape(repr(rec))}</div>{loop_svg(rec.plan)}"
        f"<details><summary>{len(rows)} measures, by <code>rec.stat(name)</code></summary><table>{head}{''.join(rows)}</table></details>"
    )


def png(colours: np.ndarray) -> bytes:
    """A PNG of colours [row, column, 3], 0 to 255."""
    rows, columns, _ = colours.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), colours.astype(np.uint8).reshape(rows, -1)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
        + chunk(b"IEND", b"")
    )


def coloured(values: np.ndarray, reach: float) -> np.ndarray:
    """[row, column, 3]: white at 0, red up to `reach`, blue down to its negative; grey where there is no number."""
    share = np.clip(np.nan_to_num(values) / (reach or 1.0), -1, 1)[..., None]
    mixed = _WHITE + np.abs(share) * (np.where(share > 0, _RED, _BLUE) - _WHITE)
    return np.where(np.isnan(values)[..., None], 225, mixed).round().astype(np.uint8)


@dataclass(frozen=True, eq=False)
class LinkedMaps:
    """Maps of one shape side by side: pointing at a cell of one marks it in all, with its values and labels.

    `panels` name -> values [row, column]; `rows` and `columns` are the labels; `axes` what they are.
    """

    title: str
    panels: Mapping[str, np.ndarray]
    rows: Sequence[str]
    columns: Sequence[str]
    axes: tuple[str, str]
    note: str = ""

    def __post_init__(self) -> None:
        shape = (len(self.rows), len(self.columns))
        wrong = {name: values.shape for name, values in self.panels.items() if values.shape != shape}
        if wrong or not self.panels or max(shape) > _MOST or not min(shape):
            raise InputError(
                f"expected maps of shape {shape}, from 1 to {_MOST} each way, got {wrong or list(self.panels)}"
            )

    @property
    def reach(self) -> float:
        """The largest absolute value: all panels share one scale."""
        return float(max(np.nanmax(np.abs(values), initial=0.0) for values in self.panels.values()))

    def to_png(self) -> bytes:
        """The maps side by side, at least 256 pixels high."""
        times = max(1, -(-256 // max(len(self.rows), len(self.columns))))
        gap = np.full((len(self.rows) * times, 8, 3), 255, np.uint8)
        parts = []
        for values in self.panels.values():
            parts += [coloured(values, self.reach).repeat(times, 0).repeat(times, 1), gap]
        return png(np.concatenate(parts[:-1], axis=1))

    def to_html(self) -> str:
        """Interactive; without scripts the maps and the first lines stay."""
        name = f"vl-{uuid4().hex[:10]}"
        height = _SIDE * min(max(len(self.rows) / len(self.columns), 0.4), 2.0)
        maps = "".join(self._panel(panel, values, height) for panel, values in self.panels.items())
        data = {
            "rows": list(self.rows),
            "columns": list(self.columns),
            "axes": self.axes,
            "panels": [{"name": n, "values": _rounded(v)} for n, v in self.panels.items()],
        }
        text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        note = f"<div style='opacity:.7'>{html.escape(self.note)}</div>" if self.note else ""
        return (
            f"<div id='{name}' style='font-family:sans-serif;font-size:13px'><b>{html.escape(self.title)}</b>{note}"
            f"<div style='display:flex;flex-wrap:wrap;gap:12px;margin:6px 0'>{maps}</div>"
            f"<div class='vl-read' aria-live='polite' style='min-height:3em;white-space:pre-wrap;font-family:monospace'>"
            f"rows: {html.escape(self.axes[0])}, columns: {html.escape(self.axes[1])}; red is more, blue less, the scale ends at {self.reach:.3g}</div>"
            f"<script type='application/json'>{text}</script><script>{_SCRIPT.replace('NAME', name)}</script></div>"
        )

    def _panel(self, name: str, values: np.ndarray, height: float) -> str:
        picture = base64.b64encode(png(coloured(values, self.reach))).decode()
        return (
            f"<figure style='margin:0'><figcaption>{html.escape(name)}</figcaption>"
            f"<div class='vl-map' style='position:relative;width:{_SIDE}px;height:{height:.0f}px;border:1px solid #9AA5B1;cursor:crosshair'>"
            f"<img alt='{html.escape(self.title)}, {html.escape(name)}' src='data:image/png;base64,{picture}' width='{_SIDE}' height='{height:.0f}' "
            "style='image-rendering:pixelated;width:100%;height:100%;display:block;max-width:none;margin:0' draggable='false'></div></figure>"
        )

    def show(self) -> None:
        """Displays it in a notebook; prints what it is elsewhere."""
        show(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            "text/html": self.to_html(),
            "image/png": base64.b64encode(self.to_png()).decode(),
            "text/plain": repr(self),
        }

    def __repr__(self) -> str:
        return f"{self.title}: {len(self.rows)} {self.axes[0]} x {len(self.columns)} {self.axes[1]}; {', '.join(self.panels)}"


def token_strip(tokens: Sequence[str], values: np.ndarray, unit: str) -> str:
    """The text, each token shaded by its value: red for positive, blue for negative."""
    reach = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    spans = []
    for token, value in zip(tokens, values, strict=True):
        red, green, blue = (178, 24, 43) if value > 0 else (33, 102, 172)
        shade = 0.0 if np.isnan(value) else 0.6 * abs(value) / reach
        title = "no prediction" if np.isnan(value) else f"{value:+.4f} {unit}"
        text = html.escape(token).replace("\n", "↵<br>") or "&nbsp;"
        spans.append(f"<span title='{title}' style='background:rgba({red},{green},{blue},{shade:.2f})'>{text}</span>")
    return f"<div style='font-family:monospace;white-space:pre-wrap;max-width:100ch'>{''.join(spans)}</div>"


def show(thing: object) -> None:
    """Displays in a notebook, prints in a terminal."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        print(repr(thing))
        return
    if get_ipython() is None:
        print(repr(thing))
        return
    from IPython.display import display

    display(thing)


def _rounded(values: np.ndarray) -> list[list[float | None]]:
    return [[None if np.isnan(v) else float(f"{v:.3g}") for v in row] for row in values]


_SCRIPT = """(() => {
const root = document.getElementById('NAME'); if (!root) return;
const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
const maps = [...root.querySelectorAll('.vl-map')], read = root.querySelector('.vl-read');
const bars = maps.map(map => ['100%', null].map((_, i) => { const bar = document.createElement('div');
  bar.style.cssText = 'position:absolute;pointer-events:none;display:none;box-sizing:border-box;outline:1px solid #000;box-shadow:0 0 0 2px #fff8';
  map.appendChild(bar); return bar; }));
const R = data.rows.length, C = data.columns.length;
const show = (r, c) => {
  bars.forEach(([row, column]) => {
    Object.assign(row.style, {display: 'block', left: 0, width: '100%', top: 100 * r / R + '%', height: 100 / R + '%'});
    Object.assign(column.style, {display: 'block', top: 0, height: '100%', left: 100 * c / C + '%', width: 100 / C + '%'}); });
  read.textContent = data.axes[0] + ' ' + data.rows[r] + '   ' + data.axes[1] + ' ' + data.columns[c] + '\\n' +
    data.panels.map(p => p.name + ' ' + (p.values[r][c] ?? '-')).join('   '); };
let at = [0, 0];
const move = (r, c) => { at = [Math.min(Math.max(r, 0), R - 1), Math.min(Math.max(c, 0), C - 1)]; show(...at); };
maps.forEach(map => { map.tabIndex = 0;
  map.addEventListener('mousemove', e => { const box = map.getBoundingClientRect();
    move(Math.floor((e.clientY - box.top) / box.height * R), Math.floor((e.clientX - box.left) / box.width * C)); });
  map.addEventListener('keydown', e => { const by = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[e.key];
    if (by) { e.preventDefault(); move(at[0] + by[0], at[1] + by[1]); } }); });
})();"""
