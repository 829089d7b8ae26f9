"""Intervention: one change of one site, at chosen layers, visits, heads, experts and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from visitlens.errors import InputError, VisitlensError
from visitlens.hooks.core.loop_plan import ExecutionPlan, Step
from visitlens.hooks.core.sites import SITES, check_sites
from visitlens.hooks.interventions.forward import At, SiteValues, TokenChoice, numbers, tokens_at

Choice = int | Iterable[int] | None
"""One number, several, or None for all. Layers are 0-based, visits 1-based."""


_EXPERT_SITES = ("router", "experts", "gates", "expert_out")


@dataclass(frozen=True, eq=False)
class Place:
    """Where an intervention acts; None is everywhere. At K and V, `head` counts key/value heads."""

    site: str
    layer: tuple[int, ...] | None = None
    visit: tuple[int, ...] | None = None
    head: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    token: TokenChoice = None
    after: int | None = None
    """Only visits later than this one."""
    least: int = 1
    """Only layers that run at least so often."""

    @classmethod
    def of(
        cls,
        site: str,
        layer: Choice = None,
        visit: Choice = None,
        head: Choice = None,
        token: TokenChoice = None,
        expert: Choice = None,
    ) -> Place:
        """Raises InputError: an unknown site, or a choice of heads or experts that the site doesn't have."""
        check_sites([site])
        axes = SITES[site].axes
        if head is not None and not {"head", "kv_head"} & set(axes):
            raise InputError(f"site {site!r} has no heads to choose; choose them at Q, K, V, P or PV")
        if expert is not None and site not in _EXPERT_SITES:
            raise InputError(f"site {site!r} has no experts to choose; choose them at {', '.join(_EXPERT_SITES)}")
        return cls(site, numbers(layer), numbers(visit), numbers(head), numbers(expert), token)

    def steps(self, plan: ExecutionPlan) -> list[Step]:
        """Raises InputError: a layer or visit that the plan doesn't have."""
        for layer in self.layer or ():
            if layer not in plan.visits:
                raise InputError(f"there is no layer {layer}; the plan has layers 0..{max(plan.visits)}")
        layers = set(self.layer if self.layer is not None else plan.visits)
        for visit in self.visit or ():
            if not any(1 <= visit <= plan.visits[layer] for layer in layers):
                raise InputError(f"no chosen layer has a visit {visit}; visits per layer are {plan.visits}")
        layers = {layer for layer in layers if plan.visits[layer] >= self.least}
        chosen = [s for s in plan.steps if s.layer in layers and (self.visit is None or s.visit in self.visit)]
        return [s for s in chosen if self.after is None or s.visit > self.after]

    def mask(self, value: Tensor, at: At) -> Tensor | None:
        """What is chosen, broadcast against the value; None is all of it."""
        parts = []
        per_query = "key" in SITES[self.site].axes  # [context, head, query, key]; others are [context, position, ...]
        if self.head is not None:
            axis = 1 if per_query else 2
            parts.append(_along(axis, value, self.head, "head"))
        if self.token is not None:
            parts.append(per_token(at.forward.chosen(self.token), self.site, value))
        if at.there is not None:
            parts.append(per_token(at.there, self.site, value))
        if self.expert is not None:
            if self.site == "router":
                parts.append(_along(2, value, self.expert, "expert"))
            else:
                used = value if self.site == "experts" else at.experts
                chosen = torch.isin(used, torch.tensor(self.expert, device=used.device))
                parts.append(chosen.unsqueeze(-1) if self.site == "expert_out" else chosen)
        if not parts:
            return None
        mask = parts[0]
        for part in parts[1:]:
            mask = mask & part
        return mask

    def __str__(self) -> str:
        return self.text()

    def text(self, *given: object) -> str:
        """As it is written, with positional arguments after the site."""
        chosen = {name: getattr(self, name) for name in ("layer", "visit", "head", "expert", "token")}
        parts = [f"{name}={_short(value)}" for name, value in chosen.items() if value is not None]
        return ", ".join([repr(self.site), *map(repr, given), *parts])


@dataclass(frozen=True, eq=False)
class Intervention:
    """`change(value, at)` gives what stands at the place instead, broadcast against the value."""

    name: str
    place: Place
    change: Callable[[Tensor, At], Tensor]
    source: int | None = None
    """The visit of the same layer and the same forward whose value it reads."""
    needs_reference: bool = False
    """Whether it reads the run without these interventions."""
    values: SiteValues | None = None
    """Another run whose values it puts in, looked up before anything is changed: a lazy one runs then."""
    number: float | None = None
    """The number that it was given, for its text."""
    whole_batch: bool = False
    """Whether it reads the values of the batch's other documents too."""
    beside: tuple[str, ...] = ()
    """Sites whose values at the same step it reads."""
    unless_summed: Intervention | None = None
    """What does the same in a model whose next residual isn't the sum of writes."""

    def prepare(self, steps: Iterable[Step]) -> None:
        """Raises InputError: the other run has no value there."""
        if self.values is not None:
            for step in steps:
                try:
                    self.values.at(self.place.site, step.index)
                except InputError:
                    there = tokens_at(self.values, step.index)
                    if there is None or there.any():  # else its loop ended before, and nothing is put in
                        raise

    def stored(self, plan: ExecutionPlan) -> set[tuple[str, int]]:
        """(site, step) of the values of the same forward that it reads.

        Raises:
            InputError: a layer without the source visit, or one that runs later than the visit that takes from it.
        """
        keys = set()
        for step in self.place.steps(plan):
            if self.source is not None:
                source = plan.step(step.layer, self.source)
                if source.index > step.index:
                    raise InputError(
                        f"{self}: visit {self.source} runs after visit {step.visit}, which can't take from it; "
                        "use swap, or replace from another run"
                    )
                keys.add((self.place.site, source.index))
            if self.place.site in ("gates", "expert_out") and self.place.expert is not None:
                keys.add(("experts", step.index))
            keys |= {(site, step.index) for site in self.beside}
        return keys

    def apply(self, value: Tensor, at: At) -> tuple[Tensor, bool]:
        """The changed value, and whether anything was chosen.

        Raises:
            InputError: the new value's shape doesn't fit.
        """
        mask = self.place.mask(value, at)
        if mask is not None and not bool(mask.any()):
            return value, False
        try:
            new = self.change(value, at).to(device=value.device, dtype=value.dtype)
            fits = torch.broadcast_shapes(new.shape, value.shape) == value.shape
            came = f"got {tuple(new.shape)}"
        except RuntimeError as error:  # of torch: shapes that don't go together
            if isinstance(error, (VisitlensError, torch.OutOfMemoryError)):
                raise
            fits, came, new = False, str(error), value
        if not fits:
            raise InputError(f"{self}: expected a value that fits {tuple(value.shape)} at {at.step}, {came}")
        return (new.expand_as(value) if mask is None else torch.where(mask, new, value)), True

    def __repr__(self) -> str:
        source = "" if self.source is None else f", source={self.source}"
        place = self.place.text() if self.number is None else self.place.text(self.number)
        return f"{self.name}({place}{source})"


def flatten(interventions: Iterable[Intervention | Iterable[Intervention]]) -> list[Intervention]:
    """Some constructors give several; their order is kept.

    Raises:
        InputError: something that is no intervention.
    """
    flat = []
    for item in interventions:
        if isinstance(item, Intervention):
            flat.append(item)
        elif isinstance(item, (tuple, list)):
            flat += flatten(item)
        else:
            raise InputError(f"expected interventions such as zero('PV', layer=3), got {item!r}")
    return flat


def per_token(tokens: Tensor, site: str, value: Tensor) -> Tensor:
    """A mask [context, position] of tokens, or of queries, broadcast against a site's value."""
    if "key" in SITES[site].axes:  # [context, head, query, key]; others are [context, position, ...]
        return tokens[:, None, :, None]
    return tokens.reshape(*tokens.shape, *[1] * (value.ndim - 2))


def _along(axis: int, value: Tensor, chosen: tuple[int, ...], what: str) -> Tensor:
    size = value.shape[axis]
    wrong = [number for number in chosen if not 0 <= number < size]
    if wrong:
        raise InputError(f"expected a {what} in 0..{size - 1}, got {', '.join(map(str, wrong))}")
    mask = torch.zeros(size, dtype=torch.bool, device=value.device)
    mask[list(chosen)] = True
    return mask.view(*[1] * axis, size, *[1] * (value.ndim - axis - 1))


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"mask {tuple(value.shape)}"
    if isinstance(value, tuple) and len(value) == 1:
        return str(value[0])
    return getattr(value, "__name__", repr(value))
