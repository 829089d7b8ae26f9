"""Capture: the values of chosen sites at every step of one forward, kept apart by visit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.capture.attention_rule import AttentionRule
from visitlens.hooks.core.loop_plan import ExecutionPlan
from visitlens.hooks.core.model_interface import InstrumentedModel, check_model
from visitlens.hooks.core.sites import Sizes, check_sites, token_shape
from visitlens.kernels.memory import keep_freed_memory

VISITED = "visited"
"""Among captured values: [context, position] whether a token is really at the step; of steps where halting or routing decides."""


class Captured:
    """Site values of the last forward: `get(site, layer, visit)` is [context, position, ...]. They are copies: what the model
    does to its own tensors afterwards doesn't reach them.

    `absent` names the steps that lack a site, with the reason; `sizes` are the model's; `rules` the steps whose attention
    rows aren't the plain causal softmax of Q and K.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        sites: tuple[str, ...],
        absent: Mapping[str, Mapping[int, str]] | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self.plan, self.sites = plan, sites
        self.absent, self.sizes = absent or {}, sizes
        self.rules: dict[int, AttentionRule] = {}
        self._values: dict[str, dict[int, Tensor | None]] = {site: {} for site in sites}
        self._rooms: dict[tuple[str, int], Tensor] = {}

    def get(self, site: str, layer: int, visit: int) -> Tensor:
        """Raises InputError where the site wasn't captured or there is no such visit."""
        check_sites([site], self.sites)
        return self.at(site, self.plan.step(layer, visit).index)

    def at(self, site: str, step: int) -> Tensor:
        if (value := self.held(site, step)) is not None:
            return value
        if why := self.absent.get(site, {}).get(step):
            raise InputError(f"{self.plan.steps[step]} has no site {site!r}: {why}")
        if (there := self.held(VISITED, step)) is not None and not there.any():
            raise InputError(f"{self.plan.steps[step]} has no tokens: all had halted, and the loop ended before it")
        raise InputError(f"site {site!r} has no value at step {step}: run the model inside the capture first")

    def held(self, site: str, step: int) -> Tensor | None:
        """The value, if there is one yet."""
        return self._values.get(site, {}).get(step)

    def begin(self, contexts: int, length: int, weights: Tensor) -> None:
        """Lets go of the last forward's values and sets memory aside for those of a forward over [contexts, length], in
        the weights' dtype: allocated among its temporaries, they would break up the memory that those leave behind."""
        self.clear()
        if self.sizes is None:
            return
        for site in self.sites:
            heads, *_ = width = token_shape(site, self.sizes)
            shape = (contexts, heads, length, length) if site == "P" else (contexts, length, *width)
            dtype = torch.int64 if site == "experts" else weights.dtype
            for step in range(len(self.plan)):
                self._values[site][step] = None  # takes its place in the dict now, too
                if step not in self.absent.get(site, {}):
                    self._rooms[site, step] = torch.empty(shape, dtype=dtype, device=weights.device)

    def room(self, site: str, step: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory for a value, not filled: what was set aside for it, where that fits."""
        room = self._rooms.pop((site, step), None)
        if room is not None and (room.shape, room.dtype, room.device) == (shape, like.dtype, like.device):
            return room
        return like.new_empty(shape)

    def store(self, site: str, step: int, value: Tensor) -> None:
        """A copy of it."""
        value = value.detach()
        self.hold(site, step, self.room(site, step, value.shape, value).copy_(value))

    def hold(self, site: str, step: int, value: Tensor) -> None:
        """The value itself."""
        self._values.setdefault(site, {})[step] = value

    def __repr__(self) -> str:
        steps = {step for values in self._values.values() for step, value in values.items() if value is not None}
        return f"Captured({', '.join(self.sites)} at {len(steps)} of {len(self.plan)} steps)"

    def clear(self) -> None:
        """Lets go of every value."""
        for values in self._values.values():
            values.clear()
        self._rooms.clear()


@contextmanager
def capture(model: InstrumentedModel, sites: Iterable[str]) -> Iterator[Captured]:
    """Keeps the sites' values of each forward inside; hooks are gone afterwards. Outputs stay bit-identical.

    From the first capture on, glibc keeps freed memory for the process: a forward's values would else go back to the system
    and be faulted in again, page by page, at the next one.

    Raises:
        PlanError: the model leaves its plan.
        InputError: an unknown site, or one that the model doesn't have; another thread is inside a capture of this model.

    Examples:
        >>> model = vl.load("smelt")
        >>> tokens = model.run("Two visits of one layer.").token_ids  # [batch, token]
        >>> with vl.capture(model.native, ["Q", "PV"]) as captured:
        ...     logits = model.native(tokens)
        >>> captured.get("PV", layer=3, visit=2).shape[-2:]  # [..., head, dimension]
        torch.Size([6, 12])
    """
    keep_freed_memory()
    check_model(model)
    captured = Captured(model.plan, model.check_sites(sites), model.absent_steps(), model.config)
    with model.claimed(), model.observing(captured):
        yield captured
