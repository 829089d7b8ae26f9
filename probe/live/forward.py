"""How a live run's model is run: watched step by step, read early, its heads silenced. The native model, and adapted ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.hooks.adapters.replay import Replay, around, layer_modules, replay_of
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.core.loop_plan import Step, visit_choices
from visitlens.hooks.models.looped_moe import LoopedMoE

Change = Callable[[Tensor, int], Tensor]
"""(attended context PV [context, token, head, d], index of the step) -> what takes its place."""
Reader = Callable[[slice], Tensor]
"""Logits [token, vocab] of some of a prompt's tokens."""
Resumed = Callable[[int], Tensor]
"""Logits [context, vocab] after a position."""
_SITES = ("resid", "Q", "K", "PV", "experts", "gates", "attn_write", "moe_write")


class Forward(Protocol):
    """`sites` are those that a live run reads, of those that the model has; `no_lens` says why its steps can't be read early."""

    sites: tuple[str, ...]
    no_lens: str

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [context, token, vocab]."""
        ...

    def watched(self, advance: Callable[[], None]) -> Any:
        """Inside, `advance` is called before each step: where a run can be stopped."""
        ...

    def states(self, captured: Captured) -> list[Tensor | None]:
        """Residual stream [token, hidden] after each step, bit for bit as the model had it; None where there is none."""
        ...

    def read(self, tokens: Tensor, state: Tensor) -> Reader:
        """The model's output, were this its last residual stream."""
        ...

    def through(self, tokens: Tensor, state: Tensor, start: int) -> Reader:
        """The model's output, were this the residual stream that the step `start` gets."""
        ...

    def silenced(self, steps: Sequence[Step], change: Change) -> Any:
        """Inside, attended contexts are changed at these steps."""
        ...

    def kept(self, tokens: Tensor, advance: Callable[[], None]) -> Any:
        """What `resumed` needs of the run as it was: one forward, `watched`."""
        ...

    def resumed(self, tokens: Tensor, kept: Any, steps: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Resumed]]:
        """For each choice among the visits of a layer that runs at `steps`, in `visit_choices`' order: a forward that goes on from
        the first of them, for use where they are `silenced`. Each must be run before the next is asked for."""
        ...

    def cost(self, steps: Sequence[int]) -> int:
        """Steps that these forwards run together."""
        ...

    def forget(self) -> None:
        """Lets go of what reading a prompt has kept."""
        ...


def forward_of(model: Any) -> Forward:
    """The native model's, or an adapted one's."""
    return NativeForward(model) if isinstance(model, LoopedMoE) else AdaptedForward(model)


class NativeForward:
    sites: tuple[str, ...] = _SITES
    no_lens: str = ""

    def __init__(self, model: LoopedMoE) -> None:
        self.model = model

    def __call__(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.model(tokens))

    @contextmanager
    def watched(self, advance: Callable[[], None]) -> Iterator[None]:
        def step(value: Tensor, hook: Any) -> None:
            advance()

        names = [f"blocks.{s.layer}.visit.{s.visit}.hook_resid_pre" for s in self.model.plan.steps]
        with self.model.hooks(fwd_hooks=[(name, step) for name in names]):
            yield

    def states(self, captured: Captured) -> list[Tensor | None]:
        last = len(self.model.plan) - 1
        parts = [captured.at(site, last)[0] for site in ("resid", "attn_write", "moe_write")]
        return [*(captured.at("resid", step)[0] for step in range(1, last + 1)), parts[0] + parts[1] + parts[2]]

    def read(self, tokens: Tensor, state: Tensor) -> Reader:
        return lambda some: self.model.logits(state[some])

    def through(self, tokens: Tensor, state: Tensor, start: int) -> Reader:
        return self.read(tokens, self.model.run_steps(state.unsqueeze(0), start=start)[0])

    @contextmanager
    def silenced(self, steps: Sequence[Step], change: Change) -> Iterator[None]:
        def hooked(z: Tensor, hook: Any, step: int) -> Tensor:
            return change(z, step)

        with ExitStack() as stack:
            for step in steps:
                name = f"blocks.{step.layer}.visit.{step.visit}.attn.hook_z"
                stack.enter_context(self.model.hooks(fwd_hooks=[(name, partial(hooked, step=step.index))]))
            yield

    def kept(self, tokens: Tensor, advance: Callable[[], None]) -> Captured:
        with capture(self.model, ["resid"]) as captured, self.watched(advance):
            self.model(tokens[:1], return_type="none")  # all contexts are one prompt
        return captured

    def resumed(
        self, tokens: Tensor, kept: Captured, steps: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], Resumed]]:
        def run(position: int, start: int) -> Tensor:
            state = kept.at("resid", start).expand(len(tokens), -1, -1)
            return self.model.logits(self.model.run_steps(state, start=start)[:, position])

        for choice in visit_choices(len(steps)):
            yield choice, partial(run, start=steps[choice[0] - 1])

    def cost(self, steps: Sequence[int]) -> int:
        return sum(len(self.model.plan) - steps[choice[0] - 1] for choice in visit_choices(len(steps)))

    def forget(self) -> None:
        pass


class AdaptedForward:
    """Read early by the model's own code: its layers give what they gave in the run as it was (`Replay`), the last one the
    state in question, so that whatever comes behind the last layer is done to it."""

    def __init__(self, model: AdaptedModel) -> None:
        self.model = model
        missing = model.config.missing
        self.sites = tuple(site for site in (*_SITES, "resid_out") if site not in missing)
        self.no_lens = missing.get("resid_out", "")
        if model.config.ragged:
            self.no_lens = "halting or routing leaves tokens out of its visits, so a step's state isn't every token's"
        self._read: tuple[Tensor, Replay] | None = None  # the prompt that is read, and its run

    def __call__(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.model(tokens))

    def watched(self, advance: Callable[[], None]) -> AbstractContextManager[None]:
        def step(_: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            advance()
            return forward(*args, **kwargs)

        return around((module for _, module in layer_modules(self.model)), step)

    def states(self, captured: Captured) -> list[Tensor | None]:
        held = [captured.held("resid_out", step) for step in range(len(self.model.plan))]
        return [None if state is None else state[0] for state in held]

    def read(self, tokens: Tensor, state: Tensor) -> Reader:
        return self.through(tokens, state, len(self.model.plan))

    def through(self, tokens: Tensor, state: Tensor, start: int) -> Reader:
        if self._read is None or not torch.equal(self._read[0], tokens):
            self._read = tokens, self.kept(tokens, lambda: None)

        def put(*_: Any) -> Tensor:
            return state.unsqueeze(0)

        places = [("resid_out", self.model.plan.steps[start - 1])]
        with self._read[1].going_on(start), self.model.changing(places, put):
            logits = cast(Tensor, self.model(tokens))[0]
        return lambda some: logits[some]

    @contextmanager
    def silenced(self, steps: Sequence[Step], change: Change) -> Iterator[None]:
        def changed(site: str, step: Step, value: Tensor, there: Tensor | None) -> Tensor:
            return change(value, step.index)

        with self.model.changing([("PV", step) for step in steps], changed):
            yield

    def kept(self, tokens: Tensor, advance: Callable[[], None]) -> Replay:
        replay = replay_of(self.model)  # not watched: what stops a run is no error of the model
        with self.watched(advance), replay.going_on(keep=len(self.model.plan)):
            self.model(tokens, return_type="none")
        return replay

    def resumed(self, tokens: Tensor, kept: Replay, steps: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Resumed]]:
        def run(position: int, going_on: AbstractContextManager[None]) -> Tensor:
            with going_on:
                return self(tokens)[:, position]

        for choice, _, going_on in kept.changed_at(steps):
            yield choice, partial(run, going_on=going_on)

    def cost(self, steps: Sequence[int]) -> int:
        starts = [steps[choice[len(choice) > 1] - 1] for choice in visit_choices(len(steps))]
        return sum(len(self.model.plan) - start for start in starts)

    def forget(self) -> None:
        self._read = None
