"""How a loss improvement is shared out over document lengths, and what parameters and experts do instead (SMELT Figure 20a)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import frame, line
from visitlens.probe.drawing.series import with_interval
from visitlens.probe.drawing.theme import Theme
from visitlens.probe.scaling.figure import TableFigure, points
from visitlens.probe.scaling.lengths import length_contrasts
from visitlens.probe.scaling.study import Study
from visitlens.probe.scaling.table import LAW


class LengthContrast(TableFigure):
    slug = "length-contrast"
    paper = "5.3, Figure 20a"
    title = "Loss improvement by document length"
    question = "Is the improvement larger on long documents, and is it so when experts or parameters are added instead?"
    order = 20
    interval = "95% percentile interval of a bootstrap over the family's pairs"
    needs = (*LAW, "bucket")
    pair = True

    def content(self, study: Study) -> dict[str, Any]:
        shape, ratio = length_contrasts(study.table, study.target, study.reference, seed=study.seed)
        drawn, notes = {}, []
        for family in shape.labels["family"]:
            words = (
                f"{study.target} instead of {study.reference}"
                if family == "architecture"
                else f"{family}, {study.reference}"
            )
            drawn[family] = points(shape.sel(family=family), study.reference, words)
            entry = points(ratio.sel(family=family), study.reference, words)
            notes.append(
                f"{words}: {with_interval(entry)} times as much on the longer half of the buckets as on the shorter."
            )
        return {"series": drawn, "notes": notes}

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        figure = frame(data, theme, width=820, height=520)
        for number, entry in enumerate(data["series"].values(), 1):
            style = theme.visit(2) if number == 1 else theme.part(number)
            figure.add_trace(line(entry, style))
        figure.add_hline(y=1, line={"color": theme.muted, "dash": "dot", "width": 1})
        figure.update_xaxes(type="category", title_text="longest document of the bucket (tokens)")
        return figure.update_yaxes(title_text="improvement over its mean", rangemode="tozero")
