"""The fitted scaling law against the runs: fitted over measured loss, and residuals over compute (SMELT 4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import frame
from visitlens.probe.drawing.theme import Theme, escape
from visitlens.probe.scaling.figure import Looks, TableFigure, hover, numbers, points
from visitlens.probe.scaling.study import Study
from visitlens.probe.scaling.table import LAW


class LawFit(TableFigure):
    slug = "law-fit"
    paper = "4.3, Eq. 2"
    title = "Scaling law: fit and residuals"
    question = "How closely does the fitted law follow the runs, and is there anything systematic in what it misses?"
    order = 9
    interval = "none: one residual an endpoint"
    needs = LAW

    def content(self, study: Study) -> dict[str, Any]:
        drawn, notes = {}, []
        for arch, fit in study.fits.items():
            table = fit.endpoints
            extra = {
                "measured": numbers(table["loss"]),
                "fitted": numbers(fit.fitted),
                "compute": numbers(table["F"] * table["D"]),
                "scales": table["scale"].tolist(),
            }
            drawn[arch] = points(fit.residual_stat(), arch, arch, **extra)
            x = fit.surface
            notes.append(
                f"{arch}: L = {x.E:.4f} + {x.A:.4g} (1-S)^{x.b:.4f} / F^{x.a:.4f} + {x.K:.4g} / D^{x.c:.4f}; RMSE {1e3 * fit.rmse:.2f} "
                f"millinats over {len(table)} endpoints; condition number {fit.condition:.2g}."
            )
            notes += [f"{warning}." for warning in fit.warnings]
        ends = sum(len(fit.endpoints) for fit in study.fits.values())
        return {"series": drawn, "notes": notes, "counted": f"{ends} endpoints"}

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        panels = {
            "rows": 1,
            "cols": 2,
            "horizontal_spacing": 0.11,
            "subplot_titles": ["fitted against measured", "measured minus fitted"],
        }
        figure = frame(data, theme, width=980, height=520, panels=panels)
        looks = Looks(theme, data["archs"])
        every = [v for entry in data["series"].values() for v in (*entry["measured"], *entry["fitted"])]
        diagonal = {"x": [min(every), max(every)], "y": [min(every), max(every)]}
        line = {"color": theme.muted, "dash": "dot", "width": 1}
        figure.add_trace(
            go.Scatter(**diagonal, mode="lines", line=line, showlegend=False, hoverinfo="skip"), row=1, col=1
        )
        figure.add_hline(y=0, line=line, row=1, col=2)  # pyright: ignore[reportArgumentType]
        for entry in data["series"].values():
            style = looks.arch(entry["model"])
            shared = {
                "mode": "markers",
                "name": escape(entry["label"]),
                "legendgroup": entry["model"],
                "marker": {"symbol": style.symbol, "color": style.colour, "size": 8},
                "text": hover(
                    "{}: {:.4f}, fitted {:.4f}", entry["axes"]["endpoint"], entry["measured"], entry["fitted"]
                ),
            }
            figure.add_trace(
                go.Scatter(x=entry["measured"], y=entry["fitted"], hovertemplate="%{text}", **shared),
                row=1,
                col=1,
            )
            residuals = [1e3 * v for v in entry["values"]]

            figure.add_trace(
                go.Scatter(x=entry["compute"], y=residuals, hovertemplate="%{text}", **{**shared, "showlegend": False}),
                row=1,
                col=2,
            )
        figure.update_xaxes(title_text="measured loss (nats per token)", row=1, col=1)
        figure.update_yaxes(title_text="fitted loss (nats per token)", row=1, col=1)
        figure.update_xaxes(type="log", title_text="training FLOPs", exponentformat="power", dtick=1, row=1, col=2)
        return figure.update_yaxes(title_text="residual (millinats)", row=1, col=2)
