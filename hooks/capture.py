"""Capture: the values of chosen sites at every step of one forward, kept apart by visit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visitlens.hooks.loop_plan import ExecutionPlan
from visitlens.hooks.sites import SITES, check_sites
from visitlens.hooks.visit_clock import VisitClock
from visitlens.kernels.attention_rows import RowStatistics, VisitOverlaps, row_statistics, visit_overlaps
from visitlens.kernels.errors import InputError
from visitlens.kernels.memory import return_freed_memory
from visitlens.kernels.segments import Segments
from visitlens.kernels.vector_geometry import norms, pairwise_products

if TYPE_CHECKING:
    from visitlens.hooks.models.looped_moe import LoopedMoE


_MUCH = 100_000_000  # bytes; giving memory back costs about a tenth of a second per GB


class Captured:
    """Site values of the last forward: `get(site, layer, visit)` is [context, position, ...]."""

    def __init__(self, plan: ExecutionPlan, sites: tuple[str, ...]) -> None:
        self.plan, self.sites = plan, sites
        self._values: dict[str, dict[int, Tensor]] = {site: {} for site in sites}

    def get(self, site: str, layer: int, visit: int) -> Tensor:
        """Raises InputError where the site wasn't captured or there is no such visit."""
        check_sites([site], self.sites)
        return self.at(site, self.plan.step(layer, visit).index)

    def at(self, site: str, step: int) -> Tensor:
        try:
            return self._values[site][step]
        except KeyError:
            raise InputError(
                f"site {site!r} has no value at step {step}: run the model inside the capture first"
            ) from None

    def store(self, site: str, step: int, value: Tensor) -> None:
        self._values[site][step] = value.detach()

    def clear(self) -> None:
        """Lets go of every value, and of the memory where that is much."""
        held = sum(value.nbytes for values in self._values.values() for value in values.values())
        for values in self._values.values():
            values.clear()
        if held > _MUCH:
            return_freed_memory()


@contextmanager
def capture(model: LoopedMoE, sites: Iterable[str]) -> Iterator[Captured]:
    """Keeps the sites' values of each forward inside; hooks are gone afterwards. Outputs stay bit-identical.

    Raises:
        PlanError: the model leaves its plan.
        InputError: an unknown site.
    """
    plan = model.plan
    captured = Captured(plan, check_sites(sites))
    clock = VisitClock(plan)

    def begin(_: Tensor, hook: Any) -> None:
        nonlocal clock
        clock = VisitClock(plan)  # the last forward may have ended in an error
        captured.clear()  # its values, before this one's take their place in memory

    def enter(_: Tensor, hook: Any, layer: int) -> None:
        clock.enter(layer)

    def store(value: Tensor, hook: Any, site: str, step: int) -> None:
        captured.store(site, step, value)

    hooks: list[tuple[str | Callable[..., Any], Callable[..., Any]]] = [("hook_embed", begin)]
    for step in plan.steps:
        prefix = f"blocks.{step.layer}.visit.{step.visit}"
        hooks.append((f"{prefix}.hook_resid_pre", partial(enter, layer=step.layer)))
        hooks += [(f"{prefix}.{SITES[s].hook}", partial(store, site=s, step=step.index)) for s in captured.sites]
    with model.hooks(fwd_hooks=hooks):
        # Not a hook on the model: TransformerLens' run_with_hooks calls `forward` and passes those by.
        handle = model.ln_final.register_forward_hook(lambda *_: clock.finish())
        try:
            yield captured
        finally:
            handle.remove()


class StepValues:
    """Site values of one batch over its real tokens, flat: `site(name, step)` is [token, ...]; padding is left out.

    What several statistics need is computed here, once: attention rows from Q and K, norms, products of the updates.
    """

    def __init__(self, captured: Captured, segment_ids: Tensor, attention_implementation: str = "auto") -> None:
        self.plan = captured.plan
        self._captured, self._implementation = captured, attention_implementation
        real = (segment_ids >= 0).flatten()
        self._keep = None if bool(real.all()) else real.nonzero().squeeze(1)
        with_padding = Segments.from_ids(segment_ids)
        if self._keep is None:
            self.segments = with_padding
        else:
            lengths = [end - start for start, end in with_padding.spans if bool(real[start])]
            self.segments = Segments((0, *torch.tensor(lengths).cumsum(0).tolist()))
        self._flat: dict[tuple[str, int], Tensor] = {}
        self._norms: dict[tuple[str, int], Tensor] = {}

    def site(self, name: str, step: int) -> Tensor:
        if (name, step) not in self._flat:
            value = self._captured.at(name, step).flatten(0, 1)
            self._flat[name, step] = value if self._keep is None else value[self._keep]
        return self._flat[name, step]

    def norm(self, name: str, step: int) -> Tensor:
        """Norms of a site's vectors: [token], or [token, head] where a site has heads."""
        if (name, step) not in self._norms:
            self._norms[name, step] = norms(self.site(name, step))
        return self._norms[name, step]

    @cached_property
    def update_products(self) -> Tensor:
        """[token, step, step] inner products of every two steps' updates, attention write + MoE write."""
        steps = range(len(self.plan))
        return pairwise_products([(self.site("attn_write", s), self.site("moe_write", s)) for s in steps])

    @cached_property
    def visible_keys(self) -> Tensor:
        """[token] how many keys a query sees: its position in the segment, plus 1."""
        return self.segments.positions() + 1

    @cached_property
    def attention_rows(self) -> list[RowStatistics]:
        """One a step."""
        rows = {}
        for layer, overlaps in self.attention_overlaps.items():
            visits = [s.index for s in self.plan.steps if s.layer == layer]
            rows.update(zip(visits, overlaps.rows, strict=True))
        for step in self.plan.steps:
            if step.index not in rows:
                q, k = self._queries_and_keys(step.index)
                rows[step.index] = row_statistics(q, k, self.segments, implementation=self._implementation)
        return [rows[i] for i in range(len(self.plan))]

    @cached_property
    def attention_overlaps(self) -> dict[int, VisitOverlaps]:
        """Looped layer -> overlaps of its visits."""
        return {
            layer: visit_overlaps(
                [self._queries_and_keys(s.index) for s in self.plan.steps if s.layer == layer],
                self.segments,
                implementation=self._implementation,
            )
            for layer in self.plan.looped_layers
        }

    def _queries_and_keys(self, step: int) -> tuple[Tensor, Tensor]:
        """With NaN for infinities: a score of -inf would leave its row a number, as if the key weren't there."""
        q, k = self.site("Q", step), self.site("K", step)
        if bool(q.isfinite().all()) and bool(k.isfinite().all()):
            return q, k
        return q.masked_fill(q.isinf(), float("nan")), k.masked_fill(k.isinf(), float("nan"))
