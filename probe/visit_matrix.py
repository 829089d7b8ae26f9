"""A measure of pairs as a square table of one layer's visits. No torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from visitlens.hooks.loop_plan import ExecutionPlan
from visitlens.kernels.errors import InputError
from visitlens.probe.measure import StatArray


def visit_matrix(stat: StatArray, plan: ExecutionPlan, layer: int) -> StatArray:
    """[visit, later_visit, ...] of one layer; see `RecordedRun.visit_matrix`."""
    pairs = [(at, pair) for at, pair in enumerate(plan.pairs) if pair.layer == layer]
    if "pair" not in stat.axes or not pairs:
        raise InputError(
            f"expected a measure of pairs and a looped layer among {list(plan.looped_layers)}, got "
            f"{stat.measure.name!r} [{', '.join(stat.axes)}] and layer {layer}"
        )
    symmetric = stat.measure.unit != "ratio" and not any(axis.startswith("later_") for axis in stat.axes)
    visits = plan.visits[layer]

    def square(values: np.ndarray, lead: int, empty: float = np.nan) -> np.ndarray:
        values = np.moveaxis(values, stat.axes.index("pair") + lead, lead)
        table = np.full((*values.shape[:lead], visits, visits, *values.shape[lead + 1 :]), empty)
        for at, pair in pairs:
            cell = (pair.earlier.visit - 1, pair.later.visit - 1)
            for where in {cell, cell[::-1]} if symmetric else {cell}:
                table[(slice(None),) * lead + where] = values.take(at, lead)
        return table

    axes = ("visit", "later_visit", *(axis for axis in stat.axes if axis != "pair"))
    numbers = list(range(1, visits + 1))
    return replace(
        stat,
        measure=replace(stat.measure, axes=axes),
        values=square(stat.values, 0),
        replicates=None if stat.replicates is None else square(stat.replicates, 1),
        counts=None if stat.counts is None else square(stat.counts, 0, 0.0),
        labels={"visit": numbers, "later_visit": numbers, **{a: stat.labels[a] for a in axes[2:]}},
    )
