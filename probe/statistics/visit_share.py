"""How many tokens are really at a visit, or at both of two, where halting or routing leaves some out (ours)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import Geometry, Statistic, TokenValues, present, stack

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


class VisitShare(Statistic):
    measures = (
        Measure(
            name="visit_share",
            title="Tokens that are at a visit",
            axes=("step",),
            unit="share of tokens",
            definition="1 where a token is really at the step: not halted before it, nor routed past it.",
            paper="ours",
        ),
        Measure(
            name="both_visits_share",
            title="Tokens that are at both of two visits",
            axes=("pair",),
            unit="share of tokens",
            definition="1 where a token is really at both visits: what measures of the pair are averaged over.",
            paper="ours",
        ),
    )
    sites = frozenset()
    needs: ClassVar = dict.fromkeys(("visit_share", "both_visits_share"), frozenset({"ragged visits"}))
    looped_only = True
    stored = frozenset({"visit_share"})

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        at = stack([present(values, step) for step in range(len(geometry.plan))])
        both = stack([at[:, pair.earlier.index] & at[:, pair.later.index] for pair in geometry.plan.pairs])
        shares = {"visit_share": at, "both_visits_share": both}
        return {name: TokenValues(share.to(torch.float64), everywhere=True) for name, share in shares.items()}
