"""TransformerLens' calls on the native model: hook names by visit, and one line that says what there is where one is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformer_lens.HookedRootModule import HookedRootModule

from visitlens.errors import InputError
from visitlens.hooks.core.loop_plan import ExecutionPlan

_NAME = re.compile(r"blocks\.(?P<layer>\d+)\.(?:visit\.(?P<visit>\d+|\*)\.)?(?P<point>.+)")


class NamedHooks(HookedRootModule):
    """Names are `blocks.LAYER.visit.VISIT.POINT`, with `visit.*` for every visit; of a layer that runs once, also without."""

    plan: ExecutionPlan

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]] = (),
        bwd_hooks: Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """As TransformerLens'; inside, the hook functions act at the named points.

        Raises:
            InputError: no such hook point or visit, or a looped layer's name without a visit; inside, a hook function that
                returns a value of another shape than it was given.
        """
        forward, backward = (
            [
                (point, _of_shape(function))
                for name, function in hooks
                for point in ([name] if callable(name) else self.named(name, need_visit=True))
            ]
            for hooks in (fwd_hooks, bwd_hooks)
        )
        with super().hooks(forward, backward, reset_hooks_end, clear_contexts) as model:
            yield model

    def names_chosen(self, names_filter: Any) -> Any:
        """`names_filter` with its names in full: a name (with a visit, `*` or none) or several; a function and None as they are.

        Raises:
            InputError: a name that matches no hook point.
        """
        if names_filter is None or callable(names_filter):
            return names_filter
        names = [names_filter] if isinstance(names_filter, str) else list(names_filter)
        return [point for name in names for point in self.named(name)]

    def named(self, name: str, *, need_visit: bool = False) -> list[str]:
        """The hook points that a name stands for; without a visit, those of every visit.

        Raises:
            InputError: none; or, where it is needed, no visit is named in a layer that has several.
        """
        if name in self.hook_dict:
            return [name]
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        layer = int(match["layer"]) if match else -1
        if match is None or layer not in self.plan.visits:
            raise InputError(
                f"no hook point {name!r}; names are hook_embed and blocks.LAYER.visit.VISIT.POINT, layers 0 to {len(self.plan.visits) - 1}"
            )
        visits, point = self.plan.visits[layer], match["point"]
        known = [n.removeprefix(start) for n in self.hook_dict if n.startswith(start := f"blocks.{layer}.visit.1.")]
        if point not in known:
            raise InputError(f"no hook point {point!r} in layer {layer}; it has {', '.join(known)}")
        if match["visit"] is None and visits > 1 and need_visit:
            raise InputError(
                f"layer {layer} runs {visits} times: name the visit, blocks.{layer}.visit.1.{point}, or all of them, "
                f"blocks.{layer}.visit.*.{point}"
            )
        if match["visit"] not in (None, "*"):
            raise InputError(f"no visit {match['visit']} of layer {layer}: it runs {visits} times")
        return [f"blocks.{layer}.visit.{visit}.{point}" for visit in range(1, visits + 1)]


def _of_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """The hook function, held to return a value of the shape that it was given."""

    def checked(value: Any, hook: Any) -> Any:
        result = function(value, hook=hook)
        if isinstance(result, Tensor) and isinstance(value, Tensor) and result.shape != value.shape:
            raise InputError(
                f"the hook function at {hook.name} returned a value of shape {tuple(result.shape)}, expected {tuple(value.shape)}"
            )
        return result

    return checked
