"""The operations: zero, mean, resample, replace, add, scale, project_out, and those between visits.

Each names a site (`hooks/core/sites.py`) and, by `layer`, `visit`, `head`, `expert` and `token`, where in it; what isn't named is
everywhere. They are applied by `intervene`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.interventions.forward import At, Generated, SiteValues, TokenChoice, numbers, tokens_at
from visitlens.hooks.interventions.intervention import Choice, Intervention, Place, per_token

SiteMeans = Mapping[tuple[str, int], Tensor]
"""(site, step) -> mean over the tokens of a sample, shaped as one token's value; at `expert_out` [expert, hidden], over
the tokens that use the expert (`site_means`)."""


class Where(TypedDict, total=False):
    """Where in a site; what isn't named is everywhere."""

    layer: Choice
    visit: Choice
    head: Choice
    token: TokenChoice


class WhereExpert(Where, total=False):
    """The same at sites that have experts: router, experts, gates, expert_out."""

    expert: Choice


Operation = TypeVar("Operation", bound=Callable[..., object])


def _where_shown(operation: Operation) -> Operation:
    """The keywords of `Where` in the signature, for help and tab completion."""
    shown = inspect.signature(operation)
    (where,) = (p for p in shown.parameters.values() if p.kind is p.VAR_KEYWORD)
    names = (WhereExpert if "WhereExpert" in str(where.annotation) else Where).__annotations__
    given = [p for p in shown.parameters.values() if p is not where]
    keywords = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=a) for n, a in names.items()
    ]
    operation.__signature__ = shown.replace(parameters=[*given, *keywords])  # type: ignore[attr-defined]  # functions take it
    return operation


@_where_shown
def zero(site: str, **where: Unpack[WhereExpert]) -> Intervention:
    """Zeros. At `expert_out` or `gates` with `expert`, the expert is silenced and the other gates stay as they are."""
    return Intervention("zero", _numeric(Place.of(site, **where), "zero"), lambda value, at: value.new_zeros(()))


@_where_shown
def scale(site: str, factor: float | Tensor, **where: Unpack[WhereExpert]) -> Intervention:
    """The value times a factor (a number, or a tensor that broadcasts against [context, position, ...])."""
    place = _numeric(Place.of(site, **where), "scale")
    factor = _amount(factor, "scale")
    return Intervention("scale", place, lambda value, at: value * factor, number=_number(factor))


@_where_shown
def add(site: str, vector: float | Tensor, **where: Unpack[WhereExpert]) -> Intervention:
    """The value plus a vector over its last axis (a steering vector), or any tensor that broadcasts against it."""
    place = _numeric(Place.of(site, **where), "add")
    vector = _amount(vector, "add")
    return Intervention("add", place, lambda value, at: value + vector, number=_number(vector))


@_where_shown
def replace(site: str, value: float | Tensor | SiteValues, **where: Unpack[WhereExpert]) -> Intervention:
    """A given value, or that of another run at the same site and step (activation patching: a `Captured`, a captured
    generation or a run)."""
    place = Place.of(site, **where)
    if not callable(getattr(value, "at", None)):
        constant = torch.as_tensor(_amount(value, f"a capture or a run to replace {site!r} by"))
        return Intervention("replace", place, lambda old, at: constant, number=_number(value))
    run = cast(SiteValues, value)

    def other(old: Tensor, at: At) -> Tensor:
        step = at.step.index

        def found() -> Tensor:
            theirs = run.at(at.site, step)
            return theirs if "key" in SITES[site].axes else at.forward.here(theirs)

        there = tokens_at(run, step)
        return _where(None if there is None else at.forward.here(there), found, old, at)

    return Intervention("replace", place, other, values=run)


def _where(there: Tensor | None, other: Callable[[], Tensor], own: Tensor, at: At) -> Tensor:
    """Another step's or run's value, for the tokens that it had there; the others keep their own."""
    if there is None:
        return other()
    if not bool(there.any()):
        return own
    return torch.where(per_token(there.to(own.device), at.site, own), other().to(own), own)


@_where_shown
def mean(site: str, over: SiteMeans | None = None, **where: Unpack[WhereExpert]) -> Intervention:
    """The mean over tokens: of a sample (`over=site_means(...)`), or of the batch that runs. Whatever the position. At
    `expert_out` each expert's own, over the tokens that use it."""

    def change(value: Tensor, at: At) -> Tensor:
        by_expert = site == "expert_out"
        if over is None:
            real, batch = at.real, at.batch(value)
            if not by_expert:
                return batch[real].mean(0)
            used = at.batch(value, "experts")
            number = int(torch.maximum(used.max(), at.experts.max())) + 1
            return means_by_expert(batch[real], used[real], number)[at.experts]
        try:
            found = over[at.site, at.step.index]
        except KeyError:
            raise InputError(f"the means hold no {at.site!r} at {at.step}; make them with site_means") from None
        return found[at.experts] if by_expert else found

    if over is not None and not isinstance(over, Mapping):
        raise InputError(f"expected the means of a sample, from site_means, got {over!r:.80}")
    place = _per_token(Place.of(site, **where), "mean")
    return Intervention("mean", place, change, whole_batch=over is None, beside=("experts",) * (site == "expert_out"))


def means_by_expert(outputs: Tensor, experts: Tensor, number: int) -> Tensor:
    """[number, hidden] mean of outputs [token, k, hidden] over the tokens that use each of experts [token, k]; 0 for one
    that nobody uses."""
    ids = experts.flatten()
    totals = torch.zeros(number, outputs.shape[-1], dtype=torch.float64, device=outputs.device)
    totals.index_add_(0, ids, outputs.flatten(0, 1).double())
    return totals / torch.bincount(ids, minlength=number).clamp(min=1).unsqueeze(1)


@_where_shown
def resample(site: str, seed: int = 0, **where: Unpack[Where]) -> Intervention:
    """Another document's value: each token gets that of a token drawn from the other documents of its batch."""
    place = Place.of(site, **where)
    if "key" in SITES[site].axes or site == "expert_out":
        why = "another document's keys are other tokens; resample Q or K"
        if site == "expert_out":
            why = "another document's token uses other experts; resample moe_write, or take the mean"
        raise InputError(f"{site!r} can't be resampled: {why}")

    def change(value: Tensor, at: At) -> Tensor:
        return at.batch(value).flatten(0, 1)[at.forward.other_documents(seed, at.real)].view_as(value)

    return Intervention("resample", place, change, whole_batch=True)


@_where_shown
def project_out(site: str, directions: Tensor, **where: Unpack[WhereExpert]) -> Intervention:
    """The value without its part along one direction [d] or several [n, d] of its last axis."""
    directions = torch.as_tensor(_amount(directions, "project_out"))
    if directions.ndim not in (1, 2) or not directions.numel() or not bool(directions.isfinite().all()):
        raise InputError(f"expected finite directions [d] or [n, d], got shape {tuple(directions.shape)}")
    _, sizes, rows = torch.linalg.svd(directions.reshape(-1, directions.shape[-1]).double(), full_matrices=False)
    precision = torch.finfo(directions.dtype if directions.is_floating_point() else torch.float32).eps
    basis = rows[sizes > precision * max(directions.shape) * sizes.max()]
    if not len(basis) or not float(sizes.max()):
        raise InputError("expected a direction to project out, got only zeros")

    def change(value: Tensor, at: At) -> Tensor:
        if value.shape[-1] != basis.shape[1]:
            raise InputError(f"expected directions of {value.shape[-1]} numbers for {at.site!r}, got {basis.shape[1]}")
        b = basis.to(value)
        return value - (value @ b.T) @ b

    return Intervention("project_out", _per_token(Place.of(site, **where), "project_out"), change)


def generated(*numbers: int) -> Generated:
    """Tokens to act on, `token=generated(0, 2)`: what the model wrote, counted from 0 after the prompt; all without a number.

    The prompt is what the first forward through a cache gets. Its last token's forward writes generated token 0: to change
    that, act on the prompt.
    """
    if any(not isinstance(n, int) or n < 0 for n in numbers):
        raise InputError(f"expected numbers of generated tokens, counted from 0, got {', '.join(map(repr, numbers))}")
    return Generated(numbers or None)


# Between visits


@_where_shown
def take(site: str, source: int = 1, **where: Unpack[Where]) -> Intervention:
    """What visit `source` of the same layer had in the same forward (after its own interventions): a frozen site.

    `visit` is by default every later one; from itself (`source=2, visit=2`) it is the identity. At `experts` the visit keeps its own router's gates, renormalised over the experts taken;
    to take both, name both.
    """
    if not isinstance(source, int) or source < 1:
        raise InputError(f"expected the number of a visit to take from, counted from 1, got {source!r}")
    place = dataclasses.replace(Place.of(site, **where), least=source)
    if place.visit is None:
        place = dataclasses.replace(place, after=source)

    def change(value: Tensor, at: At) -> Tensor:
        if at.step.visit == source:
            return value
        step = at.plan.step(at.step.layer, source)
        return _where(at.forward.there.get(step.index), lambda: at.forward.value(site, step), value, at)

    return Intervention("take", place, change, source=source)


def swap(
    site: str,
    visits: tuple[int, int] = (1, 2),
    *,
    layer: Choice = None,
    head: Choice = None,
    token: TokenChoice = None,
) -> Intervention:
    """Each of two visits gets what the other had in the run without these interventions (one more forward)."""
    chosen = numbers(visits) or ()
    if len(set(chosen)) != 2 or len(chosen) != 2:
        raise InputError(f"expected two different visits to swap, got {visits}")
    a, b = chosen
    other = {a: b, b: a}

    def change(value: Tensor, at: At) -> Tensor:
        if at.forward.reference is None:
            raise InputError("swap needs the run without interventions: call the model inside `intervene`")
        step, reference = at.plan.step(at.step.layer, other[at.step.visit]).index, at.forward.reference
        return _where(tokens_at(reference, step), lambda: reference.at(site, step), value, at)

    place = dataclasses.replace(Place.of(site, layer, visits, head, token), least=max(visits))
    return Intervention("swap", place, change, needs_reference=True)


def skip(*, layer: Choice = None, visit: Choice = None, token: TokenChoice = None) -> tuple[Intervention, ...]:
    """No write at all: the residual stream passes the visit unchanged. Without `layer`, the visit of every layer."""
    if visit is None and layer is None:
        raise InputError("skip what? name a visit, a layer, or both")
    passed = Intervention(
        "skip",
        Place.of("resid_out", layer, visit, token=token),
        lambda value, at: at.forward.values["resid", at.step.index],
        beside=("resid",),
    )
    writes = (zero(site, layer=layer, visit=visit, token=token) for site in ("attn_write", "moe_write"))
    return tuple(dataclasses.replace(write, unless_summed=passed) for write in writes)


def knock_out_sink(
    mass: Literal["renormalise", "drop"] = "renormalise",
    *,
    layer: Choice = None,
    visit: Choice = None,
    head: Choice = None,
) -> Intervention:
    """No attention to the segment start, save by the segment start itself, which sees nothing else.

    `renormalise` gives its mass to the other keys in proportion (a query whose other keys have none at all in this dtype
    attends to nothing); `drop` gives it to nobody.
    """
    if mass not in ("renormalise", "drop"):
        raise InputError(f"expected mass 'renormalise' or 'drop', got {mass!r}")

    def change(pattern: Tensor, at: At) -> Tensor:
        starts = at.forward.start_keys
        own = torch.arange(starts.shape[1], device=pattern.device) + at.forward.offset
        keys = torch.arange(pattern.shape[-1], device=pattern.device) + own[-1] + 1 - pattern.shape[-1]  # the last ones
        blocked = (keys == starts.unsqueeze(-1)) & (own != starts).unsqueeze(-1)  # [context, query, key]
        rest = pattern.masked_fill(blocked.unsqueeze(1), 0.0)
        if mass == "drop":
            return rest
        total = rest.sum(-1, keepdim=True)  # a learned sink's slot keeps its own mass
        return rest * (pattern.sum(-1, keepdim=True) / total).masked_fill(total <= 0, 1.0)

    return Intervention(f"knock_out_sink[{mass}]", Place.of("P", layer, visit, head), change)


def _amount(given: Any, what: str) -> float | Tensor:
    """A number or a tensor; of an array or a list, its tensor.

    Raises:
        InputError: something else.
    """
    if isinstance(given, (int, float, Tensor)):
        return given
    try:
        made = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        made = None
    if made is None or made.is_complex():
        raise InputError(f"{what}: expected a number or a tensor, got {given!r:.80}")
    return made


def _number(given: object) -> float | None:
    return given if isinstance(given, (int, float)) else None


def _numeric(place: Place, name: str) -> Place:
    if place.site == "experts":
        raise InputError(
            f"{name} makes no sense of expert numbers; silence an expert by zero('expert_out', expert=...)"
        )
    return place


def _per_token(place: Place, name: str) -> Place:
    if "key" in SITES[place.site].axes:
        raise InputError(f"{name} needs one vector a token, but {place.site!r} has a row over keys; use Q, K or PV")
    return _numeric(place, name)
