"""Loss improvement by document length, and what it looks like when parameters or experts are added instead (SMELT 5.3). Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.scaling.bootstrap import cell_weights
from visitlens.probe.scaling.table import PartLosses, RunTable, keys_of

FAMILIES = ("architecture", "more experts", "more parameters")
"""Target against reference; the reference's consecutive sparsity levels at one scale; its consecutive scales at one level."""
DRAWS = 1000
LENGTH_GAIN = Measure(
    "length_gain",
    "Loss improvement by document length, relative to its mean",
    ("family", "bucket"),
    "times the mean over buckets",
    "Each pair's loss improvement in a length bucket over its mean over buckets; mean over the family's pairs.",
    "5.3, Figure 20a",
)
LENGTH_RATIO = Measure(
    "length_ratio",
    "Improvement on long over short documents",
    ("family",),
    "ratio",
    "Mean over the longer half of the buckets over the mean over the shorter half, of the family's mean shape.",
    "5.3",
)


def length_contrasts(
    table: RunTable, target: str, reference: str, draws: int = DRAWS, seed: int = 0
) -> tuple[StatArray, StatArray]:
    """The normalised shape [family, bucket] and the ratio of long to short [family]; buckets are named by their upper bound in tokens.

    Intervals are of a bootstrap over each family's pairs. A family without pairs is left out.

    Raises:
        InputError: fewer than two buckets, no pair of both architectures, or a pair whose mean improvement isn't positive, so that its
            shape has no meaning (names it).
    """
    parts = table.by_part("bucket")
    order = np.argsort([float(bucket) for bucket in parts.parts])
    buckets = [parts.parts[i] for i in order]
    if len(buckets) < 2:
        raise InputError(f"{table.name}: contrasts by length need two buckets or more, got {', '.join(buckets)}")
    shapes = {}
    for family in FAMILIES:
        pairs = list(_pairs(parts, family, target, reference))
        if pairs:
            shapes[family] = np.array([_shape(parts, pair, order, family) for pair in pairs])
    if FAMILIES[0] not in shapes:
        raise InputError(f"{table.name}: no endpoint has both {target} and {reference} with buckets")
    values = np.stack([shape.mean(0) for shape in shapes.values()])
    replicates = np.stack([cell_weights(len(s), draws, seed) @ s / len(s) for s in shapes.values()], 1)
    labels = {"family": list(shapes), "bucket": buckets}
    how = "; ".join(f"{family}: {len(shape)} pairs" for family, shape in shapes.items())
    shape = StatArray(LENGTH_GAIN, values, labels, replicates, aggregation=f"mean over pairs ({how})")
    half = len(buckets) // 2
    ratio = StatArray(
        LENGTH_RATIO,
        values[:, -half:].mean(1) / values[:, :half].mean(1),
        {"family": list(shapes)},
        replicates[..., -half:].mean(-1) / replicates[..., :half].mean(-1),
        aggregation=f"{half} longest over {half} shortest buckets ({how})",
    )
    return shape, ratio


def _pairs(parts: PartLosses, family: str, target: str, reference: str) -> Iterator[tuple[int, int]]:
    """(worse, better) endpoints of a family."""
    ends = parts.ends
    at = {key: i for i, key in enumerate(keys_of(ends, ("arch", "scale", "level", "D", "seed")))}
    scales, levels = ends.ordered("scale", "F"), ends.ordered("level", "S")
    following: dict[str, dict[str, str]] = {
        "more experts": dict(pairwise(levels)),
        "more parameters": dict(pairwise(scales)),
    }
    for (arch, scale, level, *rest), i in at.items():
        if arch != reference:
            continue
        if family == FAMILIES[0]:
            other = (target, scale, level, *rest)
        elif family == "more experts":
            other = (arch, scale, following[family].get(level), *rest)
        else:
            other = (arch, following[family].get(scale), level, *rest)
        if other in at:
            yield i, at[other]


def _shape(parts: PartLosses, pair: tuple[int, int], order: Sequence[int] | np.ndarray, family: str) -> np.ndarray:
    worse, better = pair
    improvement = (parts.losses[worse] - parts.losses[better])[order]
    mean = improvement.mean()
    if not mean > 0:
        ends = parts.ends
        names = (f"{ends['arch'][i]} {ends['scale'][i]} {ends['level'][i]}" for i in (better, worse))
        raise InputError(
            f"{ends.name}: {' over '.join(names)} ({family}) improves the loss by {mean:.3g} nats on average; a shape relative to "
            "the mean needs an improvement"
        )
    return improvement / mean
