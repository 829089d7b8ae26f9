"""The share of a token's experts that two visits of a layer have in common (SMELT 6.1). No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from visitlens.probe.measures.derived import Derived, Visits
from visitlens.probe.measures.measure import Measure, StatArray

if TYPE_CHECKING:
    from visitlens.probe.reading.recorded_run import RecordedRun


def expert_overlap(run: RecordedRun, visits: Visits, measure: Measure) -> StatArray:
    shared = run.between_visits("shared_expert_count", visits)
    return shared.combine(run.recording.config["experts_per_token"], np.divide, measure)


DERIVED = (
    Derived(
        Measure(
            "expert_overlap",
            "Expert overlap between two visits",
            ("layer",),
            "share of k",
            "|S1 ∩ S2| / k.",
            "6.1, html Figure 23c",
        ),
        expert_overlap,
    ),
)
