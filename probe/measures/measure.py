"""Measure, the one definition of a statistic; StatArray, its values with named axes and intervals. No torch.

A statistic is accumulated per *document group* as (total, count), so a mean is `sum(total) / sum(count)` and its
interval comes from leaving groups out. `StatArray` carries these replicates along, so that a mean over layers,
a ratio of visits or a difference of runs keeps a correct interval (`intervals`, the only place where one is made).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from visitlens.errors import InputError, UnavailableError
from visitlens.probe.measures import intervals
from visitlens.probe.measures.axes import one_way, own_labels

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True)
class Measure:
    """What a number means. Written into every recording, so that an old one describes itself.

    `axes` name the dimensions of one token's value, in order; `paper` is the place in SMELT (arXiv 2609.01343) or "ours".
    `grouped=False` keeps one total for the whole recording: no interval can be formed. `symmetric=False`: of a pair, earlier and
    later visit can't be exchanged. `package` is the one that brings
    the statistic, where it isn't visitlens; the recorder fills it in, and `own_labels`, those of axes that the statistic
    brings itself.

    Examples:
        >>> measure = vl.Measure("sink_mass", "Attention on the segment start", ("step", "head"), "share of mass", "P[i, start].", "6.4")
        >>> measure.axes
        ('step', 'head')
    """

    name: str
    title: str
    axes: tuple[str, ...]
    unit: str
    definition: str
    paper: str
    grouped: bool = True
    symmetric: bool = True
    package: str = ""
    own_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    def to_attributes(self) -> dict[str, str]:
        """As a recording holds it: axes joined by commas; the package where another one than visitlens defines it."""
        return {
            "title": self.title,
            "axes": ",".join(self.axes),
            "unit": self.unit,
            "definition": self.definition,
            "paper": self.paper,
            **({} if self.symmetric or one_way(self.axes, self.unit) else {"symmetric": "no"}),
            **({"package": self.package} if self.package else {}),
            **({"labels": json.dumps(self.own_labels)} if self.own_labels else {}),
        }

    @classmethod
    def from_attributes(cls, name: str, attributes: Mapping[str, str], grouped: bool) -> Measure:
        axes = tuple(a for a in attributes["axes"].split(",") if a)
        texts = {key: str(attributes[key]) for key in ("title", "unit", "definition", "paper")}
        package = str(attributes.get("package", ""))
        symmetric = attributes.get("symmetric") != "no" and not one_way(axes, texts["unit"])
        labels = own_labels(attributes, axes)
        return cls(
            name=name, axes=axes, grouped=grouped, symmetric=symmetric, package=package, own_labels=labels, **texts
        )


@dataclass(frozen=True)
class StatArray:
    """Values with named axes, labels, an interval and a definition.

    `values [*axes]`; `replicates [group, *axes]` are jackknife replicates, the value with one group of documents left out (None:
    no interval); `labels[axis]` has one entry an element. Arithmetic with another StatArray of the same axes, or with a number,
    keeps the replicates paired where both are of the same `units`, and the two apart where they are of different documents.
    `support [2, *axes]`: how many groups of documents are behind a value, and how many of equal length they are worth (None: each
    replicate is of one). `span`: between what the values must lie; an interval is cut there.
    `counts [*axes]` is n, how many tokens each value is a mean of (of a mean over an axis, or of two arrays, the smallest
    behind it; None: not known). `ragged`: it is shown, because halting or routing leaves tokens out of visits.

    Examples:
        >>> sink = vl.open("run.vlens").sink_mass()  # [step, head]
        >>> by_step = sink.mean("head")
        >>> low, high = by_step.interval()
        >>> by_step.values.shape, low.shape
        ((12,), (12,))
        >>> first, second = (vl.open("run.vlens").at_visit("sink_mass", visit) for visit in (1, 2))
        >>> (second - first).axes, (second / first).measure.unit
        (('layer', 'head'), 'ratio')
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
    support: np.ndarray | None = None
    units: intervals.Units = ()
    span: tuple[float, float] = (-np.inf, np.inf)

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
        """Bounds [*axes] (`intervals.interval`); NaN where there are no replicates or too few documents (`no_interval` says which)."""
        if self.replicates is None or not self.replicates.shape[0]:
            return np.full(self.values.shape, np.nan), np.full(self.values.shape, np.nan)
        low, high = intervals.interval(self.values, self.replicates, self._support, level)
        return np.maximum(low, self.span[0]), np.minimum(high, self.span[1])

    def p_values(self) -> np.ndarray:
        """[*axes] two-sided p of a value of 0, below 0.05 exactly where the 95 % interval leaves 0 out; NaN where there is none."""
        if self.replicates is None or not self.replicates.shape[0]:
            return np.full(self.values.shape, np.nan)
        return intervals.p_values(self.values, self.replicates, self._support)

    @property
    def no_interval(self) -> str:
        """Why no element has an interval; empty where one has."""
        if self.replicates is None or not self.values.size:
            return "one total for all documents"
        if intervals.enough(self._support).any():
            return ""
        groups, worth = self._support.reshape(2, -1).max(1)
        alike = "" if groups - worth < 0.05 else f", which are as uneven as {worth:.1f} of equal length are few"
        return f"too few documents: {groups:.0f}{alike}; an interval takes {intervals.FEWEST}"

    @property
    def _support(self) -> np.ndarray:
        if self.support is not None:
            return self.support
        return np.full((2, *self.values.shape), 0.0 if self.replicates is None else float(len(self.replicates)))

    def mean(self, axis: str) -> StatArray:
        """Uniform mean over one axis, leaving out elements that were never measured (NaN)."""
        at = self._axis(axis)
        aggregation = f"{self.aggregation}, mean over {axis.replace('_', ' ')}s"
        result = self._drop(axis, lambda a, lead: _nanmean(a, at + lead), aggregation)
        counts = None if self.counts is None or not self.counts.size else np.asarray(_least(self.counts, at))
        support = None if self.support is None else _least(self.support, at + 1)
        return replace(result, counts=counts, support=support)

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
                named = {**result.labels, axis: [labels[i] for i in keep]}
                result = result.rearranged(lambda a, lead, at=at, keep=keep: a.take(keep, at + lead), labels=named)
                continue
            if want not in labels:
                raise InputError(f"{result.measure.name} has no {axis} {want!r}; it has {labels}")
            index = labels.index(want)
            result = result._drop(
                axis, lambda a, lead, at=at, index=index: a.take(index, at + lead), result.aggregation
            )
        return result

    def rearranged(self, change: Callable[[np.ndarray, int], np.ndarray], **fields: Any) -> StatArray:
        """With the same elements in other places: `change(array, lead)` to everything that has an entry an element, `lead` axes in
        front of its own; NaN where it makes a place for none. `fields` are further fields of the result."""
        counts, support = self.counts, self.support
        return replace(
            self,
            values=np.asarray(change(self.values, 0)),
            replicates=None if self.replicates is None else change(self.replicates, 1),
            counts=None if counts is None else np.nan_to_num(np.asarray(change(counts.astype(float), 0))),
            support=None if support is None else np.nan_to_num(change(support, 1)),
            **fields,
        )

    @classmethod
    def stacked(cls, parts: Sequence[StatArray], axis: str, labels: Sequence[Any]) -> StatArray:
        """Arrays of the same axes and documents side by side, along a new first axis."""
        first = parts[0]

        def together(name: str, lead: int) -> np.ndarray | None:
            arrays = [getattr(part, name) for part in parts]
            return None if any(array is None for array in arrays) else np.stack(arrays, lead)

        return replace(
            first,
            measure=replace(first.measure, axes=(axis, *first.axes)),
            values=np.stack([part.values for part in parts]),
            replicates=together("replicates", 1),
            support=together("support", 1),
            counts=together("counts", 0),
            labels={axis: list(labels), **first.labels},
        )

    def combine(self, other: StatArray | float, operation: Callable[[Any, Any], Any], measure: Measure) -> StatArray:
        """`operation` on values, and on replicates: pairwise where both are of the same documents, on those of one with the other's
        value where they aren't."""
        span = (-np.inf, np.inf)
        if not isinstance(other, StatArray):
            replicates = None if self.replicates is None else operation(self.replicates, other)
            values = operation(self.values, other)
            return replace(self, measure=measure, values=values, replicates=replicates, span=span)
        if other.values.shape != self.values.shape:
            raise InputError(
                f"{self.measure.name} {self.values.shape} and {other.measure.name} {other.values.shape} differ in shape"
            )
        units, replicates = (), None
        with np.errstate(divide="ignore", invalid="ignore"):
            values = operation(self.values, other.values)
            if self.replicates is not None and other.replicates is not None:
                mine, theirs = self._blocks("first"), other._blocks("second")
                if len(self.replicates) == len(other.replicates) and not (self.units and other.units):
                    theirs = mine  # arrays that don't say whose they are
                units = intervals.joined(mine, theirs)
                replicates = operation(
                    intervals.aligned(self.values, self.replicates, mine, units),
                    intervals.aligned(other.values, other.replicates, theirs, units),
                )
        mine, theirs = self.counts, other.counts
        counts = None if mine is None or theirs is None else np.minimum(mine, theirs)
        support = np.minimum(self._support, other._support) if self.support is not None or units else other.support
        return replace(
            self,
            measure=measure,
            values=values,
            replicates=replicates,
            counts=counts,
            support=support,
            units=units,
            span=span,
        )

    def _blocks(self, unnamed: str) -> intervals.Units:
        return self.units or ((unnamed, 0 if self.replicates is None else len(self.replicates)),)

    def __sub__(self, other: StatArray | float) -> StatArray:
        """Element by element, with the interval of the difference.

        Raises:
            InputError: other axes or other labels.
        """
        return self._with(other, np.subtract, "minus", self.measure.unit)

    def __truediv__(self, other: StatArray | float) -> StatArray:
        """Element by element, with the interval of the ratio; NaN or infinite where `other` is 0. Raises as `-`."""
        return self._with(other, np.divide, "over", "ratio")

    def _with(self, other: Any, operation: Callable[[Any, Any], Any], word: str, unit: str) -> StatArray:
        mine = self.measure
        if isinstance(other, (int, float)):
            title = f"{mine.title} {word} {other:g}"
            return self.combine(other, operation, replace(mine, title=title, unit=mine.unit))
        if not isinstance(other, StatArray):
            return NotImplemented
        if self.axes != other.axes:
            raise InputError(
                f"{mine.name} has axes {self.axes}, {other.measure.name} has {other.axes}; `sel` or `mean`"
            )
        for axis in self.axes:
            if list(self.labels[axis]) != list(other.labels[axis]):
                raise InputError(
                    f"{mine.name} and {other.measure.name} have other labels along {axis}: {list(self.labels[axis])!r:.80} "
                    f"and {list(other.labels[axis])!r:.80}; choose the same by `sel`"
                )
        theirs = other.measure
        return self.combine(
            other,
            operation,
            Measure(
                name=mine.name if mine.name == theirs.name else f"{mine.name}_{word}_{theirs.name}",
                title=f"{mine.title} {word} {theirs.title}",
                axes=self.axes,
                unit=unit,
                definition=f"({mine.definition}) {word} ({theirs.definition})",
                paper="ours",
                symmetric=mine.symmetric and theirs.symmetric,
            ),
        )

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

    def _drop(self, axis: str, reduce: Callable[[np.ndarray, int], np.ndarray], aggregation: str) -> StatArray:
        axes = tuple(a for a in self.axes if a != axis)
        labels = {a: labels for a, labels in self.labels.items() if a != axis}
        return self.rearranged(reduce, measure=replace(self.measure, axes=axes), labels=labels, aggregation=aggregation)


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
    least = np.where(counts > 0, counts, np.inf).min(axis, initial=np.inf)
    return np.where(np.isfinite(least), least, 0)


def _nanmean(array: np.ndarray, axis: int) -> np.ndarray:
    known = ~np.isnan(array)
    with np.errstate(invalid="ignore"):
        return np.where(known, array, 0.0).sum(axis) / known.sum(axis)
