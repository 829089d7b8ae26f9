"""Cached generation: one KV slot a step, the same logits as a full forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support import rounding

from visitlens.hooks.capture.generation import generate
from visitlens.hooks.capture.sampling import Sampling
from visitlens.hooks.interventions.intervene import intervene, zero
from visitlens.hooks.models.looped_moe import LoopedMoE

ModelFactory = Callable[..., LoopedMoE]
VARIANTS = {
    "baseline": {"visits": 1},
    "two visits": {"visits": 2},
    "three visits": {"visits": 3},
    "one kv head, qk norm": {"visits": 2, "num_kv_heads": 1, "qk_norm": True},
    "odd heads": {"visits": 3, "num_heads": 5, "num_kv_heads": 5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_cached_logits_are_those_of_the_full_forward(
    variant: dict, dtype: torch.dtype, make_model: ModelFactory
) -> None:
    """Prompt in chunks of several tokens, then one token at a time."""
    model = make_model(**variant, dtype=dtype)
    tokens = torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache()
    parts = [model(chunk, cache=cache) for chunk in tokens.split([7, 5, *[1] * 8], dim=1)]
    tolerance = rounding.bound(dtype)  # chunks of other lengths are products of other shapes
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), atol=tolerance, rtol=tolerance)


def test_the_start_of_a_text_is_not_the_first_token_of_a_later_chunk(make_model: ModelFactory) -> None:
    """An intervention on segment starts acts on the first token of all, whichever chunks the text comes in."""
    model = make_model(2, dtype=torch.float64)
    tokens = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(2))
    with intervene(model, zero("V", token="start")):
        whole = model(tokens)
        cache = model.new_cache()
        parts = [model(chunk, cache=cache) for chunk in tokens.split([5, 4, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=rounding.bound(torch.float64), rtol=0)
    assert float((whole - model(tokens)).abs().max()) > 1e-3, "what the start gives must matter here"


@pytest.mark.parametrize("visits", [1, 2, 3])
def test_the_cache_has_one_slot_a_step_and_visits_never_share_keys(visits: int, make_model: ModelFactory) -> None:
    model = make_model(visits)
    cache = model.new_cache()
    assert cache.length == 0
    for chunk in torch.arange(3, 12).unsqueeze(0).split([4, 1, 4], dim=1):
        model(chunk, cache=cache)
    assert cache.length == 9 and len(cache.slots) == len(model.plan)
    assert all(slot.k.shape == slot.v.shape == (1, 9, 2, 4) for slot in cache.slots)
    keys = [slot.k for slot in cache.slots]
    assert not any(torch.equal(a, b) for i, a in enumerate(keys) for b in keys[:i])


def test_the_pattern_of_a_cached_token_covers_the_whole_past(make_model: ModelFactory) -> None:
    model = make_model(2, dtype=torch.float64)
    tokens = torch.arange(3, 13).unsqueeze(0)
    full = model.run_with_cache(tokens)[1]
    cache = model.new_cache()
    model(tokens[:, :6], cache=cache)
    logits, seen = model.run_with_cache(tokens[:, 6:8], cache=cache)
    for step in model.plan.steps:
        name = f"blocks.{step.layer}.visit.{step.visit}.attn.hook_pattern"
        torch.testing.assert_close(seen[name], full[name][:, :, 6:8, :8], atol=1e-14, rtol=0)
    torch.testing.assert_close(logits, model(tokens)[:, 6:8], atol=1e-13, rtol=0)


def test_greedy_generation_writes_the_likeliest_token_each_time(make_model: ModelFactory) -> None:
    model = make_model(3)
    prompt = torch.tensor([[0, 5, 9], [0, 8, 4]])
    tokens = prompt
    for _ in range(6):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generate(model, prompt, 6), tokens)
    assert torch.equal(generate(model, prompt, 0), prompt)


def test_sampling_is_the_seeds_and_follows_the_temperature(make_model: ModelFactory) -> None:
    model, prompt = make_model(2), torch.tensor([[0, 5, 9]])
    hot = [generate(model, prompt, 12, choose=Sampling(5.0, seed=seed).chooser()) for seed in (0, 0, 1)]
    assert torch.equal(hot[0], hot[1]) and not torch.equal(hot[0], hot[2])
    cold = generate(model, prompt, 12, choose=Sampling(1e-6).chooser())
    assert torch.equal(cold, generate(model, prompt, 12))
