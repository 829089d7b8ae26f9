"""Mean score by category of one pair, an axis each: the six axes of SMELT Figure 1c. Torch-free."""

from __future__ import annotations

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.scaling.table import RunTable

CATEGORY_SCORE = Measure(
    "category_score",
    "Mean score by category",
    ("arch", "category"),
    "score",
    "Unweighted mean over the category's tasks of the mean over seeds; a task without category is an axis of its own.",
    "1, Figure 1c",
)


def radar(
    table: RunTable, target: str, reference: str, scale: str, level: str, tokens: float | None = None
) -> StatArray:
    """[arch, category] of both models of a pair, at `tokens` or else at their longest common horizon.

    Raises:
        InputError: no scores there, or tasks that one of the two lacks (names them).
    """
    mine = (table["scale"] == scale) & (table["level"] == level) & ~np.isnan(table["score"]) & (table["task"] != "")
    horizons = [set(table["D"][mine & (table["arch"] == arch)].tolist()) for arch in (reference, target)]
    common = horizons[0] & horizons[1]
    if not common or (tokens is not None and tokens not in common):
        raise InputError(
            f"{table.name}: {scale} {level} has no scores of both {reference} and {target}"
            + (f" at {tokens:.4g} tokens" if tokens is not None else " at the same token count")
        )
    at = max(common) if tokens is None else tokens
    scores = [
        _by_task(table.where(mine & (table["arch"] == arch) & (table["D"] == at))) for arch in (reference, target)
    ]
    if different := sorted(set(scores[0]) ^ set(scores[1])):
        raise InputError(
            f"{table.name}: {scale} {level}: only one of the two has {', '.join(task for _, task in different)}"
        )
    axes = list(dict.fromkeys(axis for axis, _ in scores[0]))
    values = [[np.mean([v for (axis, _), v in mine.items() if axis == wanted]) for wanted in axes] for mine in scores]
    how = f"{scale} {level} at {at:.4g} tokens, {len(scores[0])} tasks"
    return StatArray(CATEGORY_SCORE, np.array(values), {"arch": [reference, target], "category": axes}, aggregation=how)


def _by_task(table: RunTable) -> dict[tuple[str, str], float]:
    """(category or the task itself, task) -> mean score over seeds and shots."""
    categories = table.columns.get("category", np.full(len(table), ""))
    keys = [(c or t, t) for c, t in zip(categories.tolist(), table["task"].tolist(), strict=True)]
    return {
        key: float(np.mean([s for k, s in zip(keys, table["score"].tolist(), strict=True) if k == key]))
        for key in dict.fromkeys(keys)
    }
