"""Norm at the later visit over norm at the earlier, token by token: the alternative to the ratio of means (ours)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from visitlens.probe.measure import Measure
from visitlens.probe.statistics.base import WRITES, Geometry, Statistic, TokenValues, rms, wide
from visitlens.probe.statistics.names import COMPONENTS

if TYPE_CHECKING:
    from visitlens.hooks.capture import StepValues


class TokenNormRatio(Statistic):
    measures = (
        Measure(
            name="token_norm_ratio",
            title="Norm ratio of two visits, token by token",
            axes=("pair", "component"),
            unit="ratio",
            definition="||later|| / ||earlier|| of each token, averaged; components " + ", ".join(COMPONENTS) + ".",
            paper="ours: the alternative to the ratio of means",
        ),
    )
    sites = frozenset({"attn_write", "moe_write", "X", "moe_in"})
    needs: ClassVar = {"token_norm_ratio": WRITES}
    looped_only = True

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        def norms(step: int) -> torch.Tensor:
            attn, moe = wide(values.site("attn_write", step)), wide(values.site("moe_write", step))
            parts = (attn + moe, attn, moe, values.site("X", step), values.site("moe_in", step))
            return torch.stack([rms(part) for part in parts], dim=1)

        ratios = [norms(pair.later.index) / norms(pair.earlier.index) for pair in geometry.plan.pairs]
        return {"token_norm_ratio": TokenValues(torch.stack(ratios, dim=1))}
