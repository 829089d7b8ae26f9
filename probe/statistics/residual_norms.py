"""Sizes of the residual stream and of what each step writes into it (SMELT 6.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import WRITES, Geometry, Statistic, TokenValues, site_rms, update_rms

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


def _norm(name: str, title: str, definition: str, paper: str, unit: str = "RMS") -> Measure:
    return Measure(name=name, title=title, axes=("step",), unit=unit, definition=definition, paper=paper)


class ResidualNorms(Statistic):
    measures = (
        _norm("resid_rms", "Residual stream", "||x|| / sqrt(H) at the step's input.", "6.2, html Figure 22 row 1"),
        _norm("update_rms", "Update", "||d|| / sqrt(H), d = attention write + MoE write.", "6.2, html Figure 22 row 2"),
        _norm("relative_update", "Relative update", "||d|| / ||x||.", "6.2, html Figure 22 row 3", "ratio"),
        _norm("attn_write_rms", "Attention write", "||d_attn|| / sqrt(H), after the 1/r scale.", "6.2, Eq. 8"),
        _norm("moe_write_rms", "MoE write", "||d_moe|| / sqrt(H), after the 1/r scale.", "6.2, Eq. 9"),
        _norm("norm_output_attn_rms", "RMSNorm output into attention", "||x_hat|| / sqrt(H).", "6.2, html Figure 23h"),
        _norm("norm_output_moe_rms", "RMSNorm output into the experts", "||y_hat|| / sqrt(H).", "6.2, html Figure 23h"),
    )
    sites = frozenset({"resid", "attn_write", "moe_write", "X", "moe_in"})
    needs: ClassVar = {
        "resid_rms": frozenset({"resid"}),
        "update_rms": WRITES,
        "relative_update": WRITES | {"resid"},
        "attn_write_rms": WRITES,
        "moe_write_rms": WRITES,
        "norm_output_attn_rms": frozenset({"X"}),
        "norm_output_moe_rms": frozenset({"moe_in"}),
    }
    stored = frozenset({"resid_rms", "update_rms", "relative_update", "attn_write_rms", "moe_write_rms"})

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        resid, update = site_rms(values, geometry, "resid"), update_rms(values, geometry)
        result = {"resid_rms": resid, "update_rms": update, "relative_update": update / resid}
        plain = {
            "attn_write_rms": "attn_write",
            "moe_write_rms": "moe_write",
            "norm_output_attn_rms": "X",
            "norm_output_moe_rms": "moe_in",
        }
        result |= {name: site_rms(values, geometry, site) for name, site in plain.items()}
        return {name: TokenValues(value) for name, value in result.items()}
