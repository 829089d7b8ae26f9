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
from visitlens.probe.measures.sign_flips import FlipTest, flip_test

ABLATION = "ablation"


SURE = 0.05
"""The largest corrected p at which a head is called different from no effect."""


class _Tests(dict[str, FlipTest]):
    """Visits -> the tests of all heads there, made when first asked for."""

    def __init__(self, effect: Grouped) -> None:
        self._effect = effect

    def __missing__(self, visits: str) -> FlipTest:
        at = list(self._effect.labels["visits"]).index(visits)
        self[visits] = flip_test(self._effect.total[:, at], self._effect.count[:, at])
        return self[visits]


@dataclass(frozen=True)
class TopHead:
    """The head whose ablation hurts most, by how much, and how surely: `p_family` is corrected for all heads tried, `found`
    whether it is told apart from no effect (`HeadAblation.found`), `lead` its effect minus the runner-up's."""

    layer: int
    head: int
    effect: StatArray
    p_family: float
    found: bool
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
        """[layer, head] two-sided, by sign flips over prompts or documents (`sign_flips`), of each head alone; NaN where there are
        too few for an interval."""
        return self._tests[visits or self.every_visit].p

    def p_family(self, visits: str | None = None) -> np.ndarray:
        """[layer, head] the same, corrected for all these heads by the largest statistic among them."""
        return self._tests[visits or self.every_visit].p_family

    def found(self, visits: str | None = None) -> np.ndarray:
        """[layer, head] whether a head is told apart from no effect: its corrected p is at most 0.05, and its own 95 % interval
        leaves 0 out. What pages, figures and notes call found."""
        low, high = self.effect.sel(visits=visits or self.every_visit).interval()
        return (self.p_family(visits) <= SURE) & ((low > 0) | (high < 0))

    @cached_property
    def _tests(self) -> _Tests:
        return _Tests(self.grouped_effect)

    @property
    def units(self) -> str:
        """What is independent of each other, and counted: prompts or documents."""
        settings = self.about.get("settings")
        return "prompts" if isinstance(settings, Mapping) and "dyck" in settings else "documents"

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
        p, found = (of(visits)[layer, head] for of in (self.p_family, self.found))
        return TopHead(layers[layer], heads[head], effect, float(p), bool(found), runner_up, lead)

    def note(self) -> str:
        """The finding in one or two sentences."""
        top = self.top()
        heads = self.effect.values[0].size
        text = (
            f"Ablating layer {top.layer}, head {top.head} at every visit raises {self.metric} most: by "
            f"{_with_interval(top.effect)} {self.effect.measure.unit} over {digits(self.intact.values)}"
        )
        if not math.isnan(top.p_family):
            p = "p < 0.001" if top.p_family < 0.001 else f"p = {top.p_family:.3f}"
            text += f" ({p} by sign flips over {self.units}, corrected for {heads} heads{'' if top.found else ': not told apart from no effect'})"
        if top.lead is not None and top.runner_up is not None:
            text += f"; that is {_with_interval(top.lead)} more than the next, layer {top.runner_up[0]}, head {top.runner_up[1]}"
        return text + "."

    def to_dict(self) -> dict[str, Any]:
        return {
            **header(ABLATION, self.name, self.about),
            "metric": self.metric,
            "mode": self.mode,
            "note": self.note(),
            "p_family": json_numbers(np.stack([self.p_family(visits) for visits in self.effect.labels["visits"]])),
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
