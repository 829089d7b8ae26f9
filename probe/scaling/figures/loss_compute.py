"""Validation loss against cumulative training FLOPs, a panel a sparsity level (SMELT Figure 8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import frame
from visitlens.probe.drawing.theme import Theme, escape
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.scaling.figure import Looks, TableFigure, hover, numbers, points
from visitlens.probe.scaling.study import Study
from visitlens.probe.scaling.table import LAW

_LOSS = Measure(
    "endpoint_loss",
    "Validation loss of an endpoint",
    ("endpoint",),
    "nats per token",
    "Loss of a model after its last step.",
    "4.1",
)
_COLUMNS = 4


class LossCompute(TableFigure):
    slug = "loss-compute"
    paper = "4.1, Figure 8"
    title = "Validation loss against training compute"
    question = "At the same compute, which architecture has the lower loss, at every scale and sparsity level?"
    order = 8
    interval = "none: one run each"
    needs = LAW

    def content(self, study: Study) -> dict[str, Any]:
        ends = study.table.endpoints()
        levels, scales, drawn = ends.ordered("level", "S"), ends.ordered("scale", "F"), {}
        lower = pairs = 0
        losses: dict[tuple[Any, ...], float] = {}
        for level in levels:
            for scale in scales:
                for arch in study.archs:
                    mine = ends.where((ends["level"] == level) & (ends["scale"] == scale) & (ends["arch"] == arch))
                    if not len(mine):
                        continue
                    stat = StatArray(
                        _LOSS, mine["loss"], {"endpoint": [f"{d:.4g} tokens" for d in mine["D"]]}, aggregation="one run"
                    )
                    compute = mine["F"] * mine["D"]
                    entry = points(stat, arch, f"{arch}, {scale}", compute=numbers(compute), scale=scale, level=level)
                    drawn[f"{level}.{scale}.{arch}"] = entry
                    losses |= {(level, scale, arch, d): v for d, v in zip(mine["D"], mine["loss"], strict=True)}
        if study.target:
            for (level, scale, arch, d), loss in losses.items():
                other = losses.get((level, scale, study.reference, d)) if arch == study.target else None
                pairs += other is not None
                lower += other is not None and loss < other
        notes = (
            [f"{study.target} has the lower loss in {lower} of {pairs} pairs at the same scale, level and tokens."]
            if pairs
            else []
        )
        return {
            "series": drawn,
            "levels": levels,
            "scales": scales,
            "notes": notes,
            "counted": f"{len(ends)} endpoints",
        }

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        levels = data["levels"]
        cols = min(len(levels), _COLUMNS)
        rows = -(-len(levels) // cols)
        panels = {
            "rows": rows,
            "cols": cols,
            "shared_yaxes": True,
            "horizontal_spacing": 0.03,
            "vertical_spacing": 0.16,
            "subplot_titles": [f"S: {escape(level)}" for level in levels],
        }
        figure = frame(data, theme, width=max(620, 290 * cols + 80), height=200 + 320 * rows, panels=panels)
        looks, named = Looks(theme, data["archs"], data["scales"]), set()
        for entry in data["series"].values():
            at = levels.index(entry["level"])
            style, colour = looks.arch(entry["model"]), looks.colour(entry["scale"])
            name = escape(entry["label"])
            figure.add_trace(
                go.Scatter(
                    x=entry["compute"],
                    y=entry["values"],
                    name=name,
                    legendgroup=name,
                    showlegend=name not in named,
                    mode="lines+markers",
                    line={"color": colour, "dash": style.dash, "width": 1},
                    marker={"symbol": style.symbol, "color": colour, "size": 8},
                    text=hover(
                        "{}, {:.3g} FLOPs: {:.4f}", entry["axes"]["endpoint"], entry["compute"], entry["values"]
                    ),
                    hovertemplate="%{text}",
                ),
                row=at // cols + 1,
                col=at % cols + 1,
            )
            named.add(name)
        figure.update_xaxes(type="log", title_text="training FLOPs", exponentformat="power", dtick=1)
        return figure.update_yaxes(title_text="validation loss (nats per token)", col=1)
