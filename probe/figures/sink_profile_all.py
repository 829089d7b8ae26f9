"""Attention on the segment start over depth, one panel a scale (SMELT D, html Figure 56)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import frame
from visitlens.probe.drawing.theme import Theme, escape
from visitlens.probe.figures.sink_profile import SinkProfile, add_profile
from visitlens.probe.gallery.figure import Figure, panel_series
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun

_COLUMNS = 2
_HEIGHT = 430
"""Of a row of panels with its axes, in pixels."""


class SinkProfileAll(Figure):
    slug = "sink-profile-all"
    html, pdf = "56", "25"
    title = "Attention on the segment start over depth, by scale"
    question = (
        "Does attention to the segment's first token fall at the second visit at every scale, as the Baseline's rises?"
    )
    sides = ("looped", "baseline")
    over = "row"
    panels_of_a_pair = True

    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        return SinkProfile().content(looped, pair)

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        shown = data["panels"]
        columns = min(_COLUMNS, len(shown))
        rows = -(-len(shown) // columns)
        figure = frame(data, theme, width=620 * columns + 80 if columns > 1 else 900, height=150 + _HEIGHT * rows)
        figure.update_layout(margin={"t": 170, "l": 90})
        inner = 150 + _HEIGHT * rows - 170 - 110
        gap = 150 / inner  # axis titles above and below
        tall = (1 - gap * (rows - 1)) / rows
        wide = (1 - 0.09 * (columns - 1)) / columns
        first = next(at for at, panel in enumerate(shown) if not panel["absent"])
        for at, panel in enumerate(shown):
            row, col = at // columns, at % columns
            x = (col * (wide + 0.09), col * (wide + 0.09) + wide)
            y = (1 - row * (tall + gap) - tall, 1 - row * (tall + gap))
            words = escape(panel["title"])
            if panel["absent"]:
                words = f"{words}: missing ({escape(panel['absent'])})"
            else:
                models = {side: data["models"][f"{panel['prefix']}{side}"] for side in ("looped", "baseline")}
                place: dict[str, Any] = {"panel": at, "x": x, "y": y, "legend": at == first}
                add_profile(figure, panel_series(data, panel), models, panel["missing"], theme, **place)
                if col == 0 or shown[at - 1]["absent"]:
                    title = {"text": "attention on the segment start<br>(share of mass)"}
                    figure.update_layout({f"yaxis{'' if at == 0 else at + 1}": {"title": title}})
            figure.add_annotation(
                text=f"<b>{words}</b>",
                x=x[0],
                y=y[1],
                xref="paper",
                yref="paper",
                xanchor="left",
                yanchor="bottom",
                yshift=48,
                showarrow=False,
                font={"size": 14, "color": theme.muted if panel["absent"] else theme.ink},
            )
        return figure
