"""Loss and accuracy when the same weights run their span another number of times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.interventions.intervene import with_loop_count
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.samples.sample import EvalSet, Progress, silent
from visitlens.probe.samples.scores import score


def loop_count(
    model: InstrumentedModel,
    sample: EvalSet,
    *,
    loops: Sequence[int] = range(1, 9),
    on_progress: Progress = silent,
) -> dict[str, StatArray]:
    """`loss` and `accuracy` [scale, loops, slice], the writes in the span scaled by 1/loops or as the model was trained (in
    families without such a scale, as they are).

    Raises:
        InputError: an unlooped model, a loop count below 1, a family whose loop count is built in.
    """
    loops = list(loops)
    trained = max(model.plan.visits.values())
    how = f"the loops run `loops` times (a layer's visits as the model is: {trained})"
    scales = model.loop_scales  # other families' writes have no 1/r
    if "rescaled" in scales:
        how += f"; rescaled: writes in them scaled by 1/loops, kept: by 1/{trained}"
    loss = np.zeros((sample.documents, len(scales), len(loops)))
    hits = np.zeros_like(loss)
    for i, scale in enumerate(scales):
        for j, count in enumerate(loops):
            (scores,) = score(with_loop_count(model, count, scale), sample)
            loss[:, i, j], hits[:, i, j] = scores.loss, scores.hits
            on_progress(i * len(loops) + j + 1, len(scales) * len(loops))
    axes, labels = ("scale", "loops", "slice"), {"scale": scales, "loops": loops, "slice": list(sample.slices)}
    measures = {
        "loss": Measure("loss", "Loss by loop count", axes, "nats a token", f"Cross-entropy, {how}.", "ours"),
        "accuracy": Measure(
            "accuracy",
            "Accuracy by loop count",
            axes,
            "share of tokens",
            f"Share of predictions whose most likely token is right, {how}.",
            "ours",
        ),
    }
    return {
        name: sample.stat(measures[name], *sample.by_slice(total), labels)
        for name, total in (("loss", loss), ("accuracy", hits))
    }
