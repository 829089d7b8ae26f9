"""Products of expert loads: the overlap that popular experts alone give, and how uneven a step's loads are. No torch. (ours)

Both are sums over experts of products of two shares. Shares of the same tokens go together by chance, the more the fewer tokens
there are an expert, so every product is over pairs of different documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from visitlens.probe.measures.derived import Derived, Visits
from visitlens.probe.measures.estimate import product_of
from visitlens.probe.measures.measure import Measure, StatArray

if TYPE_CHECKING:
    from visitlens.probe.reading.recorded_run import RecordedRun


def chance_by_load(run: RecordedRun, visits: Visits, measure: Measure) -> StatArray:
    earlier, _ = run.both_visits("expert_load", visits)
    pairs = sorted(run.pairs(visits), key=lambda pair: pair.layer)
    sides = [pair.earlier.index for pair in pairs], [pair.later.index for pair in pairs]
    return _products(run, *sides, measure, earlier.labels["layer"], 1 / run.recording.config["experts_per_token"])


def imbalance(run: RecordedRun, visits: Visits, measure: Measure) -> StatArray:
    load, k = run.stat("expert_load"), run.recording.config["experts_per_token"]
    steps = load.labels["step"]
    at = [step.index for step in steps]
    return _products(run, at, at, measure, steps, len(load.labels["expert"]) / k**2)


def _products(
    run: RecordedRun, one: Sequence[int], other: Sequence[int], measure: Measure, labels: Sequence[Any], scale: float
) -> StatArray:
    """`scale` times the sum over experts of the products of their loads at the steps `one` and `other`."""
    load, totals = run.stat("expert_load"), run.sums("expert_load")
    first, second = ((totals.total[:, steps], totals.count[:, steps]) for steps in (one, other))
    products = product_of(
        replace(measure, axes=(*measure.axes, "expert")),
        first,
        second,
        {measure.axes[0]: labels, "expert": load.labels["expert"]},
        groups=run.group_names,
        documents=load.documents,
        tokens=load.tokens,
        provenance=load.provenance,
        counts=np.minimum(first[1].sum(0), second[1].sum(0)),
        ragged=load.ragged,
    )
    mean = products.mean("expert")
    return mean.combine(scale * len(load.labels["expert"]), np.multiply, mean.measure)


DERIVED = (
    Derived(
        Measure(
            "expert_overlap_chance_by_load",
            "Expert overlap expected from expert loads",
            ("layer",),
            "share of k",
            "sum over experts of f1(e) f2(e), / k; f_v(e) = share of tokens that use e at visit v. Over pairs of different documents: "
            "shares of the same tokens overlap by chance.",
            "ours",
        ),
        chance_by_load,
    ),
    Derived(
        Measure(
            "load_imbalance",
            "Expert load imbalance",
            ("step",),
            "ratio",
            "E * sum over experts of (f(e) / k)^2. Over pairs of different documents: squares of shares of few tokens are large by chance.",
            "ours",
        ),
        imbalance,
    ),
)
