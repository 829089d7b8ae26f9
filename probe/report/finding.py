"""A claim of the paper, what was found of it, and when it counts as decided: alone, and among many. No torch.

A claim is decided by one number whose null is 0: a difference of two measured means, or a ratio minus 1. It holds when
the whole 95% interval over documents lies on the claimed side, doesn't when it lies on the other, and is not decided
when it contains 0. Of many claims some would be decided by chance, so each also has a verdict with all of them in view:
decided only if its p value is at most 0.05 after Holm's correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from visitlens.probe.measures.intervals import holm
from visitlens.probe.measures.measure import StatArray, json_numbers
from visitlens.probe.reading.pair import Pair

RULE = "A direction holds if the whole interval of the difference lies on the claimed side of 0; is not decided if it contains 0."
FAMILY_RULE = (
    "With all decided claims in view a direction is decided only if its p value, by Holm's correction, is at most 0.05."
)
FAMILY_ERROR = 0.05
HOLDS, FAILS, OPEN, UNMEASURED = "holds", "does not hold", "not decided", "not measured"


@dataclass(frozen=True)
class Evidence:
    """`ours` and what it is compared with (`against`, a number if it is fixed), and their `difference`, by layer where it can be."""

    ours: StatArray
    against: StatArray | float
    difference: StatArray


@dataclass(frozen=True)
class Claim:
    """`direction` is +1 where the difference is claimed to be positive, -1 where negative; `paper` is what it prints, as
    text, and as ranges (low, high) of `ours` and of what it is compared with, where it prints numbers for them."""

    key: str
    section: str
    statement: str
    paper: str
    unit: str
    ours_is: str
    against_is: str
    direction: int
    evidence: Callable[[Pair], Evidence]
    published: tuple[float, float] | None = None
    published_against: tuple[float, float] | None = None


@dataclass(frozen=True)
class Finding:
    """A claim and what was found: scalars, the verdict, and in how many looped layers the direction is the claimed one."""

    claim: Claim
    verdict: str
    reason: str
    ours: StatArray | None = None
    against: StatArray | float | None = None
    difference: StatArray | None = None
    layers: tuple[int, int] | None = None
    p: float = math.nan
    p_family: float = math.nan

    @property
    def family_verdict(self) -> str:
        """The verdict with the other claims in view: that of the claim alone, or not decided."""
        return OPEN if self.verdict in (HOLDS, FAILS) and not self.p_family <= FAMILY_ERROR else self.verdict

    @property
    def in_range(self) -> bool | None:
        """Whether our value lies in the paper's range; None where it prints none (or one number) or we have no value."""
        low, high = self.claim.published or (0.0, 0.0)
        if low == high or self.ours is None or np.isnan(self.ours.values):
            return None
        return bool(low <= self.ours.values <= high)

    @property
    def note(self) -> str:
        """A direction can hold where the phenomenon is absent: said where our difference is tiny beside the paper's."""
        ours, against = self.claim.published, self.claim.published_against
        if ours is None or against is None or self.difference is None:
            return ""
        papers = min(abs(a - b) for a in ours for b in against)
        tiny = abs(float(self.difference.values)) < papers / 20
        return f"but less than a twentieth of the paper's difference of {papers:.2g}" if tiny else ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        claim = self.claim
        texts = {
            name: getattr(claim, name)
            for name in ("key", "section", "statement", "paper", "unit", "ours_is", "against_is")
        }
        return {
            **texts,
            "published": claim.published,
            "published_against": claim.published_against,
            "ours_in_published_range": self.in_range,
            "claimed_direction": "positive" if claim.direction > 0 else "negative",
            "verdict": self.verdict,
            "verdict_among_all": self.family_verdict,
            "p": json_numbers(np.asarray(self.p)),
            "p_among_all": json_numbers(np.asarray(self.p_family)),
            "reason": self.reason,
            "note": self.note,
            "ours": _number(self.ours),
            "against": _number(self.against),
            "difference": _number(self.difference),
            "layers_in_claimed_direction": self.layers,
        }


def in_family(found: Sequence[Finding]) -> list[Finding]:
    """With `p_family`: p corrected by Holm's method for all of these that have a p value."""
    return [replace(each, p_family=float(p)) for each, p in zip(found, holm([each.p for each in found]), strict=True)]


def number_tested(found: Iterable[Finding]) -> int:
    """How many of them have a p value: what the correction is for."""
    return sum(not math.isnan(each.p) for each in found)


def verdict(difference: StatArray, direction: int) -> tuple[str, str]:
    """The verdict on a scalar difference whose null is 0, and the reason for it in words."""
    if np.isnan(difference.values):
        return UNMEASURED, "no token was measured"
    low, high = (float(bound) * direction for bound in difference.interval())
    low, high = min(low, high), max(low, high)
    if np.isnan(low):
        return OPEN, f"there is no interval: {difference.no_interval}"
    if low > 0:
        return HOLDS, "the whole interval lies on the claimed side"
    if high < 0:
        return FAILS, "the whole interval lies on the other side"
    return OPEN, "the interval contains 0"


def _number(value: StatArray | float | None) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, StatArray):
        return {"value": value, "low": None, "high": None}
    low, high = value.interval()
    return {"value": json_numbers(value.values), "low": json_numbers(low), "high": json_numbers(high)}
