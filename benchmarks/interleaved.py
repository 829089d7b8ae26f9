"""Ways of doing the same, timed in turn: ratios to the first, with an interval."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def interleaved(ways: dict[str, Callable[[], Any]], rounds: int) -> tuple[float, dict[str, np.ndarray]]:
    """Median CPU seconds of the first way, and each way's ratios to it, one a round. Each round runs all of them, in an order of its
    own (the same in every run): what ran before leaves its traces in caches and in the allocator. One more round, not counted, warms up."""
    names, order = list(ways), np.random.default_rng(0)
    seconds = np.empty((rounds + 1, len(names)))
    for round_ in range(rounds + 1):
        for way in order.permutation(len(names)):
            began = time.process_time()
            kept = ways[names[way]]()
            seconds[round_, way] = time.process_time() - began
            del kept
    seconds = seconds[1:]
    return float(np.median(seconds[:, 0])), dict(zip(names, (seconds / seconds[:, :1]).T, strict=True))


def spread(ratios: np.ndarray) -> dict[str, float]:
    """The median, and what the true one lies between in 95 % of such runs or more: order statistics, whatever the distribution; of
    fewer than six rounds the lowest and highest, which say less."""
    rounds = len(ratios)
    tail, cut = 0.0, 0
    while cut < rounds // 2 and (tail := tail + math.comb(rounds, cut) / 2**rounds) <= 0.025:
        cut += 1
    low, high = np.sort(ratios)[[max(cut - 1, 0), rounds - max(cut, 1)]]
    return {"median": round(float(np.median(ratios)), 3), "low": round(float(low), 3), "high": round(float(high), 3)}
