"""Which of many effects are there at all: sign flips over documents, corrected for the number of effects. No torch.

Where an effect is nothing but noise around 0, each document's could as well have had the other sign. So the signs are flipped,
for all effects of a document at once, which keeps what they have in common, and a p value is the share of flips that give as
large a statistic as was found. The null is that every effect is as likely to be -x as x on each document: exact at any number
of documents. Of the wider null, a mean of 0, the test is approximate; its statistic, that of the intervals (`intervals.lesser`),
is corrected for skewness to that end (docs/uncertainty.md has the rates).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from visitlens.probe.measures import intervals

DRAWS = 2048
"""All flips where there are no more (11 documents), else a group of so many, that of the data one of them: no p value is below 1 / DRAWS."""
_AT_ONCE = 1 << 17  # statistics held at once: they stay in the processor's cache
NULL = "no effect: on every prompt or document the change is as likely to be -x as x"
"""What is tested, in words."""


@dataclass(frozen=True)
class FlipTest:
    """`p [*shape]` of each effect alone; `p_family [*shape]` corrected for all of them by the step-down largest statistic
    (Westfall and Young), which takes in that effects go together. NaN where there are too few documents."""

    p: np.ndarray
    p_family: np.ndarray


def flip_test(total: np.ndarray, count: np.ndarray, seed: int = 0) -> FlipTest:
    """Two-sided tests of effects `total / count`, sums [document group, *shape].

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> test = flip_test(rng.normal([0, 2], 1, (8, 2)), np.ones((8, 2)))
        >>> print(test.p_family <= 0.05)
        [False  True]
    """
    shape = total.shape[1:]
    x = total.reshape(len(total), -1)
    x = x[(np.broadcast_to(count, total.shape).reshape(x.shape) > 0).any(1)]
    worth = intervals.support_of(np.broadcast_to(count, total.shape))
    if len(x) < 2 or not x.size:
        return FlipTest(np.full(shape, np.nan), np.full(shape, np.nan))
    scale = np.sqrt((x**2).sum(0))
    x = x / np.where(scale > 0, scale, 1)
    observed = _statistics(np.ones((1, len(x))), x)[0]
    order = np.argsort(
        observed, kind="stable"
    )  # rising: the largest of an effect and of those below it is a running maximum
    x, reached = x[:, order], observed[order] * (1 - 1e-7)  # flips that give the same statistic sum it in another order
    alone, family, draws = np.zeros(len(observed)), np.zeros(len(observed)), 0
    for signs in _signs(len(x), max(1, _AT_ONCE // x.shape[1]), seed):
        found = _statistics(signs, x)
        if not draws:
            found[0] = observed[order]  # the data's own, to the last bit
        alone[order] += (found >= reached).sum(0)
        family[order] += (np.maximum.accumulate(found, axis=1) >= reached).sum(0)
        draws += len(signs)
    stepped = np.empty_like(family)
    stepped[order[::-1]] = np.maximum.accumulate(family[order[::-1]] / draws)
    known = intervals.enough(worth)
    return FlipTest(*(np.where(known, p.reshape(shape), np.nan) for p in (alone / draws, stepped)))


def _signs(documents: int, at_once: int, seed: int) -> Iterator[np.ndarray]:
    """[draw, document] of -1 and 1, in parts; the data's own come first.

    All flips, or a subgroup of them: of which the product of any two is one, so that the test stays exact with the same flips each
    time (Hemerik and Goeman 2018, "Exact testing with random permutations"). A document is flipped by those of its code's bits that
    are on in a flip, and no two documents share a code while there are codes enough.
    """
    bits = min(documents, DRAWS.bit_length() - 1)
    if bits == documents:
        codes = 1 << np.arange(documents)
    else:
        codes = np.random.default_rng(seed).choice(np.arange(1, DRAWS), documents, replace=documents >= DRAWS)
    odd = np.bitwise_count(np.arange(1 << bits)[:, None] & codes) & 1
    every = 1.0 - 2.0 * odd
    yield from (every[first : first + at_once] for first in range(0, len(every), at_once))


def _statistics(signs: np.ndarray, x: np.ndarray) -> np.ndarray:
    """[draw, effect] the size of `intervals.lesser` of x [document, effect], whose squares sum to 1 (or 0), under signs [draw, document]."""
    n = len(x)
    total = signs @ x
    squares = total * total
    spread = np.maximum(1 - squares / n, 1e-12)  # 0 where all are the same
    root = np.sqrt(spread)
    third = (signs @ x**3 + total * (2 * squares / n**2 - 3 / n)) / (spread * root)
    return np.abs(intervals.lesser(total * np.sqrt((n - 1) / n) / root, intervals.skewness(third, 1.0, n)))
