"""Attention on the segment start over depth, looped model over Baseline (SMELT 6.4 and D, html Figure 29)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.figures.base import Figure
from visitlens.probe.figures.drawing import LAYER_AXIS, STEP_AXIS, every, frame, line
from visitlens.probe.figures.pair import Pair
from visitlens.probe.figures.series import plan_of, series
from visitlens.probe.figures.theme import Style, Theme
from visitlens.probe.opened import RecordedRun, step_label


class SinkProfile(Figure):
    slug = "sink-profile"
    html, pdf = "29", "19b"
    title = "Attention on the segment start over depth"
    question = "Does attention to the segment's first token fall at the second visit, and how does the Baseline's change with depth?"
    sides = ("looped", "baseline")

    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        profile = looped.sink_mass().mean("head")
        repeated = set(looped.plan.looped_layers)
        drawn = {}
        if len(repeated) < len(looped.plan.visits):
            once = profile.sel(step=lambda step: step.layer not in repeated)
            drawn["once"] = series(once, "looped", "observed", "looped model, layers run once")
        for visit in range(1, max(looped.plan.visits.values()) + 1):
            at_visit = profile.sel(step=lambda step, visit=visit: step.layer in repeated and step.visit == visit)
            drawn[f"visit_{visit}"] = series(at_visit, "looped", "observed", f"looped model, visit {visit}")
        baseline, missing = pair.from_baseline(lambda run: run.sink_mass().mean("head"))
        if baseline is not None:
            drawn["baseline"] = series(baseline, "baseline", "control", "Baseline")
        return {
            "series": drawn,
            "missing": missing,
            "notes": [f"The Baseline's curve is missing: {missing}."] if missing else [],
        }

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        drawn = dict(data["series"])
        figure = frame(data, theme, width=900, height=580)
        figure.update_layout(margin_t=150)
        baseline = drawn.pop("baseline", None)
        if baseline is not None:
            figure.add_trace(line(baseline, theme.baseline, width=1.6))
        steps = plan_of(data["models"]["looped"]).steps
        figure.add_trace(_depth_line(drawn, theme))
        for step in steps:
            if f"visit_{step.visit}" in drawn and step.index in drawn[f"visit_{step.visit}"]["axes"]["step"]:
                colour = theme.profile_visit(step.visit).colour
                place = {
                    "x0": step.index - 0.5,
                    "x1": step.index + 0.5,
                    "xref": "x2",
                    "y0": 0,
                    "y1": 1,
                    "yref": "paper",
                }
                figure.add_shape(type="rect", **place, fillcolor=colour, opacity=0.07, line_width=0, layer="below")
        for name, entry in drawn.items():
            style = (
                Style(theme.ink, "triangle-down-open", "solid")
                if name == "once"
                else theme.profile_visit(int(name.removeprefix("visit_")))
            )
            trace = line(entry, style)
            trace.update(xaxis="x2", mode="markers", hovertemplate=f"step {trace.hovertemplate}")
            figure.add_trace(trace)
        shown = every(steps, 16)
        figure.update_layout(
            xaxis2={
                "overlaying": "x",
                "side": "top",
                "title": {"text": f"looped model: {STEP_AXIS}"},
                "tickvals": [step.index for step in shown],
                "ticktext": [step_label(step) for step in shown],
                "range": [-0.5, len(steps) - 0.5],
                "showgrid": False,
            },
            yaxis={
                "title": {"text": "attention on the segment start,<br>mean over heads (share of mass)"},
                "rangemode": "tozero",
            },
        )
        _baseline_axis(figure, data)
        return figure


def _depth_line(drawn: Mapping[str, Any], theme: Theme) -> go.Scatter:
    """A thin line through all of the looped model's steps, in execution order."""
    points = sorted(
        point for entry in drawn.values() for point in zip(entry["axes"]["step"], entry["values"], strict=True)
    )
    return go.Scatter(
        x=[step for step, _ in points],
        y=[value for _, value in points],
        xaxis="x2",
        mode="lines",
        line={"color": theme.profile or theme.muted, "width": 1},
        hoverinfo="skip",
        showlegend=False,
    )


def _baseline_axis(figure: go.Figure, data: Mapping[str, Any]) -> None:
    if data["missing"]:
        figure.add_scatter(x=[0], y=[None], showlegend=False)  # an axis without a trace isn't drawn, nor is its title
        figure.update_layout(
            xaxis={
                "title": {"text": f"Baseline not drawn: {data['missing']}"},
                "showticklabels": False,
                "ticks": "",
                "showgrid": False,
            }
        )
        return
    layers = [step.layer for step in plan_of(data["models"]["baseline"]).steps]
    figure.update_layout(
        xaxis={
            "title": {"text": f"Baseline: {LAYER_AXIS}"},
            "tickvals": every(layers, 16),
            "range": [-0.5, len(layers) - 0.5],
        }
    )
