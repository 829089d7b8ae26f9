"""Cosine between two visits at six stages of attention (SMELT 6.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visitlens.hooks.loop_plan import VisitPair
from visitlens.probe.measure import Measure
from visitlens.probe.statistics.base import Geometry, Statistic, TokenValues, cosine
from visitlens.probe.statistics.names import KV_STAGES, Q_STAGES, STAGES

if TYPE_CHECKING:
    from visitlens.hooks.capture import StepValues


class StageCosine(Statistic):
    measures = (
        Measure(
            name="stage_cosine",
            title="Cosine between two visits by attention stage",
            axes=("pair", "stage"),
            unit="cosine",
            definition="cos of the whole vector (all heads together) of X, Q, K, V, PV, O at two visits; Q and K after rotary embedding.",
            paper="6.3, html Figure 25",
        ),
        Measure(
            name="stage_cosine_heads",
            title="Cosine between two visits of each query head's Q and PV",
            axes=("pair", "q_stage", "head"),
            unit="cosine",
            definition="cos of one head's Q or PV at two visits.",
            paper="6.3, by head: ours",
        ),
        Measure(
            name="stage_cosine_kv_heads",
            title="Cosine between two visits of each key/value head's K and V",
            axes=("pair", "kv_stage", "kv_head"),
            unit="cosine",
            definition="cos of one key/value head's K or V at two visits.",
            paper="6.3, by head: ours",
        ),
    )
    # O is the attention write before its 1/r scale, which a cosine doesn't see.
    sites = frozenset({"X", "Q", "K", "V", "PV", "attn_write"})
    looped_only = True

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        def both(pair: VisitPair, stage: str) -> tuple[torch.Tensor, torch.Tensor]:
            site = "attn_write" if stage == "O" else stage
            return values.site(site, pair.earlier.index), values.site(site, pair.later.index)

        pairs = geometry.plan.pairs
        whole = [[cosine(*(x.flatten(1) for x in both(pair, stage))) for stage in STAGES] for pair in pairs]
        q_heads = [[cosine(*both(pair, stage)) for stage in Q_STAGES] for pair in pairs]
        kv_heads = [[cosine(*both(pair, stage)) for stage in KV_STAGES] for pair in pairs]
        results = {"stage_cosine": whole, "stage_cosine_heads": q_heads, "stage_cosine_kv_heads": kv_heads}
        return {
            name: TokenValues(torch.stack([torch.stack(stages, dim=1) for stages in value], dim=1))
            for name, value in results.items()
        }
