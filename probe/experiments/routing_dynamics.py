"""How routing moves from visit to visit: entropy, load, which experts go together, and which tokens change theirs most."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from visitlens.hooks.capture.capture import capture
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.samples.sample import EvalSet, Progress, silent
from visitlens.probe.samples.scores import batches, device_of


@torch.no_grad()
def routing_dynamics(
    model: InstrumentedModel,
    sample: EvalSet,
    *,
    tokens: int = 16,
    at_least: int = 8,
    on_progress: Progress = silent,
) -> dict[str, StatArray]:
    """`entropy` [step] (of a softmax router), `load` [step, expert], `together` [step, expert, other_expert]; for a looped model also `kept` [layer],
    `transitions` [layer, expert, later_expert] and `changed_tokens` [token_id].

    `tokens`: how many token ids `changed_tokens` lists, of those that occur `at_least` so often. Over every token but a document's first.

    Raises:
        InputError: a model without a router.
    """
    plan, experts = model.plan, model.config.num_experts
    model.check_sites(["experts"])
    dense, softmax = model.absent_steps().get("experts", {}), "softmax router" not in model.config.missing
    steps = [step for step in plan.steps if step.index not in dense]
    pairs = [pair for pair in plan.visit_pairs() if pair.later.index not in dense]
    k, row = model.config.experts_per_token, {step.index: i for i, step in enumerate(steps)}
    entropy = np.zeros((sample.documents, len(steps)))
    load = np.zeros((sample.documents, len(steps), experts))
    together = np.zeros((1, len(steps), experts, experts))
    moved = np.zeros((1, len(pairs), experts, experts))
    kept = np.zeros((sample.documents, len(pairs)))
    by_token = np.zeros((2, model.config.vocab_size))  # shared experts, occurrences
    jobs = len(sample.contexts.tokens)
    for number, batch in enumerate(batches(sample, device=device_of(model))):
        with capture(model, ["router", "experts"]) as captured:
            model(batch.tokens, batch.segments, return_type="none")
        chosen = [captured.at("experts", s.index)[batch.row, batch.position] for s in steps]
        masks = [torch.zeros(len(c), experts, dtype=torch.float64).scatter_(1, c.cpu(), 1.0) for c in chosen]
        for i, step in enumerate(steps):
            if softmax:
                log_p = captured.at("router", step.index)[batch.row, batch.position].double().log_softmax(-1)
                batch.add(-(log_p.exp() * log_p).sum(-1), entropy[:, i])
            batch.add(masks[i], load[:, i])
            together[0, i] += (masks[i].T @ masks[i]).numpy()
        for j, pair in enumerate(pairs):
            first, second = masks[row[pair.earlier.index]], masks[row[pair.later.index]]
            shared = (first * second).sum(1)
            batch.add(shared / k, kept[:, j])
            moved[0, j] += (first.T @ second).numpy()
            np.add.at(by_token[0], batch.tokens[batch.row, batch.position].cpu().numpy(), shared.numpy() / k)
            np.add.at(by_token[1], batch.tokens[batch.row, batch.position].cpu().numpy(), 1)
        on_progress(number + 1, jobs)
    total, every = sample.counts.sum(), list(range(experts))

    def stat(name: str, title: str, axes: dict[str, Any], unit: str, definition: str, sums: np.ndarray) -> StatArray:
        grouped = len(sums) == sample.documents
        measure = Measure(name, title, tuple(axes), unit, definition, "ours", grouped)
        counts = sample.counts.reshape(-1, *[1] * len(axes))
        if grouped:
            return sample.stat(measure, sums, counts, axes)
        return StatArray(measure, sums[0] / total, axes, None, sample.documents, int(total))

    results = {
        "entropy": stat(
            "router_entropy",
            "Router entropy",
            {"step": steps},
            "nats",
            "Entropy of the router's softmax over all experts.",
            entropy,
        ),
        "load": stat(
            "expert_load",
            "Expert load",
            {"step": steps, "expert": every},
            "share of tokens",
            "Share of tokens that use the expert.",
            load,
        ),
        "together": stat(
            "experts_together",
            "Experts used together",
            {"step": steps, "expert": every, "other_expert": every},
            "share of tokens",
            "Share of tokens that use both experts at one step; the diagonal is the load.",
            together,
        ),
    }
    if not softmax:
        del results["entropy"]
    if not pairs:
        return results
    layers = [pair.layer for pair in pairs]
    rate = np.divide(by_token[0], by_token[1], out=np.ones(by_token.shape[1]), where=by_token[1] > 0)
    often = np.flatnonzero(by_token[1] >= at_least * len(pairs))
    most = often[np.argsort(rate[often], kind="stable")][:tokens]
    changed = Measure(
        "experts_kept_by_token",
        "Tokens that change experts most",
        ("token_id",),
        "share of k",
        f"|S1 ∩ S2| / k between the first and the last visit, averaged over looped layers and occurrences; token ids that occur at least {at_least} times, the lowest first. "
        "Picked for being extreme, so no interval.",
        "ours",
        False,
    )
    results["kept"] = stat(
        "experts_kept",
        "Experts kept from the first to the last visit",
        {"layer": layers},
        "share of k",
        "|S1 ∩ S2| / k.",
        kept,
    )
    results["transitions"] = stat(
        "expert_transitions",
        "Experts at the first and at the last visit",
        {"layer": layers, "expert": every, "later_expert": every},
        "share of tokens",
        "Share of tokens that use the expert at the first visit and the later expert at the last.",
        moved,
    )
    results["changed_tokens"] = StatArray(
        changed, rate[most], {"token_id": most.tolist()}, None, sample.documents, int(total)
    )
    return results
