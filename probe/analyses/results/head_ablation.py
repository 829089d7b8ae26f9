"""HeadAblation: what ablating each head does to a metric, with intervals and corrected for the number of heads. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from visitlens.probe.drawing.series import digits, series, with_interval
from visitlens.probe.measures.grouped import Grouped, about_stat, check_integers, checked_about, checked_text, header
from visitlens.probe.measures.measure import StatArray, json_numbers

ABLATION = "ablation"


@dataclass(frozen=True)
class TopHead:
    """The head whose ablation hurts most, by how much, and how surely: `p_holm` is corrected for all heads tried, `lead`
    is its effect minus the runner-up's."""

    layer: int
    head: int
    effect: StatArray
    p_holm: float
    runner_up: tuple[int, int] | None
    lead: StatArray | None


@dataclass(frozen=True)
class HeadAblation:
    """What the metric changes by when a head is ablated. `about` holds settings and provenance."""

    name: str
    metric: str
    mode: str
    grouped_intact: Grouped
    grouped_effect: Grouped
    about: Mapping[str, Any]

    @cached_property
    def effect(self) -> StatArray:
        """[visits, layer, head] metric with the head ablated minus without; `visits` labels are "1", "2", "1+2"."""
        return self.grouped_effect.stat(**about_stat(self.about))

    @cached_property
    def intact(self) -> StatArray:
        """The metric of the intact model."""
        return self.grouped_intact.stat(**about_stat(self.about))

    @property
    def every_visit(self) -> str:
        """The label of ablation at all visits together."""
        return self.effect.labels["visits"][-1]

    def p_values(self, visits: str | None = None) -> np.ndarray:
        """[layer, head] two-sided, from the effect over its bootstrap standard error; NaN where there is no interval."""
        chosen = self.effect.sel(visits=visits or self.every_visit)
        if chosen.replicates is None:
            return np.full(chosen.values.shape, np.nan)
        spread = chosen.replicates.std(0, ddof=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            score = np.abs(chosen.values) / spread
        score[(chosen.values == 0) & (spread == 0)] = 0.0  # a head that does nothing at all
        return np.vectorize(lambda z: math.erfc(z / math.sqrt(2)), otypes=[float])(score)

    @property
    def units(self) -> str:
        """What the bootstrap draws: prompts or documents."""
        settings = self.about.get("settings")
        return "prompts" if isinstance(settings, Mapping) and "dyck" in settings else "documents"

    def p_holm(self, visits: str | None = None) -> np.ndarray:
        """[layer, head] p values, corrected by Holm's method for all these heads."""
        return holm(self.p_values(visits))

    def top(self, visits: str | None = None) -> TopHead:
        """The head whose ablation raises the metric most; at all visits together by default."""
        chosen = self.effect.sel(visits=visits or self.every_visit)
        order = np.argsort(-chosen.values, axis=None, kind="stable")
        (layer, head), *rest = (np.unravel_index(i, chosen.values.shape) for i in order[:2])
        layers, heads = chosen.labels["layer"], chosen.labels["head"]
        effect = chosen.sel(layer=layers[layer], head=heads[head])
        runner_up, lead = None, None
        if rest:
            runner_up = layers[rest[0][0]], heads[rest[0][1]]
            second = chosen.sel(layer=runner_up[0], head=runner_up[1])
            lead = effect.combine(second, np.subtract, effect.measure)
        return TopHead(layers[layer], heads[head], effect, float(self.p_holm(visits)[layer, head]), runner_up, lead)

    def note(self) -> str:
        """The finding in one or two sentences."""
        top = self.top()
        heads = self.effect.values[0].size
        text = (
            f"Ablating layer {top.layer}, head {top.head} at every visit raises {self.metric} most: by "
            f"{_with_interval(top.effect)} {self.effect.measure.unit} over {digits(self.intact.values)}"
        )
        if not math.isnan(top.p_holm):
            p = "p < 0.001" if top.p_holm < 0.001 else f"p = {top.p_holm:.3f}"
            text += f" ({p} by Holm's correction for {heads} heads)"
        if top.lead is not None and top.runner_up is not None:
            text += f"; that is {_with_interval(top.lead)} more than the next, layer {top.runner_up[0]}, head {top.runner_up[1]}"
        return text + "."

    def to_dict(self) -> dict[str, Any]:
        return {
            **header(ABLATION, self.name, self.about),
            "metric": self.metric,
            "mode": self.mode,
            "note": self.note(),
            "p_holm": json_numbers(np.stack([self.p_holm(visits) for visits in self.effect.labels["visits"]])),
            "intact": self.grouped_intact.to_dict(),
            "effect": self.grouped_effect.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HeadAblation:
        intact, effect = Grouped.from_dict(data["intact"]), Grouped.from_dict(data["effect"])
        if effect.measure.axes != ("visits", "layer", "head") or intact.measure.axes or not effect.total[0].size:
            raise ValueError(f"axes {intact.measure.axes} and {effect.measure.axes}")
        if not all(isinstance(label, str) for label in effect.labels["visits"]):
            raise ValueError("visits must be texts")
        check_integers(effect.labels["layer"], effect.labels["head"])
        name, metric, mode = (checked_text(data[key]) for key in ("name", "metric", "mode"))
        return cls(name, metric, mode, intact, effect, checked_about(data["about"]))


def _with_interval(stat: StatArray) -> str:
    return with_interval(series(stat, "", "observed", ""))


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's step-down correction over all elements; NaN stays NaN and isn't counted."""
    flat = p.ravel()
    known = np.flatnonzero(~np.isnan(flat))
    order = known[np.argsort(flat[known], kind="stable")]
    corrected = np.full(flat.shape, np.nan)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(flat[order] * np.arange(len(order), 0, -1)))
    return corrected.reshape(p.shape)
