"""Interventions: identities are bit-identical, each operation against a hand-made hook, order, errors, no hook left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.interventions.forward import Forward
from visitlens.hooks.interventions.intervene import (
    add,
    intervene,
    knock_out_sink,
    mean,
    project_out,
    replace,
    resample,
    scale,
    site_means,
    skip,
    swap,
    take,
    with_loop_count,
    zero,
)
from visitlens.hooks.interventions.operations import means_by_expert
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.packed_tokens import PackedTokens

ModelFactory = Callable[..., LoopedMoE]
SIX = ("Q", "K", "V", "experts", "gates", "expert_in")
"""All that visit 2 can do otherwise than visit 1."""


@pytest.fixture(scope="module")
def packed(make_text: Callable[..., PackedTokens]) -> PackedTokens:
    return make_text(lengths=(9, 20, 3, 30, 12, 2, 14))


@pytest.fixture(scope="module")
def text(packed: PackedTokens) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(packed.tokens), torch.from_numpy(packed.segments)


@pytest.fixture(scope="module")
def looped(make_model: ModelFactory) -> LoopedMoE:
    return make_model(2, qk_norm=True)


@pytest.fixture(scope="module")
def clean(looped: LoopedMoE, text: tuple[Tensor, Tensor]) -> Captured:
    with capture(looped, SITES) as captured:
        looped(*text)
    return captured


def intervened(model: LoopedMoE, text: tuple[Tensor, Tensor], *interventions: Any) -> Tensor:
    with intervene(model, *interventions):
        return model(*text)


def seen(model: LoopedMoE, text: tuple[Tensor, Tensor], site: str, *interventions: Any) -> Captured:
    with intervene(model, *interventions), capture(model, [site]) as captured:
        model(*text)
    return captured


# Identities


@pytest.mark.parametrize("site", SITES)
def test_a_site_replaced_by_its_own_value_changes_no_bit(site, looped, text, clean) -> None:
    plain = looped(*text)
    assert torch.equal(intervened(looped, text, replace(site, clean)), plain)
    assert torch.equal(intervened(looped, text, take(site, source=1, visit=1)), plain)


def test_no_intervention_and_neutral_ones_change_no_bit(looped, text) -> None:
    plain = looped(*text)
    assert torch.equal(intervened(looped, text), plain)
    assert torch.equal(intervened(looped, text, scale("V", 1.0), add("resid", 0.0), scale("P", 1.0)), plain)


def test_freezing_a_model_that_runs_its_span_once(make_model, text) -> None:
    once = with_loop_count(make_model(2), 1)
    assert torch.equal(intervened(once, text, *(take(site, visit=1) for site in SIX)), once(*text))
    with pytest.raises(InputError, match="matched nothing"):
        intervened(once, text, take("V"))


@pytest.mark.parametrize("visits", [2, 3])
def test_the_six_elementary_sites_are_all_that_a_later_visit_does_otherwise(visits, make_model, text) -> None:
    model = make_model(visits, shared_expert_dim=4)
    frozen = intervened(model, text, *(take(site) for site in SIX))
    repeated = intervened(model, text, take("attn_write"), take("moe_write"))
    assert torch.equal(frozen, repeated) and not torch.allclose(frozen, model(*text), atol=1e-3)
    for left_out in SIX:
        assert not torch.equal(intervened(model, text, *(take(s) for s in SIX if s != left_out)), repeated), left_out


def test_skipping_visit_2_of_the_block_is_the_same_model_run_once_at_its_scale(looped, text) -> None:
    once = with_loop_count(looped, 1, "kept")
    assert torch.equal(intervened(looped, text, skip(visit=2, layer=(1, 2))), once(*text))
    assert torch.equal(intervened(looped, text, skip(visit=2)), once(*text))
    assert not torch.allclose(once(*text), looped(*text), atol=1e-3)
    assert not torch.allclose(once(*text), with_loop_count(looped, 1)(*text), atol=1e-3)


def test_another_loop_count_has_its_plan_its_scale_and_the_same_parameters(looped, text) -> None:
    assert torch.equal(with_loop_count(looped, 2)(*text), looped(*text))
    for visits in (1, 3, 8):
        more = with_loop_count(looped, visits)
        assert len(more.plan) == 2 + 2 * visits and more.blocks[1].scale == 1 / visits and more.blocks[0].scale == 1
        assert all(a is b and not b.requires_grad for a, b in zip(more.parameters(), looped.parameters(), strict=True))
        assert with_loop_count(looped, visits, "kept").blocks[2].scale == 0.5
        assert bool(more(*text).isfinite().all()) and not more.training
    four = with_loop_count(looped, 4, "kept")
    assert torch.equal(intervened(four, text, skip(visit=(3, 4))), looped(*text))


# Operations, each against a hook written by hand


def by_hand(model: LoopedMoE, text: tuple[Tensor, Tensor], name: str, change: Callable[[Tensor], None]) -> Tensor:
    def hook(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        change(value)
        return value

    return model.run_with_hooks(*text, fwd_hooks=[(name, hook)])


def test_zero_and_scale_at_one_head_of_one_visit(looped, text) -> None:
    def silence(z: Tensor) -> None:
        z[:, :, 3] = 0

    def triple(k: Tensor) -> None:
        k[:, :, 1] *= 3

    expected = by_hand(looped, text, "blocks.2.visit.2.attn.hook_z", silence)
    assert torch.equal(intervened(looped, text, zero("PV", layer=2, visit=2, head=3)), expected)
    expected = by_hand(looped, text, "blocks.0.visit.1.attn.hook_rot_k", triple)
    assert torch.equal(intervened(looped, text, scale("K", 3, layer=0, head=[1])), expected)


def test_a_pattern_takes_heads_and_queries_on_their_own_axes(looped, text) -> None:
    def change(p: Tensor) -> None:
        p[:, 1, 5] = 0

    expected = by_hand(looped, text, "blocks.1.visit.2.attn.hook_pattern", change)
    assert torch.equal(intervened(looped, text, zero("P", layer=1, visit=2, head=1, token=5)), expected)


def test_tokens_by_position_mask_function_and_segment_start(looped, text, clean) -> None:
    tokens, segments = text
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    rare = tokens == tokens[0, 4]
    for choice, mask in (
        ("start", starts),
        (rare, rare),
        (lambda ids: ids == tokens[0, 4], rare),
        ([0, 31], torch.arange(32).expand(len(tokens), 32) % 31 == 0),
    ):
        changed = seen(looped, text, "V", add("V", 1.0, layer=1, visit=1, token=choice)).get("V", 1, 1)
        difference = (changed - clean.get("V", 1, 1)).abs().amax((2, 3))
        assert torch.equal(difference > 0.5, mask)


def test_silencing_an_expert_zeroes_its_gates_alone(looped, text, clean) -> None:
    used = clean.get("experts", 2, 1)
    expert = int(used[0, 3, 0])
    gates = seen(looped, text, "gates", zero("gates", layer=2, visit=1, expert=expert)).get("gates", 2, 1)
    assert torch.equal(gates, clean.get("gates", 2, 1).masked_fill(used == expert, 0))
    out = seen(looped, text, "experts", replace("router", -torch.inf, layer=2, visit=1, expert=expert))
    assert not bool((out.get("experts", 2, 1) == expert).any())
    swapped = seen(looped, text, "experts", replace("experts", 0, layer=2, visit=1, expert=expert)).get("experts", 2, 1)
    assert torch.equal(swapped, used.masked_fill(used == expert, 0))


def test_an_experts_output_is_what_its_gate_weighs(looped, text, clean, packed) -> None:
    """Silenced, scaled, at its mean over the tokens that use it, or replaced: by choice of the expert at one visit."""
    real, used = text[1] >= 0, clean.get("experts", 2, 2)
    outputs, gates = clean.get("expert_out", 2, 2), clean.get("gates", 2, 2)
    total = (outputs * gates.unsqueeze(-1)).sum(2) * looped.blocks[2].scale
    torch.testing.assert_close(total, clean.get("moe_write", 2, 2), atol=1e-6, rtol=1e-5)
    expert = int(used[0, 3, 0])
    hit, at = (used == expert).unsqueeze(-1), {"layer": 2, "visit": 2, "expert": expert}
    average = outputs[real][(used == expert)[real]].mean(0)
    over = site_means(looped, packed, ["expert_out"], batch=2)
    torch.testing.assert_close(over["expert_out", looped.plan.step(2, 2).index][expert].float(), average)
    for change, expected in (
        (zero("expert_out", **at), outputs.masked_fill(hit, 0)),
        (scale("expert_out", -2.0, **at), torch.where(hit, -2 * outputs, outputs)),
        (mean("expert_out", **at), torch.where(hit, average, outputs)),
        (mean("expert_out", over, **at), torch.where(hit, average, outputs)),
        (replace("expert_out", torch.ones(16), **at), torch.where(hit, 1.0, outputs)),
    ):
        got = seen(looped, text, "moe_write", change).get("moe_write", 2, 2)
        wanted = (expected * gates.unsqueeze(-1)).sum(2) * looped.blocks[2].scale
        torch.testing.assert_close(got[real], wanted[real], atol=1e-6, rtol=1e-5)
        assert not torch.equal(got[real], clean.get("moe_write", 2, 2)[real])
    silenced = intervened(looped, text, zero("expert_out", **at))
    torch.testing.assert_close(silenced, intervened(looped, text, zero("gates", **at)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_half_precision_are_added_up_in_more(
    dtype: torch.dtype, make_model: ModelFactory, packed, text
) -> None:
    """Added up in their own dtype, 4,000 values of 30,000 are infinite in float16, and in bfloat16 a sum of 256 no longer grows."""
    values = torch.full((4000, 2, 1), 30_000.0, dtype=dtype)
    experts = torch.tensor([[0, 1], [1, 2]]).repeat(2000, 1)
    by_expert = means_by_expert(values, experts, 4)
    assert by_expert.squeeze(1).tolist() == [float(values[0, 0, 0])] * 3 + [0.0]

    model, real = make_model(2, dtype=dtype), text[1] >= 0
    with capture(model, ["expert_out", "experts", "V"]) as plain:
        model(*text)
    used, outputs = (plain.get(site, 2, 2)[real] for site in ("experts", "expert_out"))
    exact = {e: outputs[used == e].double().mean(0) for e in used.unique().tolist()}
    whole = len(packed.tokens)  # in one batch, as the run above: values of another batch's shape are rounded otherwise
    for over in (None, site_means(model, packed, ["expert_out", "V"], batch=whole)):
        got = seen(model, text, "expert_out", mean("expert_out", over, layer=2, visit=2)).get("expert_out", 2, 2)[real]
        for expert, average in exact.items():
            at_each = got[used == expert]
            assert torch.equal(at_each, average.to(dtype).expand_as(at_each)), (over is None, expert)
        v = seen(model, text, "V", mean("V", over, layer=2, visit=2)).get("V", 2, 2)[real]
        assert torch.equal(v, plain.get("V", 2, 2)[real].double().mean(0).to(dtype).expand_as(v))


def test_mean_over_the_batch_and_over_a_sample(looped, text, clean, packed) -> None:
    real = text[1] >= 0
    over = site_means(looped, packed, ["PV"], batch=2)
    for visit, means in ((1, None), (2, over)):
        got = seen(looped, text, "PV", mean("PV", means, layer=1, visit=visit, head=2)).get("PV", 1, visit)
        before = clean.get("PV", 1, visit)
        torch.testing.assert_close(got[:, :, 2], before[real].mean(0)[2].expand_as(got[:, :, 2]))
        assert torch.equal(got[:, :, :2], before[:, :, :2])


def test_resampled_values_come_from_other_documents(looped, text, clean) -> None:
    got = seen(looped, text, "attn_write", resample("attn_write", seed=3, layer=0)).get("attn_write", 0, 1)
    before, segments = clean.get("attn_write", 0, 1), text[1]
    for c, i in [(0, 0), (0, 17), (1, 5), (2, 8)]:  # every BOS has the same value, so that the own one may have it too
        source = (before == got[c, i]).all(-1)
        assert bool(source[segments != segments[c, i]].any())
        assert not torch.equal(got[c, i], before[c, i]) or i == 0
    assert torch.equal(
        intervened(looped, text, resample("V", 1, layer=0)), intervened(looped, text, resample("V", 1, layer=0))
    )


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.integers(0, 5), st.integers(0, 99))
def test_a_draw_never_meets_its_own_segment_or_padding(lengths: list[int], padding: int, seed: int) -> None:
    ids = np.repeat([*range(len(lengths)), -1], [*lengths, padding])
    forward = Forward(torch.zeros(1, len(ids), dtype=torch.long), torch.from_numpy(ids)[None])
    drawn = ids[forward.other_documents(seed).numpy()]
    assert (drawn[ids >= 0] != ids[ids >= 0]).all() and (drawn >= 0).all()


def test_projecting_out_leaves_nothing_along_the_directions(looped, text, clean) -> None:
    directions = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    directions[2] = directions[0] - 2 * directions[1]  # two independent ones
    before = clean.get("attn_write", 1, 2)
    got = seen(looped, text, "attn_write", project_out("attn_write", directions, layer=1, visit=2)).get(
        "attn_write", 1, 2
    )
    assert float((got @ directions.T).abs().max()) < 1e-5
    removed = before - got
    assert torch.linalg.matrix_rank(removed.reshape(-1, 16), tol=1e-4) == 2
    one = seen(looped, text, "resid", project_out("resid", torch.eye(16)[4] * 7, layer=0)).get("resid", 0, 1)
    torch.testing.assert_close(one, clean.get("resid", 0, 1) * (torch.arange(16) != 4))


# Between visits


@pytest.mark.parametrize("site", [*SIX, "P", "X", "PV", "attn_write"])
def test_a_later_visit_takes_what_the_earlier_had(site, make_model, text) -> None:
    model = make_model(3)
    got = seen(model, text, site, take(site, source=1, visit=3))
    plain = seen(model, text, site)
    for layer in (1, 2):
        assert torch.equal(got.get(site, layer, 3), got.get(site, layer, 1))
        assert torch.equal(got.get(site, layer, 2), plain.get(site, layer, 2))


def test_what_is_taken_is_the_value_after_its_own_interventions(looped, text, clean) -> None:
    got = seen(looped, text, "V", scale("V", 2.0, visit=1, layer=(1, 2)), take("V"), add("V", 1.0, visit=2, layer=1))
    torch.testing.assert_close(got.get("V", 1, 2), 2 * clean.get("V", 1, 1) + 1)
    assert torch.equal(got.get("V", 2, 2), got.get("V", 2, 1))


def test_swapped_visits_have_each_others_values(looped, text, clean) -> None:
    got = seen(looped, text, "Q", swap("Q", layer=1))
    assert torch.equal(got.get("Q", 1, 1), clean.get("Q", 1, 2))
    assert torch.equal(got.get("Q", 1, 2), clean.get("Q", 1, 1))
    assert not torch.equal(got.get("Q", 2, 1), clean.get("Q", 2, 2))


@pytest.mark.parametrize("mass", ["renormalise", "drop"])
def test_no_query_but_the_start_sees_the_start(mass, looped, text, clean) -> None:
    rows = seen(looped, text, "P", knock_out_sink(mass, layer=2, visit=2)).get("P", 2, 2)
    before, segments = clean.get("P", 2, 2), text[1]
    for c, i in [(0, 4), (0, 12), (1, 20), (2, 6)]:
        start = int((segments[c] == segments[c, i]).nonzero()[0])
        expected = before[c, :, i].clone()
        expected[:, start] = 0
        if mass == "renormalise":
            expected /= expected.sum(-1, keepdim=True)
        torch.testing.assert_close(rows[c, :, i], expected)
        assert torch.equal(rows[c, :, start], before[c, :, start])


# Order


def test_at_one_site_interventions_act_in_the_order_given_and_a_nested_one_acts_last(looped, text, clean) -> None:
    v = clean.get("V", 1, 2)
    plus, double = add("V", 1.0, layer=1, visit=2), scale("V", 2.0, layer=1, visit=2)
    torch.testing.assert_close(seen(looped, text, "V", plus, double).get("V", 1, 2), (v + 1) * 2)
    torch.testing.assert_close(seen(looped, text, "V", double, plus).get("V", 1, 2), v * 2 + 1)
    with intervene(looped, double):
        torch.testing.assert_close(seen(looped, text, "V", plus).get("V", 1, 2), v * 2 + 1)


def test_later_steps_see_what_earlier_ones_became(looped, text) -> None:
    first = add("resid", torch.linspace(-1, 1, 16), layer=0)
    after = seen(looped, text, "resid", first)
    both = seen(looped, text, "resid", scale("resid", 2.0, layer=1, visit=2), first)
    torch.testing.assert_close(both.get("resid", 1, 2), 2 * after.get("resid", 1, 2))


def test_a_nested_intervention_chooses_its_tokens(make_model: ModelFactory) -> None:
    model, tokens = make_model(2), torch.arange(3, 13).unsqueeze(0)
    one, two = scale("V", 1.5, visit=1), zero("PV", token=[2, 5])
    with intervene(model, one, two):
        together = model(tokens)
    with intervene(model, one), intervene(model, two):
        assert torch.equal(model(tokens), together)


def test_a_nested_swap_reads_the_run_inside_the_outer_intervention(looped, text) -> None:
    outer = scale("V", 2.0, layer=1, visit=1)
    plain = seen(looped, text, "V", outer)
    with intervene(looped, outer):
        got = seen(looped, text, "V", swap("V", layer=1))
    assert torch.equal(got.get("V", 1, 2), plain.get("V", 1, 1))


# Gradients, generation, what is left behind


def test_gradients_flow_through_an_intervention(make_model, text) -> None:
    model = make_model(2, dtype=torch.float64)
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)

    def loss(value: Any) -> Tensor:
        with intervene(model, scale("PV", value, layer=1, visit=2, head=0)):
            return model(*text, return_type="loss").nansum()

    (gradient,) = torch.autograd.grad(loss(factor), factor)
    with torch.no_grad():
        slope = (loss(1 + 1e-5) - loss(1 - 1e-5)) / 2e-5
    assert float(gradient) == pytest.approx(float(slope), rel=1e-5) and abs(float(slope)) > 1e-4


def test_a_kv_cache_gives_the_same_as_the_whole_context(make_model) -> None:
    model, tokens = make_model(2), torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(2))
    for chain in ((take("V"), zero("PV", layer=3, head=1)), (knock_out_sink(visit=2),), (add("V", 1.0, token=[0, 7]),)):
        with intervene(model, *chain):
            whole, cache = model(tokens), model.new_cache()
            parts = [model(tokens[:, i : i + 1], cache=cache) for i in range(9)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_no_hook_is_left_behind(error, looped, text) -> None:
    plain = looped(*text)
    with pytest.raises(error), intervene(looped, zero("PV")), intervene(looped, swap("V")):
        looped(*text)
        raise error
    assert not any(point.has_hooks() for point in looped.hook_dict.values())
    assert "forward" not in looped.__dict__ and torch.equal(looped(*text), plain)


def test_run_with_hooks_works_inside(looped, text) -> None:
    names: list[str] = []
    with intervene(looped, zero("V", visit=2)):
        inside = looped.run_with_hooks(*text, fwd_hooks=[("hook_embed", lambda v, hook: names.append("x"))])
        assert torch.equal(inside, looped(*text)) and names == ["x"]
