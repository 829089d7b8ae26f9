"""Discovery: how a model runs its layers, from one forward and from Parameter identity; no adapter needed.

Layers are the outermost members of module lists. Two of them are one physical layer if they share at least half of the
smaller one's weights: modules may be distinct objects and be tied. A visit is an ordinal within one forward; what only
looks like a loop (a call for each token, generation, activation checkpointing) is flagged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from visitlens.errors import InputError
from visitlens.hooks.adapters.family import physical_layers
from visitlens.hooks.audit.false_loops import Run, calls_of, false_loops, shared_in_part, unread_visits
from visitlens.hooks.core.loop_plan import ExecutionPlan


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
    candidates = _with_looped_blocks(model, layer_candidates(model), run, tokens)
    calls = calls_of(candidates, run, tokens)
    ran = list(dict.fromkeys(calls))
    if not ran:
        raise InputError("found no layers: no member of a module list ran in a forward of this model")
    groups = physical_layers({path: candidates[path] for path in ran})
    flags = [*false_loops(model, candidates, run, tokens), *unread_visits(model, groups, run, tokens)]
    flags += shared_in_part(candidates)
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
    """Outermost members of module lists, and of sequences and dicts of modules of the model's own, that hold matrices; of a member
    that only wraps further lists, its members. What is of such a member's own class is a layer wherever it stands: a first block beside the list, whose experts are in a list too."""
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
            if not holds_matrices(child):
                continue
            listed = isinstance(module, nn.ModuleList) or (isinstance(module, _HOLDERS) and _is_a_block(child))
            listed = listed and not isinstance(child, _HOLDERS)  # lists may hold lists
            if isinstance(child, kinds) or (listed and not _only_wraps_lists(child)):
                found[below] = child
            else:
                walk(child, below)

    walk(model, "")
    return found


def _with_looped_blocks(
    model: nn.Module, listed: dict[str, nn.Module], run: Run, tokens: Tensor
) -> dict[str, nn.Module]:
    """The listed layers, and blocks that stand in no list and run several times; such a block's own experts are no layers."""
    blocks = {
        path: module
        for path, module in model.named_modules()
        if path and path not in listed and _is_a_block(module) and not _only_wraps_lists(module)
    }
    blocks = {path: module for path, module in blocks.items() if not any(path.startswith(f"{up}.") for up in listed)}
    calls = calls_of(blocks, run, tokens)
    found = dict(listed)
    for path in (path for path in blocks if calls.count(path) > 1):
        inside = {below for below in found if below.startswith(f"{path}.")}
        if any(_has_norm(found[below]) for below in inside) or any(path.startswith(f"{up}.") for up in found):
            continue  # it holds layers, or is part of one
        found = {below: module for below, module in found.items() if below not in inside} | {path: blocks[path]}
    order = [path for path, _ in model.named_modules()]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


_HOLDERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def holds_matrices(module: nn.Module) -> bool:
    """Whether a module is more than a norm."""
    return any(parameter.ndim > 1 for parameter in module.parameters())


def _is_a_block(module: nn.Module) -> bool:
    """A module of the model's own, between an embedding and a head, that may be a layer."""
    own = not type(module).__module__.startswith("torch.nn.") or isinstance(module, nn.TransformerEncoderLayer)
    embeds = any(isinstance(part, nn.Embedding) for part in module.modules())
    return own and not embeds and holds_matrices(module) and any(True for _ in module.children())


def _has_norm(module: nn.Module) -> bool:
    parts = (list(part.parameters(recurse=False)) for part in module.modules())
    return any(held and all(p.ndim == 1 for p in held) for held in parts)


def _only_wraps_lists(module: nn.Module) -> bool:
    weights = {id(p) for p in module.parameters()}
    in_lists = {id(p) for child in module.children() if isinstance(child, nn.ModuleList) for p in child.parameters()}
    return bool(weights) and weights == in_lists
