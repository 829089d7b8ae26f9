"""How alike two visits are at the six stages of attention (SMELT 6.3, html Figure 25)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import cell_map, diverging, frame, line, sequential
from visitlens.probe.drawing.series import series
from visitlens.probe.drawing.theme import Style, Theme
from visitlens.probe.gallery.figure import Figure
from visitlens.probe.measures.axes import STAGES
from visitlens.probe.reading.pair import Pair, first_and_last
from visitlens.probe.reading.recorded_run import RecordedRun


class StageCosine(Figure):
    slug = "stage-cosine"
    html, pdf = "25", "16"
    title = "Cosine between two visits by attention stage"
    question = "At which stage of attention do two visits part: in what is asked and matched (Q, K) or in what is carried (V, PV, O)?"
    over = "grid"

    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        stages = looped.stage_cosine()
        drawn = {
            f"layer_{layer}": series(stages.sel(layer=layer), "looped", "observed", f"layer {layer}")
            for layer in stages.labels["layer"]
        }
        drawn["mean"] = series(stages.mean("layer"), "looped", "observed", "mean over looped layers")
        notes = [
            "Thin lines are single layers. Random directions have cosine 0, but tokens share directions, and no control of other tokens is recorded."
        ]
        return {"series": drawn, "visits": first_and_last(looped), "notes": notes}

    def panel(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        stages = looped.stage_cosine().mean("layer")
        return {"series": {s: series(stages.sel(stage=s), "looped", "observed", s) for s in STAGES}, "notes": []}

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        if "panels" in data:
            return self._maps(data, theme)
        figure = frame(data, theme, width=760, height=500)
        layers = [entry for name, entry in data["series"].items() if name != "mean"]
        thin = Style(theme.muted, "circle", "solid")
        for entry in layers:
            trace = line(entry, thin, width=0.8, legend=entry is layers[0], name="each looped layer")
            trace.update(
                mode="lines",
                error_y=None,
                opacity=0.7,
                legendgroup="layers",
                hovertemplate=f"{trace.hovertemplate}<extra>{entry['label']}</extra>",
            )
            figure.add_trace(trace)
        figure.add_trace(line(data["series"]["mean"], Style(theme.same_head, "circle", "solid"), width=2.6))
        a, b = data["visits"]
        low = min(
            (v for entry in data["series"].values() for v in [*entry["values"], *entry["low"]] if v is not None),
            default=0.0,
        )
        figure.update_xaxes(title_text="attention stage (X: normalised input, O: output)", type="category")
        figure.update_yaxes(title_text=f"cosine between visits {a} and {b}", range=[min(0.0, low * 1.05), 1.03])
        return figure

    def _maps(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        panels = {"rows": 2, "cols": 3, "horizontal_spacing": 0.07, "vertical_spacing": 0.16}
        titles = [f"({letter}) {words}" for letter, words in zip("abcdef", _TITLES.values(), strict=True)]
        figure = frame(data, theme, width=1000, height=640, panels={**panels, "subplot_titles": titles}, lines=False)
        for at, stage in enumerate(_TITLES):
            cell_map(figure, data, stage, theme, row=at // 3 + 1, col=at % 3 + 1, coloraxis="coloraxis")
        figure.update_xaxes(title_text="scale", row=2)
        figure.update_yaxes(title_text="sparsity S", col=1)
        values = [entry["values"] for entry in data["series"].values() if entry["values"] is not None]
        below = min(values, default=0) < 0
        return figure.update_layout(coloraxis=diverging(1.0, "cosine") if below else sequential(1.0, "cosine"))


_TITLES = {
    "X": "input X",
    "Q": "queries Q",
    "K": "keys K",
    "V": "values V",
    "PV": "attended context PV",
    "O": "output O",
}
