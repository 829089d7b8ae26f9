"""Attention on the segment start by looped layer and head, one map a visit (SMELT 6.4, html Figure 28)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import LAYER_AXIS, cell_axes, frame, heat, largest, sequential
from visitlens.probe.drawing.series import series
from visitlens.probe.drawing.theme import Theme
from visitlens.probe.gallery.figure import Figure
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun

_MOST_COLUMNS = 3


class SinkHeads(Figure):
    slug = "sink-heads"
    html, pdf = "28", "19a"
    title = "Attention on the segment start by head"
    question = "Which heads rest on the segment's first token, and do they let go of it when their layer runs again?"

    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        visits = range(1, max(looped.plan.visits.values()) + 1)
        drawn = {
            f"visit_{v}": series(looped.at_visit("sink_mass", v), "looped", "observed", f"visit {v}") for v in visits
        }
        return {
            "series": drawn,
            "notes": ["All visits share one colour scale. Queries that are the segment start themselves are left out."],
        }

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        drawn = list(data["series"].values())
        cols = min(len(drawn), _MOST_COLUMNS)
        rows = -(-len(drawn) // cols)
        panels = {
            "rows": rows,
            "cols": cols,
            "horizontal_spacing": 0.06,
            "vertical_spacing": 0.3 / rows,
            "shared_yaxes": True,
            "subplot_titles": [entry["label"] for entry in drawn],
        }
        most_layers = max(len(entry["axes"]["layer"]) for entry in drawn)
        height = 190 + rows * max(210, 22 * most_layers) + (rows - 1) * 60
        figure = frame(data, theme, width=1000, height=height, panels=panels, lines=False)
        for at, entry in enumerate(drawn):
            layers, heads = (list(map(str, entry["axes"][axis])) for axis in ("layer", "head"))
            row, col = at // cols + 1, at % cols + 1
            figure.add_trace(heat(entry, heads, layers, places="layer %{y}, head %{x}"), row=row, col=col)
            cell_axes(figure, heads, layers, 16, row=row, col=col)
            if col > 1:
                figure.update_yaxes(ticks="", row=row, col=col)
        figure.update_xaxes(title_text="head")
        figure.update_yaxes(title_text=LAYER_AXIS, col=1)
        return figure.update_layout(
            coloraxis=sequential(largest(*(entry["values"] for entry in drawn)), "share of mass")
        )
