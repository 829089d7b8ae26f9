"""TransformerLens' calls on models that are read through an adapter, by visit: `run_with_cache`, `run_with_hooks`.

Names are those of the native model's hook points: `blocks.3.visit.2.attn.hook_rot_q`, with `visit.*` for every visit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.core.loop_plan import Step
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.core.sites import SITES

Hook = Callable[..., Any]
NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
_NAME = re.compile(r"blocks\.(?P<layer>\d+)\.(?:visit\.(?P<visit>\d+|\*)\.)?(?P<point>.+)")
_POINTS = {site.hook: site.name for site in SITES.values()}
_BY_NAME_ONLY = {"P", "expert_out"}
"""What costs a map, or a second run of the experts."""


@dataclass
class VisitPoint:
    """What a hook function gets as `hook`: the name with its visit, and the step (None outside the layers)."""

    name: str
    step: Step | None

    @property
    def visit(self) -> int | None:
        return None if self.step is None else self.step.visit

    @property
    def layer(self) -> int | None:
        return None if self.step is None else self.step.layer


class FamiliarCalls(InstrumentedModel):
    """Of models that capture and `intervene` reach by site and step."""

    @torch.no_grad()
    def run_with_cache(
        self,
        tokens: Tensor,
        names_filter: NamesFilter = None,
        pos_slice: slice | int | None = None,
        remove_batch_dim: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits and the values of every site the model has, by name with the visit.

        `names_filter` is a name (with a visit, `*` or none), several, or a function of the name with its visit; None leaves
        out what is costly (patterns, each expert's output). `pos_slice` cuts positions.

        Raises:
            InputError: a name that matches nothing; the message says what there is.
        """
        places = self._chosen(names_filter)
        with capture(self, dict.fromkeys(site for site, _ in places)) as captured:
            logits = self(tokens)
        assert logits is not None
        length = tokens.shape[1]
        return logits, {
            (name := self._name(site, step)): cut(
                captured.at(site, step.index), name, length, pos_slice, remove_batch_dim
            )
            for site, step in places
            if captured.held(site, step.index) is not None
        }

    @torch.no_grad()
    def run_with_hooks(self, tokens: Tensor, fwd_hooks: Sequence[tuple[str, Hook]] = ()) -> Tensor:
        """Logits, with hook functions `(value, hook)` at named visits; what one returns takes the value's place.

        Raises:
            InputError: no such hook point or visit, a looped layer's name without a visit, or a model that can only be read.
        """
        by_place: dict[tuple[str, Step], list[Hook]] = {}
        for name, function in fwd_hooks:
            for place in self._places(name, need_visit=True):
                by_place.setdefault(place, []).append(function)

        def change(site: str, step: Step, value: Tensor, there: Tensor | None) -> Tensor | None:
            changed = None
            for function in by_place[site, step]:
                result = function(value if changed is None else changed, hook=VisitPoint(self._name(site, step), step))
                changed = changed if result is None else result
            return changed

        with self.changing(by_place, change):
            logits = self(tokens)
        assert logits is not None
        return logits

    def _name(self, site: str, step: Step) -> str:
        return f"blocks.{step.layer}.visit.{step.visit}.{SITES[site].hook}"

    def _chosen(self, names_filter: NamesFilter) -> list[tuple[str, Step]]:
        everything = [(site, step) for site in self._sites() for step in self._steps(site)]
        if names_filter is None:
            return [place for place in everything if place[0] not in _BY_NAME_ONLY]
        if callable(names_filter):
            return [place for place in everything if names_filter(self._name(*place))]
        names = [names_filter] if isinstance(names_filter, str) else list(names_filter)
        return [place for name in names for place in self._places(name)]

    def _sites(self) -> list[str]:
        return [site for site in SITES if site not in self.config.missing]

    def _steps(self, site: str) -> list[Step]:
        absent = self.absent_steps().get(site, {})
        return [step for step in self.plan.steps if step.index not in absent]

    def _places(self, name: str, need_visit: bool = False) -> list[tuple[str, Step]]:
        match = _NAME.fullmatch(name)
        if match is None or int(match["layer"]) not in self.plan.visits:
            raise InputError(
                f"no hook point {name!r}; names are blocks.LAYER.visit.VISIT.POINT, layers 0 to {len(self.plan.visits) - 1}"
            )
        site, layer = _POINTS.get(match["point"]), int(match["layer"])
        if site is None or site in self.config.missing:
            why = f": {self.config.missing[site]}" if site else ""
            points = ", ".join(SITES[s].hook for s in self._sites())
            raise InputError(f"no hook point {match['point']!r} in layer {layer}{why}; it has {points}")
        visits = self.plan.visits[layer]
        if match["visit"] is None and visits > 1 and need_visit:
            raise InputError(
                f"layer {layer} runs {visits} times: name the visit, blocks.{layer}.visit.1.{match['point']}, or all of them, "
                f"blocks.{layer}.visit.*.{match['point']}"
            )
        chosen = match["visit"] if match["visit"] not in (None, "*") else None
        steps = [s for s in self._steps(site) if s.layer == layer and (chosen is None or s.visit == int(chosen))]
        if not steps:
            if why := self.config.absent.get(site, {}).get(layer):
                raise InputError(f"no hook point {match['point']!r} in layer {layer}: {why}")
            raise InputError(f"no visit {chosen} of layer {layer}: it runs {visits} times")
        return [(site, step) for step in steps]


def cut(value: Tensor, name: str, length: int, pos_slice: slice | int | None, remove_batch_dim: bool) -> Tensor:
    """The positions of an axis as long as the tokens: the query axis of scores and patterns, else the second."""
    if pos_slice is not None:
        axis = value.ndim - 2 if name.endswith(("hook_pattern", "hook_attn_scores")) else 1
        if value.ndim > axis and value.shape[axis] == length:
            chosen = slice(pos_slice, pos_slice + 1 or None) if isinstance(pos_slice, int) else pos_slice
            value = value[(slice(None),) * axis + (chosen,)]
    return value.squeeze(0) if remove_batch_dim and value.ndim and value.shape[0] == 1 else value
