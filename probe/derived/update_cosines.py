"""Cosines between updates at two visits: of the same layer, and of different layers, what the first is compared with (SMELT 6.2). No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from visitlens.probe.measures.derived import Derived, Visits
from visitlens.probe.measures.measure import Measure, StatArray

if TYPE_CHECKING:
    from visitlens.hooks.core.loop_plan import VisitPair
    from visitlens.probe.reading.recorded_run import RecordedRun


def same_layer(run: RecordedRun, visits: Visits, measure: Measure) -> StatArray:
    pairs = run.pairs(visits)
    return _cells(run, measure, [(pair, pair) for pair in pairs], [pair.layer for pair in pairs])


def other_layers(run: RecordedRun, visits: Visits, measure: Measure) -> StatArray:
    pairs = run.pairs(visits)
    crossed = [(a, b) for a in pairs for b in pairs if a.layer != b.layer]
    return _cells(run, measure, crossed, [(a.layer, b.layer) for a, b in crossed])


def _cells(
    run: RecordedRun, measure: Measure, cells: Sequence[tuple[VisitPair, VisitPair]], labels: Sequence[Any]
) -> StatArray:
    """From [step, later_step] to the earlier visit of each cell's first pair against the later visit of its second."""
    rows, columns = [a.earlier.index for a, _ in cells], [b.later.index for _, b in cells]
    return run.update_cosine().rearranged(
        lambda a, lead: a[(slice(None),) * lead + (rows, columns)], measure=measure, labels={measure.axes[0]: labels}
    )


DERIVED = (
    Derived(
        Measure(
            "update_cosine_same_layer",
            "Update cosine, same layer at two visits",
            ("layer",),
            "cosine",
            "cos(d, d') of one layer's updates at two visits.",
            "6.2, html Figures 23d, 24",
        ),
        same_layer,
    ),
    Derived(
        Measure(
            "update_cosine_other_layers",
            "Update cosine, different layers at two visits",
            ("layer_pair",),
            "cosine",
            "cos(d, d') of different layers' updates, one at each visit.",
            "6.2, html Figure 24",
        ),
        other_layers,
    ),
)
