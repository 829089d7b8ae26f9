"""The compute-optimal frontier of each architecture, and the compute that the target saves with its bracket (SMELT Figure 1b, Table 4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import frame
from visitlens.probe.drawing.theme import Theme, escape
from visitlens.probe.scaling.figure import CELLS, Looks, TableFigure, hover, numbers, points
from visitlens.probe.scaling.study import Laws, Study, log_range
from visitlens.probe.scaling.table import LAW


class Frontier(TableFigure):
    slug = "frontier"
    paper = "4.3, Figure 1b and the table of CE Gain"
    title = "Compute-optimal frontier and compute saved"
    question = (
        "How low can the loss be for a compute budget, and how much compute does the target save at the same loss?"
    )
    order = 1
    needs = LAW

    def content(self, study: Study) -> dict[str, Any]:
        return self.of_laws(study.laws)

    def of_laws(self, laws: Laws) -> dict[str, Any]:
        """As `content`, from surfaces alone."""
        low = min(w.compute[0] for w in laws.windows.values())
        high = max(w.compute[1] for w in laws.windows.values())
        budgets = log_range(low, max(high, *laws.budgets))
        drawn: dict[str, Any] = {}
        for arch in laws.archs:
            found = laws.frontier(arch, budgets)
            for level in laws.levels:
                marks = [found.mark(c, level.name) for c in budgets]
                stat = found.stat.sel(level=level.name)
                extra = {"budgets": budgets, "marks": marks, "level": level.name, "part": "frontier"}
                drawn[f"frontier.{arch}.{level.name}"] = points(stat, arch, f"{arch}, S {level.name}", **extra)
        notes = [f"{warning.rstrip('.')}." for warning in laws.warnings]
        if laws.target:
            found = laws.gain()
            for level in laws.levels:
                stat = found.stat.sel(level=level.name)
                marks = [found.mark(c, level.name) for c in laws.budgets]
                extra = {"budgets": list(laws.budgets), "marks": marks, "level": level.name, "part": "gain"}
                entry = points(stat, laws.target, f"saved, S {level.name}", **extra)
                if laws.brackets:
                    entry |= {
                        side: numbers(
                            [laws.brackets.get((c, level.name), (float("nan"),) * 2)[at] for c in laws.budgets]
                        )
                        for at, side in enumerate(("low", "high"))
                    }
                drawn[f"gain.{level.name}"] = entry
                notes += [
                    f"S {level.name} at {c:.3g} FLOPs: {mark}."
                    for c, mark in zip(laws.budgets, marks, strict=True)
                    if mark
                ]
        if laws.draws is not None:
            notes.append(f"Bootstrap: {laws.draws.describe()}.")
        notes.append("Drawn thin, or with open markers: the budget or its optimum lies outside what was trained.")
        interval = (
            "95% intervals as printed"
            if laws.brackets
            else CELLS
            if laws.draws is not None
            else "none: no bootstrap was asked for"
        )
        counted = f"{len(laws.archs)} fitted surfaces"
        return {
            "series": drawn,
            "levels": [level.name for level in laws.levels],
            "notes": notes,
            "interval": interval,
            "counted": counted,
            "target": laws.target,
        }

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        both = bool(data["target"])
        titles = ["lowest loss for a budget", "compute saved at the same loss"]
        panels = {
            "rows": 1,
            "cols": 2 if both else 1,
            "horizontal_spacing": 0.1,
            "subplot_titles": titles[: 2 if both else 1],
        }
        figure = frame(data, theme, width=1020 if both else 680, height=560, panels=panels)
        looks = Looks(theme, data["archs"], data["levels"])
        for entry in data["series"].values():
            (_line if entry["part"] == "frontier" else _gain)(figure, entry, looks)
        figure.update_xaxes(type="log", title_text="compute budget C (training FLOPs)", exponentformat="power", dtick=1)
        figure.update_yaxes(title_text="frontier loss (nats per token)", row=1, col=1)
        if both:
            figure.add_hline(y=0, line={"color": theme.muted, "dash": "dot", "width": 1}, row=1, col=2)  # pyright: ignore[reportArgumentType]
            figure.update_yaxes(
                title_text=f"compute that {escape(data['target'])} saves", tickformat=".0%", row=1, col=2
            )
        return figure


def _line(figure: go.Figure, entry: Mapping[str, Any], looks: Looks) -> None:
    """Thick where budget and optimum lie inside the runs, thin beyond."""
    colour, style = looks.colour(entry["level"]), looks.arch(entry["model"])
    inside = [None if mark else value for value, mark in zip(entry["values"], entry["marks"], strict=True)]
    for values, width, legend in ((entry["values"], 1.0, False), (inside, 2.6, True)):
        figure.add_trace(
            go.Scatter(
                x=entry["budgets"],
                y=values,
                mode="lines",
                name=escape(entry["label"]),
                legendgroup=entry["label"],
                showlegend=legend,
                line={"color": colour, "dash": style.dash, "width": width},
                text=hover("{:.3g} FLOPs: {:.4f}", entry["budgets"], values),
                hovertemplate="%{text}",
            ),
            row=1,
            col=1,
        )


def _gain(figure: go.Figure, entry: Mapping[str, Any], looks: Looks) -> None:
    colour = looks.colour(entry["level"])
    known = [
        v is not None and a is not None and b is not None
        for v, a, b in zip(entry["values"], entry["low"], entry["high"], strict=True)
    ]
    up = [h - v if k else 0 for v, h, k in zip(entry["values"], entry["high"], known, strict=True)]
    down = [v - a if k else 0 for v, a, k in zip(entry["values"], entry["low"], known, strict=True)]
    shift = 1.06 ** (looks.names.index(entry["level"]) - (len(looks.names) - 1) / 2)  # brackets beside each other
    bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "width": 3, "thickness": 1.4}
    figure.add_trace(
        go.Scatter(
            x=[budget * shift for budget in entry["budgets"]],
            y=entry["values"],
            mode="lines+markers",
            name=escape(entry["label"]),
            line={"color": colour, "width": 1, "dash": "dash"},
            marker={
                "color": colour,
                "size": 10,
                "symbol": ["diamond-open" if mark else "diamond" for mark in entry["marks"]],
            },
            error_y=bars if any(known) else None,
            text=hover("{:.3g} FLOPs: {:.1%}", entry["budgets"], entry["values"]),
            hovertemplate="%{text}",
        ),
        row=1,
        col=2,
    )
