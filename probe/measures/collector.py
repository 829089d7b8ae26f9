"""Finds the statistics by their files and adds them up over batches, per document group, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visitlens import plugins
from visitlens.errors import InputError
from visitlens.hooks.recording.format.totals import GroupTotals
from visitlens.probe.measures.axes import AXES
from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.phases import DECODE
from visitlens.probe.measures.statistic import Geometry, Statistic, TokenValues, present, stack

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


_FOLDER = "visitlens.probe.statistics"


@plugins.once
def registered() -> tuple[type[Statistic], ...]:
    """Every Statistic of `probe/statistics`, in name order, then those of other packages and of a notebook."""
    plugins.modules(_FOLDER)
    own = [cls for cls in Statistic.__subclasses__() if cls.__module__.startswith(f"{_FOLDER}.")]
    taken = {measure.name for cls in own for measure in cls.measures}
    others = list(plugins.added("statistics", _measures_of, taken).values())
    # A notebook's class counts by being defined, as in version 0.1; defined again, the last one does.
    local = {cls.__name__: cls for cls in Statistic.__subclasses__() if cls.__module__ == "__main__"}
    others += [cls for name, cls in local.items() if name not in {other.__name__ for other in others}]
    return (*sorted(own, key=lambda c: c.__name__), *others)


def _measures_of(name: str, cls: Any) -> list[str]:
    plugins.need(cls, Statistic, "measures", "sites")
    if clash := sorted(AXES.keys() & cls.axes.keys()):
        raise InputError(f"{cls.__name__}: the axis {', '.join(clash)} is a common one")
    known = {*AXES, *cls.axes}
    if unknown := sorted({axis for measure in cls.measures for axis in measure.axes} - known):
        raise InputError(f"{cls.__name__} has no axis {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [measure.name for measure in cls.measures]


class StatisticsCollector:
    """The recorder's `TokenStatistics`: all registered statistics, or those that define the named measures. With `written`,
    totals over the tokens that the model generated are kept beside those over all, as `decode.MEASURE`."""

    def __init__(
        self, geometry: Geometry, num_groups: int, measures: Iterable[str] | None = None, *, written: bool = False
    ) -> None:
        self.geometry, self.num_groups, self.written = geometry, num_groups, written
        looped = bool(geometry.plan.pairs)
        available = [cls() for cls in registered() if looped or not cls.looped_only]
        self.left_out = {m.name: why for s in available for m in s.measures if (why := self._refusal(s, m))}
        """Measure -> why this model doesn't have it."""
        available = [s for s in available if any(m.name not in self.left_out for m in s.measures)]
        if measures is not None:
            wanted = set(measures)
            names = sorted(m.name for s in available for m in s.measures if m.name not in self.left_out)
            for name in sorted(wanted & set(self.left_out)):
                raise InputError(f"no measure {name} of this model: {self.left_out[name]}; it has {', '.join(names)}")
            unknown = wanted - set(names)
            if unknown:
                raise InputError(f"no measure {', '.join(sorted(unknown))}; this model has {', '.join(names)}")
            available = [s for s in available if wanted & {m.name for m in s.measures}]
        self.statistics = available
        self._axes = dict(AXES)
        for statistic in available:
            self._axes |= statistic.axes
        kept = [
            (s, replace(m, package=plugins.package_of(type(s)), own_labels=self._own_labels(s, m)))
            for s in available
            for m in s.measures
            if m.name not in self.left_out
        ]
        self.measures: dict[str, Measure] = {m.name: m for _, m in kept}
        self.sites = frozenset().union(*(s.sites for s in available)) - set(geometry.missing)
        self._nowhere = {m.name: cells for s, m in kept if (cells := self._lacking(s, m)).any()}
        self._totals = self._empty()

    def update(self, values: StepValues, groups: Tensor) -> dict[str, Tensor]:
        """Adds one batch; `groups [token]`. Returns the per-token scalars that level `tokens` keeps."""
        stored, additions = {}, []
        there = self._there(values)
        of_batch = _Groups(groups, self.num_groups)
        written = values.written if self.written else None
        of_written = None if written is None else _Groups(groups[written], self.num_groups)
        for statistic in self.statistics:
            for name, token_values in statistic.per_token(values, self.geometry).items():
                if name in self.left_out:
                    continue
                if name in self._nowhere:
                    token_values = token_values.only(~self._nowhere[name])
                if there is not None and not token_values.everywhere:
                    token_values = token_values.only(self._at_both(self.measures[name], there))
                additions.append((name, *of_batch.sum(token_values)))
                if of_written is not None and written is not None:
                    additions.append((DECODE + name, *of_written.sum(token_values.of(written))))
                if name in statistic.stored:
                    stored[name] = _with_nan(token_values)
            additions += [(name, *sums) for name, *sums in self._group_sums(statistic, values, groups, None)]
            if written is not None:
                of_these = self._group_sums(statistic, values, groups, written)
                additions += [(DECODE + name, *sums) for name, *sums in of_these]
        for name, *arrays in additions:
            measure = self.measures[name.removeprefix(DECODE)]
            self._totals[name].add(GroupTotals(measure.to_attributes(), *(a.numpy() for a in arrays)))
        return stored

    def _group_sums(
        self, statistic: Statistic, values: StepValues, groups: Tensor, counted: Tensor | None
    ) -> Iterator[tuple[Any, ...]]:
        """(name, total, count, left_out, non_finite) of what a statistic sums itself, over the `counted` tokens."""
        values.counted = counted
        for name, sums in statistic.group_sums(values, self.geometry, groups, self.num_groups).items():
            if name in self.left_out:
                continue
            nowhere = self._nowhere.get(name, torch.tensor(False))
            left_out, non_finite = (sums.non_finite.masked_fill(c, 0) for c in (~nowhere, nowhere))
            others = 0 if counted is None else int((~counted).sum())
            yield name, sums.total, sums.count, left_out + sums.left_out - others, non_finite
        values.counted = None

    def _there(self, values: StepValues) -> Tensor | None:
        """[token, step] which tokens are really at a step; None where all are everywhere."""
        steps = range(len(self.geometry.plan))
        if all(values.visited(step) is None for step in steps):
            return None
        return stack([present(values, step) for step in steps])

    def _at_both(self, measure: Measure, there: Tensor) -> Tensor:
        """[token, *axes] whether a token is at every visit that a cell speaks of."""
        pairs = self.geometry.plan.pairs
        cells = torch.ones(len(there), *[1] * len(measure.axes), dtype=torch.bool)
        for at, axis in enumerate(measure.axes):
            if axis in ("step", "later_step"):
                now = there
            elif axis == "pair":
                now = there[:, [pair.earlier.index for pair in pairs]] & there[:, [pair.later.index for pair in pairs]]
            else:
                continue
            cells = cells & now.view(len(there), *[-1 if i == at else 1 for i in range(len(measure.axes))])
        return cells

    @property
    def bytes_per_group(self) -> int:
        """What the sums of one group of documents take."""
        grouped = [measure for measure in self.measures.values() if measure.grouped]
        return 16 * (1 + self.written) * sum(int(np.prod(self._shape(measure))) for measure in grouped)

    def take(self) -> dict[str, GroupTotals]:
        """The totals since the last call, and a fresh start."""
        totals, self._totals = self._totals, self._empty()
        return totals

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        names = sorted(name for s in self.statistics for name in s.stored if name in self.measures)
        return {name: self._shape(self.measures[name]) for name in names}

    def _own_labels(self, statistic: Statistic, measure: Measure) -> dict[str, tuple[str, ...]]:
        own = {axis: statistic.axes[axis] for axis in measure.axes if axis in statistic.axes}
        return {name: tuple(map(str, self.geometry.labels(axis))) for name, axis in own.items()}

    def _refusal(self, statistic: Statistic, measure: Measure) -> str:
        missing = self.geometry.missing
        return next((missing[need] for need in sorted(statistic.needs_of(measure.name)) if need in missing), "")

    def _lacking(self, statistic: Statistic, measure: Measure) -> Tensor:
        """[*axes] True where a cell's step, layer or stage has no such site: its tokens are left out, not lost to NaN."""
        geometry = self.geometry
        needs = statistic.needs_of(measure.name)
        layers = {int(layer) for site in needs for layer in geometry.absent.get(site, {})}
        cells = torch.zeros(self._shape(measure), dtype=torch.bool)
        for at, name in enumerate(measure.axes):
            axis = self._axes[name]
            lacking = [
                not layers.isdisjoint(axis.layers(label)) or axis.sites.get(label) in geometry.missing
                for label in geometry.labels(axis)
            ]
            cells |= torch.tensor(lacking).view([-1 if i == at else 1 for i in range(len(measure.axes))])
        return cells

    def _shape(self, measure: Measure) -> tuple[int, ...]:
        return tuple(len(self.geometry.labels(self._axes[axis])) for axis in measure.axes)

    def _empty(self) -> dict[str, GroupTotals]:
        totals = {}
        names = [(prefix + name, m) for prefix in ("", DECODE)[: 1 + self.written] for name, m in self.measures.items()]
        for name, measure in names:
            shape = self._shape(measure)
            grouped = (self.num_groups if measure.grouped else 1, *shape)
            left_out, non_finite = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            totals[name] = GroupTotals(
                measure.to_attributes(), np.zeros(grouped), np.zeros(grouped), left_out, non_finite
            )
        return totals


class _Groups:
    """The groups of a batch's tokens, to sum over."""

    def __init__(self, groups: Tensor, num_groups: int) -> None:
        self.present, compact = groups.unique(return_inverse=True)  # a batch holds few of the groups
        self.members = torch.nn.functional.one_hot(compact, len(self.present)).T.double()
        self.num_groups = num_groups

    def sum(self, token_values: TokenValues) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """total, count [group, *axes] and left_out, non_finite [*axes]."""
        values = token_values.values.cpu()
        shape = values.shape[1:]
        nothing = torch.zeros(shape, dtype=torch.int64)
        if token_values.valid is None:
            total = self._spread(self.members @ values.double().flatten(1), shape)
            if total.isfinite().all():  # so was every value
                return total, self._spread(self.members.sum(1, keepdim=True), shape), nothing, nothing
        finite = values.isfinite()
        valid = finite if token_values.valid is None else finite & token_values.valid
        left_out = nothing if token_values.valid is None else (~token_values.valid).expand_as(values).sum(0)
        non_finite = (~finite if token_values.valid is None else ~finite & token_values.valid).sum(0)
        summed = (self.members @ v.flatten(1) for v in (values.double().masked_fill(~valid, 0.0), valid.double()))
        total, count = (self._spread(rows, shape) for rows in summed)
        return total, count, left_out, non_finite

    def _spread(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Rows of the groups that are there, among all groups."""
        spread = torch.zeros(self.num_groups, *shape, dtype=torch.float64)
        spread.flatten(1)[self.present] = rows
        return spread


def _with_nan(token_values: TokenValues) -> Tensor:
    if token_values.valid is None:
        return token_values.values
    return token_values.values.cpu().masked_fill(~token_values.valid, float("nan"))
