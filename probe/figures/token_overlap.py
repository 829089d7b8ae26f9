"""Do two visits attend to the same tokens, against another head at the same visit (SMELT 6.3, html Figure 26)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.figures.base import Figure
from visitlens.probe.figures.drawing import LAYER_AXIS, every, frame, line
from visitlens.probe.figures.pair import Pair, first_and_last
from visitlens.probe.figures.series import series
from visitlens.probe.figures.theme import Style, Theme
from visitlens.probe.opened import RecordedRun

PANELS = {"top1_match": "most-attended token", "top8_overlap": "top-8 tokens", "mass_overlap": "attention mass"}


class TokenOverlap(Figure):
    slug = "token-overlap"
    html, pdf = "26", "17"
    title = "Attended tokens shared between two visits"
    question = "Does a head look at the same tokens when its layer runs again, more than two heads of one visit do?"

    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        a, b = first_and_last(looped)
        drawn = {}
        for name in PANELS:
            same, other = looped.attended(name).mean("head"), looped.attended_control(name).mean("head")
            drawn[name] = series(same, "looped", "observed", f"same head, visits {a} and {b}")
            drawn[f"{name}_control"] = series(other, "looped", "control", "other head, same visit")
        left_out = looped.recording.totals["top8_overlap"].left_out.flat[0]
        notes = [
            f"Left out of the top-8 panel: {left_out:,} queries that see at most 8 tokens, where the sets are equal by construction."
        ]
        return {"series": drawn, "layers": list(looped.plan.looped_layers), "visits": [a, b], "notes": notes}

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        panels = {
            "rows": 1,
            "cols": 3,
            "shared_yaxes": True,
            "horizontal_spacing": 0.03,
            "subplot_titles": list(PANELS.values()),
        }
        figure = frame(data, theme, width=1000, height=500, panels=panels)
        same, other = Style(theme.same_head, "circle", "solid"), Style(theme.muted, "square-open", "dash")
        for col, name in enumerate(PANELS, 1):
            figure.add_trace(line(data["series"][f"{name}_control"], other, legend=col == 1), row=1, col=col)
            figure.add_trace(line(data["series"][name], same, legend=col == 1), row=1, col=col)
        layers = data["layers"]
        figure.update_xaxes(title_text=LAYER_AXIS, tickvals=every(layers, 8), range=[layers[0] - 0.4, layers[-1] + 0.4])
        figure.update_yaxes(range=[0, 1.03], tickformat=".0%")
        for col in (2, 3):
            figure.update_yaxes(ticks="", col=col)
        figure.update_yaxes(title_text="shared, mean over heads", col=1)
        return figure
