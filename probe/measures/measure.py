"""Measure, the one definition of a statistic; StatArray, its values with named axes and intervals. No torch.

A statistic is accumulated per *document group* as (total, count), so a mean is `sum(total) / sum(count)` and its
interval comes from resampling groups. `StatArray` carries the bootstrap replicates along, so that a mean over layers,
a ratio of visits or a difference of runs keeps a correct interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from visitlens.errors import InputError, UnavailableError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True)
class Measure:
    """What a number means. Written into every recording, so that an old one describes itself.

    `axes` name the dimensions of one token's value, in order; `paper` is the place in SMELT (arXiv 2609.01343) or "ours".
    `grouped=False` keeps one total for the whole recording: no interval can be formed. `package` is the one that brings
    the statistic, where it isn't visitlens; the recorder fills it in.
    """

    name: str
    title: str
    axes: tuple[str, ...]
    unit: str
    definition: str
    paper: str
    grouped: bool = True
    package: str = ""

    def to_attributes(self) -> dict[str, str]:
        """As a recording holds it: axes joined by commas; the package where another one than visitlens defines it."""
        return {
            "title": self.title,
            "axes": ",".join(self.axes),
            "unit": self.unit,
            "definition": self.definition,
            "paper": self.paper,
            **({"package": self.package} if self.package else {}),
        }

    @classmethod
    def from_attributes(cls, name: str, attributes: Mapping[str, str], grouped: bool) -> Measure:
        axes = tuple(a for a in attributes["axes"].split(",") if a)
        texts = {key: str(attributes[key]) for key in ("title", "unit", "definition", "paper")}
        package = str(attributes.get("package", ""))
        return cls(name=name, axes=axes, grouped=grouped, package=package, **texts)


@dataclass(frozen=True)
class StatArray:
    """Values with named axes, labels, an interval and a definition.

    `values [*axes]`; `replicates [replicate, *axes]` are bootstrap means (None: no interval); `labels[axis]` has one entry
    an element. Arithmetic with another StatArray of the same axes, or with a number, keeps the replicates paired.
    `counts [*axes]` is n, how many tokens each value is a mean of (of a mean over an axis, or of two arrays, the smallest
    behind it; None: not known). `ragged`: it is shown, because halting or routing leaves tokens out of visits.
    """

    measure: Measure
    values: np.ndarray
    labels: Mapping[str, Sequence[Any]]
    replicates: np.ndarray | None = None
    documents: int = 0
    tokens: int = 0
    aggregation: str = "mean over tokens"
    provenance: Mapping[str, Any] = field(default_factory=dict)
    counts: np.ndarray | None = None
    ragged: bool = False

    def __post_init__(self) -> None:
        expected = tuple(len(self.labels[axis]) for axis in self.measure.axes)
        if self.values.shape != expected:
            raise InputError(
                f"{self.measure.name}: axes {self.measure.axes} want shape {expected}, got {self.values.shape}"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        return self.measure.axes

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Percentile bootstrap bounds [*axes]; NaN where there are no replicates. Those that drew nothing to average are left out."""
        if self.replicates is None or not self.replicates.shape[0]:
            return np.full(self.values.shape, np.nan), np.full(self.values.shape, np.nan)
        tail = (1 - level) / 2
        bounds = np.quantile(self.replicates, [tail, 1 - tail], axis=0)
        undrawn = np.isnan(self.replicates)
        partly = undrawn.any(0) & ~undrawn.all(0)
        if partly.any():
            bounds[:, partly] = np.nanquantile(self.replicates[:, partly], [tail, 1 - tail], axis=0)
        return bounds[0], bounds[1]

    def mean(self, axis: str) -> StatArray:
        """Uniform mean over one axis, leaving out elements that were never measured (NaN)."""
        at = self._axis(axis)
        aggregation = f"{self.aggregation}, mean over {axis.replace('_', ' ')}s"
        counts = None if self.counts is None or not self.counts.size else np.asarray(_least(self.counts, at))
        return self._drop(axis, lambda a, lead: _nanmean(a, at + lead), aggregation, counts)

    def sel(self, **chosen: Any) -> StatArray:
        """The elements with these labels: `sel(layer=3)`; a list or a function of the label keeps the axis."""
        result = self
        for axis, want in chosen.items():
            at = result._axis(axis)
            labels = list(result.labels[axis])
            if isinstance(want, list) and any(label not in labels for label in want):
                raise InputError(f"{result.measure.name} has no {axis} {want!r}; it has {labels}")
            if callable(want) or isinstance(want, list):
                keep = [i for i, label in enumerate(labels) if (want(label) if callable(want) else label in want)]
                result = replace(
                    result,
                    values=result.values.take(keep, at),
                    replicates=None if result.replicates is None else result.replicates.take(keep, at + 1),
                    counts=None if result.counts is None else result.counts.take(keep, at),
                    labels={**result.labels, axis: [labels[i] for i in keep]},
                )
                continue
            if want not in labels:
                raise InputError(f"{result.measure.name} has no {axis} {want!r}; it has {labels}")
            index = labels.index(want)
            counts = None if result.counts is None else np.asarray(result.counts.take(index, at))
            result = result._drop(
                axis, lambda a, lead, at=at, index=index: a.take(index, at + lead), result.aggregation, counts
            )
        return result

    def combine(self, other: StatArray | float, operation: Callable[[Any, Any], Any], measure: Measure) -> StatArray:
        """`operation` on values and, pairwise, on replicates."""
        if not isinstance(other, StatArray):
            replicates = None if self.replicates is None else operation(self.replicates, other)
            return replace(self, measure=measure, values=operation(self.values, other), replicates=replicates)
        if other.values.shape != self.values.shape:
            raise InputError(
                f"{self.measure.name} {self.values.shape} and {other.measure.name} {other.values.shape} differ in shape"
            )
        both = self.replicates is not None and other.replicates is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            values = operation(self.values, other.values)
            replicates = operation(self.replicates, other.replicates) if both else None
        mine, theirs = self.counts, other.counts
        counts = None if mine is None or theirs is None else np.minimum(mine, theirs)
        return replace(self, measure=measure, values=values, replicates=replicates, counts=counts)

    def rename(self, **changes: Any) -> StatArray:
        """With another name, title, unit, definition or paper in its measure."""
        return replace(self, measure=replace(self.measure, **changes))

    def to_frame(self) -> pd.DataFrame:
        """One row an element: labels, value, low, high, and n where it is known."""
        try:
            import pandas as pd
        except ImportError as error:
            raise UnavailableError("to_frame() needs pandas: pip install pandas") from error
        low, high = self.interval()
        index = (
            pd.MultiIndex.from_product([list(map(str, self.labels[a])) for a in self.axes], names=self.axes)
            if self.axes
            else None
        )
        columns = {"value": self.values.ravel(), "low": low.ravel(), "high": high.ravel()}
        if self.counts is not None:
            columns["n"] = self.counts.ravel()
        return pd.DataFrame(columns, index=index)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: measure, labels, values and interval (NaN as None), n, counts, aggregation, provenance."""
        low, high = self.interval()
        return {
            "measure": {"name": self.measure.name, **self.measure.to_attributes()},
            "labels": {axis: [str(label) for label in self.labels[axis]] for axis in self.axes},
            "values": json_numbers(self.values),
            "low": json_numbers(low),
            "high": json_numbers(high),
            **({} if self.counts is None else {"n": json_numbers(self.counts)}),
            "documents": self.documents,
            "tokens": self.tokens,
            "aggregation": self.aggregation,
            "provenance": dict(self.provenance),
        }

    def plot(self) -> go.Figure:
        """A Plotly figure: a line with its interval for one axis, a heat map for two."""
        from visitlens.probe.drawing.stat_figure import plot_stat

        return plot_stat(self)

    def _repr_html_(self) -> str:
        from visitlens.probe.measures.tables import as_html

        return as_html(self)

    def __repr__(self) -> str:
        low, high = self.interval()
        head = f"{self.measure.title} [{self.measure.unit}], {self.aggregation}, n = {self.documents} documents, {self.tokens:,} tokens"
        if not self.axes:
            return f"{head}\n  {self.values:.4f}{_bounds(low, high)}"
        if len(self.axes) == 1:
            counts = (
                [f"  n = {n:,.0f}" for n in self.counts]
                if self.ragged and self.counts is not None
                else [""] * len(self.values)
            )
            rows = zip(self.labels[self.axes[0]], self.values, low, high, counts, strict=True)
            return "\n".join([head, *(f"  {label}: {v:.4f}{_bounds(a, b)}{n}" for label, v, a, b, n in rows)])
        sizes = " x ".join(f"{len(self.labels[a])} {a}" for a in self.axes)
        return f"{head}\n  {sizes}; use .to_frame(), .sel(...), .mean(...) or .plot()"

    def _axis(self, axis: str) -> int:
        if axis not in self.axes:
            raise InputError(f"{self.measure.name} has no axis {axis!r}; it has {self.axes}")
        return self.axes.index(axis)

    def _drop(
        self,
        axis: str,
        reduce: Callable[[np.ndarray, int], np.ndarray],
        aggregation: str,
        counts: np.ndarray | None,
    ) -> StatArray:
        return replace(
            self,
            counts=counts,
            measure=replace(self.measure, axes=tuple(a for a in self.axes if a != axis)),
            values=np.asarray(reduce(self.values, 0)),
            replicates=None if self.replicates is None else reduce(self.replicates, 1),
            labels={a: labels for a, labels in self.labels.items() if a != axis},
            aggregation=aggregation,
        )


def _bounds(low: np.ndarray, high: np.ndarray) -> str:
    """Nothing where there is no interval."""
    return "" if np.isnan(low) else f"  [{low:.4f}, {high:.4f}]"


def json_numbers(array: np.ndarray) -> Any:
    """Nested lists with None for NaN and infinities."""
    if array.ndim:
        return [json_numbers(row) for row in array]
    return float(array) if np.isfinite(array) else None


def _least(counts: np.ndarray, axis: int) -> np.ndarray:
    """The smallest of those that aren't 0 (what was never measured is left out of a mean); 0 where all are."""
    least = np.where(counts > 0, counts, np.inf).min(axis)
    return np.where(np.isfinite(least), least, 0)


def _nanmean(array: np.ndarray, axis: int) -> np.ndarray:
    known = ~np.isnan(array)
    with np.errstate(invalid="ignore"):
        return np.where(known, array, 0.0).sum(axis) / known.sum(axis)
