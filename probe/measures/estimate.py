"""From sums by document group to a StatArray: means, and products of means of the same documents. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from visitlens.probe.measures import intervals
from visitlens.probe.measures.measure import Measure, StatArray

Sums = tuple[np.ndarray, np.ndarray]
"""`total` and `count` [group, *axes]: sums over the tokens of each group of documents."""
Labels = Mapping[str, Sequence[Any]]


def mean_of(measure: Measure, sums: Sums, labels: Labels, groups: str = "", **about: Any) -> StatArray:
    """Means with their replicates.

    Args:
        groups: says which groups of documents they are: arrays of the same are paired.
        about: further fields of the StatArray.

    A measure that isn't grouped has one total, whatever it is split into, and no replicates.
    """
    total, count = sums
    if not measure.grouped:
        total, count = total.sum(0, keepdims=True), count.sum(0, keepdims=True)
    values, replicates = intervals.mean_and_replicates(total, count)
    support = None if replicates is None else intervals.support_of(count)
    units, span = _units(groups, replicates), _span(measure, total, count)
    return StatArray(measure, values, labels, replicates, support=support, units=units, span=span, **about)


def product_of(
    measure: Measure, first: Sums, second: Sums, labels: Labels, groups: str = "", **about: Any
) -> StatArray:
    """Products of two means, over pairs of different documents (`intervals.product_and_replicates`); `groups`, `about` as in `mean_of`."""
    values, replicates = intervals.product_and_replicates(first, second)
    support = (
        None if replicates is None else np.minimum(intervals.support_of(first[1]), intervals.support_of(second[1]))
    )
    units = _units(groups, replicates)
    return StatArray(measure, values, labels, replicates, support=support, units=units, **about)


def _units(groups: str, replicates: np.ndarray | None) -> intervals.Units:
    return ((groups, len(replicates)),) if groups and replicates is not None else ()


def _span(measure: Measure, total: np.ndarray, count: np.ndarray) -> tuple[float, float]:
    """Between what a mean of this measure's values lies: by its unit, if every group's mean does (changes of shares needn't)."""
    if measure.unit != "cosine" and not measure.unit.startswith("share"):
        return -np.inf, np.inf
    low, high = (-1.0, 1.0) if measure.unit == "cosine" else (0.0, 1.0)
    rounding = 1e-9 * count
    inside = (total >= low * count - rounding) & (total <= high * count + rounding)
    return (low, high) if inside.all() else (-np.inf, np.inf)
