"""Replay: forwards of an adapted model that go on from a later step. The steps before it give what they gave in an earlier
forward over the same tokens, without computing.

Whatever lies between the steps (re-entries, norms, masks, the head) is the model's own code and runs again on the same values, so a
replay is bit for bit the whole forward, unless a layer tells another something past what it returns (keys kept on a module, a
change of its input in place): `replay_of` tries that out, and such a model runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from visitlens.hooks.core.loop_plan import visit_choices
from visitlens.hooks.core.visit_clock import VisitClock

if TYPE_CHECKING:
    from visitlens.hooks.adapters.adapted_model import AdaptedModel

LIMIT = 2**30
"""Bytes that a replay keeps, with its forks; steps that find no room are computed again."""
_exact: WeakKeyDictionary[AdaptedModel, bool] = WeakKeyDictionary()


def replay_of(model: AdaptedModel) -> Replay:
    """A replay that keeps nothing where the model can't be replayed exactly; tried out once a model, on a few tokens."""
    if model not in _exact:
        _exact[model] = _replays_exactly(model)
    return Replay(model, None if _exact[model] else 0)


def _replays_exactly(model: AdaptedModel) -> bool:
    """Whether steps give what they gave where others are left out, after a forward over other tokens. For each bit of their numbers
    those that have it are left out, then those that haven't: of any two, each runs once without the other."""
    steps, device = range(len(model.plan)), next(model.parameters()).device
    shape = 2, 1, min(8, model.config.context_length)
    texts = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)

    def run(text: Tensor, before: Replay | None = None, given: Collection[int] = ()) -> Replay:
        replay = Replay(model, 2**62)
        replay._kept = {} if before is None else {at: x for at, x in before._kept.items() if at[1] in given}
        with replay.giving(given, [step for step in steps if step not in given]):
            replay._keep(0, len(steps), model(text))
        return replay

    try:
        with torch.no_grad():
            whole = [run(text) for text in texts]
            for bit in range((len(steps) - 1).bit_length()):
                for which in (0, 1):  # what is left out ran over the other text before
                    given = [step for step in steps if step >> bit & 1 == which]
                    if not _equal(run(texts[which], whole[which], given)._kept, whole[which]._kept):
                        return False
                model(texts[1])
    except Exception:  # of the model's own code, as where what a step left out should have said is missing
        return False
    return True


class Replay:
    """What each step's module gave, of every part of one forward: [context, position, hidden] a step, as a rule."""

    def __init__(self, model: AdaptedModel, limit: int | None = None) -> None:
        self.model, self.left = model, LIMIT if limit is None else limit
        self.complete = True
        """Whether all that was to be kept is."""
        self._kept: dict[tuple[int, int], Any] = {}  # (part of the forward, step) -> output

    def going_on(self, start: int = 0, keep: int = 0) -> AbstractContextManager[None]:
        """Inside, a forward's steps before `start` give what is kept of them; what those from there to before `keep` give is
        kept."""
        return self.giving(range(start), range(start, keep))

    @contextmanager
    def giving(self, given: Collection[int], keep: Collection[int] = ()) -> Iterator[None]:
        """Inside, these steps of a forward give what is kept of them; what those of `keep` give is kept."""
        model, part = self.model, -1
        number = {module: layer for layer, module in layer_modules(model)}
        clock = VisitClock(model.plan, model.anatomy.ragged)

        def begin(*_: Any) -> None:
            nonlocal part, clock
            part = 0 if model.part is None or model.part.first else part + 1
            clock = VisitClock(model.plan, model.anatomy.ragged)

        def instead(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            step = clock.enter(number[module]).index
            if step in given and (part, step) in self._kept:
                return _copy(self._kept[part, step])
            output = forward(*args, **kwargs)
            if step in keep:
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
        if not 0 < (size := _bytes(output)) <= self.left:  # 0: its tensors, if any, lie where they aren't found
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


def _equal(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    pairs = zip(*(tree_leaves([kept[at] for at in sorted(kept)]) for kept in (one, other)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def _copy(output: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, output)  # models change tensors in place


def _bytes(output: Any) -> int:
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)  # `nbytes` fails in a compiled layer
