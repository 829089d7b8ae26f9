"""Axes of measures: what labels their elements, by the plan of steps and the model's configuration. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from visitlens.hooks.core.loop_plan import ExecutionPlan

STAGES = ("X", "Q", "K", "V", "PV", "O")
Q_STAGES = ("Q", "PV")
KV_STAGES = ("K", "V")
COMPONENTS = ("update", "attn_write", "moe_write", "norm_output_attn", "norm_output_moe")

Labels = Callable[[ExecutionPlan, Mapping[str, Any]], Sequence[Any]]


@dataclass(frozen=True)
class Axis:
    """`labels(plan, config)`, one for each element. `layers(label)`: the physical layers that an element speaks of.
    `sites`: label -> the site that the element is computed from, where a model may lack one of them."""

    labels: Labels
    layers: Callable[[Any], tuple[int, ...]] = lambda label: ()
    sites: Mapping[Any, str] = field(default_factory=dict)


def _numbered(name: str, more: int = 0) -> Axis:
    return Axis(lambda plan, config: range(int(config.get(name) or 0) + more))


def _named(*names: str) -> Axis:
    return Axis(lambda plan, config: names)


_STEPS = Axis(lambda plan, config: plan.steps, lambda step: (step.layer,))

AXES: Mapping[str, Axis] = {
    "step": _STEPS,
    "later_step": _STEPS,
    "pair": Axis(lambda plan, config: plan.pairs, lambda pair: (pair.layer,)),
    "head": _numbered("num_heads"),
    "kv_head": _numbered("num_kv_heads"),
    "expert": _numbered("num_experts"),
    "later_expert": _numbered("num_experts"),
    "shared": _numbered("experts_per_token", more=1),
    "stage": Axis(lambda plan, config: STAGES, sites={**{s: s for s in STAGES}, "O": "attn_write"}),
    "q_stage": _named(*Q_STAGES),
    "kv_stage": _named(*KV_STAGES),
    "component": _named(*COMPONENTS),
}
"""Name -> axis. A statistic names those of its own in `Statistic.axes`."""


def labels_of(axis: str, plan: ExecutionPlan, config: Mapping[str, Any], size: int) -> list[Any]:
    """The labels of a recorded axis; numbers from 0 where neither the recording nor this version knows any."""
    known = list(AXES[axis].labels(plan, config)) if axis in AXES else []
    return known if len(known) == size else list(range(size))


def one_way(axes: Sequence[str], unit: str) -> bool:
    """How recordings of version 0.1 tell that visits can't be exchanged: no attribute does so for these, so that they go on."""
    return "pair" in axes and unit == "ratio"


def own_labels(attributes: Mapping[str, str], axes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """What a recording says of axes that this version doesn't know; nothing where it isn't readable."""
    try:
        found = json.loads(attributes.get("labels", "{}"))
        return {str(axis): tuple(map(str, labels)) for axis, labels in found.items() if axis in axes}
    except (ValueError, TypeError, AttributeError):
        return {}
