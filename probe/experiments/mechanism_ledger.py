"""The mechanism ledger: which part of a later visit earns its gain.

A later visit's update is made of six things: its queries, keys and values; the experts chosen, their gates, and what the experts read. Taken
from the earlier visit, all six together repeat the earlier update exactly. So each can be replaced alone (what is
lost?) and each can be left in alone while the rest repeats (what is won back?). Without a router, what the feed-forward
layer reads takes the place of the last three. A family whose writes have more to them (a gate on the attention output, say) gets
a row for that rest.
"""

from __future__ import annotations

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.interventions.intervene import Intervention, skip, take
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.samples.sample import EvalSet, Progress, silent
from visitlens.probe.samples.scores import Scores, score

ATTENTION = {"queries": ("Q",), "keys": ("K",), "values": ("V",)}
ROUTED = {"experts chosen": ("experts",), "gates": ("gates",), "expert input": ("expert_in",)}
DENSE = {"feed-forward input": ("moe_in",)}
SKIPPED = "visit skipped"
WHOLE = "whole update"
REST = {"attn_write": "the rest of attention", "moe_write": "the rest of the feed-forward layer"}


def mechanisms(model: InstrumentedModel) -> dict[str, tuple[str, ...]]:
    """Name -> the sites that make it up; a whole sub-layer is its write."""
    routed = "gates" not in model.config.missing
    feed, name = (ROUTED, "experts (all of it)") if routed else (DENSE, "feed-forward layer (all of it)")
    pairs = {"pattern (queries and keys)": ("Q", "K")}
    if routed:
        pairs["routing (experts and gates)"] = ("experts", "gates")
    whole = {"attention (all of it)": ("attn_write",), name: ("moe_write",), WHOLE: ("attn_write", "moe_write")}
    return ATTENTION | feed | pairs | whole


def mechanism_ledger(
    model: InstrumentedModel,
    sample: EvalSet,
    *,
    visits: tuple[int, int] | None = None,
    on_progress: Progress = silent,
) -> dict[str, StatArray]:
    """[form, mechanism, slice] nats a token: `alone`, lost when the mechanism is the earlier visit's; `left in`, won back when
    it alone is the later visit's own and the rest repeats the earlier update. The row `visit skipped` is the whole gain.

    `visits`: the earlier and the later, by default the first and the last.

    Raises:
        InputError: an unlooped model, no such visits, a family without queries, keys, values or writes of its own.
    """
    source, visit = _visits(model, visits)
    layers = model.plan.looped_layers

    def taken(sites: tuple[str, ...]) -> list[Intervention]:
        return [take(site, source=source, visit=visit, layer=layers) for site in sites]

    found = mechanisms(model)
    parts = {
        "attn_write": ("Q", "K", "V"),
        "moe_write": tuple(s for name in (ROUTED | DENSE) for s in found.get(name, ())),
    }
    alone: dict[str, list] = {name: taken(sites) for name, sites in found.items()}
    alone[SKIPPED] = list(skip(visit=visit, layer=layers))
    left_in = {name: taken(_others(sites, parts)) for name, sites in found.items()}
    for write, rest in REST.items():  # what a write has beside its parts: its own when all of them are taken
        other = next(w for w in REST if w != write)
        left_in[rest] = taken((*parts[write], other))
    plain, *scores = score(model, sample, [(), *alone.values(), *left_in.values()], on_progress)
    scored = dict(zip(alone, scores, strict=False)), dict(zip(left_in, scores[len(alone) :], strict=True))
    repeated = scored[0][WHOLE]
    rests = [rest for rest in REST.values() if rest in left_in and _differ(repeated, scored[1][rest])]
    names = [*found, *rests, SKIPPED]
    lost = np.full((sample.documents, 2, len(names)), np.nan)
    for at, name in enumerate(names):
        if name in alone:
            lost[:, 0, at] = (scored[0][name] - plain).loss
        if name in left_in:
            lost[:, 1, at] = (repeated - scored[1][name]).loss
    rest = " The rest is what a write has beside the parts that are sites." if rests else ""
    measure = Measure(
        "mechanism_ledger",
        f"What visit {visit} earns, by mechanism",
        ("form", "mechanism", "slice"),
        "nats a token",
        f"alone: loss with the mechanism of visit {visit} taken from visit {source}, less the loss as it is. left in: loss with "
        f"all of visit {visit}'s update taken from visit {source}, less the loss when this mechanism alone is its own. "
        f"visit skipped: loss without the visit's writes, less the loss as it is.{rest}",
        "ours",
    )
    labels = {"form": ["alone", "left in"], "mechanism": names, "slice": list(sample.slices)}
    return {"mechanism_ledger": sample.stat(measure, *sample.by_slice(lost), labels, "mean over predicted tokens")}


def _others(sites: tuple[str, ...], parts: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """What else an update is made of: of the same sub-layer the parts, of the other its write."""
    others: list[str] = []
    for write, inside in parts.items():
        if write not in sites:
            here = [site for site in inside if site not in sites]
            others += here if len(here) < len(inside) else [write]
    return tuple(others)


def _differ(a: Scores, b: Scores) -> bool:
    """By more than rounding."""
    return bool(np.abs(a.loss - b.loss).max() > 1e-6 * np.abs(a.loss).max())


def _visits(model: InstrumentedModel, visits: tuple[int, int] | None) -> tuple[int, int]:
    if not model.plan.looped_layers:
        raise InputError("an unlooped model has no later visit to explain")
    pairs = model.plan.visit_pairs(*visits) if visits else model.plan.visit_pairs()
    return pairs[0].earlier.visit, pairs[0].later.visit
