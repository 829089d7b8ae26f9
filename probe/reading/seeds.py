"""The same statistic of several models that differ in the seed, or of several checkpoints: over models and over documents apart. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.measures.intervals import t_quantile
from visitlens.probe.measures.measure import StatArray, json_numbers

FEWEST_MODELS = 3


@dataclass(frozen=True)
class OverModels:
    """`mean`: over the models, with the interval over documents, *for these models*; `values [model, *axes]`: each model's own.

    `interval` is the other one: where the mean over all models of this kind would lie, on documents of this kind.
    """

    mean: StatArray
    values: np.ndarray

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Bounds [*axes] over models: Student's t of the models' values, which differ by the seed and by what a model does on the documents
        drawn; NaN with fewer than three models."""
        models = len(self.values)
        if models < FEWEST_MODELS:
            return np.full(self.mean.values.shape, np.nan), np.full(self.mean.values.shape, np.nan)
        half = t_quantile((1 + level) / 2, models - 1.0) * self.values.std(0, ddof=1) / np.sqrt(models)
        return self.mean.values - half, self.mean.values + half

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the mean with its interval over documents, that over models, and every model's value."""
        low, high = self.interval()
        over = {"models": len(self.values), "low": json_numbers(low), "high": json_numbers(high)}
        return {**self.mean.to_dict(), "over_models": over | {"values": json_numbers(self.values)}}

    def __repr__(self) -> str:
        low, high = self.interval()
        head = f"{self.mean.measure.title} [{self.mean.measure.unit}], mean of {len(self.values)} models, {self.mean.documents} documents"
        if self.mean.axes:
            return f"{head}\n  [{', '.join(self.mean.axes)}]; .mean is over documents, .interval() over models"
        documents = "[{:.4f}, {:.4f}] over documents (these models)".format(*self.mean.interval())
        models = (
            f"[{low:.4f}, {high:.4f}] over models"
            if np.isfinite(low)
            else f"no interval over models: {FEWEST_MODELS} at least"
        )
        return f"{head}\n  {float(self.mean.values):.4f}  {documents}, {models}"


def over_models(stats: Sequence[StatArray]) -> OverModels:
    """One statistic of several models, each from a recording of its own; of the same documents the interval over documents is paired.

    Raises:
        InputError: fewer than two, or of different axes.

    Examples:
        >>> runs = [vl.open(path) for path in ("seed0.vlens", "seed1.vlens", "seed2.vlens")]  # doctest: +SKIP
        >>> over_models([run.expert_overlap().mean("layer") for run in runs])  # doctest: +SKIP
    """
    shapes = {(stat.axes, stat.values.shape) for stat in stats}
    if len(stats) < 2 or len(shapes) > 1:
        raise InputError(
            f"expected a statistic of two models or more, alike in axes, got {len(stats)}: {sorted(map(str, shapes))}"
        )
    total = stats[0]
    for stat in stats[1:]:
        total = total.combine(stat, np.add, total.measure)
    mean = total.combine(len(stats), np.divide, stats[0].measure)
    return OverModels(mean, np.stack([stat.values for stat in stats]))
