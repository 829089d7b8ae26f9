"""Interventions: run a model with some of its sites changed, at chosen layers, visits, heads, experts and tokens.

    with intervene(model, take("V", visit=2), zero("PV", layer=3, visit=2, head=1)):
        logits = model(tokens, segments)      # or model.run_steps(x, segments, start=...)

**Order.** Execution order first: a step sees whatever earlier steps and earlier sites of its own step have become. At one
site of one step, in the order given, each on the result of the one before; a nested `intervene` comes after the outer
one. A visit that takes from another takes the value after all interventions on it.

Nothing is written in place, and a change to an equal value changes nothing: those logits are bit-identical. Hooks are gone after the `with`,
however it ends.

**Adapted models.** Whatever an adapter reads can be changed, and what it lacks is refused with its reason. Documents run
one by one there, so `mean` without `over` and `resample` take from the run without these interventions (one more forward).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.core.loop_plan import Step
from visitlens.hooks.core.model_interface import InstrumentedModel, check_model
from visitlens.hooks.interventions.forward import At, Forward, SiteValues, tokens_at
from visitlens.hooks.interventions.intervention import Intervention, flatten
from visitlens.hooks.interventions.operations import (
    SiteMeans,
    add,
    generated,
    knock_out_sink,
    mean,
    project_out,
    replace,
    resample,
    scale,
    skip,
    swap,
    take,
    zero,
)

if TYPE_CHECKING:
    from visitlens.hooks.text.packed_tokens import PackedTokens

__all__ = [
    "Intervention",
    "add",
    "generated",
    "intervene",
    "knock_out_sink",
    "mean",
    "project_out",
    "replace",
    "resample",
    "scale",
    "site_means",
    "skip",
    "swap",
    "take",
    "with_loop_count",
    "zero",
]


@contextmanager
def intervene(
    model: InstrumentedModel,
    *interventions: Intervention | Iterable[Intervention],
    earlier: SiteValues | None = None,
    prompt: int | None = None,
    must_match: bool = True,
) -> Iterator[None]:
    """The model, intervened on; without interventions it is left as it is.

    Args:
        earlier: values of steps that don't run inside, for `take` after `run_steps(start=...)`.
        prompt: how many tokens of the contexts are a prompt, for `token=generated(...)`. By default what the first forward
            through a cache gets, and that holds for forwards without a cache afterwards.
        must_match: whether an intervention that chose no token or expert in any forward is an error.

    Raises:
        InputError: a place that the model doesn't have; another thread is inside a capture or an intervention of this model; on
            leaving, an intervention that matched nothing.

    Examples:
        >>> model = vl.load("smelt")
        >>> tokens = model.run("Two visits of one layer.").token_ids
        >>> with vl.intervene(model.native, vl.do.zero("PV", layer=3, visit=2, head=1)):
        ...     changed = model.native(tokens)
        >>> bool((changed == model.native(tokens)).all())
        False
    """
    check_model(model)
    chain = flatten(interventions)
    if not chain:
        yield
        return
    session = _Session(model, fitted(chain, model), earlier, prompt)
    follow = {"forward": session.follow, "run_steps": session.follow_steps}
    with model.claimed(), model.changing(session.places, session.change), model.following(follow):
        yield
    if must_match:
        session.check_matched()


def fitted(chain: list[Intervention], model: InstrumentedModel) -> list[Intervention]:
    """The chain as it is done in a model whose next residual may not be the sum of writes.

    Raises:
        InputError: a site that the model doesn't have, with the reason.
    """
    missing = model.config.missing
    if "sum of writes" in missing and "resid_out" not in missing:
        chain = list(dict.fromkeys(i.unless_summed or i for i in chain))
    for intervention in chain:
        model.check_sites((intervention.place.site, *intervention.beside))
    return chain


class _Session:
    """What one `with` keeps: who acts where, and the forward that is running."""

    def __init__(
        self,
        model: InstrumentedModel,
        chain: list[Intervention],
        earlier: SiteValues | None,
        prompt: int | None,
    ) -> None:
        self.model, self.chain, self.plan, self.earlier = model, chain, model.plan, earlier
        self.prompt, self.prompt_given = prompt, prompt is not None
        self.clean: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # cache -> one of its text without interventions
        self.forward: Forward | None = None
        self.muted, self.forwards = False, 0
        self.matched = [False] * len(chain)
        self.acting: dict[tuple[str, int], list[int]] = {}
        self.stored: set[tuple[str, int]] = set()
        absent = model.absent_steps()
        for number, intervention in enumerate(chain):
            steps = intervention.place.steps(self.plan)
            if not steps:
                raise InputError(f"{intervention} matched nothing; visits per layer are {self.plan.visits}")
            without = absent.get(intervention.place.site, {})
            if all(step.index in without for step in steps):
                raise InputError(
                    f"{intervention} matched nothing: {steps[0]} has no such site, {without[steps[0].index]}"
                )
            steps = [step for step in steps if step.index not in without]
            intervention.prepare(steps)
            for step in steps:
                self.acting.setdefault((intervention.place.site, step.index), []).append(number)
            self.stored |= {(s, step) for s, step in intervention.stored(self.plan) if step not in absent.get(s, {})}
        needing = [i for i in chain if i.needs_reference or (i.whole_batch and model.in_parts)]
        self.reference_sites = {site for i in needing for site in (i.place.site, *i.beside)}

    @property
    def places(self) -> list[tuple[str, Step]]:
        return [(site, self.plan.steps[index]) for site, index in sorted({*self.acting, *self.stored})]

    def follow(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's forward, which says which tokens run."""
        signature = inspect.signature(forward)

        @wraps(forward)  # a nested `intervene` reads the signature
        def followed(*args: Any, **kwargs: Any) -> Any:
            if self.muted:
                return forward(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            tokens, cache = next(iter(given.values())), given.get("cache")
            behind = None if cache is None else cache.length
            if behind == 0 and not self.prompt_given:
                self.prompt = tokens.shape[1]
            current = Forward(tokens, given.get("segments"), behind, self.prompt, in_parts=self.model.in_parts)
            if cache is not None and (whole := next((i for i in self.chain if i.whole_batch), None)):
                instead = "replace(site, RUN) puts in another run's values"
                if whole.name == "mean":
                    instead = "mean(..., over=site_means(model, contexts, sites)) is a mean that stays"
                raise InputError(
                    f"{whole} reads all tokens of the batch, also those that aren't written yet: each new token would change what "
                    f"the ones before it had, so a cached generation can't be the forward over its text. Instead: {instead}"
                )
            if self.reference_sites:
                current.reference = self._reference(forward, given)
            with self._running(current):
                return forward(*args, **kwargs)

        return followed

    def follow_steps(self, run_steps: Callable[..., Any]) -> Callable[..., Any]:
        """The same for `run_steps`, which knows no token ids."""

        def followed(x: Tensor, segments: Tensor | None = None, **kwargs: Any) -> Any:
            if self.reference_sites:
                raise InputError("swap needs the run without interventions: call the model, not its run_steps")
            no_ids = torch.full(x.shape[:2], -1, device=x.device)
            with self._running(Forward(no_ids, segments, earlier=self.earlier)):
                return run_steps(x, segments, **kwargs)

        return followed

    @contextmanager
    def _running(self, forward: Forward) -> Iterator[None]:
        self.forward = forward
        try:
            yield
            self.forwards += 1
        finally:
            self.forward = None

    def _reference(self, forward: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """The same forward without interventions, through a cache of its own."""
        if (cache := given.get("cache")) is not None:
            if cache.length == 0:
                self.clean[cache] = self.model.new_cache()
            if cache not in self.clean:
                raise InputError(
                    "swap needs the run without interventions from the first token on: begin with a new cache"
                )
            given = {**given, "cache": self.clean[cache]}
        self.muted = True
        try:
            with capture(self.model, self.reference_sites) as captured, torch.no_grad():
                forward(**given)
                return captured
        finally:
            self.muted = False

    def change(self, site: str, step: Step, value: Tensor, there: Tensor | None) -> Tensor | None:
        """What takes a value's place at one site of one step; None where nothing changes."""
        if self.muted:
            return None
        if self.forward is None:
            raise InputError("call the model or its run_steps inside `intervene`: only they say what runs")
        self.forward.there[step.index] = there
        at, result = At(site, step, self.plan, self.forward), value
        for number in self.acting.get((site, step.index), ()):
            result, matched = self.chain[number].apply(result, at)
            self.matched[number] |= matched
            if matched and site == "experts":
                self._check_experts(self.chain[number], result)
        if (site, step.index) in self.stored:
            self.forward.values[site, step.index] = result
        unchanged = result is value or (not result.requires_grad and torch.equal(result, value))
        return None if unchanged else result

    def _check_experts(self, intervention: Intervention, experts: Tensor) -> None:
        low, high, number = int(experts.min()), int(experts.max()), self.model.config.num_experts
        if low < 0 or high >= number:
            raise InputError(f"{intervention}: expected experts in 0..{number - 1}, got {low}..{high}")

    def check_matched(self) -> None:
        """Raises InputError: some intervention chose nothing in any of the forwards."""
        idle = [repr(i) for i, matched in zip(self.chain, self.matched, strict=True) if not matched]
        if self.forwards and idle:
            raise InputError(
                f"{'; '.join(idle)} matched nothing in {self.forwards} forward(s): no token or expert there"
                + (", or none that is at the visit" if self.model.config.ragged else "")
            )


def site_means(model: InstrumentedModel, contexts: PackedTokens, sites: Iterable[str], batch: int = 1) -> SiteMeans:
    """(site, step) -> mean over the real tokens of a sample (those that are at the step), in float64: what `mean(..., over=)` takes."""
    sites = tuple(sites)
    totals: dict[tuple[str, int], Tensor] = {}
    counts: dict[tuple[str, int], Any] = {}
    device = next(iter(model.parameters())).device
    beside = ["experts"] if "expert_out" in sites and "experts" not in sites else []
    with capture(model, [*sites, *beside]) as captured, torch.no_grad():
        for first in range(0, len(contexts.tokens), batch):
            rows = slice(first, first + batch)
            segments = torch.from_numpy(contexts.segments[rows]).to(device)
            model(torch.from_numpy(contexts.tokens[rows]).to(device), segments, return_type="none")
            for site in sites:
                for step in captured.plan.steps:
                    if step.index in captured.absent.get(site, {}):
                        continue
                    real, there = segments >= 0, tokens_at(captured, step.index)
                    real = real if there is None else real & there.to(device)
                    if not real.any():
                        continue  # the loop ended before it
                    value = captured.at(site, step.index)[real].double()
                    if site == "expert_out":
                        ids = captured.at("experts", step.index)[real].flatten()
                        count = torch.bincount(ids, minlength=model.config.num_experts)
                        total = value.new_zeros(len(count), value.shape[-1]).index_add(0, ids, value.flatten(0, 1))
                    else:
                        total, count = value.sum(0), len(value)
                    counts[site, step.index] = counts.get((site, step.index), 0) + count
                    totals[site, step.index] = totals.get((site, step.index), 0) + total
    return {
        key: total / (count if isinstance(count := counts[key], int) else count.clamp(min=1).unsqueeze(1))
        for key, total in totals.items()
    }


def with_loop_count(model: InstrumentedModel, visits: int, residual_scale: str | None = None) -> InstrumentedModel:
    """The same weights (the same Parameters) with the loop span run `visits` times.

    `residual_scale`, of the native model: "rescaled" (the default) scales each write in the span by 1/visits, as a model
    trained so; "kept" leaves the scale that this model was trained with. Other families have no such scale.

    Raises:
        InputError: an unlooped model, a loop count below 1, an unknown scale, a family whose loop count is built in.
    """
    check_model(model)
    if not isinstance(visits, int) or visits < 1:
        raise InputError(f"expected at least 1 visit, a whole number, got {visits!r}")
    return model.with_loop_count(visits, residual_scale)
