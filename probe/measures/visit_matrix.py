"""Measures of steps and pairs laid out by layer and visit: one visit of each layer, or all of one layer as a square table. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.core.loop_plan import ExecutionPlan, Step
from visitlens.probe.measures.measure import StatArray


def visit_matrix(stat: StatArray, plan: ExecutionPlan, layer: int) -> StatArray:
    """[visit, later_visit, ...] of one layer; see `RecordedRun.visit_matrix`."""
    pairs = [(at, pair) for at, pair in enumerate(plan.pairs) if pair.layer == layer]
    if "pair" not in stat.axes or not pairs:
        raise InputError(
            f"expected a measure of pairs and a looped layer among {list(plan.looped_layers)}, got "
            f"{stat.measure.name!r} [{', '.join(stat.axes)}] and layer {layer}"
        )
    symmetric = stat.measure.symmetric and not any(axis.startswith("later_") for axis in stat.axes)
    visits = plan.visits[layer]

    def square(values: np.ndarray, lead: int) -> np.ndarray:
        values = np.moveaxis(values, stat.axes.index("pair") + lead, lead)
        table = np.full((*values.shape[:lead], visits, visits, *values.shape[lead + 1 :]), np.nan)
        for at, pair in pairs:
            cell = (pair.earlier.visit - 1, pair.later.visit - 1)
            for where in {cell, cell[::-1]} if symmetric else {cell}:
                table[(slice(None),) * lead + where] = values.take(at, lead)
        return table

    axes = ("visit", "later_visit", *(axis for axis in stat.axes if axis != "pair"))
    numbers = list(range(1, visits + 1))
    labels = {"visit": numbers, "later_visit": numbers, **{a: stat.labels[a] for a in axes[2:]}}
    return stat.rearranged(square, measure=replace(stat.measure, axes=axes), labels=labels)


def at_steps(stat: StatArray, steps: Sequence[Step]) -> StatArray:
    """A `step` measure at these steps, one a layer; by layer, the axis relabelled `layer`."""
    steps = sorted(steps, key=lambda step: step.layer)
    at, order = stat.axes.index("step"), [step.index for step in steps]
    chosen = stat.rearranged(lambda a, lead: a.take(order, at + lead), labels={**stat.labels, "step": steps})
    return relabel(chosen, "step", "layer", [step.layer for step in steps])


def relabel(stat: StatArray, old: str, new: str, labels: Sequence[Any]) -> StatArray:
    """With another name and other labels for one axis."""
    axes = tuple(new if axis == old else axis for axis in stat.axes)
    kept = {axis: values for axis, values in stat.labels.items() if axis != old}
    return replace(stat, measure=replace(stat.measure, axes=axes), labels={**kept, new: labels})
