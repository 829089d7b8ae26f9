"""What looks like a loop and isn't: layers that are called again for other tokens, another pass or another generated token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[[Tensor], Any]


def calls_of(candidates: Mapping[str, nn.Module], run: Run, tokens: Tensor) -> list[str]:
    """Paths of these modules, in the order of their calls in one run."""
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
    calls = calls_of(candidates, run, tokens)
    fewer = max(1, tokens.shape[1] // 2)
    shorter = calls_of(candidates, run, tokens[:, :fewer])
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
            times = len(calls_of(candidates, generate, tokens[:1]))
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


def unread_visits(model: nn.Module, layers: Sequence[Sequence[str]], run: Run, tokens: Tensor) -> list[str]:
    """Layers whose second call doesn't read what the first one wrote, in sentences: pieces of a sequence, guidance passes, towers,
    ensembles, drafts. A small change of the first call's output must reach the second call's input."""
    flags = []
    for paths in layers:
        modules = [model.get_submodule(path) for path in dict.fromkeys(paths)]
        plain, moved = _inputs(modules, run, tokens, change=False), _inputs(modules, run, tokens, change=True)
        if len(plain) < 2 or len(moved) < 2 or plain[1] is None or moved[1] is None:
            continue
        if plain[1].shape == moved[1].shape and torch.equal(plain[1], moved[1]):
            flags.append(
                f"{' and '.join(dict.fromkeys(paths))}: the second call doesn't read what the first one wrote (a piece of the sequence, "
                "another pass, a tower or a draft): these calls are no visits of a loop"
            )
    return flags


def _inputs(modules: Sequence[nn.Module], run: Run, tokens: Tensor, *, change: bool) -> list[Tensor | None]:
    """What each call of these modules is given; with `change`, the first one's output is another."""
    given: list[Tensor | None] = []
    done = 0

    def enter(_: Any, args: tuple, kwargs: dict) -> None:
        value = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
        given.append(None if value is None else value.detach().clone())

    def leave(_: Any, __: Any, output: Any) -> Any:
        nonlocal done
        done += 1
        if not change or done > 1:
            return None
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return None
        noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(0)).to(first)
        other = first + noise * first.detach().abs().mean().clamp(min=1e-3)
        return (other, *output[1:]) if isinstance(output, tuple) else other

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in dict.fromkeys(modules)]
    handles += [module.register_forward_hook(leave) for module in dict.fromkeys(modules)]
    try:
        with torch.no_grad():
            run(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return given


def shared_in_part(layers: Mapping[str, nn.Module]) -> list[str]:
    """Layers that share a base and little else (low-rank adapters, parametrisations), or memory and no Parameter, in sentences."""
    flags = []
    for (a, one), (b, other) in combinations(layers.items(), 2):
        mine, theirs = ({id(p): p for p in module.parameters()} for module in (one, other))
        shared = sum(p.numel() for key, p in mine.items() if key in theirs)
        smaller = min(sum(p.numel() for p in each.values()) for each in (mine, theirs))
        if 0 < 2 * shared < smaller:
            flags.append(
                f"{a} and {b} share {shared:,} of {smaller:,} weights, fewer than half: a common base with adapters of their own, perhaps. "
                "They count as two physical layers"
            )
        memory = [{p.untyped_storage().data_ptr() for p in each.values() if p.numel()} for each in (mine, theirs)]
        if not shared and memory[0] & memory[1] - {0}:
            flags.append(
                f"{a} and {b} hold separate Parameters over the same memory: they compute alike, and an update of one changes the other. "
                "They count as two physical layers; --tie-copies reads them as visits of one"
            )
    return flags
