"""Observing, patching and caching through TransformerLens: every (layer, visit) has hook points of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support import rounding
from torch import Tensor

from visitlens.hooks.core.sites import SITES
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.packed_tokens import PackedTokens

ModelFactory = Callable[..., LoopedMoE]
SITE_HOOKS = {site.hook for site in SITES.values()}
EXPLICIT = ("hook_pattern", "hook_attn_scores")
"""A change of these takes attention through the explicit path, which rounds otherwise than SDPA."""


@pytest.fixture(scope="module")
def text(make_text: Callable[..., PackedTokens]) -> tuple[Tensor, Tensor]:
    packed = make_text(seed=8, lengths=(1, 2, 8, 9, 40, 3))
    return torch.from_numpy(packed.tokens), torch.from_numpy(packed.segments)


@pytest.fixture(scope="module")
def looped(make_model: ModelFactory) -> LoopedMoE:
    return make_model(2, qk_norm=True)


def prefixes(model: LoopedMoE) -> list[str]:
    return [f"blocks.{s.layer}.visit.{s.visit}." for s in model.plan.steps]


def test_every_visit_of_every_layer_has_every_hook_point(make_model: ModelFactory) -> None:
    for visits in (1, 2, 4):
        model = make_model(visits)
        assert len(model.plan) == 4 + 2 * (visits - 1)
        points = [
            {name.removeprefix(prefix) for name in model.hook_dict if name.startswith(prefix)}
            for prefix in prefixes(model)
        ]
        assert all(p == points[0] for p in points) and points[0] >= SITE_HOOKS
        assert len(model.hook_dict) == 1 + len(model.plan) * len(points[0])


@pytest.mark.parametrize("visits", [1, 2, 4])
@pytest.mark.parametrize("grad", [True, False])
def test_observing_every_hook_point_leaves_the_logits_bit_identical(
    visits: int, grad: bool, make_model: ModelFactory, text: tuple[Tensor, Tensor]
) -> None:
    model = make_model(visits)
    if grad:
        model.requires_grad_(True)
    plain = model(*text)
    logits, cache = model.run_with_cache(*text)
    assert torch.equal(logits, plain)
    assert set(cache) == set(model.hook_dict)
    seen: set[str] = set()
    watched = model.run_with_hooks(*text, fwd_hooks=[(lambda _: True, lambda value, hook: seen.add(hook.name))])
    assert torch.equal(watched, plain) and seen == set(model.hook_dict)
    assert torch.equal(model(*text), plain)


def test_observing_works_in_inference_mode_too(looped: LoopedMoE, text: tuple[Tensor, Tensor]) -> None:
    with torch.inference_mode():
        plain = looped(*text)
        logits, cache = looped.run_with_cache(*text)
        assert torch.equal(logits, plain)
    outside = looped.run_with_cache(*text)[1]
    assert all(torch.equal(cache[name], outside[name]) for name in outside)


@pytest.mark.parametrize("visits", [1, 2, 4])
def test_the_cache_keeps_every_layer_and_visit_apart(
    visits: int, make_model: ModelFactory, text: tuple[Tensor, Tensor]
) -> None:
    model = make_model(visits)
    _, cache = model.run_with_cache(*text)
    resid = [cache[p + "hook_resid_pre"] for p in prefixes(model)]
    for i, prefix in enumerate(prefixes(model)):
        assert not any(torch.equal(resid[i], other) for other in resid[:i])
        following = resid[i + 1] if i + 1 < len(resid) else cache[prefix + "hook_resid_post"]
        assert torch.equal(cache[prefix + "hook_resid_post"], following)


@pytest.mark.parametrize(
    "names_filter",
    [
        "blocks.1.visit.2.attn.hook_z",
        ["blocks.1.visit.2.attn.hook_z"],
        lambda name: name == "blocks.1.visit.2.attn.hook_z",
    ],
    ids=["name", "list", "function"],
)
def test_a_names_filter_keeps_one_visit(names_filter: Any, looped: LoopedMoE, text: tuple[Tensor, Tensor]) -> None:
    whole = looped.run_with_cache(*text)[1]
    logits, cache = looped.run_with_cache(*text, names_filter=names_filter)
    assert list(cache) == ["blocks.1.visit.2.attn.hook_z"]
    assert torch.equal(cache["blocks.1.visit.2.attn.hook_z"], whole["blocks.1.visit.2.attn.hook_z"])
    assert torch.equal(logits, looped(*text))


@pytest.mark.parametrize("pos_slice", [-1, (3, 9), [2, 5, 6]])
def test_a_position_slice_cuts_the_query_positions_of_every_site(
    pos_slice: Any, looped: LoopedMoE, text: tuple[Tensor, Tensor]
) -> None:
    whole = looped.run_with_cache(*text)[1]
    cut = looped.run_with_cache(*text, pos_slice=pos_slice)[1]
    index = [-1] if pos_slice == -1 else list(range(3, 9)) if pos_slice == (3, 9) else pos_slice
    assert set(cut) == set(whole)
    for name, value in whole.items():
        expected = value[:, :, index] if name.endswith(EXPLICIT) else value[:, index]
        assert torch.equal(cut[name], expected), name


def test_a_position_slice_works_without_the_batch_axis(looped: LoopedMoE, text: tuple[Tensor, Tensor]) -> None:
    one = tuple(t[:1] for t in text)
    whole = looped.run_with_cache(*one)[1]
    cut = looped.run_with_cache(*one, pos_slice=(0, 4), remove_batch_dim=True)[1]
    for name, value in whole.items():
        assert torch.equal(cut[name], value[0, :, :4] if name.endswith(EXPLICIT) else value[0, :4]), name


def test_patching_clean_into_clean_changes_nothing(looped: LoopedMoE, text: tuple[Tensor, Tensor]) -> None:
    """Bit for bit at every hook point whose value flows on through the same arithmetic."""
    plain, cache = looped.run_with_cache(*text)
    for name in looped.hook_dict:
        patched = looped.run_with_hooks(*text, fwd_hooks=[(name, lambda value, hook: cache[hook.name].clone())])
        if name.endswith((*EXPLICIT, "mlp.hook_result")):  # experts are weighed one by one where one is changed
            torch.testing.assert_close(patched, plain, atol=1e-5, rtol=1e-5)
        else:
            assert torch.equal(patched, plain), name


def test_patching_another_runs_value_changes_the_logits_at_every_hook_point(
    looped: LoopedMoE, text: tuple[Tensor, Tensor]
) -> None:
    """A hook point that no path reads would pass the test of clean patching."""
    plain = looped(*text)
    other = looped.run_with_cache(text[0].flip(1), text[1])[1]
    ignored = {
        name
        for name in looped.hook_dict
        if torch.equal(
            looped.run_with_hooks(*text, fwd_hooks=[(name, lambda value, hook: other[hook.name].clone())]), plain
        )
    }
    assert not ignored


def test_a_hook_at_one_visit_leaves_the_other_alone(looped: LoopedMoE, text: tuple[Tensor, Tensor]) -> None:
    def silenced(*visits: int) -> tuple[Tensor, dict[str, Tensor]]:
        hooks = [(f"blocks.1.visit.{v}.attn.hook_z", lambda value, hook: torch.zeros_like(value)) for v in visits]
        with looped.hooks(fwd_hooks=hooks):
            logits, cache = looped.run_with_cache(*text)
        return logits, cache

    plain = looped(*text)
    (first, first_cache), (second, second_cache), (both, _) = silenced(1), silenced(2), silenced(1, 2)
    results = [plain, first, second, both]
    assert not any(torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])
    clean = looped.run_with_cache(*text)[1]
    assert torch.equal(second_cache["blocks.1.visit.1.hook_attn_out"], clean["blocks.1.visit.1.hook_attn_out"])
    assert second_cache["blocks.1.visit.2.hook_attn_out"].any() == torch.tensor(False)
    assert first_cache["blocks.1.visit.1.hook_attn_out"].any() == torch.tensor(False)
    assert first_cache["blocks.1.visit.2.hook_attn_out"].any()
    assert torch.equal(looped(*text), plain)


# The pattern


def test_the_observed_pattern_is_the_softmax_of_the_observed_queries_and_keys(
    looped: LoopedMoE, text: tuple[Tensor, Tensor]
) -> None:
    cache = looped.run_with_cache(*text)[1]
    n = text[0].shape[1]
    visible = (text[1][:, :, None] == text[1][:, None, :]) & torch.ones(n, n, dtype=torch.bool).tril()
    for prefix in prefixes(looped):
        q, k = (cache[prefix + f"attn.hook_rot_{x}"].double() for x in "qk")
        for h in range(4):
            scores = torch.einsum("cid,cjd->cij", q[:, :, h], k[:, :, h // 2]) / 4**0.5
            weights = scores.exp() * visible
            expected = weights / weights.sum(-1, keepdim=True)
            pattern = cache[prefix + "attn.hook_pattern"][:, h].double()
            # A weight is at most 1; its score, the largest and the sum are rounded: 64 roundings are far more.
            torch.testing.assert_close(pattern, expected, atol=rounding.bound(torch.float32, 64), rtol=0)


def test_attention_output_is_the_pattern_times_the_values(looped: LoopedMoE, text: tuple[Tensor, Tensor]) -> None:
    """SDPA, which computes it, and the pattern that is shown beside it agree."""
    cache = looped.run_with_cache(*text)[1]
    for prefix in prefixes(looped):
        values = cache[prefix + "attn.hook_v"][:, :, [0, 0, 1, 1]]
        expected = torch.einsum("chij,cjhd->cihd", cache[prefix + "attn.hook_pattern"].double(), values.double())
        # Two computations of the weights, each of two sums (of at most 64 keys), and of the sum of values: 64 roundings.
        near = rounding.bound(values.dtype, 64) * float(values.abs().max())
        torch.testing.assert_close(cache[prefix + "attn.hook_z"].double(), expected, atol=near, rtol=0)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("hook_point", EXPLICIT)
def test_a_change_in_place_is_honoured_as_a_returned_tensor_is(
    hook_point: str, inference: bool, looped: LoopedMoE, text: tuple[Tensor, Tensor]
) -> None:
    name = f"blocks.2.visit.2.attn.{hook_point}"

    def in_place(value: Tensor, hook: Any) -> None:
        value[..., 0] *= 0.5

    def returned(value: Tensor, hook: Any) -> Tensor:
        changed = value.clone()
        changed[..., 0] *= 0.5
        return changed

    with torch.inference_mode(inference):
        plain = looped(*text)
        one, two = (looped.run_with_hooks(*text, fwd_hooks=[(name, hook)]) for hook in (in_place, returned))
    assert torch.equal(one, two)
    assert not torch.allclose(one, plain, atol=1e-4)


def test_an_identity_pattern_makes_each_head_copy_its_own_value(looped: LoopedMoE, text: tuple[Tensor, Tensor]) -> None:
    prefix = "blocks.1.visit.2.attn."

    def identity(value: Tensor, hook: Any) -> Tensor:
        return torch.eye(value.shape[-1]).expand_as(value)

    with looped.hooks(fwd_hooks=[(prefix + "hook_pattern", identity)]):
        cache = looped.run_with_cache(*text)[1]
    assert torch.equal(cache[prefix + "hook_z"], cache[prefix + "hook_v"][:, :, [0, 0, 1, 1]])


@pytest.mark.parametrize("hook_point", EXPLICIT)
def test_a_backward_hook_on_the_pattern_gets_its_gradient(
    hook_point: str, make_model: ModelFactory, text: tuple[Tensor, Tensor]
) -> None:
    """Against finite differences of the summed log-probabilities, along one direction."""
    model = make_model(2, dtype=torch.float64).requires_grad_(True)
    name = f"blocks.1.visit.2.attn.{hook_point}"
    gradients = []
    with model.hooks(bwd_hooks=[(name, lambda gradient, hook: gradients.append(gradient.clone()))]):
        model(*text).log_softmax(-1)[..., 5].sum().backward()
    cache = model.run_with_cache(*text, names_filter=name)[1]
    visible = cache[name] > (0 if hook_point == "hook_pattern" else -torch.inf)
    direction = torch.randn(visible.shape, dtype=torch.float64) * visible

    def moved(amount: float) -> float:
        def hook(value: Tensor, hook: Any) -> Tensor:
            return value + amount * direction

        with torch.no_grad():
            return float(model.run_with_hooks(*text, fwd_hooks=[(name, hook)]).log_softmax(-1)[..., 5].sum())

    slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
    assert float((gradients[0] * direction)[visible].sum()) == pytest.approx(slope, rel=1e-4)


def test_hooks_are_gone_after_use(looped: LoopedMoE, text: tuple[Tensor, Tensor]) -> None:
    looped.run_with_cache(*text)
    looped.run_with_hooks(*text, fwd_hooks=[(lambda _: True, lambda value, hook: None)])
    assert not any(point.has_hooks() for point in looped.hook_dict.values())
