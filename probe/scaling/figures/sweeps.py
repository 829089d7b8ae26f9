"""Sweeps over the loop's design: the paper's printed losses, and a trained sweep's beside them (SMELT 3.3 to 3.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from visitlens.errors import InputError
from visitlens.probe.drawing.drawing import frame
from visitlens.probe.drawing.theme import Style, Theme, escape
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.scaling.figure import TableFigure, hover, points
from visitlens.probe.scaling.paper import printed
from visitlens.probe.scaling.study import Study

_DIFFERENCE = Measure(
    "sweep_difference",
    "Validation loss over the sweep's Baseline",
    ("point",),
    "nats per token",
    "Loss of a point minus that of the unlooped model with the Baseline's own layers.",
    "3.3 to 3.5",
)
_X = {"span": "looped layers (share of all)", "count": "visits", "depth": "executed layers over the Baseline's"}


class Sweeps(TableFigure):
    slug = "sweeps"
    paper = "3.3 to 3.5, three tables"
    title = "Loop span, depth and loop count"
    question = "How many layers should loop, how often, and how deep should the model be, at matched budgets?"
    order = 3
    interval = "none: one run a point"
    needs = ("axis", "layers", "visits", "loss", "D")

    def content(self, study: Study) -> dict[str, Any]:
        table = study.table.where(study.table.whole & ~np.isnan(study.table["loss"]))
        (axis,) = set(table["axis"].tolist()) if len(set(table["axis"].tolist())) == 1 else (None,)
        if axis not in _X:
            raise InputError(
                f"figure {self.slug} draws one axis among {', '.join(_X)}, got {sorted(set(table['axis'].tolist()))}"
            )
        last = table.where(table["D"] == table["D"].max())
        own: list[dict[str, Any]] = [
            dict(zip(("layers", "looped", "visits", "loss"), row, strict=True))
            for row in zip(*(last[c].tolist() for c in ("layers", "looped", "visits", "loss")), strict=True)
        ]
        groups: dict[str, list[dict[str, Any]]] = {f"ours, {last['scale'][0]}": own}
        for row in printed()["sweeps"]["rows"]:
            if row["axis"] == axis:
                groups.setdefault(f"SMELT's printed, 200M, S {row['level']}", []).append(row)
        drawn = {}
        for number, (name, rows) in enumerate(groups.items()):
            for looped in (False, True) if axis == "depth" else (None,):
                chosen = [r for r in rows if looped is None or bool(r["looped"]) == looped]
                if chosen:
                    label = name if looped is None else f"{name}, {'looped' if looped else 'unlooped'}"
                    drawn[label] = _entry(chosen, rows, axis, label, study.reference, number)
        seeds = len(set(last["seed"].tolist())) if "seed" in last.columns else 1
        notes = [f"Ours: {len(own)} points at {last['D'][0]:.4g} tokens, {seeds} seed{'s' if seeds > 1 else ''} each."]
        if seeds == 1:
            notes.append(
                "One seed a point can't rank neighbours: their differences are as small as those between seeds."
            )
        return {"series": drawn, "notes": notes, "axis": axis, "counted": f"{len(own)} points"}

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        figure = frame(data, theme, width=860, height=540)
        for entry in data["series"].values():
            style = theme.visit(2) if entry["group"] == 0 else theme.part(entry["group"])
            style = Style(style.colour, style.symbol, "dot" if entry["label"].endswith("unlooped") else style.dash)
            figure.add_trace(
                go.Scatter(
                    x=entry["x"],
                    y=[1e3 * v for v in entry["values"]],
                    mode="lines+markers",
                    name=escape(entry["label"]),
                    line={"color": style.colour, "dash": style.dash},
                    marker={"symbol": style.symbol, "size": 9},
                    text=hover("{}: {:.4f} nats", entry["axes"]["point"], entry["values"]),
                    hovertemplate="%{text}",
                )
            )
        figure.add_hline(y=0, line={"color": theme.muted, "dash": "dot", "width": 1})
        figure.update_xaxes(title_text=_X[data["axis"]])
        return figure.update_yaxes(title_text="loss over the Baseline's (millinats)")


def _entry(
    chosen: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    axis: str,
    label: str,
    model: str,
    group: int,
) -> dict[str, Any]:
    """One curve, as differences from the group's unlooped model: of a depth sweep, the one with the lowest loss."""
    plain = [r for r in rows if not r["looped"]]
    if not plain:
        raise InputError(f"{label}: no unlooped point to compare with; train it too")
    base = min(plain, key=lambda r: r["loss"])
    ordered = sorted(chosen, key=lambda r: (r["layers"], r["looped"], r["visits"]))
    executed = [r["layers"] + (r["visits"] - 1) * r["looped"] for r in ordered]
    x = {
        "span": [r["looped"] / r["layers"] for r in ordered],
        "count": [float(r["visits"]) for r in ordered],
        "depth": [n / base["layers"] for n in executed],
    }[axis]
    labels = [f"{r['layers']:g} layers, {r['looped']:g} of them {r['visits']:g} times" for r in ordered]
    values = np.array([r["loss"] - base["loss"] for r in ordered])
    return points(
        StatArray(_DIFFERENCE, values, {"point": labels}, aggregation="one run a point"), model, label, x=x, group=group
    )
