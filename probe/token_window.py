"""The tokens of one packed document, and what one token's experts and attention do at two visits. Read lazily. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from visitlens.hooks.loop_plan import Step, VisitPair
from visitlens.kernels.errors import InputError
from visitlens.probe.opened import RecordedRun

MOST_TOKENS = 600
"""Of one window: a long document is shown in parts."""
_CHANGED = 8


class Segments:
    """Where the packed documents of a recording start. Reads one number a token, once."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        segment = run.recording.token_table(names=("segment",))["segment"]
        starts = np.flatnonzero(np.diff(segment, prepend=segment[:1] ^ 1))
        self.bounds = np.append(starts, len(segment))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def of_token(self, token: int) -> int:
        return int(np.searchsorted(self.bounds, token, side="right")) - 1

    def window(self, segment: int, token: int | None = None) -> TokenWindow:
        """A document, or of a long one the part that holds the token.

        Raises:
            InputError: no such document.
        """
        if not 0 <= segment < len(self):
            raise InputError(f"expected a document among 0 to {len(self) - 1}, got {segment}")
        start, stop = int(self.bounds[segment]), int(self.bounds[segment + 1])
        if stop - start > MOST_TOKENS:
            part = (token - start) // MOST_TOKENS if token is not None and start <= token < stop else 0
            start += part * MOST_TOKENS
            stop = min(stop, start + MOST_TOKENS)
        return TokenWindow(self.run, start, stop)


@dataclass(frozen=True)
class TokenWindow:
    """Tokens `start` up to `stop` of a recording."""

    run: RecordedRun
    start: int
    stop: int

    @cached_property
    def table(self) -> dict[str, np.ndarray]:
        """`id`, `segment`, `pos`, each [token]."""
        return self.run.recording.token_table(tokens=(self.start, self.stop))

    def values(self, name: str, pair: VisitPair, head: int | None = None) -> dict[str, np.ndarray]:
        """A stored measure's [token] values at both visits and their difference; or between them. Mean over heads, or one."""
        stat = self.run.recording.token_stat(name, tokens=(self.start, self.stop))
        axes = self.run.stat(name).axes

        def at(index: int) -> np.ndarray:
            part = stat[index]
            if part.ndim == 1:
                return part
            return part[:, head] if head is not None else part.mean(1)

        if axes[0] == "pair":
            return {"between": at(self.run.plan.pairs.index(pair))}
        earlier, later = at(pair.earlier.index), at(pair.later.index)
        return {"earlier": earlier, "later": later, "difference": later - earlier}

    def at_step(self, name: str, step: Step, head: int | None = None) -> np.ndarray:
        """The same at one step alone."""
        part = self.run.recording.token_stat(name, tokens=(self.start, self.stop))[step.index]
        return part if part.ndim == 1 else part[:, head] if head is not None else part.mean(1)

    def experts(self, pair: VisitPair) -> list[Experts]:
        """Of each token: which experts it keeps, drops and takes anew."""
        span = (self.start, self.stop)
        parts = [self.run.recording.experts(s.layer, s.visit, tokens=span) for s in (pair.earlier, pair.later)]
        (ids1, gates1), (ids2, gates2) = parts
        return [compare_experts(*row) for row in zip(ids1, gates1, ids2, gates2, strict=True)]


@dataclass(frozen=True)
class Experts:
    """Expert -> its gate at the earlier and at the later visit; largest first. `kept` have both."""

    kept: dict[int, tuple[float, float]]
    dropped: dict[int, float]
    new: dict[int, float]


def compare_experts(ids1: np.ndarray, gates1: np.ndarray, ids2: np.ndarray, gates2: np.ndarray) -> Experts:
    """From the expert ids and gates [k] of one token at two visits."""
    first = {int(i): float(g) for i, g in zip(ids1, gates1, strict=True)}
    second = {int(i): float(g) for i, g in zip(ids2, gates2, strict=True)}
    kept = {i: (g, second[i]) for i, g in first.items() if i in second}
    dropped = {i: g for i, g in first.items() if i not in second}
    new = {i: g for i, g in second.items() if i not in first}
    return Experts(
        dict(sorted(kept.items(), key=lambda item: -max(item[1]))),
        dict(sorted(dropped.items(), key=lambda item: -item[1])),
        dict(sorted(new.items(), key=lambda item: -item[1])),
    )


def changed_keys(earlier: np.ndarray, later: np.ndarray, most: int = _CHANGED) -> tuple[list[int], list[int]]:
    """Of one query's attention rows [key]: the keys that gained most from visit to visit, and those that lost most."""
    difference = np.nan_to_num(later.astype(np.float64) - earlier.astype(np.float64))
    order = np.argsort(difference, kind="stable")
    lost = [int(i) for i in order[:most] if difference[i] < 0]
    gained = [int(i) for i in order[::-1][:most] if difference[i] > 0]
    return gained, lost


def stored_measures(run: RecordedRun) -> tuple[str, ...]:
    """Measures whose per-token values the recording keeps: found by reading one token of each."""
    found = []
    for name in run.measures:
        try:
            run.recording.token_stat(name, tokens=(0, 1))
        except InputError:
            continue
        found.append(name)
    return tuple(found)
