"""Replay: forwards of an adapted model that go on from a later step. The steps before it give what they gave in an earlier
forward over the same tokens, without computing.

Whatever lies between the steps (re-entries, norms, masks, the head) is the model's own code and runs again on the same values, so a
replay is bit for bit the whole forward, in every family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from visitlens.hooks.loop_plan import visit_choices
from visitlens.hooks.visit_clock import VisitClock

if TYPE_CHECKING:
    from visitlens.hooks.adapters.adapted import AdaptedModel

LIMIT = 2**30
"""Bytes that a replay keeps, with its forks; steps that find no room are computed again."""


class Replay:
    """What each step's module gave, of every part of one forward: [context, position, hidden] a step, as a rule."""

    def __init__(self, model: AdaptedModel, limit: int | None = None) -> None:
        self.model, self.left = model, LIMIT if limit is None else limit
        self.complete = True
        """Whether all that was to be kept found room."""
        self._kept: dict[tuple[int, int], Any] = {}  # (part of the forward, step) -> output

    @contextmanager
    def going_on(self, start: int = 0, keep: int = 0) -> Iterator[None]:
        """Inside, a forward's steps before `start` give what is kept of them; what those from there to before `keep` give is
        kept."""
        model, part = self.model, -1
        number = {module: layer for layer, module in layer_modules(model)}
        clock = VisitClock(model.plan, model.anatomy.ragged)

        def begin(*_: Any) -> None:
            nonlocal part, clock
            part = 0 if model.part is None or model.part.first else part + 1
            clock = VisitClock(model.plan, model.anatomy.ragged)

        def instead(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            step = clock.enter(number[module]).index
            if step < start and (part, step) in self._kept:
                return _copy(self._kept[part, step])
            output = forward(*args, **kwargs)
            if start <= step < keep:
                self._keep(part, step, output)
            return output

        handle = model.body.register_forward_pre_hook(begin)
        try:
            with around(number, instead):
                yield
        finally:
            handle.remove()

    def changed_at(
        self, steps: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], AbstractContextManager[None]]]:
        """For each choice among the visits of a layer that runs at `steps` (`visit_choices`), how to change it there alone: the
        choice, the visits at which it is still to be changed, and what that forward runs in. One that is changed at every
        visit goes on from the one that is changed at the first, which must have run by then."""
        fork = self
        for choice in visit_choices(len(steps)):
            if len(choice) > 1 and fork.complete:
                yield choice, choice[1:], fork.going_on(steps[1])
            elif choice == (1,) and len(steps) > 1:
                fork = Replay(self.model, self.left)
                fork._kept = {at: output for at, output in self._kept.items() if at[1] < steps[0]}
                yield choice, choice, fork.going_on(steps[0], keep=steps[1])
            else:
                yield choice, choice, self.going_on(steps[min(choice) - 1])

    def _keep(self, part: int, step: int, output: Any) -> None:
        self.left += _bytes(self._kept.pop((part, step), ()))  # of the forward before, or in the way of an error
        if (size := _bytes(output)) > self.left:
            self.complete = False
            return
        self._kept[part, step] = _copy(output)
        self.left -= size


@contextmanager
def around(
    modules: Iterable[nn.Module], call: Callable[[nn.Module, Callable[..., Any], Any, Any], Any]
) -> Iterator[None]:
    """Inside, `call(module, forward, args, kwargs)` takes the place of each module's forward; its hooks are called as ever."""
    held = {module: vars(module).get("forward") for module in modules}

    def called(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(module, forward, args, kwargs)

    try:
        for module in held:
            module.forward = partial(called, module, module.forward)
        yield
    finally:
        for module, own in held.items():
            if own is not None:
                module.forward = own
            elif "forward" in vars(module):
                del module.forward


def layer_modules(model: AdaptedModel) -> list[tuple[int, nn.Module]]:
    """(physical layer, module) of each module that runs steps, once each."""
    found = {
        model.body.get_submodule(path): number
        for number, layer in enumerate(model.anatomy.layers)
        for path in layer.modules
    }
    return [(number, module) for module, number in found.items()]


def _copy(output: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, output)  # models change tensors in place


def _bytes(output: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(output) if isinstance(x, Tensor))
