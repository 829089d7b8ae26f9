"""Hooks belong to the thread that set them: a forward of another one is refused, never changed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

import visitlens as vl
from visitlens.errors import InputError
from visitlens.hooks.capture.capture import capture

TOKENS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=["native", "adapted"])
def model(request: pytest.FixtureRequest, make_model: Callable[..., Any]) -> Any:
    if request.param == "native":
        return make_model(2)
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 24,
    }
    torch.manual_seed(0)
    return vl.adapt(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval())


def in_another_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@torch.no_grad()
def test_a_forward_of_another_thread_is_refused_while_one_intervenes_or_looks(model: Any) -> None:
    plain = model(TOKENS)
    for inside in (vl.intervene(model, vl.do.scale("V", 2.0)), capture(model, ["V"])):
        with inside:
            with pytest.raises(InputError, match="another thread is inside a capture or an intervention"):
                in_another_thread(lambda: model(TOKENS))
            with pytest.raises(InputError, match="give each thread a model of its own"):
                in_another_thread(lambda: vl.intervene(model, vl.do.zero("V")).__enter__())
            model(TOKENS)
        assert torch.equal(in_another_thread(lambda: model(TOKENS)), plain)


@torch.no_grad()
def test_captures_of_one_thread_nest_and_are_given_back_after_an_error(model: Any) -> None:
    with capture(model, ["V"]) as outer, capture(model, ["V"]) as inner:
        model(TOKENS)
        assert torch.equal(outer.at("V", 1), inner.at("V", 1))
    with pytest.raises(ZeroDivisionError), capture(model, ["V"]):
        _ = 1 / 0
    assert model.owner is None
    assert in_another_thread(lambda: model(TOKENS)) is not None


@torch.no_grad()
def test_plain_forwards_of_many_threads_are_what_each_is_alone(model: Any) -> None:
    inputs = [torch.randint(3, 61, (2, 10 + n), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    alone = [model(tokens) for tokens in inputs]
    barrier = Barrier(4)

    def run(n: int) -> list[torch.Tensor]:
        barrier.wait()
        with torch.no_grad():
            return [model(inputs[n]) for _ in range(8)]

    with ThreadPoolExecutor(4) as pool:
        for n, found in enumerate(pool.map(run, range(4))):
            assert all(torch.equal(logits, alone[n]) for logits in found)
