"""Compute saved by category of the text and by quartile of the reference's source loss (SMELT Figure 19)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.errors import InputError
from visitlens.probe.drawing.drawing import frame
from visitlens.probe.drawing.theme import Theme
from visitlens.probe.scaling.figure import TableFigure, hover, points
from visitlens.probe.scaling.frontier import Level
from visitlens.probe.scaling.study import Study
from visitlens.probe.scaling.subset import fit_parts, quartile_sizes, quartiles
from visitlens.probe.scaling.table import LAW

_TITLES = {"category": "by category", "quartile": "by quartile of the reference's source loss"}


class SubsetGain(TableFigure):
    slug = "subset-gain"
    paper = "5.2, Figure 19"
    title = "Compute saved by part of the text"
    question = "Is the compute saved the same on all kinds of text, and on what the reference predicts well and badly?"
    order = 19
    interval = "none: intercepts refitted once to each part"
    needs = LAW
    pair = True

    def content(self, study: Study) -> dict[str, Any]:
        if not study.table.has("category") and not study.table.has("source"):
            raise InputError(f"figure {self.slug} needs the column category or source; {study.table.name} has neither")
        laws = study.laws
        compute, level = central(laws.budgets, laws.levels)
        drawn, notes = {}, [f"At {compute:.3g} FLOPs and S {level.name}; a, b, c are those of the fit to all text."]
        for column in ("category", "source"):
            if not study.table.has(column):
                continue
            parts = fit_parts(study.table, study.fits, column, study.levels)
            gains = parts.gain(study.target, study.reference, compute, level.sparsity)
            if column == "category":
                drawn[column] = points(gains, study.target, "compute saved", panel=column)
            elif len(parts.parts) >= 4:
                found = quartiles(study.table, gains, study.target, study.reference)
                sizes = quartile_sizes(len(parts.parts))
                drawn["quartile"] = points(found, study.target, "compute saved", panel="quartile")
                notes.append(
                    f"{len(parts.parts)} sources in quartiles of {', '.join(map(str, sizes))}, Q1 the lowest loss of {study.reference}."
                )
            else:
                notes.append(f"{len(parts.parts)} sources are too few for quartiles.")
        if not drawn:
            raise InputError(f"figure {self.slug}: {study.table.name} has neither categories nor four sources")
        return {"series": drawn, "notes": notes}

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        shown = list(data["series"].values())
        titles = [_TITLES[entry["panel"]] for entry in shown]
        panels = {
            "rows": 1,
            "cols": len(shown),
            "shared_yaxes": True,
            "horizontal_spacing": 0.06,
            "subplot_titles": titles,
        }
        figure = frame(data, theme, width=460 * len(shown) + 160, height=480, panels=panels, lines=False)
        for col, entry in enumerate(shown, 1):
            (labels,) = entry["axes"].values()
            order = (
                sorted(range(len(labels)), key=lambda i, e=entry: -(e["values"][i] or 0))
                if entry["panel"] == "category"
                else range(len(labels))
            )
            values = [entry["values"][i] for i in order]
            figure.add_trace(
                go.Bar(
                    x=[labels[i] for i in order],
                    y=values,
                    marker_color=theme.paler(theme.visits[1]),
                    text=["" if v is None else f"{100 * v:.1f}%" for v in values],
                    textposition="outside",
                    showlegend=False,
                    hovertext=hover("{}: {:.1%}", [labels[i] for i in order], values),
                    hovertemplate="%{hovertext}",
                ),
                row=1,
                col=col,
            )
        figure.update_xaxes(type="category")
        return figure.update_yaxes(title_text="compute saved", tickformat=".0%", col=1)


def central(budgets: tuple[float, ...], levels: tuple[Level, ...]) -> tuple[float, Level]:
    """The middle budget and level, as the paper's 1e21 FLOPs and 95 %."""
    return budgets[len(budgets) // 2], levels[len(levels) // 2]
