"""Gate-weighted expert overlap between two visits (ours)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visitlens.kernels.set_overlap import shared_weight
from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import Geometry, Statistic, TokenValues, wide

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


class GateOverlap(Statistic):
    measures = (
        Measure(
            name="gate_overlap",
            title="Gate-weighted expert overlap between two visits",
            axes=("pair",),
            unit="share of gate mass",
            definition="sum over experts of min(g1, g2), g the renormalised gates (0 for experts not used).",
            paper="ours",
        ),
    )
    sites = frozenset({"experts", "gates"})
    looped_only = True

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        overlaps = []
        for pair in geometry.plan.pairs:
            experts = [values.site("experts", s.index) for s in (pair.earlier, pair.later)]
            gates = (wide(values.site("gates", s.index)) for s in (pair.earlier, pair.later))
            # some models scale theirs, or don't normalise
            earlier, later = (g / g.sum(-1, keepdim=True) for g in gates)
            overlap = shared_weight(experts[0], earlier, experts[1], later, geometry.num_experts)
            good = (earlier.isfinite() & later.isfinite()).all(-1)
            overlaps.append(overlap.masked_fill(~good, float("nan")))
        return {"gate_overlap": TokenValues(torch.stack(overlaps, dim=1))}
