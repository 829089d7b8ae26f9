"""Statistic: a pure function from one batch's site values to per-token values of its measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from visitlens.hooks.core.loop_plan import ExecutionPlan
from visitlens.probe.measures.axes import AXES, Axis
from visitlens.probe.measures.measure import Measure

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


@dataclass(frozen=True)
class Geometry:
    """What a statistic may know of the model."""

    plan: ExecutionPlan
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    num_experts: int
    experts_per_token: int
    missing: Mapping[str, str] = field(default_factory=dict)
    """Site, or one of `sites.ASSUMPTIONS` -> why the model doesn't have it."""
    absent: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Site -> layers that lack it although others have it."""

    @classmethod
    def of(cls, plan: ExecutionPlan, config: Mapping[str, Any]) -> Geometry:
        names = ("hidden_size", "num_heads", "num_kv_heads", "num_experts", "experts_per_token")
        flags = {"learned_sink": ("learned sink", "its attention has no learned sink")}
        flags |= {"ragged": ("ragged visits", "every token is at every visit")}
        missing = dict(config.get("missing", {})) | dict(flags[name] for name in flags if not config.get(name))
        sizes = {name: config[name] for name in names}
        return cls(plan, **sizes, missing=missing, absent=config.get("absent", {}))

    def size(self, axis: str) -> int:
        """Length of one of the common axes (`measures.axes`)."""
        return len(self.labels(AXES[axis]))

    def labels(self, axis: Axis) -> list[Any]:
        """One for each element of an axis."""
        return list(axis.labels(self.plan, vars(self)))


@dataclass(frozen=True)
class TokenValues:
    """`values [token, *axes]`; `valid` of a shape that broadcasts to it, False where the definition leaves a token out.
    `everywhere`: of tokens that aren't at a visit too, which are left out otherwise.

    Examples:
        >>> values = vl.TokenValues(torch.ones(4, 12), valid=torch.tensor([False, True, True, True]).view(-1, 1))
        >>> values.values.shape  # [token, step]; the first token is left out
        torch.Size([4, 12])
    """

    values: Tensor
    valid: Tensor | None = None
    everywhere: bool = False

    def of(self, tokens: Tensor) -> TokenValues:
        """Of these tokens alone, bool [token]."""
        values, valid = self.values.cpu(), self.valid
        valid = None if valid is None else valid.expand_as(values)[tokens]
        return replace(self, values=values[tokens], valid=valid)

    def only(self, cells: Tensor) -> TokenValues:
        """Leaves out every token where `cells [*axes]` is False."""
        return replace(self, valid=cells if self.valid is None else self.valid & cells)


@dataclass(frozen=True)
class GroupSums:
    """`total`, `count` [group, *axes]; `non_finite [*axes]`: tokens kept out of both for a NaN or infinite input;
    `left_out [*axes]`: those that aren't at the visit."""

    total: Tensor
    count: Tensor
    non_finite: Tensor
    left_out: Tensor


class Statistic(ABC):
    """One file in this folder holds one statistic; being there is being registered.

    Examples:
        >>> class WriteSize(vl.Statistic):
        ...     measures = (vl.Measure("write_size", "Size of the attention write", ("step",), "norm", "|d_attn|.", "ours"),)
        ...     sites = frozenset({"attn_write"})
        ...
        ...     def per_token(self, values, geometry):
        ...         sizes = [values.site("attn_write", step.index).norm(dim=-1) for step in geometry.plan.steps]
        ...         return {"write_size": vl.TokenValues(torch.stack(sizes, dim=1))}  # [token, step]
        >>> registered = vl.register(WriteSize)
        >>> vl.record("smelt", "text.jsonl", "sizes.vlens", measures=["write_size"], max_tokens=256).stat("write_size").axes
        ('step',)
    """

    measures: ClassVar[tuple[Measure, ...]]
    sites: ClassVar[frozenset[str]]
    looped_only: ClassVar[bool] = False
    """True: needs two visits of a layer, so an unlooped model has none of it."""
    stored: ClassVar[frozenset[str]] = frozenset()
    """Measures whose per-token values are kept at level `tokens`."""
    axes: ClassVar[Mapping[str, Axis]] = {}
    """Axes of its own, by name, beside the common ones of `measures.axes`; recordings keep their labels as text."""

    needs: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Measure -> what it can't do without among `sites` and `hooks.core.sites.ASSUMPTIONS`; all of `sites` where it isn't here.
    A model that lacks it has no such measure. Of other sites that a model lacks, `per_token` gets NaN."""

    def needs_of(self, measure: str) -> frozenset[str]:
        return self.needs.get(measure, self.sites)

    @abstractmethod
    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        """Measure name -> its values for each token."""

    def group_sums(
        self, values: StepValues, geometry: Geometry, groups: Tensor, num_groups: int
    ) -> dict[str, GroupSums]:
        """Measures that are cheaper to sum at once than by token."""
        return {}


WRITES = frozenset({"attn_write", "moe_write", "sum of writes"})
"""What measures of the writes' sizes and of their sum need."""


def stack(values: list[Tensor]) -> Tensor:
    """Per-step [token, ...] to [token, step, ...]."""
    return torch.stack(values, dim=1)


def wide(value: Tensor) -> Tensor:
    """At least float32, so that bfloat16 values aren't squared or summed as such."""
    return value if value.dtype == torch.float64 else value.float()


def rms(norm: Tensor, width: int) -> Tensor:
    """||x|| / sqrt(width); NaN for an infinite one, so that no ratio with it is a number."""
    return (norm * width**-0.5).masked_fill(norm.isinf(), float("nan"))


def update_rms(values: StepValues, geometry: Geometry) -> Tensor:
    """[token, step] of the updates, attention write + MoE write."""
    return rms(values.update_products.diagonal(dim1=1, dim2=2).sqrt(), geometry.hidden_size)


def site_rms(values: StepValues, geometry: Geometry, site: str) -> Tensor:
    """[token, step] of a site with one vector a token, by the vector's own width: what attention reads may be wider than the
    residual stream (Zamba)."""
    return stack([rms(values.norm(site, s), values.site(site, s).shape[-1]) for s in range(len(geometry.plan))])


def present(values: StepValues, step: int) -> Tensor:
    """[token] on the CPU, whether it is really at the step, and counted."""
    there = values.visited(step)
    there = torch.ones(values.segments.num_tokens, dtype=torch.bool) if there is None else there
    return there if values.counted is None else there & values.counted


def routed(values: StepValues, step: int) -> Tensor:
    """[token] on the CPU, False where the router's scores weren't numbers, so that its choice of experts means nothing."""
    return values.site("gates", step).isfinite().all(-1).cpu()
