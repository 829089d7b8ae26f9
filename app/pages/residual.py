"""Residual: the stream's norm, what each visit writes into it, and how alike the writes of two visits are."""

from __future__ import annotations

from typing import Any

from visitlens.app.panels.panel import Panel, lines_panel
from visitlens.app.panels.paper_figures import registered_panel
from visitlens.app.panels.plots import Level, Line
from visitlens.app.view.view import View
from visitlens.errors import VisitlensError
from visitlens.probe.measures.axes import COMPONENTS
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.two_visits import two_visits

PATH, TITLE, ORDER = "/residual", "Residual", 21
NEEDS = ("looped",)
CONTROLS = ("visits", "agg")
AGGREGATIONS = {"mean": "ratio of means", "token": "mean of each token's ratio"}
_WORDS = {
    "update": "update",
    "attn_write": "attention write",
    "moe_write": "MoE write",
    "norm_output": "RMSNorm output",
    "norm_output_attn": "RMSNorm before attention",
    "norm_output_moe": "RMSNorm before the MoE",
}


def layout(view: View) -> list[Any]:
    panels = [
        _norms(view, name) for name in ("resid_rms", "update_rms", "relative_update") if name in view.recorded.measures
    ]
    return [
        p for p in [*panels, _ratios(view), _cosines(view), registered_panel(view, "update-cosine", wide=True)] if p
    ]


def _norms(view: View, name: str) -> Panel:
    two = two_visits(view.recorded, name, view.visits)
    drawn = [Line(label, stat, visit) for (label, stat), visit in zip(two.present.items(), two.visits, strict=False)]
    return lines_panel(
        view,
        name.replace("_", "-"),
        drawn[0].stat.measure.title,
        drawn,
        f"earlier, later = rec.both_visits({name!r}, visits={view.visits})\nlater.plot()",
        links={"path": "/layers", "x": "layer"},
    )


def _ratios(view: View) -> Panel | None:
    run, visits = view.recorded, view.visits
    found: list[tuple[str, StatArray]] = []
    by_token = view.selection.agg == "token"
    try:
        if by_token:
            stat = run.between_visits("token_norm_ratio", visits)
            found = [(_WORDS[c], stat.sel(component=c)) for c in COMPONENTS]
        else:
            found = [
                (_WORDS[c], run.norm_ratio(c, visits)) for c in ("update", "attn_write", "moe_write", "norm_output")
            ]
    except VisitlensError:
        return None
    code = (
        f"rec.between_visits('token_norm_ratio', visits={visits}).plot()"
        if by_token
        else f"rec.norm_ratio('update', visits={visits}).plot()"
    )
    return lines_panel(
        view,
        "norm-ratios",
        f"Norms: visit {visits[1]} over visit {visits[0]}",
        [Line(label, stat, f"part {at}") for at, (label, stat) in enumerate(found, 1)],
        code,
        levels=[Level("no change", 1.0)],
        unit="ratio",
        notes=[f"Aggregation: {AGGREGATIONS['token' if by_token else 'mean']}."],
        links={"path": "/layers", "x": "layer"},
    )


def _cosines(view: View) -> Panel | None:
    run, visits = view.recorded, view.visits
    try:
        same, other = run.update_cosine_same_layer(visits), run.update_cosine_other_layers(visits)
    except VisitlensError:
        return None
    levels = [Level("orthogonal", 0.0)]
    notes = []
    if other.values.size:
        mean = other.mean("layer_pair")
        low, high = mean.interval()
        levels.append(Level("different layers", float(mean.values)))
        notes = [
            f"Control: updates of different layers at the two visits, mean {float(mean.values):.3f} [{float(low):.3f}, {float(high):.3f}]."
        ]
    return lines_panel(
        view,
        "update-cosine-layer",
        "Update cosine, same layer at both visits",
        [Line("same layer", same, "plain")],
        f"rec.update_cosine_same_layer(visits={visits}).plot()",
        levels=levels,
        notes=notes,
        links={"path": "/layers", "x": "layer"},
    )
