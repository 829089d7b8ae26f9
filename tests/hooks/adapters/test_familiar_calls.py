"""TransformerLens' calls on an adapted model: names with visits, filters, position slices, hooks that change a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import capture

TOKENS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model(adapted: Callable[..., Any]) -> Any:
    return adapted("hrm_text")


def test_the_cache_keeps_every_visit_under_its_name(model: Any) -> None:
    logits, cache = model.run_with_cache(TOKENS)
    assert torch.equal(logits, model(TOKENS)) and not any(name.endswith("hook_pattern") for name in cache)
    with capture(model, ["Q", "resid"]) as captured:
        model(TOKENS)
    for step in model.plan.steps:
        prefix = f"blocks.{step.layer}.visit.{step.visit}"
        assert torch.equal(cache[f"{prefix}.attn.hook_rot_q"], captured.at("Q", step.index))
        total = sum(cache[f"{prefix}.{point}"] for point in ("hook_resid_pre", "hook_attn_out", "hook_mlp_out"))
        torch.testing.assert_close(total, cache[f"{prefix}.hook_resid_post"], atol=1e-5, rtol=1e-5)


def test_filters_and_slices(model: Any) -> None:
    one = model.run_with_cache(TOKENS, "blocks.1.visit.4.attn.hook_pattern", pos_slice=slice(3, 5))[1]
    assert {name: tuple(value.shape) for name, value in one.items()} == {
        "blocks.1.visit.4.attn.hook_pattern": (2, 4, 2, 12)
    }
    every = model.run_with_cache(TOKENS[:1], ["blocks.2.attn.hook_v"], pos_slice=-1, remove_batch_dim=True)[1]
    assert {name: tuple(value.shape) for name, value in every.items()} == {
        f"blocks.2.visit.{visit}.attn.hook_v": (1, 4, 4) for visit in (1, 2)
    }
    chosen = model.run_with_cache(TOKENS, lambda name: name.endswith("visit.2.hook_mlp_out"))[1]
    assert list(chosen) == [f"blocks.{layer}.visit.2.hook_mlp_out" for layer in range(4)]


def test_hooks_change_the_visit_they_name(model: Any) -> None:
    logits, cache = model.run_with_cache(TOKENS)
    for step in model.plan.steps:  # patching a value into its own place changes nothing
        name = f"blocks.{step.layer}.visit.{step.visit}.hook_attn_out"
        assert torch.equal(model.run_with_hooks(TOKENS, [(name, lambda value, hook: cache[hook.name])]), logits)
    seen: list[Any] = []

    def silence(value: torch.Tensor, hook: Any) -> torch.Tensor:
        seen.append((hook.layer, hook.visit))
        return torch.zeros_like(value)

    second = model.run_with_hooks(TOKENS, [("blocks.0.visit.2.hook_attn_out", silence)])
    assert seen == [(0, 2)]
    every = model.run_with_hooks(TOKENS, [("blocks.0.visit.*.hook_attn_out", silence)])
    assert not torch.equal(second, every) and not torch.equal(second, logits) and len(seen) == 7
    assert torch.equal(model.run_with_hooks(TOKENS), logits) and torch.equal(model(TOKENS), logits)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks.0.hook_attn_out", "layer 0 runs 6 times: name the visit, blocks.0.visit.1.hook_attn_out"),
        ("blocks.0.visit.7.hook_attn_out", "no visit 7 of layer 0: it runs 6 times"),
        ("blocks.0.visit.1.hook_attention", "no hook point 'hook_attention' in layer 0; it has hook_resid_pre"),
        ("blocks.0.visit.1.mlp.hook_router_logits", "no hook point 'mlp.hook_router_logits' in layer 0: .* dense"),
        ("blocks.9.visit.1.hook_attn_out", "names are blocks.LAYER.visit.VISIT.POINT, layers 0 to 3"),
        ("embed", "names are blocks.LAYER.visit.VISIT.POINT, layers 0 to 3"),
    ],
)
def test_a_wrong_name_is_refused_with_what_there_is(model: Any, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.run_with_hooks(TOKENS, [(name, lambda value, hook: None)])
    if "name the visit" not in message:
        with pytest.raises(InputError, match=message):
            model.run_with_cache(TOKENS, name)


def test_a_layer_that_lacks_a_point_says_why(adapted: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"no hook point 'attn.hook_rot_q' in layer 0: a Mamba layer"):
        adapted("zamba").run_with_cache(TOKENS, "blocks.0.visit.1.attn.hook_rot_q")
