"""Replayed forwards: bit for bit the whole ones, in every family, whatever is kept; nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.hooks.adapters.remote_code.tiny_ragged import tiny_llama

import visitlens as vl
from visitlens.hooks.adapters import replay as module
from visitlens.hooks.adapters.replay import Replay, layer_modules, replay_of
from visitlens.hooks.capture.capture import capture

TOKENS = torch.randint(3, 40, (2, 14), generator=torch.Generator().manual_seed(5))
SEGMENTS = torch.tensor([[0] * 6 + [1] * 8, [2] * 6 + [3] * 5 + [-1] * 3])


def test_a_forward_that_is_changed_late_is_replayed_exactly(
    family: str, adapted: Callable[..., Any], check_replays: Callable[..., None]
) -> None:
    assert replay_of(adapted(family)).left
    check_replays(adapted(family), TOKENS, SEGMENTS)


@pytest.mark.parametrize("kind", ["halting", "recursive"])
def test_a_forward_whose_visits_leave_tokens_out(
    kind: str, request: pytest.FixtureRequest, check_replays: Callable[..., None]
) -> None:
    assert replay_of(request.getfixturevalue(kind)).left
    check_replays(request.getfixturevalue(kind), TOKENS, SEGMENTS)


@pytest.mark.parametrize(("teller", "listener"), [(0, 1), (1, 2), (0, 3), (2, 3)])
def test_a_model_whose_layers_tell_each_other_something_unseen_runs_whole(
    teller: int, listener: int, check_replays: Callable[..., None]
) -> None:
    """As keys that a layer leaves on a module for another one."""
    hf, note = tiny_llama(4), dict[str, torch.Tensor]()
    hf.model.layers[teller].mlp.register_forward_hook(lambda _, __, output: note.update(said=output))
    hf.model.layers[listener].input_layernorm.register_forward_hook(lambda _, __, output: output + note["said"])
    model = vl.adapt(hf)
    assert not replay_of(model).left
    check_replays(model, TOKENS, SEGMENTS)


def test_what_is_kept_stays_where_a_model_changes_it_in_place(check_replays: Callable[..., None]) -> None:
    hf = tiny_llama(3)
    hf.model.layers[0].register_forward_hook(lambda _, __, output: output.mul_(1.5))
    model = vl.adapt(hf)
    assert replay_of(model).left
    check_replays(model, TOKENS, SEGMENTS)


@torch.no_grad()
def test_layers_that_are_compiled_in_place() -> None:
    hf = tiny_llama(2)
    plain = hf(TOKENS).logits
    hf.model.layers[0].compile(backend="eager")
    model = vl.adapt(hf)
    with Replay(model).going_on(keep=2):
        assert torch.allclose(model(TOKENS), plain, atol=1e-6)


@torch.no_grad()
def test_an_output_whose_tensors_are_not_found_is_not_kept() -> None:
    class Opaque:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    hf = tiny_llama(3)
    first, second = hf.model.layers[0].forward, hf.model.layers[1].forward
    hf.model.layers[0].forward = lambda x, **options: Opaque(first(x, **options))  # type: ignore[method-assign]  # of one layer
    hf.model.layers[1].forward = lambda state, **options: second(state.x, **options)  # type: ignore[method-assign]  # of one layer
    model = vl.adapt(hf)
    replay = Replay(model)
    with replay.going_on(keep=3):
        model(TOKENS)
    assert set(replay._kept) == {(0, 1), (0, 2)} and not replay.complete


@torch.no_grad()
def test_what_finds_no_room_is_computed_again(
    adapted: Callable[..., Any], check_replays: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 documents (lengths 6, 5 and 8) of hidden size 16: three outputs of the two first, in two parts, and no more."""
    model = adapted("dory")
    step = 16 * 4 * 5  # bytes of the part that runs first, the document of length 5
    monkeypatch.setattr(module, "LIMIT", 3 * step + step // 2)
    replay = Replay(model)
    with replay.going_on(keep=len(model.plan)):
        model(TOKENS, SEGMENTS)
    assert set(replay._kept) == {(0, 0), (0, 1), (0, 2)} and replay.left == step // 2
    with replay.going_on(keep=len(model.plan)):
        model(TOKENS, SEGMENTS)
    assert replay.left == step // 2, "the same once more"
    check_replays(model, TOKENS, SEGMENTS)


@torch.no_grad()
def test_an_error_leaves_the_model_as_it_was(adapted: Callable[..., Any]) -> None:
    model, replay = adapted("zamba2"), Replay(adapted("zamba2"))
    with pytest.raises(KeyboardInterrupt), replay.going_on(keep=9):
        model(TOKENS)
        raise KeyboardInterrupt
    assert not any("forward" in vars(m) for _, m in layer_modules(model)) and not model.body._forward_pre_hooks
    with capture(model, ["resid"]) as captured:
        model(TOKENS)
    assert captured.held("resid", 1) is not None


@torch.no_grad()
def test_steps_before_the_start_are_not_computed(adapted: Callable[..., Any]) -> None:
    model = adapted("hrm_text")
    replay, ran = Replay(model), list[int]()
    with replay.going_on(keep=len(model.plan)):
        plain = model(TOKENS)
    handles = [m.mlp.register_forward_hook(lambda *_, n=n: ran.append(n)) for n, m in layer_modules(model)]  # type: ignore[union-attr]  # a layer
    with replay.going_on(11):
        assert torch.equal(model(TOKENS), plain)
    for handle in handles:
        handle.remove()
    assert ran == [step.layer for step in model.plan.steps[11:]]
