"""The residual stream and what is written into it, by looped layer and visit (SMELT 6.2, html Figure 22)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.figures.base import Figure
from visitlens.probe.figures.drawing import HEAD_MARGIN, LAYER_AXIS, every, frame, line
from visitlens.probe.figures.pair import Pair
from visitlens.probe.figures.series import series
from visitlens.probe.figures.theme import Theme
from visitlens.probe.measure import StatArray
from visitlens.probe.opened import RecordedRun

_ROWS = {
    "resid_rms": "residual stream<br>‖x‖/√H",
    "update_rms": "update<br>‖d‖/√H",
    "relative_update": "relative update<br>‖d‖/‖x‖",
}


class ResidualFlow(Figure):
    slug = "residual-flow"
    html, pdf = "22", "13"
    title = "Residual stream and updates by visit"
    question = "Does a layer write more into the residual stream when it runs again, and more in proportion to it?"
    sides = ("looped", "baseline")

    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        drawn, missing = {}, ""
        layers = list(looped.plan.looped_layers)
        for name in _ROWS:
            for visit in range(1, max(looped.plan.visits.values()) + 1):
                stat = looped.at_visit(name, visit)
                drawn[f"{name}.visit_{visit}"] = series(stat, "looped", "observed", f"visit {visit}")
            baseline, missing = pair.from_baseline(partial(_same_layers, name=name, layers=layers))
            if baseline is not None:
                entry = series(baseline, "baseline", "control", "Baseline, same layer")
                drawn[f"{name}.baseline"] = {
                    **entry,
                    "axes": {"layer": [step.layer for step in baseline.labels["step"]]},
                }
        return {
            "series": drawn,
            "layers": layers,
            "visits": list(range(1, max(looped.plan.visits.values()) + 1)),
            "missing": missing,
            "notes": [f"The Baseline's curve is missing: {missing}."] if missing else [],
        }

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        panels = {"rows": len(_ROWS), "cols": 1, "shared_xaxes": True, "vertical_spacing": 0.045}
        figure = frame(data, theme, width=760, height=HEAD_MARGIN + 690, panels=panels)
        layers = data["layers"]
        for row, (name, title) in enumerate(_ROWS.items(), 1):
            if (baseline := data["series"].get(f"{name}.baseline")) is not None:
                figure.add_trace(line(baseline, theme.baseline, legend=row == 1, width=1.4), row=row, col=1)
            for visit in data["visits"]:
                entry = data["series"][f"{name}.visit_{visit}"]
                figure.add_trace(line(entry, theme.visit(visit), legend=row == 1), row=row, col=1)
            figure.update_yaxes(title_text=title, rangemode="tozero", row=row, col=1)
        figure.update_xaxes(tickvals=every(layers), range=[layers[0] - 0.4, layers[-1] + 0.4])
        figure.update_xaxes(title_text=f"looped layer: {LAYER_AXIS}", row=len(_ROWS), col=1)
        return figure


def _same_layers(run: RecordedRun, name: str, layers: list[int]) -> StatArray:
    """An unlooped model's step measure at these layers."""
    return run.stat(name).sel(step=lambda step: step.layer in layers)
