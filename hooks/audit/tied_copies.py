"""Copies: layers that were one when they were trained, and have Parameters of their own since they were saved.

Checkpoints of recursive models whose sharing is by tied Parameters hold each layer's weights once a place (transformers
saves no others): loaded, they are distinct Parameters of equal values, and identity says nothing of the loop any more.
"""

from __future__ import annotations

from torch import equal, nn

from visitlens.errors import InputError
from visitlens.hooks.audit.discovery import layer_candidates


def copied_layers(model: nn.Module) -> list[list[str]]:
    """Paths of layers that hold equal weights, at least half of them by size, in separate Parameters; each group in order."""
    layers = layer_candidates(model)
    groups: list[list[str]] = []
    for path, layer in layers.items():
        for group in groups:
            if 2 * sum(p.numel() for p in _copies(layers[group[0]], layer).values()) >= _size(layer):
                group.append(path)
                break
        else:
            groups.append([path])
    return [group for group in groups if len(group) > 1]


def tie_copies(model: nn.Module) -> list[list[str]]:
    """Makes the equal weights of such layers one Parameter each, the first layer's; returns the groups.

    Raises:
        InputError: there are none.
    """
    groups = copied_layers(model)
    if not groups:
        raise InputError("the model has no layers that are copies of one another: leave tie_copies out")
    for first, *others in groups:
        source = model.get_submodule(first)
        for path in others:
            layer = model.get_submodule(path)
            for name, parameter in _copies(source, layer).items():
                owner, _, leaf = name.rpartition(".")
                setattr(layer.get_submodule(owner), leaf, parameter)
    return groups


def _copies(first: nn.Module, other: nn.Module) -> dict[str, nn.Parameter]:
    """Of two layers: the first one's Parameters that the other has by the same name and value, and not as the same object."""
    mine, theirs = dict(first.named_parameters()), dict(other.named_parameters())
    if mine.keys() != theirs.keys():
        return {}
    pairs = sorted(((name, p, theirs[name]) for name, p in mine.items()), key=lambda pair: -pair[1].numel())
    found: dict[str, nn.Parameter] = {}
    left = _size(other)
    for name, p, q in pairs:  # the largest first: layers that differ are told by one of them
        if p is not q and p.shape == q.shape and equal(p, q):
            found[name] = p
        else:
            left -= q.numel()
            if 2 * left < _size(other):
                return {}
    return found


def _size(layer: nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters())
