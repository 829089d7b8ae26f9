"""Document-level (cluster) bootstrap: means and their replicates from per-group totals and counts. No torch.

Documents fall into G groups by a hash of their tokens; a replicate draws G groups with replacement and forms the ratio
of sums. Groups, not tokens, are the independent units: tokens of one document are alike.
"""

from __future__ import annotations

import numpy as np

REPLICATES = 1000


def resampling_weights(groups: int, replicates: int = REPLICATES, seed: int = 0) -> np.ndarray:
    """[replicate, group] how often each group is drawn; the same for every measure, so that replicates are paired."""
    return (
        np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=replicates).astype(np.float64)
    )


def mean_and_replicates(
    total: np.ndarray, count: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """From total and count [group, *shape]: the mean [*shape] and replicates [replicate, *shape]; NaN where count is 0.

    With fewer than two groups that hold a document, or `weights=None`, there are no replicates.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = total.sum(0) / count.sum(0)
        if weights is None or total.shape[0] < 2:
            return mean, None
        return mean, np.tensordot(weights, total, 1) / np.tensordot(weights, count, 1)
