"""Gradients of a number that a model's logits give, at sites: what gradient attribution starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.core.sites import check_sites
from visitlens.hooks.interventions.forward import At
from visitlens.hooks.interventions.intervene import intervene
from visitlens.hooks.interventions.intervention import Intervention, Place

if TYPE_CHECKING:
    from visitlens.hooks.core.model_interface import InstrumentedModel


@dataclass(frozen=True, eq=False)
class SiteGradients:
    """By (site, step), [context, position, ...]: `values` and, of the same shapes, `gradients`; sites that were only
    watched have no gradient. A step that lacks a site has neither."""

    values: dict[tuple[str, int], Tensor]
    gradients: dict[tuple[str, int], Tensor]


def site_gradients(
    model: InstrumentedModel,
    tokens: Tensor,
    segments: Tensor,
    sites: Iterable[str],
    metric: Callable[[Tensor], Tensor],
    watch: Iterable[str] = (),
) -> SiteGradients:
    """One forward and one backward. `metric` takes the logits [context, position, vocab]; `watch` names sites whose
    values are kept beside.

    Documents don't meet, so the gradient of a sum of losses is that of each document's own at its own tokens.

    Raises:
        InputError: an unknown site, or one whose values are numbers of experts.
    """
    sites, watch = check_sites(sites), check_sites(watch)
    if "experts" in sites:
        raise InputError("no gradient at 'experts', which are numbers; use gates")
    values: dict[tuple[str, int], Tensor] = {}
    leaves: dict[tuple[str, int], Tensor] = {}

    def lifted(value: Tensor, at: At) -> Tensor:
        """The value plus zeros, whose gradient is the value's. Documents that run in parts have zeros elsewhere."""
        key = at.site, at.step.index
        if key not in leaves:
            leaves[key], values[key] = torch.zeros_like(value, requires_grad=True), torch.zeros_like(value)
        values[key] += value.detach()
        return value + leaves[key]

    chain = [Intervention("gradient", Place.of(site), lifted) for site in sites]
    with torch.enable_grad(), intervene(model, chain), capture(model, watch) as captured:
        logits = model(tokens, segments)
        assert logits is not None
        gradients = torch.autograd.grad(metric(logits), list(leaves.values()))
    for site in watch:
        for step in model.plan.steps:
            if step.index not in captured.absent.get(site, {}):
                values[site, step.index] = captured.at(site, step.index)
    return SiteGradients(values, dict(zip(leaves, gradients, strict=True)))
