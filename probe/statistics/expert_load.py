"""Which experts are used, by step; and which follow which between two visits (ours)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import Geometry, GroupSums, Statistic, TokenValues, present, routed, stack, wide

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


class ExpertLoad(Statistic):
    measures = (
        Measure(
            name="expert_load",
            title="Share of tokens that use an expert",
            axes=("step", "expert"),
            unit="share of tokens",
            definition="f(e) = tokens that use expert e / tokens, per step; sums to k over the experts.",
            paper="ours; the load-aware chance level is sum over e of f1(e) f2(e)",
        ),
        Measure(
            name="router_entropy",
            title="Router entropy",
            axes=("step",),
            unit="nats",
            definition="Entropy of the router's softmax over all experts, before the choice of k.",
            paper="ours",
        ),
    )
    sites = frozenset({"experts", "gates", "router"})
    needs: ClassVar = {
        "expert_load": frozenset({"experts", "gates"}),
        "router_entropy": frozenset({"router", "softmax router"}),
    }

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        entropies = []
        for step in range(len(geometry.plan)):
            log_p = wide(values.site("router", step)).log_softmax(-1)
            entropies.append(-(log_p.exp() * log_p).sum(-1))
        return {"router_entropy": TokenValues(stack(entropies))}

    def group_sums(
        self, values: StepValues, geometry: Geometry, groups: Tensor, num_groups: int
    ) -> dict[str, GroupSums]:
        experts = geometry.num_experts
        loads, tokens, lost, away = [], [], [], []
        for step in range(len(geometry.plan)):
            there = present(values, step)
            good = routed(values, step) & there
            cells = (groups.unsqueeze(1) * experts + values.site("experts", step).cpu())[good]
            loads.append(torch.bincount(cells.flatten(), minlength=num_groups * experts).view(num_groups, experts))
            tokens.append(torch.bincount(groups[good], minlength=num_groups).unsqueeze(1))
            lost.append((there & ~good).sum())
            away.append((~there).sum())
        total, count = torch.stack(loads, dim=1).double(), torch.stack(tokens, dim=1).double()
        non_finite, left_out = (torch.stack(kept_out).unsqueeze(1).expand(-1, experts) for kept_out in (lost, away))
        return {"expert_load": GroupSums(total, count.expand_as(total), non_finite, left_out)}
