"""The native looped MoE against a plain float64 implementation, and what must hold of it for any weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from visitlens.hooks.capture.capture import capture
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.packed_tokens import PackedTokens

ModelFactory = Callable[..., LoopedMoE]
TextFactory = Callable[..., PackedTokens]

VARIANTS: dict[str, dict] = {
    "baseline": {"visits": 1},
    "two visits": {"visits": 2},
    "three visits": {"visits": 3},
    "four visits of every layer": {"visits": 4, "loop_start": 0, "loop_stop": 4},
    "qk norm": {"visits": 2, "qk_norm": True},
    "shared expert": {"visits": 2, "shared_expert_dim": 6},
    "untied embeddings": {"visits": 2, "tie_embeddings": False},
    "one kv head": {"visits": 2, "num_kv_heads": 1},
    "as many kv heads as heads": {"visits": 2, "num_kv_heads": 4},
    "odd heads": {"visits": 3, "num_heads": 5, "num_kv_heads": 1},
    "odd heads, odd groups": {"visits": 2, "num_heads": 9, "num_kv_heads": 3, "head_dim": 6},
    "every expert": {"visits": 2, "num_experts": 3},
    "one expert a token": {"visits": 2, "experts_per_token": 1},
}
variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def both(text: PackedTokens) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(text.tokens), torch.from_numpy(text.segments)


# The plain implementation


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def plain_logits(model: LoopedMoE, tokens: Tensor, segments: Tensor) -> Tensor:
    """Float64, one context at a time with its full mask, one head at a time, one token's experts at a time."""
    return torch.stack([plain_context(model, t, s) for t, s in zip(tokens, segments, strict=True)])


def plain_context(model: LoopedMoE, tokens: Tensor, segments: Tensor) -> Tensor:
    c, weights = model.config, {name: p.double() for name, p in model.named_parameters()}
    n = len(tokens)
    positions = [0] * n
    for i in range(1, n):
        positions[i] = positions[i - 1] + 1 if segments[i] == segments[i - 1] else 0
    mask = torch.tensor([[j <= i and bool(segments[i] == segments[j]) for j in range(n)] for i in range(n)])
    span = list(range(c.loop_start, c.loop_stop))
    order = [*range(c.loop_start), *span * c.visits, *range(c.loop_stop, c.num_layers)] if span else range(c.num_layers)
    x = weights["embed.W_E"][tokens]
    for layer in order:
        w = {name.removeprefix(f"blocks.{layer}."): p for name, p in weights.items() if f"blocks.{layer}." in name}
        scale = 1 / c.visits if layer in span else 1.0
        x = x + scale * plain_attention(model, w, rms_norm(x, w["ln1.w"], c.norm_eps), mask, positions)
        x = x + scale * plain_moe(c, w, rms_norm(x, w["ln2.w"], c.norm_eps))
    return rms_norm(x, weights["ln_final.w"], c.norm_eps) @ weights.get("unembed.W_U", weights["embed.W_E"].T)


def plain_attention(model: LoopedMoE, w: dict[str, Tensor], x: Tensor, mask: Tensor, positions: list[int]) -> Tensor:
    c, d = model.config, model.config.head_dim
    # The rotation of a pair (i, i + d/2) is a product with e^(i angle); the angles' table is float32 by design.
    turn = torch.complex(model.rotary_cos.double(), model.rotary_sin.double())[positions]

    def head(name: str, number: int) -> Tensor:
        return x @ w[f"attn.W_{name}"][:, number * d : (number + 1) * d]

    def rotated(value: Tensor, gain: str) -> Tensor:
        if c.qk_norm:
            value = rms_norm(value, w[f"attn.{gain}"], c.norm_eps)
        turned = torch.complex(value[:, : d // 2], value[:, d // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], dim=1)

    contexts = []
    for h in range(c.num_heads):
        kv = h // (c.num_heads // c.num_kv_heads)
        scores = rotated(head("Q", h), "q_norm") @ rotated(head("K", kv), "k_norm").T / math.sqrt(d)
        weights = torch.exp(scores - scores.max()) * mask
        contexts.append((weights / weights.sum(1, keepdim=True)) @ head("V", kv))
    return torch.cat(contexts, dim=1) @ w["attn.W_O"]


def plain_moe(c: LoopedMoEConfig, w: dict[str, Tensor], x: Tensor) -> Tensor:
    def swiglu(row: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        gate, up = (row @ w_in).chunk(2)
        return (gate * torch.sigmoid(gate) * up) @ w_out

    rows = []
    for row in x:
        p = torch.exp(row @ w["mlp.W_router"])
        chosen = sorted(range(c.num_experts), key=lambda e, p=p: -float(p[e]))[: c.experts_per_token]
        out = sum(p[e] / p[chosen].sum() * swiglu(row, w["mlp.W_in"][e], w["mlp.W_out"][e]) for e in chosen)
        if c.shared_expert_dim:
            out = out + swiglu(row, w["mlp.W_shared_in"], w["mlp.W_shared_out"])
        rows.append(out)
    return torch.stack(rows)


@variants
def test_logits_agree_with_the_plain_implementation(
    variant: dict, make_model: ModelFactory, make_text: TextFactory
) -> None:
    tokens, segments = both(make_text(seed=5, lengths=(1, 2, 9, 30, 3), context=24))
    model = make_model(**variant, dtype=torch.float64)
    expected = plain_logits(model, tokens, segments)
    torch.testing.assert_close(model(tokens, segments), expected, atol=1e-12, rtol=1e-9)
    single = make_model(**variant)
    assert float((single(tokens, segments).double() - expected).abs().max() / expected.abs().max()) < 2e-5


def test_rotary_angles_are_position_times_a_geometric_series_of_frequencies(make_model: ModelFactory) -> None:
    model = make_model(head_dim=8, rope_theta=500.0)
    angles = np.arange(64)[:, None] * 500.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(model.rotary_cos, np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(model.rotary_sin, np.sin(angles), atol=1e-5)


# Packed documents


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("visits", [1, 3])
def test_a_documents_logits_do_not_depend_on_its_neighbours(
    visits: int, dtype: torch.dtype, make_model: ModelFactory, make_documents: Callable, make_text: TextFactory
) -> None:
    lengths = (1, 2, 8, 9, 20, 5)
    model = make_model(visits, dtype=dtype)
    tokens, segments = both(make_text(seed=2, lengths=lengths, context=45))
    packed, at = model(tokens, segments)[0], 0
    for document in make_documents(2, lengths):
        alone = model(torch.from_numpy(document).unsqueeze(0))[0]
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(packed[at : at + len(document)], alone, atol=tolerance, rtol=tolerance)
        at += len(document)


def test_attention_never_leaves_its_document_and_each_row_sums_to_1(
    make_model: ModelFactory, make_text: TextFactory
) -> None:
    tokens, segments = both(make_text())
    model = make_model(3)
    with capture(model, ["P"]) as captured:
        model(tokens, segments)
    n = tokens.shape[1]
    outside = (segments[:, :, None] != segments[:, None, :]) | torch.ones(n, n, dtype=torch.bool).triu(1)
    for step in range(len(model.plan)):
        pattern = captured.at("P", step)
        assert pattern.shape == (len(tokens), 4, n, n)
        assert not pattern.masked_select(outside.unsqueeze(1)).any()
        torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:3]), atol=1e-6, rtol=0)


def test_positions_restart_in_every_document(make_model: ModelFactory) -> None:
    """A document twice in a pack gives the same rotated queries and logits both times."""
    document = torch.tensor([0, 7, 9, 30, 4])
    tokens, segments = document.repeat(2).unsqueeze(0), torch.tensor([[0] * 5 + [1] * 5])
    model = make_model(2, dtype=torch.float64)
    with capture(model, ["Q"]) as captured:
        logits = model(tokens, segments)[0]
    torch.testing.assert_close(logits[:5], logits[5:], atol=1e-13, rtol=0)
    for step in range(len(model.plan)):
        q = captured.at("Q", step)[0]
        torch.testing.assert_close(q[:5], q[5:], atol=1e-13, rtol=0)


def test_later_tokens_do_not_change_earlier_logits(make_model: ModelFactory) -> None:
    model = make_model(2, dtype=torch.float64)
    tokens = torch.arange(3, 23).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 12:] = 5
    torch.testing.assert_close(model(tokens)[0, :12], model(changed)[0, :12], atol=1e-13, rtol=0)
    assert not torch.allclose(model(tokens)[0, 12:], model(changed)[0, 12:])


# The residual stream, and tied weights


@pytest.mark.parametrize("visits", [1, 2, 3])
def test_residual_in_plus_writes_is_the_next_residual_in_exactly(
    visits: int, make_model: ModelFactory, make_text: TextFactory
) -> None:
    tokens, segments = both(make_text())
    model = make_model(visits)
    _, cache = model.run_with_cache(tokens, segments)
    with capture(model, ["resid", "attn_write", "moe_write"]) as captured:
        model(tokens, segments)
    for step in model.plan.steps:
        resid, attn, moe = (captured.at(site, step.index) for site in ("resid", "attn_write", "moe_write"))
        prefix = f"blocks.{step.layer}.visit.{step.visit}"
        assert torch.equal(resid + attn, cache[f"{prefix}.hook_resid_mid"])
        assert torch.equal(resid + attn + moe, cache[f"{prefix}.hook_resid_post"])
        if step.index + 1 < len(model.plan):
            assert torch.equal(resid + attn + moe, captured.at("resid", step.index + 1))
    assert torch.equal(captured.at("resid", 0), cache["hook_embed"])


def test_writes_inside_the_span_are_scaled_by_1_over_r_and_outside_by_1(
    make_model: ModelFactory, make_text: TextFactory
) -> None:
    tokens, segments = both(make_text())
    model = make_model(3, dtype=torch.float64)
    with capture(model, ["PV", "attn_write"]) as captured:
        model(tokens, segments)
    for step in model.plan.steps:
        whole = captured.at("PV", step.index).flatten(2) @ model.blocks[step.layer].attn.W_O
        scale = 1 / 3 if step.layer in (1, 2) else 1.0
        torch.testing.assert_close(captured.at("attn_write", step.index), whole * scale, atol=1e-15, rtol=1e-12)


def test_one_visit_of_a_span_is_the_baseline(make_model: ModelFactory, make_text: TextFactory) -> None:
    tokens, segments = both(make_text())
    empty = make_model(1)
    once = make_model(1, loop_start=1, loop_stop=3)
    assert torch.equal(empty(tokens, segments), once(tokens, segments))


def test_visits_share_their_layers_weights(make_model: ModelFactory) -> None:
    """Looping adds steps and no parameter, and a layer's weights reach the output through every visit."""
    names = {v: {n: p.shape for n, p in make_model(v).named_parameters()} for v in (1, 2, 3)}
    assert names[1] == names[2] == names[3]
    h, heads, d, e, f, vocabulary = 16, 4, 4, 10, 8, 61
    layer = 2 * h + h * (heads + 2 * 2) * d + heads * d * h + h * e + e * h * 2 * f + e * f * h
    assert sum(p.numel() for p in make_model(3).parameters()) == vocabulary * h + 4 * layer + h

    tokens = torch.arange(3, 13).unsqueeze(0)
    model, looser = make_model(2, dtype=torch.float64), make_model(2, dtype=torch.float64)
    looser.blocks[1].attn.W_V.mul_(1.5)
    captures = []
    for m in (model, looser):
        with capture(m, ["X", "V"]) as captured:
            m(tokens)
        captures.append(captured)
    for visit in (1, 2):
        v, x = (captures[1].get(site, 1, visit) for site in ("V", "X"))
        torch.testing.assert_close(v.flatten(2), x @ model.blocks[1].attn.W_V * 1.5, atol=1e-13, rtol=0)


def test_the_first_visits_of_another_loop_count_differ_only_by_scale(make_model: ModelFactory) -> None:
    """r decides the scale of the writes: the prelude's are the same, the span's first is 2/3 as large at r = 3."""
    tokens = torch.arange(3, 13).unsqueeze(0)
    writes, weights = {}, make_model(2, dtype=torch.float64).state_dict()
    for visits in (2, 3):
        model = make_model(visits, dtype=torch.float64)
        model.load_state_dict(weights)  # the initial weights depend on the number of steps
        with capture(model, ["attn_write"]) as captured:
            model(tokens)
        writes[visits] = captured
    assert torch.equal(writes[2].get("attn_write", 0, 1), writes[3].get("attn_write", 0, 1))
    first, third = writes[2].get("attn_write", 1, 1), writes[3].get("attn_write", 1, 1)
    torch.testing.assert_close(first * 2 / 3, third, atol=1e-15, rtol=1e-12)


# Experts


def test_gates_are_the_renormalised_softmax_over_all_experts_of_the_k_largest(
    make_model: ModelFactory, make_text: TextFactory
) -> None:
    tokens, segments = both(make_text())
    model = make_model(2, dtype=torch.float64)
    with capture(model, ["moe_in", "router", "experts", "gates"]) as captured:
        model(tokens, segments)
    for step in model.plan.steps:
        router, experts, gates = (captured.at(site, step.index) for site in ("router", "experts", "gates"))
        expected = captured.at("moe_in", step.index) @ model.blocks[step.layer].mlp.W_router
        torch.testing.assert_close(router, expected, atol=1e-12, rtol=0)
        top = router.sort(dim=-1, descending=True)
        assert torch.equal(experts, top.indices[..., :3])
        share = router.exp().gather(-1, experts)
        torch.testing.assert_close(gates, share / share.sum(-1, keepdim=True), atol=1e-12, rtol=0)


# Dtypes


def test_float64_runs_in_float64_throughout(make_model: ModelFactory, make_text: TextFactory) -> None:
    tokens, segments = both(make_text())
    model = make_model(2, dtype=torch.float64)
    with capture(model, [s for s in SITES if s != "experts"]) as captured:
        assert model(tokens, segments).dtype == torch.float64
    assert {captured.at(site, 2).dtype for site in SITES if site != "experts"} == {torch.float64}


def test_bfloat16_stays_near_float32_and_routes_in_float32(make_model: ModelFactory, make_text: TextFactory) -> None:
    tokens, segments = both(make_text())
    half, full = make_model(2, dtype=torch.bfloat16), make_model(2)
    with capture(half, ["router", "resid"]) as captured:
        logits = half(tokens, segments)
    assert logits.dtype == torch.bfloat16 and captured.at("resid", 1).dtype == torch.bfloat16
    assert captured.at("router", 1).dtype == torch.float32
    exact = full(tokens, segments)
    assert float((logits.float() - exact).norm() / exact.norm()) < 0.1


# Losses


def test_token_loss_is_the_next_tokens_and_undefined_across_documents_and_into_padding(
    make_model: ModelFactory,
) -> None:
    model = make_model(2, dtype=torch.float64)
    tokens = torch.tensor([[0, 5, 6, 0, 9, 2, 2]])
    segments = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    loss = model(tokens, segments, return_type="loss")[0]
    assert loss.isnan().tolist() == [False, False, True, False, True, True]
    log_p = model(tokens, segments)[0].log_softmax(-1)
    expected = [-float(log_p[i, tokens[0, i + 1]]) for i in (0, 1, 3)]
    np.testing.assert_allclose(loss[[0, 1, 3]], expected, rtol=1e-12)
    assert float(model.training_loss(tokens, segments).cross_entropy) == pytest.approx(np.mean(expected), rel=1e-12)


def test_router_losses_are_means_over_steps_by_the_formula(make_model: ModelFactory, make_text: TextFactory) -> None:
    """E * sum_e (share of slots) (mean probability), 1 when uniform; and the mean squared log-sum-exp."""
    tokens, segments = both(make_text())
    model = make_model(2, dtype=torch.float64)
    loss = model.training_loss(tokens, segments)
    with capture(model, ["router", "experts"]) as captured:
        model(tokens, segments)
    balance, z = [], []
    for step in range(len(model.plan)):
        router, experts = captured.at("router", step).flatten(0, 1), captured.at("experts", step).flatten()
        share = np.bincount(experts, minlength=10) / len(experts)
        balance.append(10 * float((torch.from_numpy(share) * router.softmax(-1).mean(0)).sum()))
        z.append(float(router.exp().sum(-1).log().square().mean()))
    assert float(loss.load_balance) == pytest.approx(np.mean(balance), rel=1e-6)
    assert float(loss.router_z) == pytest.approx(np.mean(z), rel=1e-6)
    total = loss.cross_entropy + 0.01 * loss.load_balance + 0.001 * loss.router_z
    assert float(loss.total) == pytest.approx(float(total), rel=1e-9)


def test_the_training_gradient_is_that_of_finite_differences(make_model: ModelFactory, make_text: TextFactory) -> None:
    """Through both visits: a tied weight's gradient is the sum of theirs. The steps are too small to change an expert."""
    tokens, segments = both(make_text(lengths=(9, 5, 12), context=26))
    model = make_model(2, dtype=torch.float64, load_balance_coef=0.0)  # its loads are counts: no gradient to compare
    for name in ("blocks.1.attn.W_V", "blocks.2.mlp.W_out", "blocks.0.attn.W_Q", "embed.W_E"):
        weight = model.get_parameter(name).requires_grad_()
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        (gradient,) = torch.autograd.grad(model.training_loss(tokens, segments).total, weight)
        weight.requires_grad_(False)
        losses = []
        for sign in (1, -1):
            weight.add_(direction, alpha=sign * 1e-6)
            losses.append(float(model.training_loss(tokens, segments).total))
            weight.sub_(direction, alpha=sign * 1e-6)
        assert float((gradient * direction).sum()) == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5), name


def test_a_float64_model_turns_its_queries_by_float64_angles(make_model) -> None:
    """A cast of float32 tables is off by 6e-8 near 1: by 7e-6 in the logits of a trained model."""
    model = make_model(2, dtype=torch.float64)
    head_dim, length = model.config.head_dim, model.config.context_length
    frequencies = model.config.rope_theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64).outer(frequencies)
    torch.testing.assert_close(model.rotary_cos, angles.cos(), rtol=0, atol=1e-15)
    torch.testing.assert_close(model.rotary_sin, angles.sin(), rtol=0, atol=1e-15)
    assert make_model(2).rotary_cos.dtype == torch.float32
