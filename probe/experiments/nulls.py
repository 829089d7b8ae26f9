"""What the likeness of two visits would be without any: shuffled tokens, values less their mean, shuffled expert sets.

Vectors of one layer share a mean and a scale, so two visits look alike even between unrelated tokens; popular experts overlap by
popularity alone. Each likeness is shown beside its nulls.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.interventions.forward import Forward
from visitlens.hooks.interventions.intervene import site_means
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.samples.sample import EvalSet, Progress, silent
from visitlens.probe.samples.scores import batches, device_of

SITES = ("resid", "X", "Q", "K", "V", "PV", "attn_write", "moe_write")
NULLS = ("observed", "tokens shuffled", "less the mean", "less the mean, shuffled")


@torch.no_grad()
def nulls(
    model: InstrumentedModel, sample: EvalSet, *, seed: int = 0, on_progress: Progress = silent
) -> dict[str, StatArray]:
    """`cosine` [null, site, layer] between the first and the last visit; `expert_overlap` [null, layer], shared experts / k,
    where there is a router. Sites that the model lacks are left out.

    Shuffled: the later visit's value is that of a token of another document of the same context. Over every token but a document's first.

    Raises:
        InputError: an unlooped model; a context that holds one document alone.
    """
    pairs = model.plan.visit_pairs()
    if not pairs:
        raise InputError("an unlooped model has no two visits to compare")
    lacks = model.absent_steps()
    sites = [site for site in SITES if not all(pair.later.index in lacks.get(site, {}) for pair in pairs)]
    routed = [j for j, pair in enumerate(pairs) if pair.later.index not in lacks.get("experts", {})]
    means = site_means(model, sample.contexts, sites)
    cosines = np.full((sample.documents, len(NULLS), len(sites), len(pairs)), np.nan)
    cosines[:, :, [[pair.later.index not in lacks.get(site, {}) for pair in pairs] for site in sites]] = 0.0
    overlap = np.zeros((sample.documents, 2, len(routed)))
    jobs = len(sample.contexts.tokens)
    counted = np.zeros(sample.documents)
    for number, batch in enumerate(batches(sample, device=device_of(model))):
        with capture(model, [*sites, *["experts"] * bool(routed)]) as captured:
            model(batch.tokens, batch.segments, return_type="none")
        forward = Forward(batch.tokens, batch.segments)
        if int(forward.segments.starts().unique().numel()) - int(bool((~forward.real).any())) < 2:
            on_progress(number + 1, jobs)
            continue  # a context that one long document fills has no other to shuffle with
        batch.add(torch.ones(len(batch.row)), counted)
        flat = batch.row * batch.tokens.shape[1] + batch.position
        other = forward.other_documents(seed)[flat]
        for j, pair in enumerate(pairs):
            for i, site in enumerate(sites):
                if pair.later.index in lacks.get(site, {}):
                    continue
                first, second = (_tokens(captured.at(site, s.index)) for s in (pair.earlier, pair.later))
                centre = [means[site, s.index].flatten() for s in (pair.earlier, pair.later)]
                for n, (a, b) in enumerate(((first, second), (first - centre[0], second - centre[1]))):
                    batch.add(cosine_similarity(a[flat], b[flat], dim=-1), cosines[:, 2 * n, i, j])
                    batch.add(cosine_similarity(a[flat], b[other], dim=-1), cosines[:, 2 * n + 1, i, j])
        for at, j in enumerate(routed):
            steps = pairs[j].earlier, pairs[j].later
            first, second = (captured.at("experts", s.index).flatten(0, 1) for s in steps)
            for n, index in enumerate((flat, other)):
                shared = (first[flat].unsqueeze(2) == second[index].unsqueeze(1)).sum((1, 2))
                batch.add(shared.double() / first.shape[1], overlap[:, n, at])
        on_progress(number + 1, jobs)
    if not counted.any():
        raise InputError(
            "every context holds one document alone, so tokens can't be shuffled between documents: give more, shorter ones"
        )
    layers = [pair.layer for pair in pairs]
    cosine = Measure(
        "null_cosine",
        "Cosine between two visits, and its nulls",
        ("null", "site", "layer"),
        "cosine",
        "Cosine of the whole vector (all heads together) at a layer's first and last visit. Shuffled: the later visit's vector is another "
        "document's. Less the mean: each visit's mean over the sample is taken off first.",
        "ours",
    )
    experts = Measure(
        "null_expert_overlap",
        "Expert overlap between two visits, and its null",
        ("null", "layer"),
        "share of k",
        "|S1 ∩ S2| / k. Shuffled: S2 is another document's token's, which keeps every expert's load.",
        "ours",
    )
    by_site = {"null": NULLS, "site": sites, "layer": layers}
    results = {"cosine": sample.stat(cosine, cosines, counted.reshape(-1, 1, 1, 1), by_site)}
    if routed:
        by_layer = {"null": NULLS[:2], "layer": [layers[j] for j in routed]}
        results["expert_overlap"] = sample.stat(experts, overlap, counted.reshape(-1, 1, 1), by_layer)
    return results


def _tokens(value: Tensor) -> Tensor:
    """[context * position, size] in float64."""
    return value.flatten(0, 1).flatten(1).double()
