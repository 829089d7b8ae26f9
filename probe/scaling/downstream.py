"""Downstream scores against validation loss: the reference's sigmoid (SMELT Eq. 6) and what the target scores beyond it (Eq. 7). Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from visitlens.errors import InputError, UnavailableError
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.scaling.bootstrap import cell_index, cell_weights, common_cells
from visitlens.probe.scaling.chance import centred, chance_of, known_chance
from visitlens.probe.scaling.drawn import DrawnArray
from visitlens.probe.scaling.table import ENDPOINT, RunTable, describe, keys_of, need

DRAWS = 500
NEEDED = ("arch", "scale", "level", "D", "loss", "task", "score")
FILTER = 0.1
"""How far above chance the reference must be for a pair to count among wins, as for MMLU in the paper."""
_BOUNDS = (np.array([-np.inf, -8.0, -4.0, -8.0]), np.array([np.inf, 5.0, 5.0, 8.0]))
_INSIDE = (_BOUNDS[0] + 1e-6, _BOUNDS[1] - 1e-6)
_TOLERANCES = {"xtol": 1e-10, "ftol": 1e-10, "gtol": 1e-12}
"""Of the curve's parameters, in units of the losses' and scores' own ranges."""
RESIDUAL = Measure(
    "downstream_residual",
    "Downstream residual",
    ("group",),
    "score",
    "Mean over the target's endpoints of s (y - yhat(loss)): yhat is the reference's sigmoid, s is -1 for scores that are losses.",
    "5.1, Eq. 7",
)


@dataclass(frozen=True)
class Sigmoid:
    """y = floor + height / (1 + exp(-direction steepness (loss - middle))), height and steepness > 0 (Eq. 6).

    `direction` is +1 for scores that rise with validation loss (losses themselves), -1 for accuracies.
    """

    floor: float
    height: float
    steepness: float
    middle: float
    direction: int
    r2: float = np.nan

    def __call__(self, loss: Any) -> np.ndarray:
        from scipy.special import expit

        return self.floor + self.height * expit(
            self.direction * self.steepness * (np.asarray(loss, dtype=np.float64) - self.middle)
        )


@dataclass(frozen=True)
class Scores:
    """Endpoints with a validation loss and one score, [endpoint]; `ends` names them."""

    metric: str
    ends: RunTable
    loss: np.ndarray
    score: np.ndarray
    chance: np.ndarray
    lower_is_better: bool = False

    @property
    def sign(self) -> int:
        return -1 if self.lower_is_better else 1

    def of(self, arch: str) -> np.ndarray:
        """[endpoint] mask."""
        return self.ends["arch"] == arch


@dataclass(frozen=True)
class Downstream:
    """One metric: the reference's curve, the target's residuals [target endpoint], and which of them lie outside its losses."""

    scores: Scores
    target: str
    reference: str
    curve: Sigmoid
    residuals: np.ndarray
    warnings: tuple[str, ...]

    @property
    def ends(self) -> RunTable:
        """The target's endpoints."""
        return self.scores.ends.where(self.scores.of(self.target))


@dataclass(frozen=True)
class Wins:
    """Pairs in which the target is better, of those counted; `left_out` pairs have a reference too near chance."""

    metric: str
    wins: int
    pairs: int
    left_out: int


def scores_of(table: RunTable, task: str, *, lower_is_better: bool = False, centre: bool = False) -> Scores:
    """One task's scores with each endpoint's validation loss; the mean over shots' seeds where an endpoint has several rows.

    Args:
        centre: put 0 at chance and 1 at all right (Eq. 11).

    Raises:
        InputError: no such task, no chance accuracy to centre by, or endpoints without a validation loss (names the first).
    """
    need(table, NEEDED)
    mine = (table["task"] == task) & ~np.isnan(table["score"])
    if not mine.any():
        known = ", ".join(dict.fromkeys(t for t in table["task"].tolist() if t))
        raise InputError(f"{table.name} has no scores of task {task!r}; it has {known}")
    rows = table.where(mine)
    chance = chance_of(rows) if centre else known_chance(rows)
    values = centred(rows["score"], chance) if centre else rows["score"]
    endpoint = [c for c in ENDPOINT if c != "seed"]
    losses = _losses(table, endpoint)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, key in enumerate(keys_of(rows, endpoint)):
        groups.setdefault(key, []).append(i)
    ends = rows.where(np.array([members[0] for members in groups.values()]))
    if missing := [i for i, key in enumerate(groups) if key not in losses]:
        raise InputError(f"{table.name}: {describe(ends, missing[0])} has a score of {task} but no validation loss")
    return Scores(
        task,
        ends,
        np.array([losses[key] for key in groups]),
        np.array([values[members].mean() for members in groups.values()]),
        np.array([0.0 if centre else chance[members].mean() for members in groups.values()]),
        lower_is_better,
    )


def tasks_of(table: RunTable) -> list[str]:
    """Tasks with scores, in order of appearance."""
    return list(
        dict.fromkeys(t for t, s in zip(table["task"].tolist(), table["score"], strict=True) if t and not np.isnan(s))
    )


def mean_of(parts: Sequence[Scores], name: str) -> Scores:
    """The unweighted mean of several tasks, such as DCLM Core of its 22.

    Raises:
        InputError: tasks with different endpoints.
    """
    keys = [keys_of(p.ends, ("arch", "scale", "level", "D")) for p in parts]
    if any(set(k) != set(keys[0]) for k in keys):
        raise InputError(f"{name}: its tasks don't have the same endpoints, so there is no mean of them")
    order = [[k.index(key) for key in keys[0]] for k in keys]
    score, chance = (
        np.mean([getattr(p, what)[at] for p, at in zip(parts, order, strict=True)], 0) for what in ("score", "chance")
    )
    return replace(parts[0], metric=name, score=score, chance=chance)


def downstream(scores: Scores, target: str, reference: str) -> Downstream:
    """Fits the reference's curve and takes the target's residuals from it.

    Raises:
        InputError: fewer than five endpoints of the reference, none of the target, or a fit that doesn't converge.
        UnavailableError: scipy isn't installed.
    """
    theirs, mine = scores.of(reference), scores.of(target)
    if not mine.any():
        raise InputError(f"{scores.metric}: no endpoint of {target}; there are {', '.join(scores.ends.archs)}")
    curve = fit_sigmoid(scores.loss[theirs], scores.score[theirs], scores.lower_is_better, name=scores.metric)
    residuals = scores.sign * (scores.score[mine] - curve(scores.loss[mine]))
    low, high = scores.loss[theirs].min(), scores.loss[theirs].max()
    outside = mine & ((scores.loss < low) | (scores.loss > high))
    warnings = ()
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        warnings = (
            f"{scores.metric}: {int(outside.sum())} of {target}'s {int(mine.sum())} endpoints have a loss outside {reference}'s "
            f"({low:.4g} to {high:.4g} nats), where its curve is an extrapolation; the first is "
            f"{describe(scores.ends, first)}, {scores.loss[first]:.4g} nats",
        )
    return Downstream(scores, target, reference, curve, residuals, warnings)


def fit_sigmoid(
    loss: np.ndarray,
    score: np.ndarray,
    lower_is_better: bool,
    name: str = "the scores",
    *,
    weights: np.ndarray | None = None,
    start: Sigmoid | None = None,
) -> Sigmoid:
    """Least squares: the best of eight starts, or from one curve alone. Losses and scores are scaled to their own range meanwhile.

    Raises:
        InputError: fewer than five endpoints, one loss alone, or no convergence.
    """
    if len(loss) < 5:
        raise InputError(f"{name}: a curve of four parameters needs five endpoints or more, got {len(loss)}")
    if np.ptp(loss) == 0:
        raise InputError(f"{name}: all endpoints have the loss {loss[0]:g}")
    direction = 1 if lower_is_better else -1
    middle, width, height = float(np.median(loss)), float(np.ptp(loss)), float(np.ptp(score)) or 1.0
    x, root = (loss - middle) / width, np.sqrt(np.ones_like(loss) if weights is None else weights)
    solve, expit = _scipy()

    def error(p: np.ndarray) -> np.ndarray:
        return root * (p[0] + np.exp(p[1]) * expit(direction * np.exp(p[2]) * (x - p[3])) - score / height)

    def slope(p: np.ndarray) -> np.ndarray:
        size, steep = np.exp(p[1]), np.exp(p[2])
        at = expit(direction * steep * (x - p[3]))
        change = size * at * (1 - at) * direction * steep
        return root[:, None] * np.stack([np.ones_like(x), size * at, change * (x - p[3]), -change], 1)

    if start is None:  # nearly straight over the losses, and steeper; with the middle at either side
        low = float(score.min()) / height
        shapes = product((0.0, 1.0), (0.5, 1.8), (-0.4, 0.4))
        starts = [np.array([low, size, steep, at]) for size, steep, at in shapes]
    else:
        inner = (start.floor / height, start.height / height, start.steepness * width, (start.middle - middle) / width)
        starts = [np.clip([inner[0], np.log(inner[1]), np.log(inner[2]), inner[3]], *_INSIDE)]
    found = [solve(error, at, slope, bounds=_BOUNDS, x_scale="jac", max_nfev=400, **_TOLERANCES) for at in starts]
    best = min((f for f in found if np.isfinite(f.cost)), key=lambda f: f.cost, default=None)
    if best is None:
        raise InputError(f"{name}: the curve doesn't converge; look at its scores")
    floor, size, steep, at = best.x
    curve = Sigmoid(height * floor, height * np.exp(size), np.exp(steep) / width, middle + width * at, direction)
    total = float(np.sum((score - score.mean()) ** 2))
    return replace(curve, r2=1 - float(np.sum((score - curve(loss)) ** 2)) / total if total else np.nan)


def residuals_by(found: Downstream, column: str = "scale", draws: int = DRAWS, seed: int = 0) -> StatArray:
    """[group] mean residual by scale, level or of `all`, with an interval of a bootstrap over cells: each draw takes the same cells for
    both models and refits the curve.

    Raises:
        InputError: the architectures have different cells, or fewer than three.
    """
    scores = found.scores
    archs = {arch: scores.ends.where(scores.of(arch)) for arch in (found.reference, found.target)}
    cells = common_cells(archs)
    index = {arch: cell_index(ends, cells) for arch, ends in archs.items()}
    names = archs[found.target].ordered(column, "F" if column == "scale" and "F" in scores.ends.columns else "D")
    if column == "level" and "S" in scores.ends.columns:
        names = archs[found.target].ordered(column, "S")
    groups = np.stack([*(found.ends[column] == name for name in names), np.ones(len(found.residuals), bool)])
    theirs, mine = scores.of(found.reference), scores.of(found.target)
    replicates = np.full((draws, len(groups)), np.nan)
    for row, drawn in zip(replicates, cell_weights(len(cells), draws, seed), strict=True):
        weights = drawn[index[found.reference]].astype(np.float64)
        if np.count_nonzero(weights) < 5:
            continue
        curve = fit_sigmoid(
            scores.loss[theirs],
            scores.score[theirs],
            scores.lower_is_better,
            scores.metric,
            weights=weights,
            start=found.curve,
        )
        residuals = scores.sign * (scores.score[mine] - curve(scores.loss[mine]))
        times = groups * drawn[index[found.target]]
        with np.errstate(invalid="ignore"):
            row[:] = times @ residuals / times.sum(1)
    values = groups @ found.residuals / groups.sum(1)
    how = f"mean over endpoints of {found.target}; interval of {draws} draws of {len(cells)} cells, the curve refitted"
    return DrawnArray(RESIDUAL, values, {"group": [*names, "all"]}, replicates, aggregation=how)


def wins(scores: Scores, target: str, reference: str, above_chance: float | None = None) -> Wins:
    """Pairs in which the target scores better; ties are no wins.

    Args:
        above_chance: count only pairs whose reference is at least so far above chance (`FILTER` for MMLU in the paper).

    Raises:
        InputError: no pair, or no chance accuracy to filter by.
    """
    keys = keys_of(scores.ends, ("scale", "level", "D"))
    by_arch = {
        arch: {key: i for i, (key, mine) in enumerate(zip(keys, scores.of(arch), strict=True)) if mine}
        for arch in (target, reference)
    }
    pairs = [(i, by_arch[target][key]) for key, i in by_arch[reference].items() if key in by_arch[target]]
    if not pairs:
        raise InputError(f"{scores.metric}: no scale, level and D has both {target} and {reference}")
    counted = pairs
    if above_chance is not None:
        if np.isnan(scores.chance).any():
            raise InputError(f"{scores.metric}: no chance accuracy to filter by; give it in a column chance")
        counted = [(i, j) for i, j in pairs if scores.score[i] >= scores.chance[i] + above_chance - 1e-12]
    won = sum(scores.sign * (scores.score[j] - scores.score[i]) > 0 for i, j in counted)
    return Wins(scores.metric, int(won), len(counted), len(pairs) - len(counted))


def grouped_tasks(table: RunTable, lower: Collection[str] = ()) -> dict[str, list[str]]:
    """Category -> its tasks; tasks without one are left out, as are those whose score is a loss."""
    found: dict[str, list[str]] = {}
    categories = table.columns.get("category", np.full(len(table), ""))
    for category, task in zip(categories.tolist(), table["task"].tolist(), strict=True):
        if category and task and task not in lower and task not in found.setdefault(category, []):
            found[category].append(task)
    return {category: tasks for category, tasks in found.items() if tasks}


def _losses(table: RunTable, endpoint: Sequence[str]) -> dict[tuple[Any, ...], float]:
    """Validation loss of each endpoint, mean over seeds: of its own rows, or the one beside its scores."""
    rows = table.where(~np.isnan(table["loss"]) & (table.whole | (table["task"] != "")))
    values: dict[tuple[Any, ...], list[float]] = {}
    for key, loss in zip(keys_of(rows, endpoint), rows["loss"].tolist(), strict=True):
        values.setdefault(key, []).append(loss)
    return {key: float(np.mean(found)) for key, found in values.items()}


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy.optimize import least_squares
        from scipy.special import expit
    except ImportError as error:
        raise UnavailableError("curves need scipy: pip install 'visitlens[scaling]'") from error
    return least_squares, expit
