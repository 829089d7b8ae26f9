"""How often the most likely token is right: as the model is, and with a visit skipped or given another visit's parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.interventions.intervene import skip, take, zero
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.samples.sample import EvalSet, Progress, silent
from visitlens.probe.samples.scores import Chain, score

PARTS = ("Q", "K", "V", "PV", "experts", "moe_write")


def accuracy(
    model: InstrumentedModel,
    sample: EvalSet,
    *,
    parts: Sequence[str] = PARTS,
    on_progress: Progress = silent,
) -> dict[str, StatArray]:
    """`accuracy` [intervention, slice] of the predictions that count, and `change`, the same less the intact model's.

    Interventions are on the loop span: each visit without its writes, without those of attention and of the MoE, and each
    later visit with one of `parts` as the visit before it had it. An unlooped model has `intact` alone. Where the span is
    one layer, skipping any of its visits is one and the same forward: the layer runs once less.

    Raises:
        InputError: a part that is no site of the model.
    """
    chains = {"intact": (), **_interventions(model, parts)}
    plain, *scores = score(model, sample, list(chains.values()), on_progress)
    hits = np.stack([plain.hits, *(scored.hits for scored in scores)], axis=1)
    axes, labels = ("intervention", "slice"), {"intervention": list(chains), "slice": list(sample.slices)}
    definition = "Share of scored predictions whose most likely token is right"
    measures = {
        "accuracy": Measure(
            "accuracy", "Accuracy under interventions", axes, "share of tokens", f"{definition}.", "ours"
        ),
        "change": Measure(
            "change",
            "Change of accuracy by an intervention",
            axes,
            "share of tokens",
            f"{definition}, less that of the intact model on the same tokens.",
            "ours",
        ),
    }
    return {
        name: sample.stat(measures[name], *sample.by_slice(total), labels)
        for name, total in (("accuracy", hits), ("change", hits - plain.hits[:, None]))
    }


def _interventions(model: InstrumentedModel, parts: Sequence[str]) -> dict[str, Chain]:
    """Name -> chain, visit by visit."""
    layers = model.plan.looped_layers
    chains: dict[str, Chain] = {}
    for visit in range(1, max(model.plan.visits.values()) + 1) if layers else ():
        where = {"layer": layers, "visit": visit}
        chains[f"visit {visit} skipped"] = skip(layer=layers, visit=visit)
        chains[f"visit {visit} without attention writes"] = (zero("attn_write", **where),)
        chains[f"visit {visit} without MoE writes"] = (zero("moe_write", **where),)
        for part in parts if visit > 1 else ():
            chains[f"visit {visit} with {part} of visit {visit - 1}"] = (take(part, visit - 1, **where),)
    return chains
