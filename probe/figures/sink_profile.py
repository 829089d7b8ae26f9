"""Attention on the segment start over depth, looped model over Baseline (SMELT 6.4, html Figure 29)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import LAYER_AXIS, STEP_AXIS, every, frame, line
from visitlens.probe.drawing.series import plan_of, series
from visitlens.probe.drawing.theme import Style, Theme, escape
from visitlens.probe.gallery.figure import Figure
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun, step_label


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
        figure = frame(data, theme, width=900, height=580)
        figure.update_layout(margin_t=150)
        add_profile(figure, data["series"], data["models"], data["missing"], theme)
        return figure.update_layout(
            yaxis={"title": {"text": "attention on the segment start,<br>mean over heads (share of mass)"}}
        )


def add_profile(
    figure: go.Figure,
    drawn: Mapping[str, Any],
    models: Mapping[str, Any],
    missing: str,
    theme: Theme,
    *,
    panel: int = 0,
    x: tuple[float, float] = (0.0, 1.0),
    y: tuple[float, float] = (0.0, 1.0),
    legend: bool = True,
) -> None:
    """A profile on axes of its own: the Baseline's layers below, the looped model's steps above; `x`, `y` are its place."""
    below, above, up = ("", "2", "") if panel == 0 else (f"{2 * panel + 1}", f"{2 * panel + 2}", f"{panel + 1}")
    baseline = drawn.get("baseline")
    axes: dict[str, Any] = {"xaxis": f"x{below}", "yaxis": f"y{up}"}
    if baseline is not None:
        figure.add_trace(line(baseline, theme.baseline, width=1.6, legend=legend).update(**axes))
    axes["xaxis"] = f"x{above}"
    steps = plan_of(models["looped"]).steps
    looped = {name: entry for name, entry in drawn.items() if name != "baseline"}
    figure.add_trace(_depth_line(looped, theme).update(**axes))
    for step in steps:
        if f"visit_{step.visit}" in looped and step.index in looped[f"visit_{step.visit}"]["axes"]["step"]:
            place = {"x0": step.index - 0.5, "x1": step.index + 0.5, "xref": f"x{above}", "y0": 0, "y1": 1}
            colour = theme.profile_visit(step.visit).colour
            look: dict[str, Any] = {"fillcolor": colour, "opacity": 0.07, "line_width": 0, "layer": "below"}
            figure.add_shape(type="rect", **place, yref=f"y{up} domain", **look)
    for name, entry in looped.items():
        style = (
            Style(theme.ink, "triangle-down-open", "solid")
            if name == "once"
            else theme.profile_visit(int(name.removeprefix("visit_")))
        )
        trace = line(entry, style, legend=legend)
        figure.add_trace(trace.update(**axes, mode="markers", hovertemplate=f"step {trace.hovertemplate}"))
    shown = every(steps, 16 if x == (0.0, 1.0) else 9)
    figure.update_layout(
        {
            f"xaxis{above}": {
                "overlaying": f"x{below}",
                "anchor": f"y{up}",
                "domain": x,
                "side": "top",
                "title": {"text": f"looped model: {STEP_AXIS}"},
                "tickvals": [step.index for step in shown],
                "ticktext": [step_label(step) for step in shown],
                "range": [-0.5, len(steps) - 0.5],
                "showgrid": False,
            },
            f"yaxis{up}": {"rangemode": "tozero", "domain": y, "anchor": f"x{below}"},
        }
    )
    bottom: dict[str, Any] = {"domain": x, "anchor": f"y{up}"}
    if baseline is None:
        figure.add_trace(go.Scatter(x=[0], y=[None], showlegend=False, xaxis=f"x{below}", yaxis=f"y{up}"))
        # An axis without a trace isn't drawn, nor is its title.
        bottom |= {"title": {"text": f"Baseline not drawn: {escape(missing)}"}, "showticklabels": False, "ticks": ""}
        bottom["showgrid"] = False
    else:
        layers = [step.layer for step in plan_of(models["baseline"]).steps]
        bottom |= {"title": {"text": f"Baseline: {LAYER_AXIS}"}, "range": [-0.5, len(layers) - 0.5]}
        bottom["tickvals"] = every(layers, 16)
    figure.update_layout({f"xaxis{below}": bottom})


def _depth_line(drawn: Mapping[str, Any], theme: Theme) -> go.Scatter:
    """A thin line through all of the looped model's steps, in execution order."""
    points = sorted(
        point for entry in drawn.values() for point in zip(entry["axes"]["step"], entry["values"], strict=True)
    )
    return go.Scatter(
        x=[step for step, _ in points],
        y=[value for _, value in points],
        mode="lines",
        line={"color": theme.profile or theme.muted, "width": 1},
        hoverinfo="skip",
        showlegend=False,
    )
