"""Accuracy gap by number of demonstrations, and an exact test over few-shot seeds (SMELT 5.3). Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from visitlens.errors import InputError, UnavailableError
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.scaling.bootstrap import cell_weights
from visitlens.probe.scaling.chance import chance_of
from visitlens.probe.scaling.drawn import DrawnArray
from visitlens.probe.scaling.table import RunTable, need

NEEDED = ("arch", "task", "k", "score")
MOST_SEEDS = 20
"""All sign flips are enumerated: 2^20 at most."""
DRAWS = 1000
GAP = Measure(
    "shots_gap",
    "Accuracy gap by number of demonstrations",
    ("k",),
    "share of answers",
    "Target minus reference, mean over the tasks on which both beat chance at some k, each the mean over its endpoints and seeds.",
    "5.3, Figure 20b",
)
ACCURACY = Measure(
    "shots_accuracy",
    "Accuracy by number of demonstrations",
    ("arch", "k"),
    "share of answers",
    "Mean over the tasks on which both beat chance at some k, each the mean over its endpoints and seeds.",
    "5.3, Figure 20b",
)


@dataclass(frozen=True)
class Gap:
    """`accuracy` [arch, k] and `gap` [k] over `tasks`; `left_out` tasks are at chance, or lack a k (the reason by name)."""

    accuracy: StatArray
    gap: StatArray
    tasks: tuple[str, ...]
    left_out: dict[str, str]


@dataclass(frozen=True)
class SignFlip:
    """Mean paired difference, its exact two-sided p over all sign flips, and of how many seeds."""

    difference: float
    p: float
    seeds: int


def shots_gap(
    table: RunTable, target: str, reference: str, shots: Sequence[int] = (), draws: int = DRAWS, seed: int = 0
) -> Gap:
    """The gap by k over the tasks that both models solve better than by chance, with an interval of a bootstrap over tasks.

    A task beats chance where both models' best mean accuracy over k lies above it. Every k has the same tasks.

    Args:
        shots: values of k; by default those that most tasks have.

    Raises:
        InputError: no scores of one of them, or no task left.
    """
    need(table, NEEDED)
    scores = _means(table, (reference, target))
    tasks = list(dict.fromkeys(task for _, task, _ in scores))
    wanted = list(shots) or _common(scores, tasks, (reference, target))
    rows = table.where(~np.isnan(table["score"]))
    chance = {t: float(np.mean(c)) for t in tasks if len(c := chance_of(rows)[rows["task"] == t])}
    kept, left_out = [], {}
    for task in tasks:
        lacking = [k for k in wanted if any((arch, task, k) not in scores for arch in (reference, target))]
        if lacking:
            left_out[task] = f"no score of both at k = {', '.join(map(str, lacking))}"
            continue
        best = [max(scores[arch, task, k] for k in wanted) for arch in (reference, target)]
        if min(best) <= chance[task]:
            left_out[task] = f"not above its chance accuracy of {chance[task]:g} for both"
            continue
        kept.append(task)
    if not kept:
        why = "; ".join(f"{task}: {reason}" for task, reason in left_out.items())
        raise InputError(f"{table.name}: no task is left to compare {target} with {reference} by k ({why})")
    values = np.array([[[scores[arch, task, k] for k in wanted] for task in kept] for arch in (reference, target)])
    weights = cell_weights(len(kept), draws, seed) / len(kept)
    means, replicates = values.mean(1), np.einsum("rt,atk->rak", weights, values)
    how = f"mean over {len(kept)} tasks; interval of {draws} draws of tasks"
    labels = {"arch": [reference, target], "k": wanted}
    accuracy = DrawnArray(ACCURACY, means, labels, replicates, aggregation=how)
    gap = DrawnArray(GAP, means[1] - means[0], {"k": wanted}, replicates[:, 1] - replicates[:, 0], aggregation=how)
    return Gap(accuracy, gap, tuple(kept), left_out)


def sign_flip(differences: Sequence[float] | np.ndarray) -> SignFlip:
    """The exact permutation test of paired differences: how often a mean as far from 0 comes of any signs.

    Ten differences of one sign have the smallest p there is, 2 / 2^10.

        >>> round(sign_flip([0.01 * i for i in range(1, 11)]).p, 5)
        0.00195

    Raises:
        InputError: none, more than 20, or not finite.
        UnavailableError: scipy isn't installed.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not 1 <= len(values) <= MOST_SEEDS or not np.isfinite(values).all():
        raise InputError(
            f"expected 1 to {MOST_SEEDS} finite paired differences, got {len(values)}: {values.tolist()[:5]}"
        )
    if len(values) == 1:  # one flip either way: any p is 1, and scipy wants two values
        return SignFlip(float(values[0]), 1.0, 1)
    try:
        from scipy.stats import permutation_test
    except ImportError as error:
        raise UnavailableError("the permutation test needs scipy: pip install 'visitlens[scaling]'") from error
    found = permutation_test(
        (values,), lambda x, axis: x.mean(axis), permutation_type="samples", n_resamples=2 ** len(values), batch=1 << 14
    )
    return SignFlip(float(values.mean()), float(min(found.pvalue, 1.0)), len(values))


def seed_test(table: RunTable, target: str, reference: str, task: str, k: int) -> SignFlip:
    """`sign_flip` of a task's paired few-shot seeds at k demonstrations, each the mean over endpoints that both have.

    Raises:
        InputError: no column seed, or seeds that one of the two lacks.
    """
    need(table, (*NEEDED, "seed"))
    mine = (table["task"] == task) & (table["k"] == k) & ~np.isnan(table["score"])
    by_arch = {}
    for arch in (reference, target):
        rows = table.where(mine & (table["arch"] == arch))
        by_arch[arch] = {s: float(rows["score"][rows["seed"] == s].mean()) for s in np.unique(rows["seed"]).tolist()}
    if not by_arch[target] or set(by_arch[target]) != set(by_arch[reference]):
        raise InputError(f"{table.name}: {task} at k = {k} doesn't have the same seeds for {target} and {reference}")
    return sign_flip([by_arch[target][s] - by_arch[reference][s] for s in by_arch[reference]])


def _means(table: RunTable, archs: tuple[str, str]) -> dict[tuple[str, str, int], float]:
    """(arch, task, k) -> mean score over endpoints and seeds."""
    values: dict[tuple[str, str, int], list[float]] = {}
    for arch, task, k, score in zip(*(table[c].tolist() for c in ("arch", "task", "k", "score")), strict=True):
        if arch in archs and task and not np.isnan(score) and not np.isnan(k):
            values.setdefault((arch, task, int(k)), []).append(score)
    for arch in archs:
        if not any(a == arch for a, _, _ in values):
            raise InputError(f"{table.name} has no scores by k of {arch!r}; it has {', '.join(table.archs)}")
    return {key: float(np.mean(found)) for key, found in values.items()}


def _common(scores: dict[tuple[str, str, int], float], tasks: Sequence[str], archs: tuple[str, str]) -> list[int]:
    """Values of k that more than half of the tasks have for both."""
    every = sorted({k for _, _, k in scores})
    return [k for k in every if 2 * sum(all((a, t, k) in scores for a in archs) for t in tasks) > len(tasks)]
