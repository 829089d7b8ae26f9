"""Replicates whose interval is known."""

from __future__ import annotations

import numpy as np

T_99 = 1.9842169516
"""97.5 % of Student's t with 99 degrees of freedom, from a table."""


def replicates_within(values: np.ndarray, half_width: float) -> np.ndarray:
    """[100, *axes] jackknife replicates of values [*axes], not skewed, whose 95 % interval is values +- half_width.

    The squared error is (n - 1) / n times the sum of squared deviations: n times s² for replicates at +- s.
    """
    s = half_width / T_99 / np.sqrt(99)
    return values + s * np.resize([1.0, -1.0], 100).reshape(-1, *[1] * np.ndim(values))
