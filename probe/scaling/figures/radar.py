"""Mean score by category of one pair, an axis each (SMELT Figure 1c)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from visitlens.errors import InputError
from visitlens.probe.drawing.drawing import frame
from visitlens.probe.drawing.theme import Theme, escape
from visitlens.probe.scaling.figure import Looks, TableFigure, hover, points
from visitlens.probe.scaling.radar import radar
from visitlens.probe.scaling.study import Study


class Radar(TableFigure):
    slug = "radar"
    paper = "1, Figure 1c"
    title = "Scores of one pair by category"
    question = "In which kinds of task does the target lead at the largest scale?"
    order = 2
    interval = "none: one pair of models"
    needs = ("arch", "scale", "level", "D", "task", "score")
    pair = True

    def content(self, study: Study) -> dict[str, Any]:
        table = study.table
        scored = table.where(
            ~np.isnan(table["score"]) & np.isin(table["task"], [t for t in study.tasks if t not in study.lower])
        )
        if not len(scored):
            raise InputError(f"figure {self.slug}: every task of {table.name} is scored by a loss")
        cells = list(dict.fromkeys(zip(scored["scale"].tolist(), scored["level"].tolist(), strict=True)))
        by = {"scale": "F" if table.has("F") else "D", "level": "S" if table.has("S") else "D"}
        order = {column: scored.ordered(column, key) for column, key in by.items()}
        scale, level = max(cells, key=lambda cell: (order["scale"].index(cell[0]), order["level"].index(cell[1])))
        found = radar(scored, study.target, study.reference, scale, level)
        lead = int((found.values[1] > found.values[0]).sum())
        notes = [f"{study.target} leads on {lead} of {found.values.shape[1]} axes ({found.aggregation})."]
        drawn = {arch: points(found.sel(arch=arch), arch, arch) for arch in study.archs}
        return {"series": drawn, "notes": notes, "counted": found.aggregation}

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        figure = frame(data, theme, width=640, height=620)
        looks = Looks(theme, data["archs"])
        for entry in data["series"].values():
            style = looks.arch(entry["model"])
            labels, values = [escape(label) for label in entry["axes"]["category"]], entry["values"]
            figure.add_trace(
                go.Scatterpolar(
                    r=[*values, values[0]],
                    theta=[*labels, labels[0]],
                    name=escape(entry["label"]),
                    line={"color": style.colour, "dash": style.dash},
                    marker={"symbol": style.symbol, "size": 8},
                    text=hover("{}: {:.3f}", [*labels, labels[0]], [*values, values[0]]),
                    hovertemplate="%{text}",
                )
            )
        axis = {"gridcolor": theme.grid, "linecolor": theme.muted}
        return figure.update_layout(
            polar={"bgcolor": theme.background, "radialaxis": {**axis, "rangemode": "tozero"}, "angularaxis": axis}
        )
