"""Eight cross-visit diagnostics over scale and sparsity (SMELT 6.2, html Figure 23)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go

from visitlens.probe.drawing.drawing import cell_map, diverging, frame, sequential
from visitlens.probe.drawing.series import series
from visitlens.probe.drawing.theme import Theme
from visitlens.probe.gallery.figure import Figure
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun

_SIMILARITY: dict[str, tuple[str, Callable[[RecordedRun], StatArray]]] = {
    "top8_overlap": ("top-8 attended tokens", lambda run: run.attended("top8_overlap").mean("head")),
    "mass_overlap": ("attention mass", lambda run: run.attended("mass_overlap").mean("head")),
    "expert_overlap": ("experts, of k", RecordedRun.expert_overlap),
    "update_cosine": ("update cosine", RecordedRun.update_cosine_same_layer),
}
_RATIOS = {
    "update": "whole update",
    "attn_write": "attention write",
    "moe_write": "MoE write",
    "norm_output": "RMSNorm output",
}


class GridDiagnostics(Figure):
    slug = "grid-diagnostics"
    html, pdf = "23", "14"
    title = "Eight comparisons of two visits, by scale and sparsity"
    question = "Do the visits' likeness and the growth of what is written hold at every scale and sparsity?"
    over = "grid"
    panels_of_a_pair = True

    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        drawn = {
            name: series(read(looped).mean("layer"), "looped", "observed", title)
            for name, (title, read) in _SIMILARITY.items()
        }
        for component, title in _RATIOS.items():
            ratio = looped.norm_ratio(component).mean("layer")
            drawn[f"ratio_{component}"] = series(ratio, "looped", "observed", title)
        k, experts = (looped.recording.config[name] for name in ("experts_per_token", "num_experts"))
        chance = looped.expert_overlap_chance_by_load().mean("layer")
        drawn["expert_overlap_by_load"] = series(chance, "looped", "control", "experts, load-aware chance")
        for name in ("top8_overlap", "mass_overlap"):
            control = looped.attended_control(name).mean("head").mean("layer")
            drawn[f"{name}_control"] = series(control, "looped", "control", f"{_SIMILARITY[name][0]}, other head")
        notes = [
            f"Controls: other head, top-8 {_number(drawn['top8_overlap_control'])}, mass {_number(drawn['mass_overlap_control'])}; "
            f"experts by chance {k / experts:.3f} uniform, {_number(drawn['expert_overlap_by_load'])} load-aware; no change is a ratio of 1."
        ]
        return {"series": drawn, "notes": notes}

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        names = [*_SIMILARITY, *(f"ratio_{component}" for component in _RATIOS)]
        words = [*(title for title, _ in _SIMILARITY.values()), *_RATIOS.values()]
        panels = {
            "rows": 2,
            "cols": 4,
            "horizontal_spacing": 0.045,
            "vertical_spacing": 0.2,
            "subplot_titles": [f"({letter}) {title}" for letter, title in zip("abcdefgh", words, strict=True)],
        }
        figure = frame(data, theme, width=1200, height=640, panels=panels, lines=False)
        for at, name in enumerate(names):
            row, col = at // 4 + 1, at % 4 + 1
            cell_map(figure, data, name, theme, row=row, col=col, coloraxis="coloraxis" if row == 1 else "coloraxis2")
        figure.update_xaxes(title_text="scale", row=2)
        figure.update_yaxes(title_text="sparsity S", col=1)
        entries = [entry for key, entry in data["series"].items() if key.split(".")[-1] in names]
        likeness = [e["values"] for e in entries if e["measure"]["unit"] != "ratio" and e["values"] is not None]
        ratios = [e["values"] for e in entries if e["measure"]["unit"] == "ratio" and e["values"] is not None]
        similar = diverging(1.0, "likeness") if min(likeness, default=0) < 0 else sequential(1.0, "likeness")
        reach = max((abs(value - 1) for value in ratios), default=1.0) or 1.0
        change = {**diverging(reach, "later / earlier"), "cmin": 1 - reach, "cmax": 1 + reach}
        for axis, middle in ((similar, 0.8), (change, 0.2)):
            axis["colorbar"] |= {"len": 0.42, "y": middle, "yanchor": "middle"}
        return figure.update_layout(coloraxis=similar, coloraxis2=change)


def _number(entry: Mapping[str, Any]) -> str:
    return "not measured" if entry["values"] is None else f"{entry['values']:.3f}"
