"""What follows from fitted surfaces: frontier loss, optimal FLOPs per token, tokens per parameter, compute saved. Torch-free.

Every value carries a mark where it isn't supported by the runs: the budget lies outside their compute, or the optimum outside the model
sizes or token counts that were trained. Where a value doesn't exist it is NaN, and the mark says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.scaling.bootstrap import Draws
from visitlens.probe.scaling.drawn import DrawnArray
from visitlens.probe.scaling.law import Fit, Window
from visitlens.probe.scaling.surface import Surface, compute_gain

BUDGETS = (1e20, 1e21, 1e22)
"""FLOPs; the paper's."""
_AXES = ("budget", "level")


def _measure(name: str, title: str, unit: str, definition: str, paper: str) -> Measure:
    return Measure(name, title, _AXES, unit, definition, paper)


FRONTIER = _measure(
    "frontier_loss",
    "Loss on the compute-optimal frontier",
    "nats per token",
    "The lowest loss of the fitted surface over all splits of the budget C = F D.",
    "4.2, Eq. 4",
)
OPTIMAL_FLOPS = _measure(
    "optimal_flops_per_token",
    "Compute-optimal FLOPs per token",
    "FLOPs per token",
    "F* = (a A (1-S)^b C^c / (c K))^(1/(a+c)).",
    "4.2, Eq. 3",
)
TPP = _measure(
    "tokens_per_parameter",
    "Compute-optimal tokens per dense-equivalent parameter",
    "tokens per parameter",
    "D* / (F* / 6), with D* = C / F*.",
    "4.3",
)
GAIN = _measure(
    "compute_gain",
    "Compute saved at the same loss (CE Gain)",
    "share of compute",
    "1 - C / C_ref: C_ref is the budget at which the reference's frontier reaches the loss of the target's at C.",
    "4.2, Eq. 5",
)


@dataclass(frozen=True)
class Level:
    """A sparsity level by name, and the S at which the surfaces are evaluated."""

    name: str
    sparsity: float


@dataclass(frozen=True)
class Marked:
    """A StatArray [budget, level], and `marks[budget][level]`: a sentence where the runs don't support the value, else ""."""

    stat: StatArray
    marks: tuple[tuple[str, ...], ...]

    def mark(self, budget: float, level: str) -> str:
        labels = self.stat.labels
        return self.marks[list(labels["budget"]).index(budget)][list(labels["level"]).index(level)]

    def to_dict(self) -> dict[str, Any]:
        return {**self.stat.to_dict(), "marks": [list(row) for row in self.marks]}


def levels_of(fits: Mapping[str, Fit]) -> tuple[Level, ...]:
    """The levels of the fitted endpoints. S is the name read as a percentage (`85%`) where it is one within two points of what the
    runs have, as in the paper's tables; else the median of all architectures' runs."""
    names: dict[str, list[float]] = {}
    for fit in fits.values():
        for name, s in zip(fit.endpoints["level"].tolist(), fit.endpoints["S"].tolist(), strict=True):
            names.setdefault(name, []).append(s)
    found = [Level(name, _label_value(name, float(np.median(values)))) for name, values in names.items()]
    return tuple(sorted(found, key=lambda level: level.sparsity))


def frontier(arch: str, surface: Surface, levels: Sequence[Level], **options: Any) -> Marked:
    """Frontier loss of one architecture; options as of `optimum`."""
    return _derived(FRONTIER, {arch: surface}, levels, lambda s, C, S: s[arch].frontier(C, S), **options)


def optimum(arch: str, surface: Surface, levels: Sequence[Level], **options: Any) -> Marked:
    """F* of one architecture.

    Args:
        options: `budgets` in FLOPs; `windows` by architecture, for the marks; `draws`, for the intervals.
    """
    return _derived(OPTIMAL_FLOPS, {arch: surface}, levels, lambda s, C, S: s[arch].optimal_flops(C, S), **options)


def tokens_per_parameter(arch: str, surface: Surface, levels: Sequence[Level], **options: Any) -> Marked:
    """TPP of one architecture; options as of `optimum`."""
    return _derived(TPP, {arch: surface}, levels, lambda s, C, S: s[arch].tokens_per_parameter(C, S), **options)


def gain(
    target: str,
    reference: str,
    surfaces: Mapping[str, Surface],
    levels: Sequence[Level],
    *,
    windows: Mapping[str, Window] | None = None,
    **options: Any,
) -> Marked:
    """CE Gain of `target` over `reference`; options as of `optimum`. The reference is marked at the budget C_ref that it would need."""
    mine, theirs = surfaces[target], surfaces[reference]
    found = _derived(
        GAIN,
        {target: mine, reference: theirs},
        levels,
        lambda s, C, S: compute_gain(s[target], s[reference], C, S),
        **options,
    )
    marks = []
    for budget, values in zip(found.stat.labels["budget"], found.stat.values, strict=True):
        row = []
        for level, value in zip(levels, values, strict=True):
            if np.isnan(value):
                row.append(f"{target}'s loss lies below E of {reference}, which no compute reaches")
            elif windows:
                needed = budget / (1 - value)
                row.append(
                    _joined(
                        _mark(target, mine, windows[target], budget, level.sparsity),
                        _mark(reference, theirs, windows[reference], needed, level.sparsity),
                    )
                )
            else:
                row.append("")
        marks.append(tuple(row))
    return Marked(found.stat, tuple(marks))


def _derived(
    measure: Measure,
    surfaces: Mapping[str, Surface],
    levels: Sequence[Level],
    value: Callable[[Mapping[str, Surface], Any, Any], Any],
    *,
    budgets: Sequence[float] = BUDGETS,
    windows: Mapping[str, Window] | None = None,
    draws: Draws | None = None,
) -> Marked:
    if not budgets or min(budgets) <= 0:
        raise InputError(f"expected compute budgets in FLOPs, greater than 0, got {list(budgets)}")
    compute, sparsity = np.asarray(budgets, float)[:, None], np.array([level.sparsity for level in levels])
    values = np.broadcast_to(value(surfaces, compute, sparsity), (len(budgets), len(levels))).astype(np.float64)
    replicates = None
    if draws is not None:
        columns = {a: Surface.from_array(draws.surfaces[a].as_array()[:, None, None]) for a in surfaces}
        with np.errstate(over="ignore", invalid="ignore"):
            replicates = np.asarray(value(columns, compute, sparsity), dtype=np.float64)
    marks = tuple(
        tuple(_joined(*(_mark(a, s, windows[a], c, x.sparsity) for a, s in surfaces.items())) for x in levels)
        if windows
        else ("",) * len(levels)
        for c in budgets
    )
    labels = {"budget": list(budgets), "level": [level.name for level in levels]}
    how = "of the fitted surfaces" + (f"; interval of {draws.describe()}" if draws is not None else "")
    return Marked(DrawnArray(measure, values, labels, replicates, aggregation=how), marks)


def _mark(arch: str, surface: Surface, window: Window, compute: float, sparsity: float) -> str:
    """`SMELT: C = 1e+22 is 4.5 times the largest trained, F* = 4.54e+10 is 4.41 times the largest trained`; "" inside all three."""
    flops = float(surface.optimal_flops(compute, sparsity))
    spans = {
        "C": (compute, window.compute),
        "F*": (flops, window.flops_per_token),
        "D*": (compute / flops, window.tokens),
    }
    outside = [
        f"{name} = {v:.3g} is {where} trained" for name, (v, span) in spans.items() if (where := _outside(v, span))
    ]
    return f"{arch}: {', '.join(outside)}" if outside else ""


def _outside(value: float, span: tuple[float, float]) -> str:
    for bound, beyond, name in ((span[1], value / span[1], "largest"), (span[0], span[0] / value, "smallest")):
        if beyond > 1:
            way = "above" if name == "largest" else "below"
            return f"just {way} the {name}" if beyond < 1.05 else f"{value / bound:.3g} times the {name}"
    return ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _label_value(name: str, measured: float) -> float:
    number = name.strip().lstrip("S=~≈ ").rstrip("% ")
    try:
        value = float(number) / 100
    except ValueError:
        return measured
    return value if 0 <= value < 1 and abs(value - measured) <= 0.02 else measured
