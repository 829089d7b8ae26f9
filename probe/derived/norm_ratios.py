"""Mean norms of the residual stream's writes at the later visit over those at the earlier one (SMELT 6.2). No torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from visitlens.probe.measures.derived import Derived, Visits
from visitlens.probe.measures.measure import Measure, StatArray

if TYPE_CHECKING:
    from visitlens.probe.reading.recorded_run import RecordedRun

_COMPONENTS = {
    "update": "Update",
    "attn_write": "Attention write",
    "moe_write": "MoE write",
    "norm_output_attn": "RMSNorm output into attention",
    "norm_output_moe": "RMSNorm output into the experts",
}


def norm_ratio(run: RecordedRun, visits: Visits, measure: Measure, component: str) -> StatArray:
    earlier, later = run.both_visits(f"{component}_rms", visits)
    return later.combine(earlier, np.divide, measure)


def norm_output_ratio(run: RecordedRun, visits: Visits, measure: Measure) -> StatArray:
    attn, moe = (run.norm_ratio(f"norm_output_{part}", visits) for part in ("attn", "moe"))
    return attn.combine(moe, lambda x, y: (x + y) / 2, measure)


def _measure(component: str, title: str) -> Measure:
    return Measure(
        f"norm_ratio_{component}",
        f"{title}: later visit over earlier",
        ("layer",),
        "ratio",
        "Mean over tokens of the norm at the later visit / the same at the earlier, per layer.",
        "6.2, html Figure 23e-h",
    )


DERIVED = (
    Derived(_measure("norm_output", "RMSNorm output, mean of the block's two norms"), norm_output_ratio),
    *(Derived(_measure(name, title), partial(norm_ratio, component=name)) for name, title in _COMPONENTS.items()),
)
