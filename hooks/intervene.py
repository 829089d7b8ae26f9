"""Interventions: run a model with some of its sites changed, at chosen layers, visits, heads, experts and tokens.

    with intervene(model, take("V", visit=2), zero("PV", layer=3, visit=2, head=1)):
        logits = model(tokens, segments)      # or model.run_steps(x, segments, start=...)

**Order.** Execution order first: a step sees whatever earlier steps and earlier sites of its own step have become. At one
site of one step, in the order given, each on the result of the one before; a nested `intervene` comes after the outer
one. A visit that takes from another takes the value after all interventions on it.

Nothing is written in place, and a change to an equal value changes nothing: those logits are bit-identical. Hooks are gone after the `with`,
however it ends. A model that isn't the native one takes part if it has a `plan` and `site_hook(site, step)`, the name
or function by which its `hooks(fwd_hooks=...)` finds the site.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visitlens.hooks.capture import capture
from visitlens.hooks.interventions.forward import At, Forward, SiteValues
from visitlens.hooks.interventions.intervention import Intervention, flatten
from visitlens.hooks.interventions.operations import (
    SiteMeans,
    add,
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
from visitlens.hooks.loop_plan import Step
from visitlens.hooks.sites import SITES
from visitlens.kernels.errors import InputError

if TYPE_CHECKING:
    from visitlens.hooks.contexts import PackedTokens
    from visitlens.hooks.models.looped_moe import LoopedMoE

__all__ = [
    "Intervention",
    "add",
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

do = sys.modules[__name__]
"""What `visitlens.do` is: `vl.do.take("V", visit=2)`."""


@contextmanager
def intervene(
    model: LoopedMoE,
    *interventions: Intervention | Iterable[Intervention],
    earlier: SiteValues | None = None,
    must_match: bool = True,
) -> Iterator[None]:
    """The model, intervened on; without interventions it is left as it is.

    Args:
        earlier: values of steps that don't run inside, for `take` after `run_steps(start=...)`.
        must_match: whether an intervention that chose no token or expert in any forward is an error.

    Raises:
        InputError: a place that the model doesn't have; on leaving, an intervention that matched nothing.
    """
    chain = flatten(interventions)
    if not chain:
        yield
        return
    if not hasattr(model, "hooks"):
        raise InputError(
            f"interventions need a model with hook points, such as the native LoopedMoE; {type(model).__name__} has none"
        )
    for intervention in chain:
        intervention.prepare(model.plan)
    session = _Session(model, chain, earlier)
    names = [(_hook_name(model, site, step), partial(session.change, site, step)) for site, step in session.places]
    with model.hooks(fwd_hooks=names), ExitStack() as put_back:
        for method, follow in (("forward", session.follow), ("run_steps", session.follow_steps)):
            if hasattr(model, method):
                put_back.callback(_restore, model, method, model.__dict__.get(method))
                setattr(model, method, follow(getattr(model, method)))
        yield
    if must_match:
        session.check_matched()


def _restore(model: Any, method: str, own: Any) -> None:
    if own is None:
        delattr(model, method)
    else:
        setattr(model, method, own)


class _Session:
    """What one `with` keeps: who acts where, and the forward that is running."""

    def __init__(self, model: LoopedMoE, chain: list[Intervention], earlier: SiteValues | None) -> None:
        self.model, self.chain, self.plan, self.earlier = model, chain, model.plan, earlier
        self.forward: Forward | None = None
        self.muted, self.forwards = False, 0
        self.matched = [False] * len(chain)
        self.acting: dict[tuple[str, int], list[int]] = {}
        self.stored: set[tuple[str, int]] = set()
        for number, intervention in enumerate(chain):
            steps = intervention.place.steps(self.plan)
            if not steps:
                raise InputError(f"{intervention} matched nothing; visits per layer are {self.plan.visits}")
            for step in steps:
                self.acting.setdefault((intervention.place.site, step.index), []).append(number)
            self.stored |= intervention.stored(self.plan)
        self.reference_sites = {i.place.site for i in chain if i.needs_reference}

    @property
    def places(self) -> list[tuple[str, Step]]:
        return [(site, self.plan.steps[index]) for site, index in sorted({*self.acting, *self.stored})]

    def follow(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's forward, which says which tokens run."""
        signature = inspect.signature(forward)

        def followed(*args: Any, **kwargs: Any) -> Any:
            if self.muted:
                return forward(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            tokens, cache = next(iter(given.values())), given.get("cache")
            current = Forward(tokens, given.get("segments"), 0 if cache is None else cache.length)
            if self.reference_sites:
                if cache is not None:
                    raise InputError("swap needs a run without interventions, which a KV cache doesn't allow")
                current.reference = self._reference(forward, args, kwargs)
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
        self.forward, self.forwards = forward, self.forwards + 1
        try:
            yield
        finally:
            self.forward = None

    def _reference(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.muted = True
        try:
            with capture(self.model, self.reference_sites) as captured, torch.no_grad():
                forward(*args, **kwargs)
                return captured
        finally:
            self.muted = False

    def change(self, site: str, step: Step, value: Tensor, hook: Any) -> Tensor | None:
        """The hook of one site at one step; None where nothing changes."""
        if self.muted:
            return None
        if self.forward is None:
            raise InputError("call the model or its run_steps inside `intervene`: only they say what runs")
        at, result = At(site, step, self.plan, self.forward), value
        for number in self.acting.get((site, step.index), ()):
            result, matched = self.chain[number].apply(result, at)
            self.matched[number] |= matched
        if (site, step.index) in self.stored:
            self.forward.values[site, step.index] = result
        unchanged = result is value or (not result.requires_grad and torch.equal(result, value))
        return None if unchanged else result

    def check_matched(self) -> None:
        """Raises InputError: some intervention chose nothing in any of the forwards."""
        idle = [repr(i) for i, matched in zip(self.chain, self.matched, strict=True) if not matched]
        if self.forwards and idle:
            raise InputError(
                f"{'; '.join(idle)} matched nothing in {self.forwards} forward(s): no token or expert there"
            )


def _hook_name(model: Any, site: str, step: Step) -> Any:
    if hasattr(model, "site_hook"):
        return model.site_hook(site, step)
    return f"blocks.{step.layer}.visit.{step.visit}.{SITES[site].hook}"


def site_means(model: LoopedMoE, contexts: PackedTokens, sites: Iterable[str], batch: int = 1) -> SiteMeans:
    """(site, step) -> mean over the real tokens of a sample, in float64: what `mean(..., over=)` takes."""
    totals: dict[tuple[str, int], Tensor] = {}
    device = model.embed.W_E.device
    with capture(model, sites) as captured, torch.no_grad():
        for first in range(0, len(contexts.tokens), batch):
            rows = slice(first, first + batch)
            segments = torch.from_numpy(contexts.segments[rows]).to(device)
            model(torch.from_numpy(contexts.tokens[rows]).to(device), segments, return_type="none")
            for site in captured.sites:
                for step in captured.plan.steps:
                    total = captured.at(site, step.index)[segments >= 0].double().sum(0)
                    totals[site, step.index] = totals.get((site, step.index), 0) + total
    return {key: total / contexts.num_tokens for key, total in totals.items()}


def with_loop_count(model: LoopedMoE, visits: int, residual_scale: str = "rescaled") -> LoopedMoE:
    """The same weights (the same Parameters) with the loop span run `visits` times.

    `residual_scale`: "rescaled" scales each write in the span by 1/visits, as a model trained so; "kept" leaves the scale
    that this model was trained with.

    Raises:
        InputError: an unlooped model, a loop count below 1, an unknown scale.
    """
    from dataclasses import replace as changed

    from visitlens.hooks.models.looped_moe import LoopedMoE

    if model.config.loop_start == model.config.loop_stop:
        raise InputError("an unlooped model has no span to run more often")
    if residual_scale not in ("rescaled", "kept"):
        raise InputError(f"expected residual_scale 'rescaled' or 'kept', got {residual_scale!r}")
    with torch.device("meta"):
        view = LoopedMoE(changed(model.config, visits=visits))
    view.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    view.rotary_cos, view.rotary_sin = model.rotary_cos, model.rotary_sin
    if residual_scale == "kept":
        for mine, theirs in zip(view.blocks, model.blocks, strict=True):
            mine.scale = theirs.scale
    return view.train(model.training)
