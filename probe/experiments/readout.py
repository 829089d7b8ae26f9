"""What could be read out at every step: the logit lens and the coda lens, side by side, since they disagree.

The logit lens puts the final norm and the unembedding on the residual stream after a step; the coda lens first runs
the layers that follow the loop span on it, as if the span had ended there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.interventions.intervene import replace
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.samples.sample import EvalSet, Progress, silent
from visitlens.probe.samples.scores import STATE, Batch, batches, device_of, predictions, state_after

LENSES = ("logit lens", "coda lens")
_QUANTITIES = {
    "loss": ("Loss read out at every step", "nats a token", "Cross-entropy of the read-out."),
    "entropy": ("Entropy of the read-out at every step", "nats", "Entropy of the predicted distribution."),
    "divergence": ("Divergence of the read-out from the final one", "nats", "KL(final distribution || read-out)."),
    "flips": (
        "Answers that change at a step",
        "share of tokens",
        "Share of predictions whose most likely token differs from the one read out a step before.",
    ),
    "final_answer": (
        "Answers that are already the final one",
        "share of tokens",
        "Share of predictions whose most likely token is that of the final distribution.",
    ),
}


@torch.no_grad()
def readout(model: InstrumentedModel, sample: EvalSet, *, on_progress: Progress = silent) -> dict[str, StatArray]:
    """`loss`, `entropy`, `divergence`, `flips`, `final_answer` [lens, step] after each step, over the tokens that count."""
    plan = model.plan
    coda = max((s.index for s in plan.steps if s.layer in plan.looped_layers), default=len(plan) - 1) + 1
    totals = {name: np.zeros((sample.documents, len(LENSES), len(plan))) for name in _QUANTITIES}
    jobs = len(sample.contexts.tokens)
    for number, batch in enumerate(batches(sample, device=device_of(model))):
        with capture(model, STATE) as captured:
            model(batch.tokens, batch.segments, return_type="none")
        final = _lens(model, batch, captured, len(plan) - 1).log_softmax(-1)
        for i in range(len(LENSES)):
            before = None
            for step in range(len(plan)):
                if step in captured.absent.get("resid_out", {}):
                    continue
                if i == 0:
                    read = _lens(model, batch, captured, step).log_softmax(-1)
                else:
                    read = final if step >= coda else _coda_lens(model, batch, captured, step, coda).log_softmax(-1)
                for name, values in _read(read, final, batch.truth, before).items():
                    batch.add(values, totals[name][:, i, step])
                before = read.argmax(-1)
        on_progress(number + 1, jobs)
    labels = {"lens": LENSES, "step": plan.steps}
    counts = sample.counts.reshape(-1, 1, 1)
    return {
        name: sample.stat(
            Measure(f"readout_{name}", title, ("lens", "step"), unit, definition, "ours"), totals[name], counts, labels
        )
        for name, (title, unit, definition) in _QUANTITIES.items()
    }


def _lens(model: InstrumentedModel, batch: Batch, captured: Captured, step: int) -> Tensor:
    """[counted, vocab] what the final norm and the unembedding make of the state after a step. An adapted model runs with
    that state put in after its last step, so that it reads out in its own way."""
    state = state_after(captured, step)
    if not model.in_parts:
        return batch.read(model, state)
    last = model.plan.steps[-1]
    return predictions(model, batch, [replace("resid_out", state.nan_to_num(), layer=last.layer, visit=last.visit)])


def _coda_lens(model: InstrumentedModel, batch: Batch, captured: Captured, step: int, coda: int) -> Tensor:
    """The same of the state after the coda, run on from there."""
    state = state_after(captured, step)
    if not model.in_parts:
        return batch.read(model, model.run_steps(state, batch.segments, start=coda))
    if coda == len(model.plan):
        return _lens(model, batch, captured, step)
    first = model.plan.steps[coda]
    return predictions(model, batch, [replace("resid", state.nan_to_num(), layer=first.layer, visit=first.visit)])


def _read(read: Tensor, final: Tensor, truth: Tensor, before: Tensor | None) -> dict[str, Tensor]:
    answer = read.argmax(-1)
    return {
        "loss": F.nll_loss(read, truth, reduction="none"),
        "entropy": -(read.exp() * read).sum(-1),
        "divergence": (final.exp() * (final - read)).sum(-1),
        "flips": torch.full_like(answer, torch.nan, dtype=torch.float64)
        if before is None
        else (answer != before).double(),
        "final_answer": (answer == final.argmax(-1)).double(),
    }
