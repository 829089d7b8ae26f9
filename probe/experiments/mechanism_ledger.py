"""The mechanism ledger: which part of a later visit earns its gain.

A later visit's update is made of six things: its queries, keys and values; the experts chosen, their gates, and what the experts read. Taken
from the earlier visit, all six together repeat the earlier update exactly. So each can be replaced alone (what is
lost?) and each can be left in alone while the rest repeats (what is won back?).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from visitlens.hooks.intervene import Intervention, skip, take
from visitlens.kernels.errors import InputError
from visitlens.probe.measure import Measure, StatArray
from visitlens.probe.samples import Progress, Sample, silent
from visitlens.probe.scores import score

if TYPE_CHECKING:
    from visitlens.hooks.models.looped_moe import LoopedMoE

ELEMENTARY = {
    "queries": ("Q",),
    "keys": ("K",),
    "values": ("V",),
    "experts chosen": ("experts",),
    "gates": ("gates",),
    "expert input": ("expert_in",),
}
MECHANISMS = ELEMENTARY | {
    "pattern (queries and keys)": ("Q", "K"),
    "routing (experts and gates)": ("experts", "gates"),
    "attention (all of it)": ("Q", "K", "V"),
    "experts (all of it)": ("experts", "gates", "expert_in"),
    "whole update": ("Q", "K", "V", "experts", "gates", "expert_in"),
}
SKIPPED = "visit skipped"
_ALL = MECHANISMS["whole update"]


def mechanism_ledger(
    model: LoopedMoE, sample: Sample, *, visits: tuple[int, int] | None = None, on_progress: Progress = silent
) -> dict[str, StatArray]:
    """[form, mechanism, slice] nats a token: `alone`, lost when the mechanism is the earlier visit's; `left in`, won back when
    it alone is the later visit's own and the rest repeats the earlier update. The row `visit skipped` is the whole gain.

    `visits`: the earlier and the later, by default the first and the last.

    Raises:
        InputError: an unlooped model, no such visits.
    """
    source, visit = _visits(model, visits)

    def taken(sites: tuple[str, ...]) -> list[Intervention]:
        return [take(site, source=source, visit=visit) for site in sites]

    names = [*MECHANISMS, SKIPPED]
    layers = model.plan.looped_layers
    alone: dict[str, list] = {name: taken(sites) for name, sites in MECHANISMS.items()}
    alone[SKIPPED] = list(skip(visit=visit, layer=layers))
    left_in = {name: taken(tuple(s for s in _ALL if s not in sites)) for name, sites in MECHANISMS.items()}
    plain, *scores = score(model, sample, [(), *alone.values(), *left_in.values()], on_progress)
    lost = np.full((sample.documents, 2, len(names)), np.nan)
    for name, scored in zip(alone, scores[: len(alone)], strict=True):
        lost[:, 0, names.index(name)] = (scored - plain).loss
    repeated = lost[:, 0, names.index("whole update")]
    for name, scored in zip(left_in, scores[len(alone) :], strict=True):
        lost[:, 1, names.index(name)] = repeated - (scored - plain).loss
    measure = Measure(
        "mechanism_ledger",
        f"What visit {visit} earns, by mechanism",
        ("form", "mechanism", "slice"),
        "nats a token",
        f"alone: loss with the mechanism of visit {visit} taken from visit {source}, less the loss as it is. left in: loss with "
        f"all of visit {visit}'s update taken from visit {source}, less the loss when this mechanism alone is its own. "
        "visit skipped: loss without the visit's writes, less the loss as it is.",
        "ours",
    )
    labels = {"form": ["alone", "left in"], "mechanism": names, "slice": list(sample.slices)}
    return {"mechanism_ledger": sample.stat(measure, *sample.by_slice(lost), labels, "mean over predicted tokens")}


def _visits(model: LoopedMoE, visits: tuple[int, int] | None) -> tuple[int, int]:
    if not model.plan.looped_layers:
        raise InputError("an unlooped model has no later visit to explain")
    pairs = model.plan.visit_pairs(*visits) if visits else model.plan.visit_pairs()
    return pairs[0].earlier.visit, pairs[0].later.visit
