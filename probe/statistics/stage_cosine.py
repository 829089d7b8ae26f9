"""Cosine between two visits at six stages of attention (SMELT 6.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from visitlens.hooks.core.loop_plan import VisitPair
from visitlens.kernels.vector_geometry import inner, norms
from visitlens.probe.measures.axes import KV_STAGES, Q_STAGES, STAGES
from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import Geometry, Statistic, TokenValues

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


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
    # A model may lack X or O: its cell stays empty.
    needs: ClassVar = {
        "stage_cosine": frozenset({"Q", "K", "V", "PV"}),
        "stage_cosine_heads": frozenset({"Q", "PV"}),
        "stage_cosine_kv_heads": frozenset({"K", "V"}),
    }
    looped_only = True

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        def parts(pair: VisitPair, stage: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Inner product and both norms, by head where there are heads."""
            site, (a, b) = "attn_write" if stage == "O" else stage, (pair.earlier.index, pair.later.index)
            return inner(values.site(site, a), values.site(site, b)), values.norm(site, a), values.norm(site, b)

        def cosine(dot: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return dot / (a * b)

        def of_all_heads(dot: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return cosine(dot, a, b) if dot.ndim == 1 else cosine(dot.sum(-1), norms(a), norms(b))

        pairs = geometry.plan.pairs
        by_stage = [{stage: parts(pair, stage) for stage in STAGES} for pair in pairs]
        whole = [[of_all_heads(*found[stage]) for stage in STAGES] for found in by_stage]
        q_heads = [[cosine(*found[stage]) for stage in Q_STAGES] for found in by_stage]
        kv_heads = [[cosine(*found[stage]) for stage in KV_STAGES] for found in by_stage]
        results = {"stage_cosine": whole, "stage_cosine_heads": q_heads, "stage_cosine_kv_heads": kv_heads}
        return {
            name: TokenValues(torch.stack([torch.stack(stages, dim=1) for stages in value], dim=1))
            for name, value in results.items()
        }
