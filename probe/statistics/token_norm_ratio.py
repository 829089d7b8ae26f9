"""Norm at the later visit over norm at the earlier, token by token: the alternative to the ratio of means (ours)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from visitlens.probe.measures.axes import COMPONENTS
from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import WRITES, Geometry, Statistic, TokenValues, site_rms, update_rms

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


class TokenNormRatio(Statistic):
    measures = (
        Measure(
            name="token_norm_ratio",
            title="Norm ratio of two visits, token by token",
            axes=("pair", "component"),
            unit="ratio",
            symmetric=False,
            definition="||later|| / ||earlier|| of each token, averaged; components " + ", ".join(COMPONENTS) + ".",
            paper="ours: the alternative to the ratio of means",
        ),
    )
    sites = frozenset({"attn_write", "moe_write", "X", "moe_in"})
    needs: ClassVar = {"token_norm_ratio": WRITES}
    looped_only = True

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        sites = ("attn_write", "moe_write", "X", "moe_in")
        sizes = [update_rms(values, geometry), *(site_rms(values, geometry, site) for site in sites)]
        components = torch.stack(sizes, dim=-1)  # [token, step, component]
        earlier, later = (
            [getattr(pair, which).index for pair in geometry.plan.pairs] for which in ("earlier", "later")
        )
        return {"token_norm_ratio": TokenValues(components[:, later] / components[:, earlier])}
