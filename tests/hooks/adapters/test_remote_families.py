"""Families whose code isn't in an installable package, on small re-implementations of their loop anatomy, written here.

Not their code and not their weights: the order of layers, the norms and the names that the adapters rely on are theirs,
everything else is as small as it can be. A real checkpoint is checked when it is inspected (`visitlens inspect`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.hooks.adapters.remote_code.mended import TinyHuginn, TinyOuro
from tests.hooks.adapters.remote_code.tiny_moeut import TinyMoEUT
from torch import Tensor, nn

from visitlens.errors import InputError, PlanError
from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.hooks.adapters.families.huginn import Huginn
from visitlens.hooks.adapters.families.moeut import MoEUT
from visitlens.hooks.audit.guards import check
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.capture.generation import capture_generation
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.interventions.intervene import intervene, replace, scale, skip, take, with_loop_count
from visitlens.hooks.loading.inspect_model import describe

TOKENS = torch.randint(3, 40, (2, 20), generator=torch.Generator().manual_seed(5))
SEGMENTS = torch.tensor([[0] * 8 + [1] * 12, [2] * 8 + [3] * 9 + [-1] * 3])


def seeded(build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(2)
    return build().requires_grad_(False)


def recursive_llama() -> Any:
    """Llama with six layer modules of two sets of Parameters, but for the norms; the attention of one lost its tying."""
    import transformers

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    model: Any = transformers.LlamaForCausalLM(config)
    layers = model.model.layers
    for i in range(2, 6):
        for part in ("self_attn", "mlp"):
            for name, child in getattr(layers[i % 2], part).named_children():
                if isinstance(child, nn.Linear) and (i, part) != (5, "self_attn"):
                    getattr(getattr(layers[i], part), name).weight = child.weight
    return model


MODELS: dict[str, tuple[Callable[[], AdaptedModel], list[int]]] = {
    "huginn": (lambda: adapt(seeded(TinyHuginn), steps=4), [0, *[1, 2] * 4, 3]),
    "ouro": (lambda: adapt(seeded(TinyOuro)), [0, 1] * 4),
    "moeut": (lambda: adapt(seeded(TinyMoEUT), MoEUT(context_length=64)), [0, 1] * 3),
    "recursive": (lambda: adapt(seeded(recursive_llama)), [0, 1] * 3),
}
each = pytest.mark.parametrize("name", MODELS)


@each
def test_the_guards_hold_and_the_order_is_the_one_by_hand(name: str) -> None:
    model = MODELS[name][0]()
    assert [step.layer for step in model.plan.steps] == MODELS[name][1]
    guards = {guard.name: guard for guard in check(model, TOKENS[:1])}
    assert guards["observation"].ok and guards["attention rows"].ok and guards["documents"].ok, guards
    assert guards["writes"].ok is (None if name == "huginn" else True), guards["writes"]
    assert guards["cached generation"].ok is (None if name == "moeut" else True)


@each
def test_every_site_comes_by_visit_packed_as_alone(name: str) -> None:
    model = MODELS[name][0]()
    sites = [site for site in SITES if site not in model.config.missing]
    with capture(model, sites) as packed:
        logits = model(TOKENS, SEGMENTS)
    values = StepValues(packed, SEGMENTS, "torch")
    assert logits is not None and len(values.attention_rows) == len(model.plan)
    with capture(model, sites) as alone:
        other = model(TOKENS[:1, 8:])
    assert other is not None
    torch.testing.assert_close(logits[:1, 8:], other, atol=1e-5, rtol=1e-4)
    for step in model.plan.steps:
        for site in set(sites) - {"P"}:
            torch.testing.assert_close(
                packed.at(site, step.index)[:1, 8:], alone.at(site, step.index), atol=1e-5, rtol=1e-4
            )
    visits = [packed.get("Q", model.plan.looped_layers[0], v) for v in (1, 2)]
    assert not torch.equal(*visits)


@each
def test_interventions_reach_every_site(name: str) -> None:
    model, real = MODELS[name][0](), SEGMENTS >= 0
    sites = [site for site in SITES if site not in model.config.missing]
    with capture(model, sites) as clean:
        plain = model(TOKENS, SEGMENTS)
    with intervene(model, *((replace(site, clean), take(site, visit=1)) for site in sites)):
        assert torch.equal(model(TOKENS, SEGMENTS)[real], plain[real])  # type: ignore[index]  # tensors
    layer = model.plan.looped_layers[0]
    for site in set(sites) - {"experts", "P"}:
        with intervene(model, take(site, layer=layer, visit=2)), capture(model, [site]) as seen:
            logits = model(TOKENS, SEGMENTS)
        assert torch.equal(seen.get(site, layer, 2)[real], seen.get(site, layer, 1)[real]), site
        assert not torch.equal(logits[real], plain[real]), site  # type: ignore[index]  # tensors
    with intervene(model, skip(layer=layer, visit=2)), capture(model, ["resid", "resid_out"]) as seen:
        model(TOKENS, SEGMENTS)
    assert torch.equal(seen.get("resid", layer, 2)[real], seen.get("resid_out", layer, 2)[real])


@each
def test_what_goes_on_from_a_step_is_the_whole_forward(name: str, check_replays: Callable[..., None]) -> None:
    check_replays(MODELS[name][0](), TOKENS, SEGMENTS)


def test_huginn_generates_by_token_and_visit_and_its_core_has_gradients() -> None:
    """Its code restarts positions at 0 behind a cache, and cuts every loop's gradient, unless told otherwise."""
    model = MODELS["huginn"][0]()
    generation = capture_generation(model, TOKENS[:, :7], 4, ["resid", "K"])
    assert torch.equal(model(generation.tokens)[:, 6:10].argmax(-1), generation.tokens[:, 7:])  # type: ignore[index]  # a tensor
    factor = torch.ones((), requires_grad=True)

    def loss(value: Any) -> Tensor:
        with intervene(model, scale("V", value, layer=1, visit=2)):
            return model(TOKENS, return_type="loss").double().sum()  # type: ignore[union-attr]  # a tensor

    (gradient,) = torch.autograd.grad(loss(factor), factor)
    with torch.no_grad():
        slope = (loss(1.01) - loss(0.99)) / 0.02
    assert float(gradient) == pytest.approx(float(slope), rel=0.05) and float(gradient) != 0.0


def test_loop_counts_of_models_that_read_theirs_when_they_run() -> None:
    for raw, family in ((TinyHuginn, None), (TinyOuro, None), (TinyMoEUT, MoEUT(context_length=64))):
        model = adapt(seeded(raw), family)
        before, plain = model.plan.visits[model.plan.looped_layers[0]], model(TOKENS)
        assert torch.equal(with_loop_count(model, before)(TOKENS), plain)
        two = with_loop_count(model, 2)
        assert all(guard.ok is not False for guard in check(two, TOKENS[:1]))
        assert {two.plan.visits[layer] for layer in model.plan.looped_layers} == {2}
        with capture(two, ["resid"]):
            assert not torch.equal(two(TOKENS), plain)  # type: ignore[arg-type]  # a tensor
        for visits in () if raw is TinyMoEUT else (2, before + 1):
            changed = with_loop_count(model, visits)
            tokens = capture_generation(changed, TOKENS[:, :7], 3, ["resid"]).tokens
            assert torch.equal(changed(tokens)[:, 6:9].argmax(-1), tokens[:, 7:])  # type: ignore[index]  # a tensor
        assert torch.equal(model(TOKENS), plain)  # type: ignore[arg-type]  # a tensor


def test_moeuts_gates_follow_the_choice() -> None:
    model = MODELS["moeut"][0]()
    with capture(model, ["router", "experts", "gates"]) as clean:
        model(TOKENS)
    change = replace("experts", clean.get("experts", 1, 2).flip(0), layer=1, visit=2)
    with (
        intervene(model, change, scale("gates", 0.5, layer=1, visit=2, expert=3)),
        capture(model, ["experts", "gates"]) as seen,
    ):
        model(TOKENS)
    chosen = clean.get("experts", 1, 2).flip(0)
    gates = clean.get("router", 1, 2).sigmoid().gather(-1, chosen)
    assert torch.equal(seen.get("experts", 1, 2), chosen)
    torch.testing.assert_close(seen.get("gates", 1, 2), torch.where(chosen == 3, gates / 2, gates))


def test_huginns_initial_state_is_its_seeds_and_its_steps_are_the_callers() -> None:
    raw = seeded(TinyHuginn)
    logits = [adapt(raw, steps=3, state_seed=seed)(TOKENS) for seed in (0, 0, 1)]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])  # type: ignore[arg-type]  # tensors
    assert len(adapt(raw).plan) == 2 + 3 * 2, "the configuration's mean where nothing is asked for"
    assert "drawn with seed 1" in adapt(raw, state_seed=1).config.notes[0]
    state = torch.get_rng_state()
    adapt(raw)(TOKENS)
    assert torch.equal(state, torch.get_rng_state()), "nobody else's random numbers are touched"
    family, double = Huginn(steps=3), seeded(TinyHuginn).double()
    assert torch.equal(adapt(raw, family)(TOKENS), logits[0])  # type: ignore[arg-type]  # tensors
    in_double = adapt(double, family)(TOKENS), adapt(double, steps=3)(TOKENS)
    assert torch.equal(*in_double), "of another precision, drawn in it"  # type: ignore[arg-type]  # tensors
    with pytest.raises(InputError, match="at least 1 loop, got 0"):
        adapt(raw, steps=0)
    with pytest.raises(InputError, match="takes no option 'loops'; it takes steps, state_seed"):
        adapt(raw, loops=2)


def test_ouros_passes_can_be_set() -> None:
    model = adapt(seeded(TinyOuro), steps=2)
    assert model.config.to_dict() != adapt(seeded(TinyOuro)).config.to_dict(), (
        "a recording of another number is another"
    )
    assert len(model.plan) == 4
    with capture(model, ["resid"]) as values:
        model(TOKENS)
    assert values.plan.visits == {0: 2, 1: 2}

    raw = seeded(TinyOuro)  # two readings of one model: neither changes the other, or the model
    plain = raw(TOKENS).logits
    four, two = adapt(raw), adapt(raw, steps=2)
    assert len(adapt(raw).plan) == len(four.plan) == 8 and len(two.plan) == 4
    for reading in (four, two, four):
        assert torch.equal(reading(TOKENS), raw(TOKENS).logits) is (reading is four)
        assert all(guard.ok is not False for guard in check(reading, TOKENS[:1]))
    assert torch.equal(raw(TOKENS).logits, plain)


def test_an_attention_that_goes_past_the_watched_one_is_no_empty_result() -> None:
    model = adapt(seeded(TinyOuro))

    def past(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=True)

    model.body.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)  # type: ignore[index]  # a list
    with capture(model, ["Q"]), pytest.raises(PlanError, match=r"step 1 \(layer 1, visit 1\) ran and gave no 'Q'"):
        model(TOKENS)


def test_moeuts_experts_are_read_from_a_bare_parameter() -> None:
    model = MODELS["moeut"][0]()
    with capture(model, ["router", "experts", "gates", "moe_write", "resid", "attn_write"]) as values:
        model(TOKENS)
    for step in model.plan.steps:
        ffn: Any = model.model.transformer.layers[step.layer].ffn  # type: ignore[union-attr]  # our own module
        x = values.at("resid", step.index) + values.at("attn_write", step.index)
        experts, gates = values.at("experts", step.index), values.at("gates", step.index)
        hidden = torch.einsum("btd,btkdf->btkf", x, ffn.keys[experts]).relu()
        out = torch.einsum("btkf,btkfd,btk->btd", hidden, ffn.values[experts], gates)
        torch.testing.assert_close(out, values.at("moe_write", step.index))
        torch.testing.assert_close(values.at("router", step.index).sigmoid().gather(-1, experts), gates)


def test_a_recursive_model_shows_what_is_tied_and_what_lost_its_tying() -> None:
    found = describe(seeded(recursive_llama), 16)
    assert [(s["layer"], s["visit"], s["module"]) for s in found["steps"][2:4]] == [
        (0, 2, "layers.2"),
        (1, 2, "layers.3"),
    ]
    status = {(tie["layer"], tie["component"]): tie["status"] for tie in found["ties"]}
    assert status[0, "self_attn"] == status[0, "mlp"] == status[1, "mlp"] == "tied"
    assert status[1, "self_attn"] == "untied" and status[0, "input_layernorm"] == "untied"
