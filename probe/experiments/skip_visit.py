"""What each looped layer's visit is worth: the loss without its writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.interventions.intervene import skip
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.samples.sample import EvalSet, Progress, silent
from visitlens.probe.samples.scores import score

if TYPE_CHECKING:
    from visitlens.hooks.core.model_interface import InstrumentedModel


def skip_visit(model: InstrumentedModel, sample: EvalSet, *, on_progress: Progress = silent) -> dict[str, StatArray]:
    """`skip_visit` [step, slice] for one visit of one looped layer; `skip_block` [visit, slice] for the visit of all of them.

    Raises:
        InputError: an unlooped model.
    """
    layers = model.plan.looped_layers
    if not layers:
        raise InputError("an unlooped model has no visits to skip; ablate a layer by skip(layer=...)")
    steps = [s for s in model.plan.steps if s.layer in layers]
    visits = sorted({s.visit for s in steps})
    chains = [skip(layer=s.layer, visit=s.visit) for s in steps] + [skip(layer=layers, visit=v) for v in visits]
    plain, *scores = score(model, sample, [(), *chains], on_progress)
    lost = np.stack([(scored - plain).loss for scored in scores], axis=1)
    definition = "Loss without the attention and MoE writes of {}, less the loss as it is."
    one = Measure(
        "skip_visit",
        "What a visit of a layer is worth",
        ("step", "slice"),
        "nats a token",
        definition.format("one visit of one layer"),
        "ours",
    )
    block = Measure(
        "skip_block",
        "What a visit of the loop span is worth",
        ("visit", "slice"),
        "nats a token",
        definition.format("all looped layers at one visit"),
        "ours",
    )
    names = list(sample.slices)
    n = len(steps)
    return {
        "skip_visit": sample.stat(one, *sample.by_slice(lost[:, :n]), {"step": steps, "slice": names}),
        "skip_block": sample.stat(block, *sample.by_slice(lost[:, n:]), {"visit": visits, "slice": names}),
    }
