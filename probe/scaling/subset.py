"""Compute saved on a part of the text: a category, a source, or a quartile of sources by Baseline loss (SMELT 5.2). Torch-free.

A part alone can't identify six coefficients. So the exponents a, b, c stay those of the fit to all text, and only E, A and K are refitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.scaling.law import Fit, Problem, chosen
from visitlens.probe.scaling.surface import Surface, compute_gain
from visitlens.probe.scaling.table import PartLosses, RunTable, keys_of

QUARTILES = ("Q1", "Q2", "Q3", "Q4")
PART_GAIN = Measure(
    "part_gain",
    "Compute saved by part of the text (CE Gain)",
    ("part",),
    "share of compute",
    "CE Gain at one budget and sparsity level, with a, b, c of the fit to all text and E, A, K refitted to the part.",
    "5.2",
)
QUARTILE_GAIN = Measure(
    "quartile_gain",
    "Compute saved by quartile of the reference's source loss",
    ("quartile",),
    "share of compute",
    "Mean CE Gain of the sources in each quarter of a pair's ranking by the reference's loss (Q1: lowest), mean over pairs.",
    "5.2",
)


@dataclass(frozen=True)
class PartFits:
    """Surfaces of each part by architecture: `surfaces[arch]` has coefficients [part]."""

    parts: tuple[str, ...]
    surfaces: Mapping[str, Surface]

    def gain(self, target: str, reference: str, compute: float, sparsity: float) -> StatArray:
        """[part] CE Gain; NaN where the target's loss lies below the reference's E."""
        values = compute_gain(self.surfaces[target], self.surfaces[reference], compute, sparsity)
        how = f"at {compute:.3g} FLOPs and S = {sparsity:g}"
        return StatArray(PART_GAIN, np.asarray(values, dtype=np.float64), {"part": list(self.parts)}, aggregation=how)


def fit_parts(table: RunTable, fits: Mapping[str, Fit], column: str, levels: Sequence[str] = ()) -> PartFits:
    """Refits E, A, K of every architecture to each part.

    Args:
        fits: of all text, from `fit_laws`; their exponents are kept.
        column: source or category; a category's loss is the mean over its rows (its sources).

    Raises:
        InputError: the table has no such parts, an endpoint lacks one, or a refit doesn't converge.
    """
    parts = table.by_part(column)
    surfaces = {}
    for arch, fit in fits.items():
        keep = np.isin(parts.ends.rows, chosen(parts.ends, arch, levels).rows)
        ends, losses = parts.ends.where(keep), parts.losses[keep]
        found = []
        for name, loss in zip(parts.parts, losses.T, strict=True):
            refit = _refit(RunTable({**ends.columns, "loss": loss}, ends.rows, ends.name), fit.surface)
            if refit is None:
                raise InputError(f"{table.name}: the fit of {arch} to {column} {name} doesn't converge")
            found.append(refit)
        surfaces[arch] = Surface.from_array(np.array(found))
    return PartFits(parts.parts, surfaces)


def quartiles(table: RunTable, gains: StatArray, target: str, reference: str, column: str = "source") -> StatArray:
    """[quartile] mean gain of the sources in each quarter, by each pair's own ranking; sizes as `np.array_split` makes them.

    A source's gain stays the same in all pairs; its quarter needn't. The mean of quartiles, weighted by their sizes, is the mean of
    the sources' gains.

    Args:
        gains: [part] of `PartFits.gain`, by source.

    Raises:
        InputError: fewer than four sources, or no pair of endpoints with both architectures.
    """
    parts = table.by_part(column)
    if list(gains.labels["part"]) != list(parts.parts):
        raise InputError(f"expected the gains of {len(parts.parts)} parts by {column}, got those of other parts")
    if len(parts.parts) < len(QUARTILES):
        raise InputError(f"quartiles need four sources or more, got {len(parts.parts)}")
    rows = matched(parts, target, reference)
    means = np.array(
        [
            [gains.values[quarter].mean() for quarter in np.array_split(np.argsort(losses, kind="stable"), 4)]
            for losses in parts.losses[rows]
        ]
    )
    how = f"{gains.aggregation}; {len(rows)} pairs, {', '.join(map(str, quartile_sizes(len(parts.parts))))} sources"
    return StatArray(QUARTILE_GAIN, means.mean(0), {"quartile": list(QUARTILES)}, aggregation=how)


def quartile_sizes(sources: int) -> list[int]:
    """How many sources fall into each quarter: 39 into 10, 10, 10, 9."""
    return [len(quarter) for quarter in np.array_split(np.arange(sources), len(QUARTILES))]


def matched(parts: PartLosses, target: str, reference: str) -> np.ndarray:
    """Rows of `parts` that are the reference's endpoint of a pair with both architectures."""
    keys = keys_of(parts.ends, ("scale", "level", "D", "seed"))
    archs = parts.ends["arch"].tolist()
    theirs = {key for key, arch in zip(keys, archs, strict=True) if arch == target}
    rows = [i for i, (key, arch) in enumerate(zip(keys, archs, strict=True)) if arch == reference and key in theirs]
    if not rows:
        raise InputError(f"{parts.ends.name}: no endpoint (scale, level, D, seed) has both {target} and {reference}")
    return np.array(rows)


def _refit(table: RunTable, shared: Surface) -> np.ndarray | None:
    """[coefficient], the best of the eight starts with the exponents of `shared`; None where none converges."""
    problem = Problem.of(table)
    exponents = (float(shared.a), float(shared.b), float(shared.c))
    weights = np.ones(len(table))
    starts = {tuple(start[:3]): np.array([*start[:3], *exponents]) for start in problem.starts()}
    results = [problem.minimise(start, weights, fixed=exponents) for start in starts.values()]
    good = [found for found, converged in results if converged]
    return problem.surface(min(good, key=lambda r: r.fun).x).as_array() if good else None
