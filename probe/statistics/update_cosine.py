"""Cosine between the updates of every two steps (SMELT 6.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from visitlens.kernels.vector_geometry import cosines
from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import WRITES, Geometry, Statistic, TokenValues

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


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
        return {"update_cosine": TokenValues(cosines(values.update_products))}
