"""RowRule: how attention rows follow from queries and keys, in NumPy. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowRule:
    """How a step's attention rows follow from its queries and keys: `hooks.capture.attention_rule.AttentionRule`, of whole prompts."""

    scale: float
    window: int | None = None
    causal: bool = True
    sinks: np.ndarray | None = None
    soft_cap: float | None = None

    def pattern(self, queries: np.ndarray, keys: np.ndarray, head: int) -> np.ndarray:
        """P [query, key] of one head, from [token, d] each."""
        scores = queries @ keys.T * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        if self.causal:
            scores[np.triu_indices(len(scores), 1)] = -np.inf
        if self.window is not None:
            scores[np.tril_indices(len(scores), -self.window)] = -np.inf
        sink = -np.inf if self.sinks is None else self.sinks[head]
        highest = np.maximum(scores.max(-1, keepdims=True), sink)
        weights = np.exp(scores - highest)
        return weights / (weights.sum(-1, keepdims=True) + np.exp(sink - highest))
