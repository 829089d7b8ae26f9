"""Accuracy by number of demonstrations, and the gap between both architectures (SMELT Figure 20b)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import frame, line
from visitlens.probe.drawing.theme import Style, Theme
from visitlens.probe.scaling.figure import Looks, TableFigure, points
from visitlens.probe.scaling.shots import NEEDED, shots_gap
from visitlens.probe.scaling.study import Study


class ShotsGap(TableFigure):
    slug = "shots-gap"
    paper = "5.3, Figure 20b"
    title = "Accuracy by number of demonstrations"
    question = "Does the target gain more than the reference where more examples stand in the prompt?"
    order = 21
    interval = "95% percentile interval of a bootstrap over tasks"
    needs = NEEDED
    pair = True

    def content(self, study: Study) -> dict[str, Any]:
        found = shots_gap(study.table, study.target, study.reference, seed=study.seed)
        drawn = {arch: points(found.accuracy.sel(arch=arch), arch, arch) for arch in study.archs}
        drawn["gap"] = points(found.gap, study.target, f"{study.target} minus {study.reference}")
        notes = [f"Over {len(found.tasks)} tasks: {', '.join(found.tasks)}."]
        notes += [f"Left out: {task} ({reason})." for task, reason in found.left_out.items()]
        return {"series": drawn, "notes": notes, "counted": f"{len(found.tasks)} tasks"}

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        titles = ["accuracy", "gap"]
        figure = frame(
            data,
            theme,
            width=900,
            height=500,
            panels={"rows": 1, "cols": 2, "horizontal_spacing": 0.12, "subplot_titles": titles},
        )
        looks = Looks(theme, data["archs"])
        for arch in data["archs"]:
            figure.add_trace(line(data["series"][arch], looks.arch(arch)), row=1, col=1)
        figure.add_trace(line(data["series"]["gap"], Style(theme.ink, "diamond", "solid")), row=1, col=2)
        figure.add_hline(y=0, line={"color": theme.muted, "dash": "dot", "width": 1}, row=1, col=2)  # pyright: ignore[reportArgumentType]
        figure.update_xaxes(type="category", title_text="demonstrations k")
        figure.update_yaxes(title_text="accuracy (share of answers)", row=1, col=1)
        return figure.update_yaxes(title_text="gap (share of answers)", row=1, col=2)
