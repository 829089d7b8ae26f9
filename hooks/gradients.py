"""Gradients of a number that a model's final residual stream gives, at sites: what gradient attribution starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visitlens.hooks.sites import SITES, check_sites
from visitlens.kernels.errors import InputError

if TYPE_CHECKING:
    from visitlens.hooks.models.looped_moe import LoopedMoE


@dataclass(frozen=True, eq=False)
class SiteGradients:
    """By (site, step): `values` and, of the same shapes, `gradients`; sites that were only watched have no gradient."""

    values: dict[tuple[str, int], Tensor]
    gradients: dict[tuple[str, int], Tensor]


def site_gradients(
    model: LoopedMoE,
    tokens: Tensor,
    segments: Tensor,
    sites: Iterable[str],
    metric: Callable[[Tensor], Tensor],
    watch: Iterable[str] = (),
) -> SiteGradients:
    """One forward and one backward. `metric` takes the residual stream after the last step, [context, position, H];
    `watch` names sites whose values are kept beside.

    Documents don't meet, so the gradient of a sum of losses is that of each document's own at its own tokens.

    Raises:
        InputError: an unknown site, or one whose values are numbers of experts or kept off the computed path (P).
    """
    sites, watch = check_sites(sites), check_sites(watch)
    if {"experts", "P"} & set(sites):
        raise InputError(
            "no gradient at 'experts', which are numbers, nor at 'P', which is computed beside the path; use gates or PV"
        )
    values: dict[tuple[str, int], Tensor] = {}

    def begin(value: Tensor, hook: Any) -> Tensor:
        return value.detach().requires_grad_(True)

    def keep(value: Tensor, hook: Any, key: tuple[str, int]) -> None:
        values[key] = value

    hooks: list[tuple[Any, Any]] = [("hook_embed", begin)]
    for step in model.plan.steps:
        prefix = f"blocks.{step.layer}.visit.{step.visit}"
        hooks += [(f"{prefix}.{SITES[site].hook}", partial(keep, key=(site, step.index))) for site in (*sites, *watch)]
    last = model.plan.steps[-1]
    final: list[Tensor] = []
    hooks.append((f"blocks.{last.layer}.visit.{last.visit}.hook_resid_post", lambda value, hook: final.append(value)))
    with torch.enable_grad(), model.hooks(fwd_hooks=hooks):
        model(tokens, segments, return_type="none")
        wanted = [key for key in values if key[0] in sites]
        gradients = torch.autograd.grad(metric(final[0]), [values[key] for key in wanted])
    detached = {key: value.detach() for key, value in values.items()}
    return SiteGradients(detached, dict(zip(wanted, gradients, strict=True)))
