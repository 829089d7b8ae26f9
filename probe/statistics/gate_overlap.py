"""Gate-weighted expert overlap between two visits (ours)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visitlens.probe.measure import Measure
from visitlens.probe.statistics.base import Geometry, Statistic, TokenValues, wide

if TYPE_CHECKING:
    from visitlens.hooks.capture import StepValues


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
            same = values.site("experts", pair.earlier.index).unsqueeze(2) == values.site(
                "experts", pair.later.index
            ).unsqueeze(1)
            gates = (wide(values.site("gates", s.index)) for s in (pair.earlier, pair.later))
            earlier, later = (
                g / g.sum(-1, keepdim=True) for g in gates
            )  # some models scale theirs, or don't normalise
            overlap = (torch.minimum(earlier.unsqueeze(2), later.unsqueeze(1)) * same).sum((1, 2))
            good = (earlier.isfinite() & later.isfinite()).all(-1)
            overlaps.append(overlap.masked_fill(~good, float("nan")))
        return {"gate_overlap": TokenValues(torch.stack(overlaps, dim=1))}
