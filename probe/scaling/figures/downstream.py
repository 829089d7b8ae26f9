"""Downstream scores against validation loss with the reference's curve, and residuals from it by scale (SMELT Figures 13 and 16a)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from visitlens.errors import InputError
from visitlens.probe.drawing.drawing import bars, frame
from visitlens.probe.drawing.theme import Theme, escape
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.scaling.downstream import NEEDED, residuals_by
from visitlens.probe.scaling.figure import Looks, TableFigure, hover, numbers, points
from visitlens.probe.scaling.study import Study

_SCORE = Measure(
    "downstream_score",
    "Downstream score",
    ("endpoint",),
    "score",
    "The task's result at an endpoint, mean over seeds.",
    "5.1",
)
_MOST = 4


class DownstreamResiduals(TableFigure):
    slug = "downstream"
    paper = "5.1, Figures 13 and 16"
    title = "Downstream scores beyond what validation loss predicts"
    question = "Does the target score better than a reference model of the same validation loss?"
    order = 13
    interval = "95% percentile interval of a bootstrap over cells, the curve refitted on each draw"
    needs = NEEDED
    pair = True

    def content(self, study: Study) -> dict[str, Any]:
        drawn, notes, tasks = {}, [], []
        for task in study.tasks:
            try:
                found = study.downstream(task)
                groups = residuals_by(found, "scale", seed=study.seed)
            except InputError as error:
                notes.append(f"{task} is left out: {error}.")
                continue
            tasks.append(task)
            for arch in study.archs:
                mine = found.scores.of(arch)
                ends = found.scores.ends.where(mine)
                labels = [
                    f"{s} {v}, {d:.3g} tokens" for s, v, d in zip(ends["scale"], ends["level"], ends["D"], strict=True)
                ]
                stat = StatArray(_SCORE, found.scores.score[mine], {"endpoint": labels}, aggregation="mean over seeds")
                drawn[f"{task}.{arch}"] = points(
                    stat, arch, arch, losses=numbers(found.scores.loss[mine]), task=task, part="score"
                )
            span = found.scores.loss[found.scores.of(study.reference)]
            at = np.linspace(span.min(), span.max(), 60)
            drawn[f"{task}.residual"] = points(
                groups,
                study.target,
                task,
                task=task,
                part="residual",
                curve={"x": numbers(at), "y": numbers(found.curve(at))},
            )
            notes.append(f"{task}: the curve of {study.reference} has R2 {found.curve.r2:.3f}.")
            notes += [f"{warning}." for warning in found.warnings]
        if not tasks:
            raise InputError(f"figure {self.slug}: no task can be drawn; {' '.join(notes)}")
        if len(tasks) > _MOST:
            notes.append(f"Drawn are the first {_MOST} of {len(tasks)} tasks; the data holds all.")
        return {"series": drawn, "notes": notes, "tasks": tasks}

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        tasks = data["tasks"][:_MOST]
        titles = [escape(task) for task in tasks]
        panels = {
            "rows": 2,
            "cols": len(tasks),
            "subplot_titles": titles,
            "vertical_spacing": 0.16,
            "horizontal_spacing": 0.08,
        }
        figure = frame(data, theme, width=max(640, 330 * len(tasks) + 80), height=760, panels=panels)
        looks = Looks(theme, data["archs"])
        for entry in data["series"].values():
            if entry["task"] not in tasks:
                continue
            col = tasks.index(entry["task"]) + 1
            if entry["part"] == "score":
                style = looks.arch(entry["model"])
                figure.add_trace(
                    go.Scatter(
                        x=entry["losses"],
                        y=entry["values"],
                        mode="markers",
                        name=escape(entry["label"]),
                        legendgroup=entry["model"],
                        showlegend=col == 1,
                        marker={"symbol": style.symbol, "color": style.colour, "size": 8},
                        text=hover(
                            "{}: {:.4g} at {:.4f} nats", entry["axes"]["endpoint"], entry["values"], entry["losses"]
                        ),
                        hovertemplate="%{text}",
                    ),
                    row=1,
                    col=col,
                )
                continue
            curve = {
                **entry["curve"],
                "mode": "lines",
                "showlegend": col == 1,
                "name": f"curve of {escape(data['archs'][0])}",
            }
            figure.add_trace(go.Scatter(**curve, line={"color": theme.baseline_colour, "dash": "dot"}), row=1, col=col)
            up, down = bars(entry)
            figure.add_trace(
                go.Bar(
                    x=entry["axes"]["group"],
                    y=entry["values"],
                    error_y={"type": "data", "symmetric": False, "array": up, "arrayminus": down},
                    marker_color=theme.paler(theme.visits[1]),
                    showlegend=False,
                    hovertext=hover("{}: {:.4g}", entry["axes"]["group"], entry["values"]),
                    hovertemplate="%{hovertext}",
                ),
                row=2,
                col=col,
            )
        figure.update_xaxes(title_text="validation loss (nats per token)", row=1)
        figure.update_xaxes(type="category", title_text="scale", row=2)
        figure.update_yaxes(title_text="score", row=1, col=1)
        return figure.update_yaxes(title_text="mean residual (score)", row=2, col=1)
