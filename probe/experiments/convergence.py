"""Whether the residual stream settles: the size of each step, the angle between consecutive ones, the way still to go."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.interventions.intervene import with_loop_count
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.samples.sample import EvalSet, Progress, silent
from visitlens.probe.samples.scores import STATE, batches, device_of, state_after

if TYPE_CHECKING:
    from visitlens.hooks.core.model_interface import InstrumentedModel

_QUANTITIES = {
    "size": ("Size of a {}", "ratio", "||x' - x|| / ||x|| over one {}."),
    "angle": (
        "Angle between consecutive {}s",
        "degrees",
        "Angle between this {}'s change of the residual stream and the one before it.",
    ),
    "distance": ("Distance to the last state", "ratio", "||x' - x_last|| / ||x_last||, x' the state after the {}."),
}


@torch.no_grad()
def convergence(
    model: InstrumentedModel, sample: EvalSet, *, loops: int | None = None, on_progress: Progress = silent
) -> dict[str, StatArray]:
    """`step_size`, `step_angle`, `step_distance` [step] along the whole model, `visit_*` [visit] from one end of the loop span to the next.

    `loops` runs the span that often, writes scaled as trained: whether it would settle. Over every token of a document but its first.

    Raises:
        InputError: an unlooped model, with `loops`.
    """
    layers = model.plan.looped_layers
    if loops is not None:
        model = with_loop_count(model, loops, "kept")
    plan = model.plan
    looped = [s for s in plan.steps if s.layer in (layers or plan.looped_layers)]
    if not looped:
        raise InputError("an unlooped model has no visits to converge over")
    ends = [max(s.index for s in looped if s.visit == v) for v in sorted({s.visit for s in looped})]
    axes = {"step": list(plan.steps), "visit": [plan.steps[end].visit for end in ends]}
    totals = {
        f"{axis}_{name}": np.zeros((sample.documents, len(labels)))
        for axis, labels in axes.items()
        for name in _QUANTITIES
    }
    jobs = len(sample.contexts.tokens)
    for number, batch in enumerate(batches(sample, device=device_of(model))):
        with capture(model, STATE) as captured:
            model(batch.tokens, batch.segments, return_type="none")
        every = [captured.at("resid", 0), *(state_after(captured, step) for step in range(len(plan)))]
        span = [every[looped[0].index], *(every[end + 1] for end in ends)]
        for axis, states in (("step", every), ("visit", span)):
            chosen = [state[batch.row, batch.position].double() for state in states]
            for at, values in enumerate(_motion(chosen)):
                for name, value in zip(_QUANTITIES, values, strict=True):
                    batch.add(value, totals[f"{axis}_{name}"][:, at])
        on_progress(number + 1, jobs)
    return {
        f"{axis}_{name}": sample.stat(
            Measure(f"{axis}_{name}", title.format(axis), (axis,), unit, definition.format(axis), "ours"),
            totals[f"{axis}_{name}"],
            sample.counts.reshape(-1, 1),
            {axis: labels},
        )
        for axis, labels in axes.items()
        for name, (title, unit, definition) in _QUANTITIES.items()
    }


def _motion(states: list[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each move: size, angle to the move before (NaN for the first), distance still to go; each [token]."""
    last, before = states[-1], None
    for start, end in pairwise(states):
        move = end - start
        cosine = None if before is None else cosine_similarity(move, before, dim=-1).clamp(-1, 1)
        angle = torch.full_like(move[:, 0], torch.nan) if cosine is None else cosine.arccos().rad2deg()
        yield move.norm(dim=-1) / start.norm(dim=-1), angle, (end - last).norm(dim=-1) / last.norm(dim=-1)
        before = move
