"""How many of the k experts two visits share, as a histogram (SMELT 6.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visitlens.kernels.set_overlap import shared_count
from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import Geometry, Statistic, TokenValues, routed

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


class SharedExperts(Statistic):
    measures = (
        Measure(
            name="shared_experts",
            title="Tokens by number of experts shared between two visits",
            axes=("pair", "shared"),
            unit="share of tokens",
            definition="|S1 ∩ S2| for the sets S of k experts a token uses at two visits of one layer, as a histogram over 0..k.",
            paper="6.1, html Figure 21",
        ),
        Measure(
            name="shared_expert_count",
            title="Experts shared between two visits",
            axes=("pair",),
            unit="experts",
            definition="|S1 ∩ S2| for the sets S of k experts a token uses at two visits of one layer.",
            paper="6.1",
        ),
    )
    sites = frozenset({"experts", "gates"})
    looped_only = True
    stored = frozenset({"shared_expert_count"})

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        counts, good = [], []
        for pair in geometry.plan.pairs:
            earlier, later = values.site("experts", pair.earlier.index), values.site("experts", pair.later.index)
            counts.append(shared_count(earlier, later, geometry.num_experts))
            good.append(routed(values, pair.earlier.index) & routed(values, pair.later.index))
        shared, bad = torch.stack(counts, dim=1).cpu(), ~torch.stack(good, dim=1)
        histogram = torch.nn.functional.one_hot(shared, geometry.experts_per_token + 1).double()
        return {
            "shared_experts": TokenValues(histogram.masked_fill(bad.unsqueeze(2), float("nan"))),
            "shared_expert_count": TokenValues(shared.double().masked_fill(bad, float("nan"))),
        }
