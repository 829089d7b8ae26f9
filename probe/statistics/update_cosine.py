"""Cosine between the updates of every two steps (SMELT 6.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from visitlens.probe.measure import Measure
from visitlens.probe.statistics.base import WRITES, Geometry, Statistic, TokenValues, wide

if TYPE_CHECKING:
    from visitlens.hooks.capture import StepValues


class UpdateCosine(Statistic):
    measures = (
        Measure(
            name="update_cosine",
            title="Cosine between residual updates",
            axes=("step", "later_step"),
            unit="cosine",
            definition="Mean over tokens of cos(d_s, d_s'), d = attention write + MoE write, in execution order.",
            paper="6.2, html Figure 24",
        ),
    )
    sites = frozenset({"attn_write", "moe_write"})
    needs: ClassVar = {"update_cosine": WRITES}

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        first = wide(values.site("attn_write", 0))
        units = first.new_empty(first.shape[0], len(geometry.plan), first.shape[1])  # one copy of all updates, no more
        for step in range(len(geometry.plan)):
            update = wide(values.site("attn_write", step)) + wide(values.site("moe_write", step))
            units[:, step] = update / update.norm(dim=-1, keepdim=True)
        return {"update_cosine": TokenValues(torch.bmm(units, units.transpose(1, 2)))}
