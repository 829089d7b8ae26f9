"""Do two visits attend to the same tokens, against another head at the same visit (SMELT 6.3, html Figure 26)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import LAYER_AXIS, every, frame, line
from visitlens.probe.drawing.series import series
from visitlens.probe.drawing.theme import Style, Theme, escape
from visitlens.probe.gallery.figure import Figure, panel_series
from visitlens.probe.reading.pair import Pair, first_and_last
from visitlens.probe.reading.recorded_run import RecordedRun

PANELS = {"top1_match": "most-attended token", "top8_overlap": "top-8 tokens", "mass_overlap": "attention mass"}


class TokenOverlap(Figure):
    slug = "token-overlap"
    html, pdf = "26", "17"
    title = "Attended tokens shared between two visits"
    question = "Does a head look at the same tokens when its layer runs again, more than two heads of one visit do?"
    over = "row"

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

    def panel(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        found = self.content(looped, pair)
        for name in PANELS:
            same, other = looped.attended(name).mean("head"), looped.attended_control(name).mean("head")
            found["series"][name] = series(same.mean("layer"), "looped", "observed", "same head, two visits")
            found["series"][f"{name}_control"] = series(
                other.mean("layer"), "looped", "control", "other head, same visit"
            )
        return found

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
        if "panels" in data:
            return self._scales(figure, data, same, other)
        for col, name in enumerate(PANELS, 1):
            figure.add_trace(line(data["series"][f"{name}_control"], other, legend=col == 1), row=1, col=col)
            figure.add_trace(line(data["series"][name], same, legend=col == 1), row=1, col=col)
        layers = data["layers"]
        figure.update_xaxes(title_text=LAYER_AXIS, tickvals=every(layers, 8), range=[layers[0] - 0.4, layers[-1] + 0.4])
        return _shares(figure, "shared, mean over heads")

    def _scales(self, figure: go.Figure, data: Mapping[str, Any], same: Style, other: Style) -> go.Figure:
        scales = [escape(panel["scale"]) for panel in data["panels"]]
        for col, name in enumerate(PANELS, 1):
            for key, style in ((f"{name}_control", other), (name, same)):
                entry = _over_scales(data, key, scales)
                figure.add_trace(line(entry, style, legend=col == 1), row=1, col=col)
        gone = [scale for scale, panel in zip(scales, data["panels"], strict=True) if panel["absent"]]
        labels = [f"{scale}<br>missing" if scale in gone else scale for scale in scales]
        figure.update_xaxes(
            type="category", categoryorder="array", categoryarray=scales, range=[-0.4, len(scales) - 0.6]
        )
        figure.update_xaxes(title_text="scale", tickvals=scales, ticktext=labels)
        return _shares(figure, "shared, mean over heads and looped layers")


def _over_scales(data: Mapping[str, Any], name: str, scales: list[str]) -> dict[str, Any]:
    """A scalar series of each cell as one line; a gap where a cell is missing."""
    entries = [panel_series(data, panel).get(name) for panel in data["panels"]]
    label = next(entry["label"] for entry in entries if entry is not None)
    points = {key: [None if e is None else e[key] for e in entries] for key in ("values", "low", "high")}
    return {"label": label, "axes": {"scale": scales}, **points}


def _shares(figure: go.Figure, title: str) -> go.Figure:
    figure.update_yaxes(range=[0, 1.03], tickformat=".0%")
    for col in (2, 3):
        figure.update_yaxes(ticks="", col=col)
    return figure.update_yaxes(title_text=title, col=1)
