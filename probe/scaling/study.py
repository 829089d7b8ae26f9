"""Study, everything that one table of runs says about a target architecture and its reference; each part is computed when asked for. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.scaling.bootstrap import DRAWS, Draws, Progress, bootstrap
from visitlens.probe.scaling.downstream import (
    Downstream,
    Scores,
    downstream,
    scores_of,
    tasks_of,
)
from visitlens.probe.scaling.frontier import BUDGETS, Level, Marked, frontier, gain, levels_of, tokens_per_parameter
from visitlens.probe.scaling.law import Fit, Window, fit_law
from visitlens.probe.scaling.paper import REFERENCE, TARGET, paper_levels, paper_surfaces, paper_windows, printed
from visitlens.probe.scaling.surface import Surface
from visitlens.probe.scaling.table import RunTable


@dataclass(frozen=True)
class Study:
    """A table, and which of its architectures is compared with which.

    `target` is "" where the table has one architecture alone: then there is a frontier, and no gain. `draws` of the bootstrap; 0 leaves
    intervals out. `levels` are fitted; empty means all. `budgets` in FLOPs, of gains; empty means powers of ten as `decades` takes them.
    `lower` names tasks whose score is a loss.
    """

    table: RunTable
    reference: str
    target: str = ""
    levels: tuple[str, ...] = ()
    budgets: tuple[float, ...] = ()
    draws: int = DRAWS
    seed: int = 0
    lower: tuple[str, ...] = ()
    on_progress: Progress = field(default=lambda done, total: None, repr=False, compare=False)

    @classmethod
    def of(cls, table: RunTable, target: str = "", reference: str = "", **options: Any) -> Study:
        """Of a table with one or two architectures; of more, name both. An architecture called Baseline, in any case, is the reference.

        Raises:
            InputError: an architecture that the table doesn't have, or three or more and none named.
        """
        archs = list(table.archs)
        for name in (target, reference):
            if name and name not in archs:
                raise InputError(f"{table.name} has no architecture {name!r}; it has {', '.join(archs)}")
        if not (target and reference) and len(archs) > 2:
            raise InputError(f"{table.name} has {', '.join(archs)}; say which is the target and which the reference")
        if not reference:
            plain = [a for a in archs if a != target and a.lower() == "baseline"]
            reference = next(iter(plain), None) or next((a for a in archs if a != target), archs[0])
        if not target:
            target = next((a for a in archs if a != reference), "")
        if target == reference:
            raise InputError(f"expected two different architectures, got {target!r} twice")
        return cls(table, reference, target, **options)

    @property
    def archs(self) -> tuple[str, ...]:
        """The reference, then the target where there is one."""
        return (self.reference, self.target) if self.target else (self.reference,)

    @cached_property
    def fits(self) -> dict[str, Fit]:
        ends = self.table.endpoints()
        return {arch: fit_law(ends, arch, self.levels) for arch in self.archs}

    @cached_property
    def resampled(self) -> Draws | None:
        return bootstrap(self.fits, self.draws, self.seed, on_progress=self.on_progress) if self.draws else None

    @cached_property
    def laws(self) -> Laws:
        """The fitted surfaces, ready for frontier and gain."""
        return Laws(
            self.target,
            self.reference,
            {arch: fit.surface for arch, fit in self.fits.items()},
            {arch: fit.window for arch, fit in self.fits.items()},
            levels_of(self.fits),
            self.budgets or decades(*(fit.window for fit in self.fits.values())),
            self.resampled,
            tuple(w for fit in self.fits.values() for w in fit.warnings),
        )

    @property
    def tasks(self) -> list[str]:
        return tasks_of(self.table) if self.table.has("task", "score") else []

    def scores(self, task: str, centre: bool = False) -> Scores:
        return scores_of(self.table, task, lower_is_better=task in self.lower, centre=centre)

    def downstream(self, task: str, centre: bool = False) -> Downstream:
        self.need_pair("downstream residuals")
        return downstream(self.scores(task, centre), self.target, self.reference)

    def need_pair(self, what: str) -> None:
        """Raises InputError where there is one architecture alone."""
        if not self.target:
            raise InputError(f"{what} compare two architectures; {self.table.name} has {self.reference} alone")


@dataclass(frozen=True)
class Laws:
    """Surfaces by architecture with what their runs span, and a bootstrap's refits where there are some.

    `brackets` are printed intervals of the gain, [budget, level] low and high, where refits can't be had.
    """

    target: str
    reference: str
    surfaces: Mapping[str, Surface]
    windows: Mapping[str, Window]
    levels: tuple[Level, ...]
    budgets: tuple[float, ...]
    draws: Draws | None = None
    warnings: tuple[str, ...] = ()
    brackets: Mapping[tuple[float, str], tuple[float, float]] = field(default_factory=dict)

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(self.surfaces)

    def frontier(self, arch: str, budgets: Sequence[float] = ()) -> Marked:
        return frontier(arch, self.surfaces[arch], self.levels, **self._options(budgets))

    def tpp(self, arch: str, budgets: Sequence[float] = ()) -> Marked:
        return tokens_per_parameter(arch, self.surfaces[arch], self.levels, **self._options(budgets))

    def gain(self, budgets: Sequence[float] = ()) -> Marked:
        if not self.target:
            raise InputError(f"a gain compares two architectures; there is {self.reference} alone")
        return gain(self.target, self.reference, self.surfaces, self.levels, **self._options(budgets))

    def _options(self, budgets: Sequence[float]) -> dict[str, Any]:
        return {"budgets": budgets or self.budgets, "windows": self.windows, "draws": self.draws}


def paper_laws() -> Laws:
    """The printed surfaces and intervals: gains come out 0.06 to 0.14 points below the printed ones, because coefficients are rounded."""
    brackets = {
        (row["budget"], row["level"]): (row["low"] / 100, row["high"] / 100)
        for row in printed()["compute_gain"]["rows"]
    }
    warnings = ("Intervals are the paper's printed ones; its losses, from which they came, are not published.",)
    return Laws(
        TARGET,
        REFERENCE,
        paper_surfaces(),
        paper_windows(),
        paper_levels(),
        BUDGETS,
        warnings=warnings,
        brackets=brackets,
    )


def decades(*windows: Window) -> tuple[float, ...]:
    """Powers of ten inside the compute that all architectures were trained with, and the next one; its middle where it holds none."""
    low, high = max(w.compute[0] for w in windows), min(w.compute[1] for w in windows)
    inside = [10.0**n for n in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    return (*inside, 10 * inside[-1]) if inside else (math.sqrt(low * high),)


def log_range(low: float, high: float, points: int = 41) -> list[float]:
    """Budgets evenly spaced in their logarithm."""
    return np.geomspace(low, high, points).tolist()


def lower_is_better(names: Collection[str], known: Collection[str]) -> tuple[str, ...]:
    """Raises InputError where a name is no task."""
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"no task {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(names)
