"""Interventions through adapters, on every family: identities to the bit, each site against what a capture then sees, loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.hooks.capture.attention_rule import AttentionRule
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.interventions.intervene import (
    add,
    intervene,
    knock_out_sink,
    mean,
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

Adapted = Callable[..., AdaptedModel]
TOKENS = torch.randint(3, 61, (2, 30), generator=torch.Generator().manual_seed(3))
SEGMENTS = torch.tensor([[0] * 9 + [1] * 21, [2] * 9 + [3] * 18 + [-1] * 3])
NEAR = {"atol": 3e-5, "rtol": 3e-4}


def sites_of(model: AdaptedModel) -> list[str]:
    return [site for site in SITES if site not in model.config.missing]


def steps_with(model: AdaptedModel, site: str) -> list[int]:
    return [s.index for s in model.plan.steps if s.index not in model.absent_steps().get(site, {})]


def run(model: AdaptedModel, *chain: Any, segments: Tensor | None = SEGMENTS) -> Tensor:
    with intervene(model, *chain):
        logits = model(TOKENS, segments)
    assert logits is not None
    return logits if segments is None else logits[segments >= 0]


def seen(model: AdaptedModel, sites: list[str], *chain: Any) -> Captured:
    with intervene(model, *chain), capture(model, sites) as captured:
        model(TOKENS, SEGMENTS, return_type="none")
    return captured


def test_a_site_replaced_by_its_own_value_changes_no_bit(family: str, adapted: Adapted) -> None:
    model = adapted(family)
    sites = sites_of(model)
    for segments, chains in ((None, [sites]), (SEGMENTS, [*([site] for site in sites), sites])):
        plain = run(model, segments=segments)
        assert torch.equal(run(model, *[()], segments=segments), plain)
        with capture(model, sites) as clean:
            model(TOKENS, segments)
        for chain in chains:
            own = [(replace(site, clean), take(site, source=1, visit=1)) for site in chain]
            assert torch.equal(run(model, *own, segments=segments), plain), chain
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.model.modules())
    assert "forward" not in model.__dict__


def test_clean_to_clean_is_exactly_nothing_at_every_layer_and_visit(family: str, adapted: Adapted) -> None:
    model = adapted(family)
    plain = run(model)
    clean = seen(model, sites_of(model))
    for step in model.plan.steps:
        here = [site for site in sites_of(model) if step.index in steps_with(model, site)]
        own = [replace(site, clean, layer=step.layer, visit=step.visit) for site in here]
        assert torch.equal(run(model, *own), plain), step


def test_ablating_a_visit_is_that_visits_alone(loops: list[AdaptedModel]) -> None:
    for model in loops:
        layer = next(layer for layer in model.plan.looped_layers if layer not in model.config.absent.get("PV", {}))
        found = [run(model), *(run(model, zero("PV", layer=layer, visit=visits)) for visits in (1, 2, (1, 2)))]
        assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i]), model.config.family


def test_what_is_put_in_is_what_a_capture_sees_and_the_logits_move(family: str, adapted: Adapted) -> None:
    model, real = adapted(family), SEGMENTS >= 0
    sites = [site for site in sites_of(model) if site not in ("experts", "P")]
    with capture(model, sites) as clean:
        plain = model(TOKENS, SEGMENTS)
    assert plain is not None
    for site in sites:
        step = model.plan.steps[steps_with(model, site)[-1]]
        change = scale(site, 1.5, layer=step.layer, visit=step.visit, token=lambda ids: ids % 2 == 0)
        with intervene(model, change), capture(model, [site]) as captured:
            logits = model(TOKENS, SEGMENTS)
        got, before, chosen = captured.at(site, step.index), clean.at(site, step.index), real & (TOKENS % 2 == 0)
        torch.testing.assert_close(got[chosen], before[chosen] * 1.5, **NEAR)
        torch.testing.assert_close(got[real & ~chosen], before[real & ~chosen], atol=0, rtol=0)
        assert logits is not None and not torch.equal(logits[real], plain[real]), site


def test_a_pattern_by_head_query_and_sink(family: str, adapted: Adapted) -> None:
    model = adapted(family)
    step = model.plan.steps[steps_with(model, "P")[-1]]
    place = {"layer": step.layer, "visit": step.visit}
    before = seen(model, ["P"]).at("P", step.index)
    got = seen(model, ["P", "PV"], zero("P", head=1, token=4, **place))
    assert not got.at("P", step.index)[:, 1, 4].any()
    assert torch.equal(got.at("P", step.index)[:, 0], before[:, 0])
    assert not got.at("PV", step.index)[:, 4, 1].any() and bool(got.at("PV", step.index)[:, 4, 0].any())
    rows = seen(model, ["P"], knock_out_sink(**place)).at("P", step.index)
    for context, start, end in ((0, 0, 9), (0, 9, 30), (1, 9, 27)):
        p, q = (x[context, :, start:end, start:end] for x in (before, rows))
        assert not q[:, 1:, 0].any()
        left = p[:, 1:, 1:]  # a learned sink keeps its mass
        whole = p[:, 1:].sum(-1, keepdim=True)
        torch.testing.assert_close(q[:, 1:, 1:], left / left.sum(-1, keepdim=True) * whole, **NEAR)
        assert torch.equal(q[:, 0], p[:, 0])


def tied(model: Any) -> Any:
    """The same model with its last layer's Parameters in every layer but the first: layers 1 and 2 are one, run twice."""
    layers = model.model.layers
    layers[1].load_state_dict(layers[2].state_dict())
    for name, parameter in layers[2].named_parameters():
        owner = layers[1].get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], parameter)
    return model


@pytest.fixture(scope="module")
def loops(adapted: Adapted, make_hf: Callable[..., Any]) -> list[AdaptedModel]:
    recursive = [adapt(tied(make_hf(family))) for family in ("llama", "olmoe", "gpt_oss")]
    return [*(adapted(f) for f in ("dory", "inkling2_loop_text", "hrm_text", "albert", "zamba2")), *recursive]


def test_frozen_and_swapped_sites(loops: list[AdaptedModel]) -> None:
    for model in loops:
        layer = next(layer for layer in model.plan.looped_layers if layer not in model.config.absent.get("Q", {}))
        for site in ("K", "P", "PV", "attn_write", "moe_in", "router", "experts", "gates", "expert_out"):
            if site in model.config.missing or layer in model.config.absent.get(site, {}):
                continue
            got = seen(model, [site], take(site, layer=layer, visit=2))
            assert torch.equal(got.get(site, layer, 2).nan_to_num(), got.get(site, layer, 1).nan_to_num()), site
        clean, both = seen(model, ["Q"]), seen(model, ["Q"], swap("Q", layer=layer))
        for here, there in ((1, 2), (2, 1)):
            assert torch.equal(both.get("Q", layer, here).nan_to_num(), clean.get("Q", layer, there).nan_to_num())


def test_skipping_the_second_visit_is_the_model_without_it(make_hf: Callable[..., Any]) -> None:
    """Where visits follow each other without more in between, it is the same weights run once."""
    for family in ("llama", "qwen3", "olmoe", "gpt_oss", "albert"):
        raw = make_hf(family)
        if family == "albert":
            raw.config.num_hidden_groups = 1
            raw.base_model.config.num_hidden_groups = 1
        model = adapt(raw if family == "albert" else tied(raw))
        layer = model.plan.looped_layers[0]
        skipped = run(model, skip(layer=layer, visit=tuple(range(2, model.plan.visits[layer] + 1))))
        assert not torch.equal(skipped, run(model))
        if family == "albert":
            assert torch.equal(skipped, run(model.with_loop_count(1)))
        else:
            del raw.model.layers[2]
            raw.config.num_hidden_layers = 2
            assert torch.equal(skipped, run(adapt(raw)))


def test_another_loop_count_is_the_model_configured_so(make_hf: Callable[..., Any]) -> None:
    for family, name, count in (
        ("dory", "n_recurrent_loops", 2),
        ("inkling2_loop_text", "loop_num_passes", 2),
        ("hrm_text", "H_cycles", 3),
        ("hrm_text", "H_cycles", 1),
    ):
        raw = make_hf(family)
        model, plain = adapt(raw), run(adapt(raw))
        other = with_loop_count(model, count)
        expected = adapt(make_hf(family, **{name: count}))
        assert other.plan == expected.plan and other.plan != model.plan
        assert torch.equal(run(other), run(expected)) and torch.equal(run(model), plain)
        assert all(a is b for a, b in zip(other.parameters(), model.parameters(), strict=True))
    with pytest.raises(InputError, match="leave residual_scale out"):
        with_loop_count(model, 2, "rescaled")
    with pytest.raises(InputError, match="at least 1 visit, a whole number, got 0"):
        with_loop_count(model, 0)
    with pytest.raises(InputError, match="no loop count that is read when it runs"):
        with_loop_count(adapt(make_hf("zamba")), 2)


def test_experts_by_choice_gate_and_output(adapted: Adapted) -> None:
    for family in ("qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "gpt_oss", "inkling2_loop_text"):
        model = adapted(family)
        step = model.plan.steps[steps_with(model, "experts")[-1]]
        at, place, real = step.index, {"layer": step.layer, "visit": step.visit}, SEGMENTS >= 0
        sites = ["router", "experts", "gates", "expert_out", "moe_write"]
        clean = seen(model, sites)
        used, gates, outputs = (clean.at(site, at)[real] for site in ("experts", "gates", "expert_out"))
        expert = int(used[0, 0])
        hit = used == expert
        silenced = run(model, zero("expert_out", expert=expert, **place))
        torch.testing.assert_close(silenced, run(model, zero("gates", expert=expert, **place)), **NEAR)
        assert not torch.equal(silenced, run(model))
        tripled = seen(model, ["expert_out"], scale("expert_out", 3.0, expert=expert, **place)).at("expert_out", at)
        torch.testing.assert_close(tripled[real], torch.where(hit.unsqueeze(-1), 3 * outputs, outputs), **NEAR)
        average = outputs.flatten(0, 1)[hit.flatten()].mean(0)
        for over in (None, site_means_of(model)):
            got = seen(model, ["expert_out"], mean("expert_out", over, expert=expert, **place)).at("expert_out", at)
            torch.testing.assert_close(got[real][hit], average.expand(int(hit.sum()), -1), **NEAR)
        # Another choice: the gates are the family's own for it.
        other = seen(model, sites, replace("experts", clean.at("experts", at).flip(-1), **place))
        assert torch.equal(other.at("experts", at)[real], used.flip(-1))
        torch.testing.assert_close(other.at("gates", at)[real], gates.flip(-1), **NEAR)
        torch.testing.assert_close(other.at("moe_write", at)[real], clean.at("moe_write", at)[real], **NEAR)
        # Scores: what is shut out is not chosen, and gates follow.
        shut = seen(model, sites, replace("router", -1e4, expert=expert, **place))
        torch.testing.assert_close(shut.at("router", at)[real][:, expert], torch.full((57,), -1e4))
        if "softmax router" not in model.config.missing:  # a sigmoid's bias may choose it all the same
            assert not bool((shut.at("experts", at)[real] == expert).any()) and bool(hit.any())


def site_means_of(model: AdaptedModel) -> Any:
    from visitlens.hooks.text.packed_tokens import PackedTokens

    packed = PackedTokens(
        TOKENS.numpy().astype("int32"),
        SEGMENTS.numpy().astype("int32"),
        torch.arange(4).numpy().astype("int32"),
        torch.arange(4).numpy().astype("uint64"),
    )
    return site_means(model, packed, ["expert_out"], batch=2)


def test_a_batch_of_documents_of_several_lengths(adapted: Adapted) -> None:
    """`mean` and `resample` reach the other documents, positions are those of the context, each document is its own."""
    model, real = adapted("llama"), SEGMENTS >= 0
    clean = seen(model, ["V"]).at("V", 1)
    got = seen(model, ["V"], mean("V", layer=1)).at("V", 1)
    torch.testing.assert_close(got[real], clean[real].mean(0).expand_as(got[real]))
    got = seen(model, ["V"], resample("V", layer=1, seed=2)).at("V", 1)
    for c, i in ((0, 3), (0, 20), (1, 10)):
        source = (clean == got[c, i]).all(-1).all(-1)
        assert bool(source.any()) and not bool((source & (SEGMENTS[c, i] == SEGMENTS)).any())
    got = seen(model, ["V"], add("V", 1.0, layer=1, token=[10, 28])).at("V", 1)
    moved = (got - clean).abs().amax((2, 3)) > 0.5
    assert moved.nonzero().tolist() == [[0, 10], [0, 28], [1, 10]]
    got = seen(model, ["V"], add("V", 1.0, layer=1, token="start")).at("V", 1)
    assert ((got - clean).abs().amax((2, 3)) > 0.5).nonzero().tolist() == [[0, 0], [0, 9], [1, 0], [1, 9]]


def test_order_at_one_site_nested_and_along_the_steps(loops: list[AdaptedModel]) -> None:
    for model in loops[:2]:
        layer = next(layer for layer in model.plan.looped_layers if layer not in model.config.absent.get("Q", {}))
        for site in ("Q", "PV", "moe_in"):
            plus, double = (op(site, x, layer=layer, visit=2) for op, x in ((add, 1.0), (scale, 2.0)))
            clean = seen(model, [site]).get(site, layer, 2).nan_to_num()
            got = seen(model, [site], plus, double).get(site, layer, 2).nan_to_num()
            real = SEGMENTS >= 0
            torch.testing.assert_close(got[real], ((clean + 1) * 2)[real], **NEAR)
            with intervene(model, double):
                got = seen(model, [site], plus).get(site, layer, 2)
            torch.testing.assert_close(got[real], (clean * 2 + 1)[real], **NEAR)


def test_sdpa_stays_in_use_unless_the_pattern_is_changed(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[int] = []
    attended: list[int] = []
    rows, sdpa = AttentionRule.pattern, torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(AttentionRule, "pattern", lambda *given: formed.append(1) or rows(*given))
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: attended.append(1) or sdpa(*a, **k)
    )
    model = adapted("dory")
    with intervene(model, zero("V", layer=1), scale("PV", 2.0), take("K", layer=1, visit=2), swap("Q", layer=2)):
        model(TOKENS)
    assert len(attended) == 2 * len(model.plan) and not formed, "twice, for swap"
    with intervene(model, zero("P", layer=1, visit=3, head=2)):
        model(TOKENS)
    assert len(formed) == 1


def test_gradients_reach_what_is_put_in(family: str, adapted: Adapted) -> None:
    model = adapted(family)
    step = model.plan.steps[steps_with(model, "PV")[-1]]
    factor = torch.ones((), requires_grad=True)

    def loss(value: Any) -> Tensor:
        with intervene(model, scale("PV", value, layer=step.layer, visit=step.visit, head=0)):
            return model(TOKENS, SEGMENTS, return_type="loss").double().nansum()  # type: ignore[union-attr]  # a tensor

    (gradient,) = torch.autograd.grad(loss(factor), factor)
    with torch.no_grad():
        slope = (loss(1.002) - loss(0.998)) / 0.004  # less would drown in float32, more flips an expert
    assert float(gradient) == pytest.approx(float(slope), rel=0.05, abs=5e-3) and float(gradient) != 0.0


def test_what_a_family_lacks_is_refused_with_the_reason(adapted: Adapted) -> None:
    for family, chain, said in (
        (
            "llama",
            zero("gates", expert=1),
            "llama has no site 'gates': its feed-forward layers are dense.*it has resid, X",
        ),
        ("zamba", skip(layer=2, visit=2), "isn't added to the residual"),
        ("zamba", zero("Q", layer=0), "a Mamba layer"),
        ("qwen3_moe", zero("router", layer=0), "a dense feed-forward layer among MoE layers"),
        ("inkling2_loop_text", zero("resid"), "no residual stream"),
        ("dory", zero("PV", layer=9), "no layer 9"),
        ("dory", zero("PV", layer=1, token=500), "matched nothing in 1 forward"),
    ):
        with pytest.raises(InputError, match=said):
            run(adapted(family), chain)
    model = adapted("llama")
    with intervene(model, zero("V")), pytest.raises(InputError, match="call the adapted model itself"):
        model.model(TOKENS)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_no_hook_is_left_behind(error: type[BaseException], adapted: Adapted) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for family in ("dory", "olmoe"):
        model = adapted(family)
        plain, before = run(model), ALL_ATTENTION_FUNCTIONS["sdpa"]
        with (
            pytest.raises(error),
            intervene(model, zero("PV")),
            intervene(model, swap("V") if family == "dory" else zero("K")),
        ):
            model(TOKENS)
            raise error
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.model.modules())
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before and torch.equal(run(model), plain)
