"""The one way from sums by document group to an interval or a p value: the jackknife over documents. No torch.

Groups of documents are the independent units: tokens of one document are alike. A replicate is the value with one group left
out, so any function of sums (a mean, a ratio, a difference of ratios) has replicates by doing to them what is done to the
value. Their spread gives the standard error, their skewness bends the interval, and the lengths of the documents give the
degrees of freedom. docs/uncertainty.md has what these intervals cover, and what other methods did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

FEWEST = 8
"""Documents' worth: with fewer there is no interval, anywhere. Documents of unequal length are worth fewer than they are."""
SKEW = 1.75
"""What the skewness of the replicates is multiplied by: that of few values from a long tail is too small, since the tail is
seldom among them. Chosen by coverage (docs/uncertainty.md)."""
METHOD = "95% interval over documents, for this model (jackknife, studentised, corrected for skewness)"
"""In words; where the documents are prompts, `over("prompts")`."""


def over(units: str) -> str:
    """`METHOD`, over documents or prompts."""
    return METHOD.replace("documents", units)


Units = tuple[tuple[str, int], ...]
"""What the replicates leave out one at a time: (which groups of documents, how many), one or more such blocks."""


def mean_and_replicates(total: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The mean, and the mean without each group.

    Args:
        total: [group, *shape] sums.
        count: [group, *shape] how many tokens are in each.

    Returns:
        The mean [*shape], NaN where count is 0, and replicates [group, *shape]; None with one group.

    Examples:
        >>> mean_and_replicates(np.array([[5.0], [3.0]]), np.array([[1.0], [3.0]]))
        (array([2.]), array([[1.], [5.]]))
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        all_total, all_count = total.sum(0), count.sum(0)
        mean = all_total / all_count
        if total.shape[0] < 2:
            return mean, None
        # Sums of what is left, not differences to the whole: of a group that holds everything nothing may be left but rounding.
        return mean, np.where(count == all_count, np.nan, all_total - total) / (all_count - count)


def product_and_replicates(
    first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray | None]:
    """The product of two means without the bias of a plug-in: over pairs of different groups of documents.

    Both means are of the same documents, so their product holds the covariance of their errors, which for sums of squares of
    many small shares can be larger than what is measured. A pair of different documents has none.

    Args:
        first, second: total and count, each [group, *shape].

    Returns:
        The product [*shape] and replicates [group, *shape]. Where one group alone holds tokens there is no such pair, and the
        product is the plug-in.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        (one, in_one), (two, in_two) = first, second
        own, counted = one * two, in_one * in_two
        all_own, all_counted = own.sum(0), counted.sum(0)
        whole, number = one.sum(0) * two.sum(0), in_one.sum(0) * in_two.sum(0)
        alone = number - all_counted <= 1e-12 * number
        product = np.where(alone, whole / number, (whole - all_own) / (number - all_counted))
        if one.shape[0] < 2:
            return product, None
        left = [array.sum(0) - array for array in (one, two, in_one, in_two)]
        pairs = left[2] * left[3] - (all_counted - counted)
        rest = (left[0] * left[1] - (all_own - own)) / np.where(pairs > 1e-12 * number, pairs, np.nan)
        return product, rest


def support_of(count: np.ndarray) -> np.ndarray:
    """[2, *shape] how many groups hold a token, and how many of equal size they are worth, (Σ n)² / Σ n² (Kish), from
    count [group, *shape]."""
    squares = (count**2).sum(0)
    worth = np.divide(count.sum(0) ** 2, squares, out=np.zeros_like(squares), where=squares > 0)
    return np.stack([(count > 0).sum(0), worth])


def enough(support: np.ndarray) -> np.ndarray:
    """[*shape] whether there are documents enough for an interval."""
    return support[1] > FEWEST - 1e-6  # the sums of equal lengths round


def interval(
    values: np.ndarray, replicates: np.ndarray, support: np.ndarray, level: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds [*shape] of values [*shape] with replicates [replicate, *shape]; NaN where there are too few documents.

    On each side the further of two bounds: Student's t, and t corrected for skewness by Hall's transformation (1992, J. R. Stat.
    Soc. B 54:221). The first holds for even tails, the second for long ones; neither does for both.
    """
    error, q, degrees = _moments(replicates, support)
    t = t_quantile((1 + level) / 2, degrees)
    low = values - error * np.maximum(t, _unbent(t, q))
    high = values + error * np.maximum(t, -_unbent(-t, q))
    known = enough(support)
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


def p_values(values: np.ndarray, replicates: np.ndarray, support: np.ndarray) -> np.ndarray:
    """[*shape] two-sided p of a value of 0: below 0.05 exactly where the 95 % interval leaves 0 out."""
    error, q, degrees = _moments(replicates, support)
    with np.errstate(divide="ignore", invalid="ignore"):
        score = np.where((values == 0) & (error == 0), 0.0, values / error)
    return np.where(enough(support), t_tails(np.abs(lesser(score, q)), degrees), np.nan)


def lesser(t: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The nearer to 0 of t and of t corrected for skewness `q` (over the root of the number); 0 where their signs differ."""
    with np.errstate(invalid="ignore"):
        bent = t + q / 6 + t * t * q * (1 / 3 + t * q / 27)
    lesser = np.where(np.abs(bent) < np.abs(t), bent, t)
    return np.where(t * bent < 0, 0.0, lesser)


def _moments(replicates: np.ndarray, support: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Standard error, corrected skewness over the root of the number of groups, and degrees of freedom, each [*shape]."""
    groups, worth = support
    apart = replicates - replicates.mean(0)
    squares = apart * apart
    second, third = squares.sum(0), (squares * apart).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt((groups - 1) / groups * second)
        q = skewness(-third, second, groups)
    return error, q, np.maximum(np.floor(4 * (worth - 1) + 1e-6) / 4, 1.0)  # in quarters: few quantiles to find


def skewness(third: np.ndarray, second: np.ndarray | float, number: np.ndarray | float) -> np.ndarray:
    """From sums of squares and cubes about the mean: the skewness, without bias of small normal samples, times `SKEW`, over √n."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bias = np.sqrt(number * (number - 1)) / np.maximum(np.asarray(number) - 2, 1)
        return (
            SKEW * bias * np.clip(np.nan_to_num(third / second**1.5, posinf=0.0, neginf=0.0), -1, 1)
        )  # more is rounding


def _unbent(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The t whose corrected value is x."""
    small = np.abs(q) < 1e-6
    q = np.where(small, 1.0, q)
    return np.where(small, x, 3 / q * (np.cbrt(1 + q * (x - q / 6)) - 1))


# Replicates of two arrays of different documents


def aligned(values: np.ndarray, replicates: np.ndarray, units: Units, wanted: Units) -> np.ndarray:
    """Replicates for blocks of groups that may not be among `units`: leaving one of those out changes nothing."""
    if units == wanted:
        return replicates
    starts = np.cumsum([0, *(size for _, size in units)])
    own = {block: replicates[a:b] for block, a, b in zip(units, starts, starts[1:], strict=False)}
    rest = [own.get(block, np.broadcast_to(values, (block[1], *values.shape))) for block in wanted]
    return np.concatenate(rest)


def joined(one: Units, other: Units) -> Units:
    """Every block of both, once."""
    return tuple(dict.fromkeys([*one, *other]))


# Student's t


def t_quantile(p: float, degrees: np.ndarray | float) -> np.ndarray:
    """Quantile of Student's t, also of degrees that aren't whole.

    Examples:
        >>> print(np.round(t_quantile(0.975, np.array([7, 29.0])), 3))
        [2.365 2.045]
    """
    z = NormalDist().inv_cdf(p)
    n, places = np.unique(np.asarray(degrees, dtype=np.float64), return_inverse=True)
    t = z + (z**3 + z) / 4 / n + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / n**2  # Fisher and Cornish: where Newton starts
    for _ in range(6):
        density = np.exp(_log_scale(n) - (n + 1) / 2 * np.log1p(t * t / n))
        tail = np.where(t < 0, 1 - t_tails(t, n) / 2, t_tails(t, n) / 2)
        t = t + (tail - (1 - p)) / density
    return t[places].reshape(np.shape(degrees))


def t_tails(t: np.ndarray, degrees: np.ndarray | float) -> np.ndarray:
    """Two-sided: the probability that Student's t is at least |t| away from 0."""
    n, t = np.broadcast_arrays(np.asarray(degrees, dtype=np.float64), np.abs(np.asarray(t, dtype=np.float64)))
    # With t = √n tan θ the density is cos^(n-1) θ; by Gauss and Legendre up to where nothing is left of it.
    end = np.minimum(np.arctan(t / np.sqrt(n)), 9 / np.sqrt(n))
    nodes, weights = _gauss()
    angles = end[..., None] * (nodes + 1) / 2
    inside = end * (np.cos(angles) ** (n[..., None] - 1) @ weights) / 2
    return np.clip(1 - 2 * inside * np.sqrt(n) * np.exp(_log_scale(n)), 0.0, 1.0)


@cache
def _gauss() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(48)


def _log_scale(degrees: np.ndarray) -> np.ndarray:
    """Log of the density at 0."""
    gamma = np.vectorize(math.lgamma, otypes=[float])
    return gamma((degrees + 1) / 2) - gamma(degrees / 2) - np.log(degrees * math.pi) / 2


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm's step-down correction over all elements; NaN stays NaN and isn't counted.

    Examples:
        >>> print(holm([0.01, 0.04, 0.03]))
        [0.03 0.06 0.06]
    """
    p = np.asarray(p, dtype=np.float64)
    flat = p.ravel()
    known = np.flatnonzero(~np.isnan(flat))
    order = known[np.argsort(flat[known], kind="stable")]
    corrected = np.full(flat.shape, np.nan)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(flat[order] * np.arange(len(order), 0, -1)))
    return corrected.reshape(p.shape)
