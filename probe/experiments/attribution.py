"""What each head and each expert is worth, by gradient: all single ablations from one forward and backward a batch.

Silencing a unit multiplies its output by 0 instead of 1; to first order the loss moves by minus the derivative at 1. How
far that is from the exact ablation is measured on units spread over the whole ranking.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

from visitlens.errors import InputError
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.interventions.gradients import site_gradients
from visitlens.hooks.interventions.intervene import Intervention, site_means, zero
from visitlens.hooks.interventions.intervene import mean as mean_of
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.samples.sample import EvalSet, Progress, silent
from visitlens.probe.samples.scores import batches, check_predicts, device_of, score

_ONE = {"heads": "a head", "experts": "an expert"}
_WHAT = "Change of the loss when {} at one step is {}, to first order: the gradient of the summed loss, per predicted token."


def attribution(
    model: InstrumentedModel,
    sample: EvalSet,
    *,
    ablation: str = "zero",
    exact: int = 24,
    on_progress: Progress = silent,
) -> dict[str, StatArray]:
    """`heads` [step, head] and, where there is a router, `experts` [step, expert] by gradient; for `exact` units of each, the exact ablation beside it
    (`heads_checked`, `experts_checked` [estimate, unit]), and how the two agree.

    `ablation` of heads: "zero" or "mean" (over the sample). Experts are silenced by their gates.

    Raises:
        InputError: another ablation, or a negative number to check; a model that has no PV.
    """
    if ablation not in ("zero", "mean") or exact < 0:
        raise InputError(f"expected ablation 'zero' or 'mean' and exact >= 0, got {ablation!r} and {exact}")
    means = site_means(model, sample.contexts, ["PV"]) if ablation == "mean" else None
    attributed = attribute(model, sample, means)
    steps = model.plan.steps
    how = {"heads": "replaced by its mean" if ablation == "mean" else "zeroed", "experts": "silenced"}
    results: dict[str, StatArray] = {}
    counts = sample.counts.reshape(-1, 1, 1)
    for name, effects in attributed.items():
        unit, one = name[:-1], _ONE[name]
        measure = Measure(
            name,
            f"What {one} is worth, by gradient",
            ("step", unit),
            "nats a token",
            _WHAT.format(one, how[name]),
            "ours",
        )
        labels = {"step": steps, unit: list(range(effects.shape[2]))}
        results[name] = sample.stat(measure, effects, counts, labels, "mean over predicted tokens")
    for name, effects in attributed.items():
        if exact:
            results |= _checked(model, sample, name, effects, exact, means, on_progress)
    return results


def attribute(model: InstrumentedModel, sample: EvalSet, means: object = None) -> dict[str, np.ndarray]:
    """Nats by [document, step, head] and, where there is a router, [document, step, expert] that the summed loss gains when
    one of them is ablated; NaN at a step that has none."""
    check_predicts(model)
    config, plan = model.config, model.plan
    sizes = {"heads": config.num_heads, "experts": config.num_experts}
    if "gates" in model.config.missing:
        del sizes["experts"]
    totals = {name: np.full((sample.documents, len(plan), size), np.nan) for name, size in sizes.items()}
    sites = ("PV", "gates") if "experts" in totals else ("PV",)
    for batch in batches(sample, device=device_of(model)):

        def loss(logits: torch.Tensor, batch=batch) -> torch.Tensor:
            return F.cross_entropy(batch.at(logits), batch.truth, reduction="sum")

        found = site_gradients(model, batch.tokens, batch.segments, sites, loss, watch=("experts",) * (len(sites) - 1))
        document = sample.document_of[batch.rows]
        real = document >= 0
        here = np.unique(document[real])
        for (site, step), gradient in found.gradients.items():
            value = found.values[site, step]
            total = totals["heads" if site == "PV" else "experts"][:, step]
            total[here] = np.where(np.isnan(total[here]), 0.0, total[here])
            if site == "PV":
                target = 0.0 if means is None else means[site, step].to(value)  # type: ignore[index]  # keyed by (site, step)
                effect = ((target - value) * gradient).sum(-1).double().cpu().numpy()
                np.add.at(total, document[real], effect[real])
            else:
                slots = -(value * gradient).double().cpu().numpy()[real]
                ids = found.values["experts", step].cpu().numpy()[real]
                np.add.at(total, (np.repeat(document[real], ids.shape[1]), ids.ravel()), slots.ravel())
    return totals


def exact_chain(name: str, layer: int, visit: int, unit: int, means: object = None) -> list[Intervention]:
    """The exact ablation that the gradient stands for."""
    if name == "experts":
        return [zero("gates", layer=layer, visit=visit, expert=unit)]
    if means is not None:
        return [mean_of("PV", means, layer=layer, visit=visit, head=unit)]  # type: ignore[arg-type]  # as site_means gives
    return [zero("PV", layer=layer, visit=visit, head=unit)]


def spread(total: np.ndarray, number: int) -> list[tuple[int, int]]:
    """`number` cells of a [step, unit] table, evenly spaced over its ranking, the extremes among them."""
    order = np.argsort(total, axis=None, kind="stable")[: int((~np.isnan(total)).sum())]  # NaN is sorted last
    picked = np.unique(np.linspace(0, len(order) - 1, min(number, len(order))).round().astype(int))
    return [(int(i), int(j)) for i, j in zip(*np.unravel_index(order[picked], total.shape), strict=True)]


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, ties by their mean rank."""
    ranks = [_ranks(x) for x in (a, b)]
    centred = [r - r.mean() for r in ranks]
    scale = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    return float((centred[0] * centred[1]).sum() / scale) if scale else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _checked(
    model: InstrumentedModel,
    sample: EvalSet,
    name: str,
    effects: np.ndarray,
    number: int,
    means: object,
    on_progress: Progress,
) -> dict[str, StatArray]:
    cells = spread(effects.sum(0), number)
    steps = model.plan.steps
    chains = [exact_chain(name, steps[i].layer, steps[i].visit, unit, means) for i, unit in cells]
    plain, *ablated = score(model, sample, [(), *chains], on_progress)
    both = np.zeros((sample.documents, 2, len(cells)))
    both[:, 0] = np.stack([effects[:, i, unit] for i, unit in cells], axis=1)
    both[:, 1] = np.stack([(scored - plain).loss for scored in ablated], axis=1)
    unit = name[:-1]
    labels = {
        "estimate": ["by gradient", "exact"],
        unit: [f"{steps[i].layer}·{steps[i].visit} {unit} {u}" for i, u in cells],
    }
    measure = Measure(
        f"{name}_checked",
        f"What {_ONE[name]} is worth, by gradient and exactly",
        ("estimate", unit),
        "nats a token",
        f"The gradient's estimate and the exact ablation, for {len(cells)} {name} spread evenly over the gradient's ranking.",
        "ours",
    )
    checked = sample.stat(measure, both, sample.counts.reshape(-1, 1, 1), labels, "mean over predicted tokens")
    guess, truth = checked.values
    replicated = checked.replicates
    agreement = Measure(
        f"{name}_rank_correlation",
        "Rank correlation of the gradient's estimate with the exact ablation",
        (),
        "Spearman's rho",
        f"Over the {len(cells)} {name} checked.",
        "ours",
    )
    worst = Measure(
        f"{name}_worst_error",
        "Largest error of the gradient's estimate",
        (),
        "nats a token",
        f"Largest absolute difference to the exact ablation among the {len(cells)} {name} checked.",
        "ours",
    )

    def number_of(measure: Measure, of) -> StatArray:
        replicates = None if replicated is None else np.array([of(*r) for r in replicated])
        support = None if checked.support is None else checked.support.reshape(2, -1).min(1)
        values, labels = np.asarray(of(guess, truth)), {}
        return replace(
            checked, measure=measure, values=values, labels=labels, replicates=replicates, support=support, counts=None
        )

    return {
        measure.name: checked,
        agreement.name: number_of(agreement, rank_correlation),
        worst.name: number_of(worst, lambda g, t: float(np.abs(g - t).max())),
    }
