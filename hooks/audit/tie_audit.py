"""Tie audit: for each looped layer and each of its components, what the visits share. Sharing is Parameter identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from visitlens.hooks.audit.discovery import StepLedger

TIED, PARTLY, PER_VISIT, UNTIED = "tied", "partly tied", "per-visit", "untied"


@dataclass(frozen=True)
class Tie:
    """One component of one looped layer: `status` is tied, partly tied, per-visit or untied; `detail` names the exceptions."""

    layer: int
    component: str
    status: str
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def audit_ties(model: nn.Module, ledger: StepLedger) -> list[Tie]:
    """By looped layer, its components in order. A component is a direct child of the layer's module, or its own Parameters."""
    return [tie for layer in ledger.plan.looped_layers for tie in _layer_ties(model, ledger, layer)]


def _layer_ties(model: nn.Module, ledger: StepLedger, layer: int) -> list[Tie]:
    modules = [model.get_submodule(path) for path in ledger.layers[layer]]
    visits = frozenset(range(1, ledger.plan.visits[layer] + 1))
    components: dict[str, list[str]] = {}
    for name, _ in modules[0].named_parameters(remove_duplicate=False):
        components.setdefault(name.partition(".")[0] if "." in name else "(own weights)", []).append(name)
    ties = []
    for component, names in components.items():
        untied = [name for name in names if not _one_parameter(modules, name)]
        parts = {name.rpartition(".")[0] for name in names}
        some = {part: ran for part in parts if (ran := ledger.visited.get((layer, part), visits)) != visits}
        notes = _only_at(some)
        if untied:
            copies = " (equal copies now: training one leaves the others)" if _equal(modules, untied) else ""
            notes.append(f"separate Parameters: {_few(untied)}{copies}")
        if len(untied) == len(names):
            status = UNTIED
        elif parts == set(some) and not untied:
            status = PER_VISIT
        else:
            status = PARTLY if notes else TIED
        ties.append(Tie(layer, component, status, "; ".join(notes)))
    return ties


def _only_at(parts: Mapping[str, frozenset[int]]) -> list[str]:
    """In sentences, by visits: the parts that run at some visits only."""
    by_visits: dict[tuple[int, ...], list[str]] = {}
    for part, visits in sorted(parts.items()):
        by_visits.setdefault(tuple(sorted(visits)), []).append(part)
    return [f"at visit {', '.join(map(str, visits))} only: {_few(names)}" for visits, names in by_visits.items()]


def _few(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _one_parameter(modules: list[nn.Module], name: str) -> bool:
    return len({id(_parameter(module, name)) for module in modules}) == 1


def _equal(modules: list[nn.Module], names: list[str]) -> bool:
    for name in names:
        first, *rest = (_parameter(module, name) for module in modules)
        if not all(first is not None and other is not None and torch.equal(first, other) for other in rest):
            return False
    return True


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    return dict(module.named_parameters(remove_duplicate=False)).get(name)
