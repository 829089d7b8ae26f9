"""The contract that every adapter gets for free: plan, residual arithmetic, attention rows, documents, padding, caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support import rounding
from torch import Tensor

from visitlens.errors import InputError, PlanError
from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.hooks.capture.attention_rule import AttentionRule
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.core.sites import SITES

Adapted = Callable[..., AdaptedModel]
TOKENS = torch.randint(3, 61, (2, 30), generator=torch.Generator().manual_seed(3))
SEGMENTS = torch.tensor([[0] * 9 + [1] * 21, [2] * 9 + [3] * 18 + [-1] * 3])
DOCUMENTS = [(0, slice(0, 9)), (0, slice(9, 30)), (1, slice(0, 9)), (1, slice(9, 27))]
BOTH_WAYS = {"albert"}
SINK_SLOT = {"gpt_oss", "inkling2_loop_text"}
WINDOWED = {"gpt_oss", "dory", "inkling2_loop_text"}
NEAR = {"atol": 3e-5, "rtol": 3e-4}


DENSE = ("albert", "dory", "hrm_text", "llama", "qwen3", "zamba", "zamba2")


def sites_of(model: AdaptedModel) -> list[str]:
    return [site for site in SITES if site not in model.config.missing]


def captured(model: AdaptedModel, tokens: torch.Tensor, segments: torch.Tensor | None = None) -> Captured:
    with capture(model, sites_of(model)) as values:
        model(tokens, segments, return_type="none")
    return values


def steps_with(model: AdaptedModel, site: str) -> list[int]:
    absent = model.absent_steps().get(site, {})
    return [s.index for s in model.plan.steps if s.index not in absent]


def test_the_steps_are_those_written_by_hand(family: str, adapted: Adapted, expected_steps: dict) -> None:
    model = adapted(family)
    assert [(s.layer, s.visit) for s in model.plan.steps] == expected_steps[family]
    captured(model, TOKENS[:1])  # the clock holds the calls to the plan
    physical = {
        frozenset(id(p) for p in model.body.get_submodule(path).parameters()) for path in model.config.layer_names
    }
    assert len(physical) == len(model.config.layer_names), "a physical layer is its Parameters"


def test_observation_leaves_the_logits_bit_identical(family: str, adapted: Adapted) -> None:
    model = adapted(family)
    plain = model.model(TOKENS, **model.family.call).logits
    with capture(model, sites_of(model)):
        assert torch.equal(model.model(TOKENS, **model.family.call).logits, plain)
        assert torch.equal(model(TOKENS), plain)
    assert torch.equal(model(TOKENS), plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.model.modules())


def test_residual_and_writes_make_the_next_residual_or_the_family_says_why_not(family: str, adapted: Adapted) -> None:
    model = adapted(family)
    outputs: list[torch.Tensor] = []
    handles = []
    for path in dict.fromkeys(path for layer in model.anatomy.layers for path in layer.modules):
        module = model.body.get_submodule(path)
        handles.append(
            module.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        )
    values = captured(model, TOKENS)
    for handle in handles:
        handle.remove()
    assert len(outputs) == len(model.plan)
    if "sum of writes" in model.config.missing:
        assert len(model.config.missing["sum of writes"]) > 40
        return
    chained = 0
    for step in range(len(model.plan)):
        total = values.at("resid", step) + values.at("attn_write", step) + values.at("moe_write", step)
        torch.testing.assert_close(total, outputs[step], **NEAR)
        if step + 1 < len(model.plan):
            chained += torch.allclose(outputs[step], values.at("resid", step + 1), atol=0, rtol=0)
    breaks = 7 if family == "hrm_text" else 0  # a stack's end: normalised, and summed with the other state
    assert chained == len(model.plan) - 1 - breaks


def test_rows_are_the_models_own(family: str, adapted: Adapted) -> None:
    """P sums to 1 (with the sink slot, where there is one), stays in its document, its past and its window, and P V is PV."""
    model = adapted(family)
    values = captured(model, TOKENS, SEGMENTS)
    heads = model.config.num_heads // model.config.num_kv_heads
    beyond_window = 0
    for step in steps_with(model, "P"):
        maps, v, pv = (values.at(site, step) for site in ("P", "V", "PV"))
        for context, span in DOCUMENTS:
            p = maps[context, :, span]
            inside = p[..., span]
            assert not p.masked_fill(
                torch.ones_like(p).bool().index_fill(-1, torch.arange(30)[span], False) == 0, 0
            ).any()
            sums = inside.sum(-1)
            if family in SINK_SLOT:
                assert bool((sums < 1).all()) and bool((sums > 0).all())
            else:
                torch.testing.assert_close(sums, torch.ones_like(sums), **NEAR)
            if family not in BOTH_WAYS:
                assert not inside.triu(1).any()
            beyond_window += int((inside.tril(-12) == 0).all()) if inside.shape[-1] > 12 else 0
            context_of = (inside @ v[context, span].transpose(0, 1).repeat_interleave(heads, 0)).transpose(0, 1)
            torch.testing.assert_close(context_of, pv[context, span], **NEAR)
    assert bool(beyond_window) == (family in WINDOWED)


def test_row_statistics_are_those_of_the_map(family: str, adapted: Adapted) -> None:
    model = adapted(family)
    with capture(model, ["Q", "K", "P"]) as values:
        model(TOKENS, SEGMENTS, return_type="none")
    found = StepValues(values, SEGMENTS, "torch")
    for step in steps_with(model, "P"):
        maps = values.at("P", step)
        documents = [maps[context, :, span, span].transpose(0, 1) for context, span in DOCUMENTS]
        rows = found.attention_rows[step]
        torch.testing.assert_close(rows.sink_mass, torch.cat([p[..., 0] for p in documents]), **NEAR)
        torch.testing.assert_close(rows.first4_mass, torch.cat([p[..., :4].sum(-1) for p in documents]), **NEAR)
        entropy = [
            torch.special.entr(p).sum(-1) for p in documents
        ]  # over keys: what a learned sink takes is no outcome
        torch.testing.assert_close(rows.entropy, torch.cat(entropy), atol=2e-4, rtol=1e-3)
    for layer, overlaps in found.attention_overlaps.items():
        visits = [s.index for s in model.plan.steps if s.layer == layer]
        if visits[0] not in steps_with(model, "P"):
            continue
        for (a, b), overlap in overlaps.across.items():
            maps = [values.at("P", visits[v]) for v in (a, b)]
            shared = [torch.minimum(*(m[c, :, s, s] for m in maps)).sum(-1).T for c, s in DOCUMENTS]
            torch.testing.assert_close(overlap.mass_overlap, torch.cat(shared), **NEAR)
            assert int(overlap.top8_shared.min()) >= 0 and int(overlap.top8_shared.max()) <= 8


def test_a_document_among_others_is_the_document_alone(family: str, adapted: Adapted) -> None:
    """No family leaks between packed documents, because each runs as a sequence of its own; padding changes nothing."""
    model = adapted(family)
    together, logits = captured(model, TOKENS, SEGMENTS), model(TOKENS, SEGMENTS)
    assert logits is not None and bool(logits[1, 27:].isnan().all())
    for context, span in DOCUMENTS:
        alone = captured(model, TOKENS[context : context + 1, span])
        assert_alike(model(TOKENS[context : context + 1, span])[0], logits[context, span])
        for site in set(sites_of(model)) - {"P"}:
            for step in steps_with(model, site):
                assert_alike(alone.at(site, step)[0], together.at(site, step)[context, span])


def assert_alike(one: Tensor, other: Tensor) -> None:
    """But for rounding of the largest value: 4 forwards' worth, as layers with a recurrent state round at every position. What
    leaks from another document is hundreds of times as large."""
    size = float(other.nan_to_num(posinf=0, neginf=0).abs().max())
    near = 4 * rounding.bound(torch.float32) * max(1.0, size)
    torch.testing.assert_close(one, other, atol=near, rtol=0, equal_nan=False)


def test_experts_are_those_that_were_used(family: str, adapted: Adapted) -> None:
    model = adapted(family)
    assert ("experts" in model.config.missing) == (family in DENSE)
    if family in DENSE:
        return
    values = captured(model, TOKENS)
    not_top = 0
    for step in steps_with(model, "experts"):
        path = model.config.layer_names[model.plan.steps[step].layer]
        mlp: Any = model.body.get_submodule(path).mlp
        x, experts, gates = (values.at(site, step).flatten(0, 1) for site in ("moe_in", "experts", "gates"))
        out = mlp.experts(x, experts, gates)
        if hasattr(mlp, "shared_experts"):
            out = out + mlp.shared_experts(x)
        if family == "inkling2_loop_text":  # a convolution follows
            layer: Any = model.body.get_submodule(path)
            out = layer.post_mlp_convolution(out.unflatten(0, TOKENS.shape)).flatten(0, 1)
        torch.testing.assert_close(out, values.at("moe_write", step).flatten(0, 1), **NEAR)
        by_logits = values.at("router", step).flatten(0, 1).topk(experts.shape[1]).indices
        not_top += int((by_logits.sort(-1).values != experts.sort(-1).values).any())
    assert bool(not_top) == (family in ("deepseek_v3", "inkling2_loop_text"))


def test_cached_generation_is_the_full_prefill(family: str, adapted: Adapted) -> None:
    """At every (token, visit): a prompt of 17 and then token by token, against one forward. A visit has its own cache slot."""
    model = adapted(family)
    assert model.family.causal == (family != "albert")
    if family == "albert":  # an encoder doesn't generate
        return
    full = captured(model, TOKENS[:1, :22])
    sites = [s for s in ("resid", "Q", "K", "PV", "experts", "moe_write") if s not in model.config.missing]
    with capture(model, sites) as values:
        cache, start = None, 0
        for end in (17, 18, 19, 20, 21, 22):
            options = {} if cache is None else {"cache": cache}
            result = model.model(TOKENS[:1, start:end], use_cache=True, **options)
            cache = result.cache if getattr(result, "cache", None) is not None else result.past_key_values
            for site in sites:
                for step in steps_with(model, site):
                    new = full.at(site, step)[:, start:end]
                    torch.testing.assert_close(values.at(site, step), new, atol=3e-4, rtol=3e-3)
            start = end


def test_what_a_model_does_not_have_is_refused_with_the_reason(adapted: Adapted) -> None:
    with pytest.raises(InputError, match=r"llama has no site 'router': .*dense.*; it has resid, X"):
        captured_site(adapted("llama"), "router")
    with pytest.raises(InputError, match="no site 'R'; expected some of resid"):
        captured_site(adapted("llama"), "R")
    with pytest.raises(InputError, match=r"step 0 \(layer 0, visit 1\) has no site 'Q': a Mamba layer"):
        captured_site(adapted("zamba"), "Q").get("Q", 0, 1)
    with pytest.raises(InputError, match="no visit 3 of layer 2"):
        captured_site(adapted("zamba"), "Q").get("Q", 2, 3)


def captured_site(model: AdaptedModel, site: str) -> Captured:
    with capture(model, [site]) as values:
        model(TOKENS, return_type="none")
    return values


def test_a_model_that_leaves_its_plan_is_refused(make_hf: Callable[..., Any]) -> None:
    from visitlens.hooks.adapters.adapt import adapt

    model = adapt(make_hf("dory"))
    model.model.config.n_recurrent_loops = 2
    with (
        capture(model, ["resid"]),
        pytest.raises(PlanError, match=r"layer 3 ran where step 5 \(layer 1, visit 3\) was due"),
    ):
        model(TOKENS)
    model.model.config.n_recurrent_loops = 4
    with (
        capture(model, ["resid"]),
        pytest.raises(PlanError, match=r"layer 1 ran where step 7 \(layer 3, visit 1\) was due"),
    ):
        model(TOKENS)


def test_packed_position_ids_are_refused_while_observing(adapted: Adapted) -> None:
    model = adapted("llama")
    packed = torch.tensor([[*range(9), *range(21)]]).expand(2, -1)
    with capture(model, ["resid"]), pytest.raises(InputError, match="packed documents leak"):
        model.model(TOKENS, position_ids=packed)


def test_masks_that_hide_tokens_are_refused_while_observing(adapted: Adapted) -> None:
    model = adapted("dory")
    padded = torch.ones_like(TOKENS)
    with capture(model, ["resid"]):
        model.model(TOKENS, attention_mask=padded, use_cache=False)
        padded[0, :3] = 0
        for mask in (padded, torch.ones(2, 1, 30, 30).tril().bool()):
            with pytest.raises(InputError, match="an attention mask that leaves tokens out"):
                model.model(TOKENS, attention_mask=mask, use_cache=False)


def test_activation_checkpointing_makes_no_new_visits(make_hf: Callable[..., Any]) -> None:
    from visitlens.hooks.adapters.adapt import adapt

    model = adapt(make_hf("dory").requires_grad_(True))
    with capture(model, ["resid"]) as values:
        plain = model.model(TOKENS, use_cache=False).logits
        before = [values.at("resid", s.index) for s in model.plan.steps]
        model.model.train()
        model.model.gradient_checkpointing_enable()
        logits = model.model(TOKENS, use_cache=False).logits
        logits.sum().backward()
    torch.testing.assert_close(logits, plain, **NEAR)
    for step in model.plan.steps:
        torch.testing.assert_close(values.at("resid", step.index), before[step.index], **NEAR)


def test_two_captures_of_two_families_at_once(adapted: Adapted) -> None:
    """Their attention functions share transformers' registry; the one that began first may end first."""
    first, second = adapted("gpt_oss"), adapted("inkling2_loop_text")
    expected = [captured_site(model, "Q").at("Q", 1) for model in (first, second)]
    outer, inner = capture(first, ["Q"]), capture(second, ["Q"])
    a = outer.__enter__()
    b = inner.__enter__()
    first(TOKENS), second(TOKENS)
    assert torch.equal(a.at("Q", 1), expected[0])
    outer.__exit__(None, None, None)
    second(TOKENS[:1])
    assert b.at("Q", 1).shape[0] == 1
    inner.__exit__(None, None, None)
    torch.testing.assert_close(b.at("Q", 1), expected[1][:1], **NEAR)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert not ALL_ATTENTION_FUNCTIONS._local_mapping


def test_a_rule_with_a_window_and_a_sink_by_hand() -> None:
    """Equal scores: a query that sees n keys gives each 1 / (n + 1) with a sink of logit 0, and the window is of 2."""
    rule = AttentionRule(scale=1.0, window=2, sinks=torch.zeros(1))
    p = rule.pattern(torch.zeros(3, 1, 2), torch.zeros(3, 1, 2))[0]
    third = 1 / 3
    torch.testing.assert_close(p, torch.tensor([[0.5, 0, 0], [third, third, 0], [0, third, third]]))
