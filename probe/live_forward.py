"""How a live run's model is run: watched step by step, read early, its heads silenced. The native model, and adapted ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from visitlens.hooks.adapters.adapted import AdaptedModel
from visitlens.hooks.capture import Captured
from visitlens.hooks.loop_plan import Step
from visitlens.hooks.models.looped_moe import LoopedMoE

Change = Callable[[Tensor, int], Tensor]
"""(attended context PV [context, token, head, d], index of the step) -> what takes its place."""
Reader = Callable[[slice], Tensor]
"""Logits [token, vocab] of some of a prompt's tokens."""
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

    def resumed(self, tokens: Tensor, captured: Captured, start: int, position: int) -> Tensor:
        """Logits [context, vocab] after a position, of a forward that is as it was before the step `start`."""
        ...

    def cost(self, start: int) -> int:
        """Steps that `resumed` runs."""
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

    def resumed(self, tokens: Tensor, captured: Captured, start: int, position: int) -> Tensor:
        state = captured.at("resid", start).expand(len(tokens), -1, -1)
        return self.model.logits(self.model.run_steps(state, start=start)[:, position])

    def cost(self, start: int) -> int:
        return len(self.model.plan) - start


class AdaptedForward:
    """Read early by the model's own code: its layers give what they gave in the run as it was (`_Replay`), the last one the
    state in question, so that whatever comes behind the last layer is done to it."""

    def __init__(self, model: AdaptedModel) -> None:
        self.model = model
        missing = model.config.missing
        self.sites = tuple(site for site in (*_SITES, "resid_out") if site not in missing)
        self.no_lens = missing.get("resid_out", "")
        if model.config.ragged:
            self.no_lens = "halting or routing leaves tokens out of its visits, so a step's state isn't every token's"
        self._replay: _Replay | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.model(tokens))

    @contextmanager
    def watched(self, advance: Callable[[], None]) -> Iterator[None]:
        hooks = [m.register_forward_pre_hook(lambda *_: advance()) for m in _layers(self.model)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def states(self, captured: Captured) -> list[Tensor | None]:
        held = [captured.held("resid_out", step) for step in range(len(self.model.plan))]
        return [None if state is None else state[0] for state in held]

    def read(self, tokens: Tensor, state: Tensor) -> Reader:
        return self.through(tokens, state, len(self.model.plan))

    def through(self, tokens: Tensor, state: Tensor, start: int) -> Reader:
        if self._replay is None or not torch.equal(self._replay.tokens, tokens):
            self._replay = _Replay(self.model, tokens)

        def put(*_: Any) -> Tensor:
            return state.unsqueeze(0)

        places = [("resid_out", self.model.plan.steps[start - 1])]
        with self._replay.until(start), self.model.changing(places, put):
            logits = cast(Tensor, self.model(tokens))[0]
        return lambda some: logits[some]

    @contextmanager
    def silenced(self, steps: Sequence[Step], change: Change) -> Iterator[None]:
        def changed(site: str, step: Step, value: Tensor, there: Tensor | None) -> Tensor:
            return change(value, step.index)

        with self.model.changing([("PV", step) for step in steps], changed):
            yield

    def resumed(self, tokens: Tensor, captured: Captured, start: int, position: int) -> Tensor:
        return self(tokens)[:, position]  # all of it: a later layer may read more than the residual stream

    def cost(self, start: int) -> int:
        return len(self.model.plan)


class _Replay:
    """What each layer's module gave in one forward over these tokens, call by call, to be given again without computing."""

    def __init__(self, model: AdaptedModel, tokens: Tensor) -> None:
        self.model, self.tokens, self.outputs = model, tokens, list[Any]()

        def keep(module: Any, arguments: Any, output: Any) -> None:
            self.outputs.append(tree_map_only(Tensor, Tensor.clone, output))  # models change tensors in place

        hooks = [module.register_forward_hook(keep) for module in _layers(model)]
        try:
            model(tokens, return_type="none")
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def until(self, start: int) -> Iterator[None]:
        """Inside, a forward's first `start` layer calls give what they gave."""
        calls = iter(range(len(self.outputs)))

        def instead(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            at = next(calls)
            return tree_map_only(Tensor, Tensor.clone, self.outputs[at]) if at < start else forward(*args, **kwargs)

        held = {module: vars(module).get("forward") for module in _layers(self.model)}
        try:
            for module in held:
                module.forward = partial(instead, module.forward)
            yield
        finally:
            for module, own in held.items():
                if own is None:
                    del module.forward
                else:
                    module.forward = own


def _layers(model: AdaptedModel) -> list[Any]:
    """The modules that run the steps, each once."""
    paths = [path for layer in model.anatomy.layers for path in layer.modules]
    return list(dict.fromkeys(model.body.get_submodule(path) for path in paths))
