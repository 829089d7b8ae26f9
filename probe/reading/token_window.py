"""The tokens of one packed document, and what one token's experts and attention do at two visits. Read lazily. No torch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.core.loop_plan import Step, VisitPair
from visitlens.probe.reading.recorded_run import RecordedRun

MOST_TOKENS = 600
"""Of one window: a long document is shown in parts."""
_CHANGED = 8


class Segments:
    """The packed documents of a recording, numbered from 0 over all shards. Opens the shards that it is asked about and no
    more: a shard begins with a document, and numbers rise, so the shard of a number is found by interpolation."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self._shards = run.recording.shards
        self._known: dict[int, tuple[int, np.ndarray]] = {}

    def __len__(self) -> int:
        first, bounds = self._in_shard(len(self._shards) - 1)
        return first + len(bounds) - 1

    def span(self, segment: int) -> tuple[int, int]:
        """The document's first token and the one after its last.

        Raises:
            InputError: no such document.
        """
        first, bounds = self._shard_of(segment)
        at = segment - first
        if not 0 <= at < len(bounds) - 1:
            raise InputError(f"expected a document among 0 to {len(self) - 1}, got {segment}")
        return int(bounds[at]), int(bounds[at + 1])

    def of_token(self, token: int) -> int:
        """The document that a recorded token lies in."""
        starts = [shard["token_start"] for shard in self._shards]
        first, bounds = self._in_shard(max(bisect_right(starts, token) - 1, 0))
        return first + int(np.clip(np.searchsorted(bounds, token, side="right") - 1, 0, len(bounds) - 2))

    def beside(self, segment: int) -> list[tuple[int, int]]:
        """(number, tokens) of the documents in the same shard."""
        first, bounds = self._shard_of(segment)
        return [(first + at, int(size)) for at, size in enumerate(np.diff(bounds))]

    def window(self, segment: int, token: int | None = None) -> TokenWindow:
        """A document, or of a long one the part that holds the token.

        Raises:
            InputError: no such document.
        """
        start, stop = self.span(segment)
        if stop - start > MOST_TOKENS:
            part = (token - start) // MOST_TOKENS if token is not None and start <= token < stop else 0
            start += part * MOST_TOKENS
            stop = min(stop, start + MOST_TOKENS)
        return TokenWindow(self.run, start, stop)

    def _shard_of(self, segment: int) -> tuple[int, np.ndarray]:
        """Of the shard that holds the document, or would."""
        low, high = 0, len(self._shards) - 1
        first, bounds = self._in_shard(low)
        while segment >= first + len(bounds) - 1 and low < high:
            limit = self._in_shard(high)[0]
            if segment >= limit:
                low = high
            elif high - low > 1:
                guess = low + (high - low) * (segment - first) // max(limit - first, 1)
                middle = min(max(guess, low + 1), high - 1)
                low, high = (low, middle) if segment < self._in_shard(middle)[0] else (middle, high)
            else:
                break
            first, bounds = self._in_shard(low)
        return first, bounds

    def _in_shard(self, at: int) -> tuple[int, np.ndarray]:
        """A shard's first document, and where its documents start; the last bound is the shard's end."""
        if at not in self._known:
            shard = self._shards[at]
            start, stop = shard["token_start"], shard["token_start"] + shard["token_count"]
            segment = self.run.recording.token_table((start, stop), ("segment",))["segment"]
            starts = np.flatnonzero(np.diff(segment, prepend=segment[:1] ^ 1))
            self._known[at] = int(segment[0]), np.append(starts, len(segment)) + start
        return self._known[at]


@dataclass(frozen=True)
class TokenWindow:
    """Tokens `start` up to `stop` of a recording. What was read of them is kept."""

    run: RecordedRun
    start: int
    stop: int

    @cached_property
    def table(self) -> dict[str, np.ndarray]:
        """`id`, `segment`, `pos`, each [token]."""
        return self.run.recording.token_table(tokens=(self.start, self.stop))

    @cached_property
    def _read(self) -> dict[tuple[str, int], np.ndarray]:
        return {}

    def values(self, name: str, pair: VisitPair, head: int | None = None) -> dict[str, np.ndarray]:
        """A stored measure's [token] values at both visits and their difference; or between them. Mean over heads, or one."""
        if self.run.stat(name).axes[0] == "pair":
            return {"between": self._at(name, self.run.plan.pairs.index(pair), head)}
        earlier, later = self.at_step(name, pair.earlier, head), self.at_step(name, pair.later, head)
        return {"earlier": earlier, "later": later, "difference": later - earlier}

    def at_step(self, name: str, step: Step, head: int | None = None) -> np.ndarray:
        """The same at one step alone."""
        return self._at(name, step.index, head)

    def _at(self, name: str, index: int, head: int | None) -> np.ndarray:
        if (name, index) not in self._read:
            self._read[name, index] = self.run.recording.token_stat(name, (self.start, self.stop), index)
        part = self._read[name, index]
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
    """Measures whose per-token values the recording keeps, as its first shard says."""
    inside = run.recording.contents(fetch=True)
    return tuple(name for name in run.measures if f"stats/{name}" in inside)
