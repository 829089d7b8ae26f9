"""Which attention maps are compared with which, in groups that share no map: what a pass must have in hand at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class ComparisonPlan:
    """Which maps, numbered visit * heads + head, are in hand together and which of them are compared.

    Attributes:
        across: pairs of visits.
        comparisons: one for each pair of visits, then one for the control of each visit.
        members: [group, member] maps.
        pairs: [group, pair, 3] two members of the group, and comparison * heads + head.
    """

    across: tuple[tuple[int, int], ...]
    comparisons: int
    members: np.ndarray
    pairs: np.ndarray


@cache
def plan_comparisons(num_visits: int, heads: int, overlaps: bool) -> ComparisonPlan:
    """The plan for every two visits and the control; without overlaps, one map a group."""
    visits, half = range(num_visits), heads // 2
    across = tuple(combinations(visits, 2)) if overlaps else ()
    pairs = {(a * heads + h, b * heads + h): n * heads + h for n, (a, b) in enumerate(across) for h in range(heads)}
    controls = num_visits if overlaps and heads > 1 else 0
    for v in range(controls):
        for h in range(heads if heads % 2 else half):
            pairs[v * heads + h, v * heads + (h + half) % heads] = (len(across) + v) * heads + h
    if not overlaps:
        groups = [[m] for m in range(num_visits * heads)]
    elif heads % 2:  # the controls chain all heads into a ring
        groups = [list(range(num_visits * heads))]
    else:
        groups = [[v * heads + h for v in visits for h in (g, g + half)] for g in range(half)]
    inside = [[(g.index(a), g.index(b), at) for (a, b), at in pairs.items() if a in g] for g in groups]
    shaped = np.array(inside, dtype=np.int64).reshape(len(groups), -1, 3)
    return ComparisonPlan(across, len(across) + controls, np.array(groups), shaped)
