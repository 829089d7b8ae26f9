"""Discovery: how a model runs its layers, from one forward and from Parameter identity; no adapter needed.

Layers are the outermost members of module lists. Two of them are one physical layer if they share at least half of the
smaller one's weights: modules may be distinct objects and be tied. A visit is an ordinal within one forward; what only
looks like a loop (a call for each token, generation, activation checkpointing) is flagged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from visitlens.errors import InputError
from visitlens.hooks.adapters.family import physical_layers
from visitlens.hooks.core.loop_plan import ExecutionPlan

Run = Callable[[Tensor], Any]


@dataclass(frozen=True)
class StepLedger:
    """What ran. `modules[i]` is the path of the module that ran step i of `plan`; `layers` the paths of each physical
    layer's modules; `visited` the visits at which a submodule ran: (layer, path below the module) -> visits."""

    plan: ExecutionPlan
    modules: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    visited: Mapping[tuple[int, str], frozenset[int]]
    flags: tuple[str, ...] = ()

    def steps(self) -> list[dict[str, Any]]:
        """JSON-ready: index, module, layer, visit."""
        return [
            {"index": step.index, "module": module, "layer": step.layer, "visit": step.visit}
            for step, module in zip(self.plan.steps, self.modules, strict=True)
        ]


def discover(model: nn.Module, run: Run, tokens: Tensor) -> StepLedger:
    """The ledger of `run(tokens)`, tokens [context, position]; runs it once more on fewer positions.

    Raises:
        InputError: no module list holds a layer that ran.
    """
    candidates = layer_candidates(model)
    calls = _calls(candidates, run, tokens)
    ran = list(dict.fromkeys(calls))
    if not ran:
        raise InputError("found no layers: no member of a module list ran in a forward of this model")
    groups = physical_layers({path: candidates[path] for path in ran})
    flags = false_loops(model, candidates, run, tokens)
    flags += [f"{path} never ran" for path in candidates if path not in ran]
    return follow(model, groups, run, tokens, flags)


def follow(
    model: nn.Module, layers: Sequence[Sequence[str]], run: Run, tokens: Tensor, flags: Iterable[str] = ()
) -> StepLedger:
    """The ledger of known layers: which of their modules and submodules ran, in order and by visit."""
    calls: list[tuple[int, str]] = []
    visited: dict[tuple[int, str], set[int]] = {}
    handles = []

    def entered(*_: Any, layer: int, path: str) -> None:
        calls.append((layer, path))

    def reached(*_: Any, layer: int, below: str) -> None:
        visited.setdefault((layer, below), set()).add(sum(number == layer for number, _ in calls))

    for layer, paths in enumerate(layers):
        for path in paths:
            module = model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(partial(entered, layer=layer, path=path)))
            for below, part in module.named_modules():
                if below and any(True for _ in part.parameters(recurse=False)):
                    handles.append(part.register_forward_pre_hook(partial(reached, layer=layer, below=below)))
    try:
        with torch.no_grad():
            run(tokens)
    finally:
        for handle in handles:
            handle.remove()
    plan = ExecutionPlan.from_layers(layer for layer, _ in calls)
    seen = {key: frozenset(visits) for key, visits in visited.items()}
    return StepLedger(plan, tuple(path for _, path in calls), tuple(tuple(p) for p in layers), seen, tuple(flags))


def layer_candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Outermost members of module lists that hold weights; of a member that only wraps further lists, its members. What is of such
    a member's own class is a layer wherever it stands: a first block beside the list, whose experts are in a list too."""
    listed = _outermost(model, ())
    within = {type(part) for layer in listed.values() for part in layer.modules() if part is not layer}
    kinds = {type(layer) for layer in listed.values()} - within
    return _outermost(model, tuple(kind for kind in kinds if not kind.__module__.startswith("torch.")))


def _outermost(model: nn.Module, kinds: tuple[type, ...]) -> dict[str, nn.Module]:
    """By path: members of module lists, and modules of these classes."""
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if not any(True for _ in child.parameters()):
                continue
            listed = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)  # lists may hold lists
            if isinstance(child, kinds) or (listed and not _only_wraps_lists(child)):
                found[below] = child
            else:
                walk(child, below)

    walk(model, "")
    return found


def _only_wraps_lists(module: nn.Module) -> bool:
    weights = {id(p) for p in module.parameters()}
    in_lists = {id(p) for child in module.children() if isinstance(child, nn.ModuleList) for p in child.parameters()}
    return bool(weights) and weights == in_lists


def _calls(candidates: Mapping[str, nn.Module], run: Run, tokens: Tensor) -> list[str]:
    calls: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, path=path: calls.append(path))
        for path, module in candidates.items()
    ]
    try:
        with torch.no_grad():
            run(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def false_loops(model: Any, candidates: Mapping[str, nn.Module], run: Run, tokens: Tensor) -> list[str]:
    """What looks like visits of these modules and isn't, in sentences."""
    flags = []
    calls = _calls(candidates, run, tokens)
    fewer = max(1, tokens.shape[1] // 2)
    shorter = _calls(candidates, run, tokens[:, :fewer])
    by_length = [path for path in dict.fromkeys(calls) if calls.count(path) != shorter.count(path)]
    flags += [
        f"{path} ran {calls.count(path)} times over {tokens.shape[1]} tokens and {shorter.count(path)} over {fewer}: it recurs "
        "over tokens, and that is one visit a token"
        for path in by_length
    ]
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        flags.append("activation checkpointing is on: a backward pass runs modules again, which makes no new visits")
    if callable(getattr(model, "can_generate", None)) and model.can_generate() and not by_length:
        generated = 3

        def generate(prompt: Tensor) -> None:
            options = {"max_new_tokens": generated, "min_new_tokens": generated, "do_sample": False}
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

        try:
            times = len(_calls(candidates, generate, tokens[:1]))
        except Exception as error:  # a model's own `generate` may raise anything, and nothing else depends on it
            return [
                *flags,
                f"generation couldn't be tried ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            ]
        flags.append(
            f"generating {generated} tokens makes {times} layer calls where one forward makes {len(calls)}: each generated token is a "
            "forward of its own, not a further visit"
        )
    return flags
