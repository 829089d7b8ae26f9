"""DrawnArray: values with bootstrap draws of runs behind them, where recordings have jackknife replicates of documents. No torch."""

from __future__ import annotations

import numpy as np

from visitlens.probe.measures.measure import StatArray


class DrawnArray(StatArray):
    """A `StatArray` whose `replicates [draw, *axes]` are bootstrap draws; its interval is their percentiles. Draws that failed are
    NaN and left out."""

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Bounds [*axes]; NaN where there are no draws, or none that worked."""
        if self.replicates is None or not self.replicates.shape[0]:
            return np.full(self.values.shape, np.nan), np.full(self.values.shape, np.nan)
        tail = 50 * (1 - level)
        worked = np.isfinite(self.replicates).any(0)
        draws = np.where(worked, self.replicates, 0.0)
        low, high = np.nanpercentile(draws, [tail, 100 - tail], axis=0)
        return np.where(worked, low, np.nan), np.where(worked, high, np.nan)

    @property
    def no_interval(self) -> str:
        """Why no element has an interval; empty where one has."""
        return "" if self.replicates is not None and np.isfinite(self.replicates).any() else "no bootstrap draw worked"
