"""What silencing attention heads does to a live run: one head, or every head in turn. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.live.live_run import LiveRun, log_softmax

KINDS = {
    "zero": "set to zero",
    "mean": "set to its mean over the prompt",
    "resample": "as in the shuffled prompt",
}
"""How a head's attended context (PV, before W_O) is silenced."""


@dataclass(frozen=True)
class TokenChange:
    """A token's probability after one position, before and after an intervention."""

    token: int
    text: str
    before: float
    after: float


@dataclass(frozen=True)
class SilencedHead:
    """One prompt with one head silenced, against the run as it was. `logits` [token, vocab] are those of the ablated run."""

    run: LiveRun = field(repr=False)
    layer: int
    head: int
    visits: tuple[int, ...]
    kind: str
    logits: np.ndarray = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes + self.run.nbytes

    def kl(self, position: int = -1) -> float:
        """KL(before || after) of what follows a token, nats."""
        return divergence(self.run.log_probs(position), log_softmax(self.logits[self.run.at(position)]))

    def kl_by_token(self) -> np.ndarray:
        """[token] KL(before || after) of what follows each token, nats: silencing a head acts on all of them."""
        return np.array([self.kl(position) for position in range(len(self.run))])

    def log_prob_change(self, position: int = -1, target: int | None = None) -> float:
        """Change of a target's log-probability after one position, nats; `run.target(position)` by default.

        Raises:
            InputError: a target outside the vocabulary.
        """
        position = self.run.at(position)
        target = self.run.target(position) if target is None else target
        check_target(target, self.run.logits.shape[1])
        return float(log_softmax(self.logits[position])[target] - self.run.log_probs(position)[target])

    def changes(self, position: int = -1, n: int = 8) -> list[TokenChange]:
        """The n tokens most likely before or after, by their larger probability."""
        position = self.run.at(position)
        before, after = np.exp(self.run.log_probs(position)), np.exp(log_softmax(self.logits[position]))
        order = np.argsort(-np.maximum(before, after), kind="stable")[:n]
        return [TokenChange(int(t), self.run.text_of(t), float(before[t]), float(after[t])) for t in order]

    def __repr__(self) -> str:
        at = " and ".join(map(str, self.visits))
        return (
            f"SilencedHead(layer {self.layer}, head {self.head}, visit {at}, {self.kind}: "
            f"KL {self.kl(-1):.4f} nats after the last token, {self.run.text_of(self.run.target())!r} "
            f"{self.log_prob_change():+.4f} nats)"
        )


@dataclass(frozen=True)
class HeadScan:
    """Every head silenced in turn: [place, head], a place being (layer, visits).

    `change`: of the target's log-probability after `position`, nats; `kl`: KL(before || after) there, nats.
    """

    run: LiveRun = field(repr=False)
    position: int
    target: int
    kind: str
    places: tuple[tuple[int, tuple[int, ...]], ...]
    change: np.ndarray
    kl: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.change.nbytes + self.kl.nbytes + self.run.nbytes

    def ranked(self) -> list[tuple[int, int, tuple[int, ...], float, float]]:
        """(layer, head, visits, change, KL), what hurts the target most first."""
        order = np.argsort(self.change, axis=None, kind="stable")
        rows = zip(*np.unravel_index(order, self.change.shape), strict=True)
        return [
            (self.places[p][0], int(h), self.places[p][1], float(self.change[p, h]), float(self.kl[p, h]))
            for p, h in rows
        ]


def check_target(target: int, vocabulary: int) -> None:
    """Raises InputError: no such token id."""
    if not 0 <= target < vocabulary:
        raise InputError(f"no token {target}: expected an id of 0 to {vocabulary - 1}")


def divergence(before: np.ndarray, after: np.ndarray) -> float:
    """KL(before || after) of two distributions given as log-probabilities [vocab], nats; never below 0."""
    return max(float((np.exp(before) * (before - after)).sum()), 0.0)
