"""Prompts that are too long, places that aren't there, memory that doesn't suffice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.tiny_live import PROMPT, hooks_left

from visitlens.errors import InputError, MemoryLimitError
from visitlens.probe.live.live_model import Tracer
from visitlens.probe.live.live_run import LiveRun

# Limits and bad input


def test_the_limit_is_the_smaller_of_the_given_and_the_models(make_live: Callable[..., Tracer]) -> None:
    assert make_live(limit=10).limit == 10 and make_live(limit=999).limit == 64
    live = make_live(limit=10)
    assert len(live.run("x" * 9)) == 10
    with pytest.raises(InputError, match=r"the prompt has 13 tokens with BOS; the limit is 10: shorten it by 3"):
        live.run("x" * 12)
    with pytest.raises(InputError, match=r"1,000,000 characters; at most 10 tokens"):
        live.run("x" * 1_000_000)
    with pytest.raises(InputError, match="empty"):
        live.run("")


def test_bos_is_put_before_a_prompt_once(live: Tracer) -> None:
    assert live.run("a").tokens.tolist() == live.run("<bos>a").tokens.tolist()


def test_wrong_places_are_named(live: Tracer, run: LiveRun) -> None:
    for work, message in (
        (lambda: live.ablate(run, 1, 4, (1,)), "no head 4: expected 0 to 3"),
        (lambda: live.ablate(run, 1, 0, (3,)), "no visit 3 of layer 1"),
        (lambda: live.ablate(run, 9, 0, (1,)), "no visit 1 of layer 9"),
        (lambda: live.ablate(run, 1, 0, ()), "at least one visit"),
        (lambda: live.ablate(run, 1, 0, (1, 1)), "each once"),
        (lambda: live.ablate(run, 1, 0, (1,), "none"), "among zero, mean, resample, got 'none'"),
        (lambda: live.ablate(live.run("a"), 1, 0, (1,), "resample"), "two at least: use zero or mean"),
        (lambda: live.scan(run, target=999), "no token 999"),
        (lambda: live.scan(run, position=999), "no token 999"),
        (lambda: run.pattern(1, 1, 7), "no head 7"),
        (lambda: run.pair(8), "no layer 8: expected 0 to 3"),
        (lambda: run.top_keys(1, 0, -99), "no token"),
        (lambda: live.ablate(run, 1, 0, (1,)).log_prob_change(target=-1), "no token -1"),
    ):
        with pytest.raises(InputError, match=message):
            work()


def test_a_run_of_another_model_is_refused(make_live: Callable[..., Tracer], run: LiveRun) -> None:
    with pytest.raises(InputError, match="not of this model"):
        make_live(3).ablate(run, 1, 0, (1,))


@pytest.mark.parametrize("size", [2**60, None])
def test_memory_that_does_not_suffice_is_a_message(
    live: Tracer, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    """From the allocator itself on a CPU, and as a GPU would say it."""

    def greedy(*_: object, **__: object) -> None:
        if size is None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(live.model, "_features", greedy)
    with pytest.raises(MemoryLimitError, match=r"not enough memory for a prompt of 41 tokens: shorten it"):
        live.run(PROMPT)
    assert hooks_left(live.model) == 0


def test_other_errors_are_not_taken_for_memory(live: Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(live.model, "_features", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        live.run(PROMPT)
