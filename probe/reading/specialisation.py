"""Which tokens an expert takes, per visit: from the expert ids of a recording at level `tokens`. No torch. (ours)

An expert's specialisation is the Kullback-Leibler divergence, in nats, of the token ids that it takes from the token ids
of the whole text. Finite counts alone make it positive, so it comes with a null: the same with the experts' tokens
drawn at random (each token's expert set moved to another token), which keeps every expert's load. It has no interval: leaving out
documents changes the very bias that the null is there for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.reading.recorded_run import RecordedRun


@dataclass(frozen=True)
class TakenToken:
    """A token id, how often the expert took it, and how many times more often than its load alone explains."""

    token: int
    count: int
    lift: float


def expert_specialisation(rec: RecordedRun, layer: int, visit: int) -> StatArray:
    """[expert] divergence of the token ids an expert takes from those of the text; NaN for an expert never used.

    Raises:
        RecordingError: the recording keeps no expert ids (level `summary`).
    """
    return _divergence(rec, layer, visit, rec.recording.token_table()["id"], "expert_specialisation")


def expert_specialisation_null(rec: RecordedRun, layer: int, visit: int, seed: int = 0) -> StatArray:
    """[expert] the same with token ids shuffled against expert sets: what finite counts give without specialisation."""
    ids = np.random.default_rng(seed).permutation(rec.recording.token_table()["id"])
    return _divergence(rec, layer, visit, ids, "expert_specialisation_null")


def expert_tokens(rec: RecordedRun, layer: int, visit: int, expert: int, most: int = 20) -> list[TakenToken]:
    """The token ids that the expert takes most often beyond its load, by excess count."""
    ids = rec.recording.token_table()["id"]
    experts, _ = rec.recording.experts(layer, visit)
    if not 0 <= expert < rec.recording.config["num_experts"]:
        raise InputError(f"expected an expert in 0..{rec.recording.config['num_experts'] - 1}, got {expert}")
    taken = np.bincount(ids[(experts == expert).any(1)], minlength=int(ids.max()) + 1)
    text = np.bincount(ids, minlength=len(taken))
    expected = text * taken.sum() / len(ids)
    order = np.argsort(expected - taken, kind="stable")[:most]
    return [TakenToken(int(t), int(taken[t]), float(taken[t] / expected[t])) for t in order if taken[t] > expected[t]]


def _divergence(rec: RecordedRun, layer: int, visit: int, ids: np.ndarray, name: str) -> StatArray:
    experts, _ = rec.recording.experts(layer, visit)
    num_experts = rec.recording.config["num_experts"]
    _, compact = np.unique(ids, return_inverse=True)
    tokens = int(compact.max()) + 1
    cells = experts.astype(np.int64) * tokens + compact[:, None]
    counts = np.bincount(cells.ravel(), minlength=num_experts * tokens).reshape(num_experts, tokens)
    text = np.bincount(compact) / len(compact)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = counts / counts.sum(1, keepdims=True)
        terms = np.where(counts > 0, share * np.log(share / text), 0.0)
    used = counts.sum(1) > 0
    measure = Measure(
        name=name,
        title="Token specialisation of an expert" + (", token ids shuffled" if name.endswith("_null") else ""),
        axes=("expert",),
        unit="nats",
        definition="KL(token ids an expert takes || token ids of the text) at one layer and visit.",
        paper="ours",
        grouped=False,
    )
    return StatArray(
        measure=measure,
        values=np.where(used, terms.sum(1), np.nan),
        labels={"expert": list(range(num_experts))},
        documents=rec.recording.documents,
        tokens=rec.recording.tokens,
        aggregation="all tokens",
        counts=counts.sum(1).astype(np.float64),
        provenance=rec.provenance,
    )
