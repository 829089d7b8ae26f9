"""Surface, the loss that a scaling law gives for FLOPs per token, sparsity and tokens, and its compute-optimal frontier in closed form. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

COEFFICIENTS = ("E", "A", "K", "a", "b", "c")


@dataclass(frozen=True)
class Surface:
    """Loss = E + A (1-S)^b / F^a + K / D^c in nats per token (SMELT Eq. 2), F in training FLOPs per token and D in tokens.

    Each coefficient is a number, or an array [draw] of a bootstrap's refits; arguments broadcast against it.

        >>> baseline = Surface(E=1.4439, A=1366.0, K=1.975e6, a=0.3703, b=0.153, c=0.6594)
        >>> round(float(baseline.gamma), 3)
        0.237
        >>> round(float(baseline.tokens_per_parameter(1e21, 0.85)))
        56
    """

    E: Any
    A: Any
    K: Any
    a: Any
    b: Any
    c: Any

    @property
    def gamma(self) -> Any:
        """The exponent with which the frontier's reducible loss falls with compute (Eq. 4)."""
        return self.a * self.c / (self.a + self.c)

    def loss(self, flops_per_token: Any, sparsity: Any, tokens: Any) -> Any:
        """Nats per token (Eq. 2)."""
        return (
            self.E + self.A * (1 - sparsity) ** self.b / flops_per_token**self.a + self.K / np.asarray(tokens) ** self.c
        )

    def optimal_flops(self, compute: Any, sparsity: Any) -> Any:
        """F*, the FLOPs per token that spend `compute` = F D FLOPs best (Eq. 3); D* is `compute` / F*."""
        ratio = self.a * self.A * (1 - sparsity) ** self.b / (self.c * self.K)
        return (ratio * np.asarray(compute, dtype=np.float64) ** self.c) ** (1 / (self.a + self.c))

    def frontier(self, compute: Any, sparsity: Any) -> Any:
        """The lowest loss that `compute` FLOPs can reach (Eq. 4)."""
        flops = self.optimal_flops(compute, sparsity)
        return self.loss(flops, sparsity, compute / flops)

    def compute_for(self, loss: Any, sparsity: Any) -> Any:
        """The compute whose frontier loss is `loss`: the frontier is E + P C^-gamma; NaN where `loss` isn't above E."""
        prefactor = self.frontier(1.0, sparsity) - self.E
        above = np.asarray(loss - self.E, dtype=np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(above > 0, (prefactor / np.where(above > 0, above, np.nan)) ** (1 / self.gamma), np.nan)

    def tokens_per_parameter(self, compute: Any, sparsity: Any) -> Any:
        """D* / (F* / 6): optimal tokens for each parameter of a dense model of the same FLOPs (Section 4.3)."""
        flops = self.optimal_flops(compute, sparsity)
        return 6 * compute / flops**2

    def as_array(self) -> np.ndarray:
        """[..., coefficient], in the order of `COEFFICIENTS`."""
        return np.stack([np.asarray(getattr(self, f.name), dtype=np.float64) for f in fields(self)], -1)

    @classmethod
    def from_array(cls, values: np.ndarray | Sequence[float]) -> Surface:
        """From [..., coefficient]."""
        return cls(*np.moveaxis(np.asarray(values, dtype=np.float64), -1, 0))


def compute_gain(target: Surface, reference: Surface, compute: Any, sparsity: Any) -> Any:
    """1 - C / C_ref: the share of compute that the target's frontier saves at the loss it reaches with `compute` (Eq. 5).

    NaN where the target's loss isn't above the reference's E, which no compute of the reference reaches.
    """
    return 1 - compute / reference.compute_for(target.frontier(compute, sparsity), sparsity)
