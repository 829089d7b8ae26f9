"""Activation patching: which (layer, visit, head or part of the prompt) carries what a prompt asks for.

The clean prompt and its corrupted twin (a Dyck prompt whose last input has brackets of other kinds, or what a task file
says) differ in nothing else; the loss is that of the clean answer. A value of the clean run, put into the corrupted one, wins back part of what the corruption cost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.core.sites import SITES, check_sites
from visitlens.hooks.interventions.intervene import Intervention, replace
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.samples.sample import EvalSet, Progress, silent
from visitlens.probe.samples.scores import STATE, batches, device_of, predictions


@torch.no_grad()
def patching(
    model: InstrumentedModel,
    sample: EvalSet,
    *,
    by: str = "head",
    site: str = "",
    on_progress: Progress = silent,
) -> dict[str, StatArray]:
    """`recovered` [step, head] or [step, part], and `corruption` (what there was to win back, nats a scored token).

    `by` is "head" (at `site` PV by default) or "part" of the prompt (at `site` resid by default).

    Raises:
        InputError: a sample without prompts (`EvalSet.of_dyck`), an unknown `by`, a site without heads, or one that the model doesn't have.
    """
    if sample.corrupted is None or sample.roles is None:
        raise InputError(
            "patching needs prompts with a corrupted version: EvalSet.of_dyck(...) or a task with `corrupted`; on the command "
            "line --dyck or --task"
        )
    if by not in ("head", "part"):
        raise InputError(f"expected by='head' or by='part', got {by!r}")
    (site,) = check_sites([site or ("PV" if by == "head" else "resid")])
    heads = {"head": model.config.num_heads, "kv_head": model.config.num_kv_heads}
    axis = next((a for a in SITES[site].axes if a in heads), None)
    if by == "head" and axis is None:
        raise InputError(f"site {site!r} has no heads; patch it by='part'")
    columns = list(range(heads[axis])) if by == "head" and axis else list(sample.role_names)
    steps = model.plan.steps
    won = np.zeros((sample.documents, len(steps), len(columns)))
    clean_loss, corrupted_loss = np.zeros(sample.documents), np.zeros(sample.documents)
    jobs, done = len(sample.contexts.tokens) * len(steps) * len(columns), 0
    native = not model.in_parts
    for batch in batches(sample, device=device_of(model)):
        other = torch.from_numpy(sample.corrupted[batch.rows]).long().to(batch.tokens.device)
        roles = torch.from_numpy(sample.roles[batch.rows]).to(batch.tokens.device)

        def loss(
            tokens: torch.Tensor, patch: tuple[Intervention, ...] = (), plain: Captured | None = None, batch=batch
        ) -> torch.Tensor:
            return F.cross_entropy(predictions(model, batch, patch, plain, tokens), batch.truth, reduction="none")

        with capture(model, {site, *(STATE if native else ())}) as clean:
            model(batch.tokens, batch.segments, return_type="none")
        with capture(model, STATE if native else ()) as corrupted:
            model(other, batch.segments, return_type="none")
        batch.add(loss(batch.tokens, plain=clean if native else None), clean_loss)
        before = loss(other, plain=corrupted if native else None)
        batch.add(before, corrupted_loss)
        for step in (s for s in steps if s.index not in clean.absent.get(site, {})):
            for j, column in enumerate(columns):
                done += 1
                on_progress(done, jobs)
                if by == "part" and not bool((roles == j).any()):
                    continue  # no demonstration in these contexts
                chosen: dict[str, Any] = {"head": column} if by == "head" else {"token": roles == j}
                patch = replace(site, clean, layer=step.layer, visit=step.visit, **chosen)
                patched = loss(other, (patch,), corrupted if native else None)
                batch.add(before - patched, won[:, step.index, j])
    lost = (corrupted_loss - clean_loss).reshape(-1, 1, 1)
    recovered = Measure(
        "recovered",
        f"Corruption won back by the clean {site}",
        ("step", by),
        "share of the corruption's loss",
        f"(loss corrupted - loss patched) / (loss corrupted - loss clean), sums over scored tokens; patched: {site} of one {by} at one step "
        "from the clean run.",
        "ours",
    )
    corruption = Measure(
        "corruption",
        "What the corruption costs",
        (),
        "nats a scored token",
        "Loss of the clean answer after the corrupted prompt, less that after the clean one.",
        "ours",
    )
    labels = {"step": steps, by: columns}
    return {
        "recovered": sample.stat(recovered, won, lost, labels, "ratio of sums over prompts"),
        "corruption": sample.stat(corruption, lost[:, 0, 0], sample.counts, {}, "mean over scored tokens"),
    }
