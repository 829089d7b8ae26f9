"""Cosines between the updates of every two steps, Baseline beside looped model (SMELT 6.2, html Figure 24)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from visitlens.hooks.core.loop_plan import ExecutionPlan
from visitlens.probe.drawing.drawing import LAYER_AXIS, STEP_AXIS, cell_axes, diverging, empty_panel, frame, heat
from visitlens.probe.drawing.series import plan_of, series, with_interval
from visitlens.probe.drawing.theme import Theme
from visitlens.probe.gallery.figure import Figure
from visitlens.probe.reading.pair import Pair, first_and_last
from visitlens.probe.reading.recorded_run import RecordedRun, step_label


class UpdateCosine(Figure):
    slug = "update-cosine"
    html, pdf = "24", "15"
    title = "Cosine between the updates of every two steps"
    question = "Does a layer write in the same direction again, more than two different layers do?"
    sides = ("looped", "baseline")

    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        a, b = first_and_last(looped)
        baseline, missing = pair.from_baseline(RecordedRun.update_cosine)
        same, other = looped.update_cosine_same_layer().mean("layer"), looped.update_cosine_other_layers()
        drawn = {
            "looped": series(looped.update_cosine(), "looped", "observed", "looped model"),
            "same_layer_mean": series(same, "looped", "summary", f"same layer at visits {a} and {b}"),
        }
        if other.values.size:
            drawn["other_layers_mean"] = series(
                other.mean("layer_pair"),
                "looped",
                "control",
                f"different layers at visits {a} and {b}",
            )
        if baseline is not None:
            drawn["baseline"] = series(baseline, "baseline", "control", "Baseline")
        parts = [
            f"{drawn[name]['label']} {with_interval(drawn[name])}"
            for name in ("same_layer_mean", "other_layers_mean")
            if name in drawn
        ]
        return {
            "series": drawn,
            "missing": missing,
            "notes": [f"Mean cosine: {'; '.join(parts)}. Dashed lines are the edges of the repeated block's visits."],
        }

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        panels = {"rows": 1, "cols": 2, "horizontal_spacing": 0.13, "subplot_titles": ["Baseline", "Looped model"]}
        figure = frame(data, theme, width=1000, height=580, panels=panels, lines=False)
        looped = plan_of(data["models"]["looped"])
        names = [step_label(step) for step in looped.steps]
        figure.add_trace(heat(data["series"]["looped"], names, names, places="%{y} and %{x}"), row=1, col=2)
        _square(figure, names, STEP_AXIS, "x2", col=2)
        dashed: dict[str, Any] = {"line": {"color": "black", "dash": "dash", "width": 1.5}, "row": 1, "col": 2}
        for edge in block_edges(looped):
            figure.add_vline(x=edge, **dashed)
            figure.add_hline(y=edge, **dashed)
        if (baseline := data["series"].get("baseline")) is None:
            empty_panel(figure, theme, f"Not drawn: {data['missing']}.", row=1, col=1)
        else:
            layers = [str(step.layer) for step in plan_of(data["models"]["baseline"]).steps]
            figure.add_trace(heat(baseline, layers, layers, places="layers %{y} and %{x}"), row=1, col=1)
            _square(figure, layers, LAYER_AXIS, "x", col=1)
        figure.update_traces(xgap=0, ygap=0)  # a dark page's gaps would hide the dashed lines
        return figure.update_layout(coloraxis=diverging(1.0, "cosine"))


def block_edges(plan: ExecutionPlan) -> list[float]:
    """Where, between two steps, a visit of the repeated block begins or ends; in steps, halves."""
    looped = set(plan.looped_layers)
    return [
        a.index + 0.5 for a, b in pairwise(plan.steps) if (a.layer in looped, a.visit) != (b.layer in looped, b.visit)
    ]


def _square(figure: go.Figure, labels: list[str], title: str, anchor: str, *, col: int) -> None:
    cell_axes(figure, labels, labels, 12, row=1, col=col)
    figure.update_xaxes(title_text=title, constrain="domain", row=1, col=col)
    figure.update_yaxes(title_text=title, scaleanchor=anchor, constrain="domain", row=1, col=col)
