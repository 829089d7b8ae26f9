"""Which expert follows which between two visits of a layer (ours)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import Geometry, GroupSums, Statistic, TokenValues, present, routed

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


class ExpertTransitions(Statistic):
    measures = (
        Measure(
            name="expert_transitions",
            title="Expert at the earlier visit and expert at the later one",
            axes=("pair", "expert", "later_expert"),
            unit="share of tokens",
            definition="Tokens that use expert e at the earlier visit and e' at the later / tokens; sums to k*k over the table.",
            paper="ours",
            grouped=False,
        ),
    )
    sites = frozenset({"experts", "gates"})
    looped_only = True

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        return {}

    def group_sums(
        self, values: StepValues, geometry: Geometry, groups: Tensor, num_groups: int
    ) -> dict[str, GroupSums]:
        experts = geometry.num_experts
        tables, tokens, away = [], [], []
        for pair in geometry.plan.pairs:
            steps = pair.earlier.index, pair.later.index
            there = present(values, steps[0]) & present(values, steps[1])
            good = routed(values, steps[0]) & routed(values, steps[1]) & there
            earlier, later = (values.site("experts", s.index).cpu()[good] for s in (pair.earlier, pair.later))
            cells = (earlier.unsqueeze(2) * experts + later.unsqueeze(1)).flatten()
            tables.append(torch.bincount(cells, minlength=experts * experts).view(experts, experts))
            tokens.append(good.sum())
            away.append((~there).sum())
        total = torch.stack(tables).double().unsqueeze(0)
        count = torch.stack(tokens).view(1, -1, 1, 1).expand_as(total)
        left_out = torch.stack(away).view(-1, 1, 1).expand_as(count[0])
        non_finite = len(groups) - count[0] - left_out
        return {"expert_transitions": GroupSums(total, count.double(), non_finite, left_out)}
