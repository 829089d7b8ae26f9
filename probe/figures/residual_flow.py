"""The residual stream and what is written into it, by looped layer and visit (SMELT 6.2, html Figure 22)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import HEAD_MARGIN, LAYER_AXIS, empty_panel, every, frame, line
from visitlens.probe.drawing.series import series
from visitlens.probe.drawing.theme import Theme, escape
from visitlens.probe.gallery.figure import Figure, panel_series
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun

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
    over = "row"

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
        if "panels" not in data:
            panels = {"rows": len(_ROWS), "cols": 1, "shared_xaxes": True, "vertical_spacing": 0.045}
            figure, first = frame(data, theme, width=760, height=HEAD_MARGIN + 690, panels=panels), 0
            _column(figure, data["series"], data, theme, 1, legend=True)
        else:
            shown = data["panels"]
            panels = {
                "rows": len(_ROWS),
                "cols": len(shown),
                "shared_xaxes": "columns",
                "vertical_spacing": 0.045,
                "horizontal_spacing": 0.05,
                "subplot_titles": [escape(panel["title"]) for panel in shown],
            }
            figure = frame(data, theme, width=max(760, 290 * len(shown) + 100), height=HEAD_MARGIN + 720, panels=panels)
            first = next(at for at, panel in enumerate(shown) if not panel["absent"])
            for at, panel in enumerate(shown):
                if panel["absent"]:
                    for row in range(1, len(_ROWS) + 1):
                        reason = f"Missing: {panel['absent']}" if row == 2 else ""
                        empty_panel(figure, theme, reason, row=row, col=at + 1, width=220)
                    continue
                _column(figure, panel_series(data, panel), panel, theme, at + 1, legend=at == first)
        for row, title in enumerate(_ROWS.values(), 1):
            figure.update_yaxes(title_text=title, row=row, col=first + 1)
        return figure


def _column(
    figure: go.Figure, drawn: Mapping[str, Any], about: Mapping[str, Any], theme: Theme, col: int, *, legend: bool
) -> None:
    """The rows of one scale."""
    layers = about["layers"]
    for row, name in enumerate(_ROWS, 1):
        if (baseline := drawn.get(f"{name}.baseline")) is not None:
            figure.add_trace(line(baseline, theme.baseline, legend=legend and row == 1, width=1.4), row=row, col=col)
        for visit in about["visits"]:
            entry = drawn[f"{name}.visit_{visit}"]
            figure.add_trace(line(entry, theme.visit(visit), legend=legend and row == 1), row=row, col=col)
        figure.update_yaxes(rangemode="tozero", row=row, col=col)
        figure.update_xaxes(tickvals=every(layers, 10), range=[layers[0] - 0.4, layers[-1] + 0.4], row=row, col=col)
    figure.update_xaxes(title_text=f"looped layer: {LAYER_AXIS}", row=len(_ROWS), col=col)


def _same_layers(run: RecordedRun, name: str, layers: list[int]) -> StatArray:
    """An unlooped model's step measure at these layers."""
    return run.stat(name).sel(step=lambda step: step.layer in layers)
