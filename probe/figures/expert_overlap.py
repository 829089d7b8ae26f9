"""How many experts two visits share, against chance (SMELT 6.1, html Figure 21)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import comb
from typing import Any

import numpy as np
import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import bars, empty_panel, frame, told
from visitlens.probe.drawing.series import reference, series, with_interval
from visitlens.probe.drawing.theme import Theme, escape
from visitlens.probe.gallery.figure import Figure, panel_series
from visitlens.probe.measures.measure import Measure
from visitlens.probe.reading.pair import Pair, first_and_last
from visitlens.probe.reading.recorded_run import RecordedRun


class ExpertOverlap(Figure):
    slug = "expert-overlap"
    html, pdf = "21", "12"
    title = "Experts shared between two visits"
    question = (
        "Does a token use the same experts when it comes through a layer again, more often than chance would have it?"
    )
    over = "column"

    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        histogram = looped.shared_experts().mean("layer")
        count = looped.between_visits("shared_expert_count").mean("layer")
        by_load = looped.expert_overlap_chance_by_load().mean("layer")
        config = looped.recording.config
        k, experts = config["experts_per_token"], config["num_experts"]
        distribution = hypergeometric(experts, k)
        shared = list(range(k + 1))
        drawn = {
            "observed": series(histogram, "looped", "observed", "observed"),
            "observed_mean": series(count, "looped", "summary", "observed mean"),
            "uniform_chance": reference(uniform_chance(experts, k), "uniform chance", _UNIFORM),
            "load_aware_chance": series(
                by_load.combine(k, np.multiply, _BY_LOAD), "looped", "control", "load-aware chance"
            ),
            "uniform_distribution": reference(
                distribution, "uniform chance, whole distribution", _DISTRIBUTION, {"shared": shared}
            ),
        }
        return {
            "series": drawn,
            "experts": experts,
            "experts_per_token": k,
            "visits": first_and_last(looped),
            "notes": [
                f"Observed mean {with_interval(drawn['observed_mean'])} of {k} experts; uniform chance {k * k / experts:.3f} "
                f"(k²/E, E = {experts}); load-aware chance {with_interval(drawn['load_aware_chance'])}."
            ],
        }

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        if "panels" not in data:
            figure = frame(data, theme, width=760, height=500)
            top = _top(data["series"])
            _histogram(figure, data["series"], data, theme, top, row=None, col=None, legend=True, alone=True)
            figure.update_yaxes(title_text=_SHARE, range=[0, top], tickformat=".0%")
            return figure
        shown = data["panels"]
        titles = [
            panel["title"].split(", ")[-1] + (f" (E = {panel['experts']})" if not panel["absent"] else "")
            for panel in shown
        ]
        panels = {
            "rows": 1,
            "cols": len(shown),
            "horizontal_spacing": 0.025,
            "subplot_titles": [escape(t) for t in titles],
        }
        titled = {**data, "title": f"{data['title']}: {shown[0]['scale']}"}
        figure = frame(titled, theme, width=max(760, 260 * len(shown) + 90), height=500, panels=panels)
        top = max(_top(panel_series(data, panel)) for panel in shown if not panel["absent"])
        first = next(at for at, panel in enumerate(shown) if not panel["absent"])
        for at, panel in enumerate(shown):
            if panel["absent"]:
                empty_panel(figure, theme, f"Missing: {panel['absent']}", row=1, col=at + 1, width=190)
                continue
            drawn = panel_series(data, panel)
            _histogram(figure, drawn, panel, theme, top, row=1, col=at + 1, legend=at == first, alone=False)
            figure.update_yaxes(range=[0, top], tickformat=".0%", showticklabels=at == first, row=1, col=at + 1)
        return figure.update_yaxes(title_text=_SHARE, row=1, col=first + 1)


_SHARE = "share of tokens, mean over looped layers"


def _top(drawn: Mapping[str, Any]) -> float:
    observed, chance = drawn["observed"], drawn["uniform_distribution"]
    return 1.08 * max(v for v in [*chance["values"], *observed["high"], *observed["values"]] if v is not None)


def _histogram(
    figure: go.Figure,
    drawn: Mapping[str, Any],
    about: Mapping[str, Any],
    theme: Theme,
    top: float,
    *,
    row: int | None,
    col: int | None,
    legend: bool,
    alone: bool,
) -> None:
    """Observed shares and both chances in one panel; `alone` has the chances' numbers in the legend."""
    observed = drawn["observed"]
    up, down = bars(observed)
    place: dict[str, Any] = {"showlegend": legend, "row": row, "col": col}
    figure.add_bar(
        x=observed["axes"]["shared"],
        y=observed["values"],
        name="observed",
        marker={"color": theme.paler(theme.same_head)},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": up,
            "arrayminus": down,
            "color": theme.ink,
            "thickness": 1.4,
        },
        customdata=list(map(told, observed["values"], observed["low"], observed["high"])),
        hovertemplate="%{x} shared: %{customdata}",
        **place,
    )
    distribution = drawn["uniform_distribution"]
    figure.add_scatter(
        x=distribution["axes"]["shared"],
        y=distribution["values"],
        name="uniform chance, whole distribution",
        mode="lines+markers",
        line={"color": theme.muted, "width": 1},
        marker={"size": 5, "color": theme.muted},
        hovertemplate="%{x} shared: %{y}",
        yhoverformat=".4f",
        **place,
    )
    for name, dash in (("uniform_chance", "dash"), ("load_aware_chance", "dot")):
        at = drawn[name]["values"]
        figure.add_scatter(
            x=[at, at],
            y=[0, top],
            name=f"{drawn[name]['label']} {at:.2f}" if alone else drawn[name]["label"],
            mode="lines",
            line={"color": theme.chance, "dash": dash, "width": 2},
            hovertemplate="%{x} shared",
            xhoverformat=".3f",
            **place,
        )
    a, b = about["visits"]
    k = about["experts_per_token"]
    words = f"experts shared between visits {a} and {b} (of {k})" if alone else f"shared experts (of {k})"
    figure.update_xaxes(title_text=words, dtick=1, range=[-0.6, k + 0.6], row=row, col=col)


def uniform_chance(experts: int, k: int) -> float:
    """Expected overlap of two independent uniform sets of k among `experts`: k * k / E, the paper's dashed line."""
    return k * k / experts


def hypergeometric(experts: int, k: int) -> list[float]:
    """P(s shared), s = 0..k, for two independent uniform sets of k among `experts`; exact until the last division."""
    whole = comb(experts, k)
    return [float(Fraction(comb(k, s) * comb(experts - k, k - s), whole)) for s in range(k + 1)]


def _count(name: str, title: str, definition: str, paper: str) -> Measure:
    return Measure(name, title, (), "experts", definition, paper)


_UNIFORM = _count(
    "uniform_chance",
    "Shared experts by uniform chance",
    "k * k / E: two independent uniform sets of k among E experts.",
    "6.1, html Figure 21",
)
_BY_LOAD = _count(
    "load_aware_chance",
    "Shared experts expected from expert loads",
    "Sum over experts of f1(e) f2(e), f_v(e) = share of tokens that use e at visit v: each visit chooses by its own loads, whatever the token.",
    "ours",
)
_DISTRIBUTION = Measure(
    "uniform_distribution",
    "Shared experts by uniform chance, whole distribution",
    ("shared",),
    "share of tokens",
    "Hypergeometric: C(k, s) C(E - k, k - s) / C(E, k).",
    "ours",
)
