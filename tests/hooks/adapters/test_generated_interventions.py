"""Interventions in cached generation: identities to the bit, and each (token, visit) as in one forward over the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import visitlens as vl
from visitlens.errors import InputError
from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.capture.generation import capture_generation, generate
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.interventions.intervene import site_means, with_loop_count
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.documents import pack

do = vl.do
PROMPT = torch.tensor([[0, 5, 9, 14, 7], [0, 8, 4, 30, 11]])
NEW = 6
MODELS = ("native", "dory", "qwen3_moe", "hrm_text", "gpt_oss", "deepseek_v3", "zamba", "inkling2_loop_text")
NEAR: dict[str, Any] = {"atol": 3e-4, "rtol": 3e-3}


@pytest.fixture
def model(request: pytest.FixtureRequest, make_model: Callable[..., Any], adapted: Callable[..., Any]) -> Any:
    return make_model(2) if request.param == "native" else adapted(request.param)


def sites_of(model: Any, *but: str) -> list[str]:
    return [site for site in SITES if site not in (*getattr(model.config, "missing", {}), *but)]


def written(model: Any, *chain: Any) -> tuple[Tensor, Tensor]:
    """What is generated under interventions, and the logits of every token as the cached forwards gave them."""
    with vl.intervene(model, *chain):
        cache, parts, new = model.new_cache(), [], PROMPT
        tokens = PROMPT
        with torch.no_grad():
            for _ in range(NEW):
                parts.append(model(new, cache=cache))
                new = parts[-1][:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, new], dim=1)
    return tokens, torch.cat(parts, dim=1)


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_own_values_change_no_bit_of_a_generation(model: Any) -> None:
    tokens, logits = written(model)
    assert torch.equal(generate(model, PROMPT, NEW), tokens)
    sites = sites_of(model, "P")
    captured = capture_generation(model, PROMPT, NEW, sites)
    assert torch.equal(captured.tokens, tokens)
    from_map = "P" in sites_of(model) and model.config.to_dict().get("architecture") == "inkling2_loop_text"
    own = [do.take(site, source=1, visit=1) for site in sites_of(model, *["P"] * from_map)]
    for chain in ([], own, [do.replace(site, captured) for site in sites]):
        again, same = written(model, *chain)
        assert torch.equal(again, tokens) and torch.equal(same, logits), chain


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_an_intervened_generation_is_the_intervened_forward_over_its_text(model: Any) -> None:
    plain = written(model)[1]
    layer = model.plan.looped_layers[0] if model.plan.looped_layers else 1
    visit = model.plan.visits[layer]
    here: dict[str, Any] = {"layer": layer, "visit": visit}
    step = model.plan.step(layer, visit).index
    lacking = {} if isinstance(model, LoopedMoE) else model.absent_steps()
    sites = [site for site in SITES if step not in lacking.get(site, {})]
    shifted = [site for site in sites if site not in ("P", "router", "experts")]
    only = {
        "K": {"token": [1, 7]}
    }  # a constant on every key is the same for each of a query's scores: a softmax can't see it
    chains: list[Any] = [[do.add(site, torch.tensor(0.3), **here, **only.get(site, {}))] for site in shifted]
    if visit > 1:
        chains += [[do.take(site, **here)] for site in ("K", "V", "experts") if site in sites]
        chains.append([do.swap("V", layer=layer)])
        if "resid_out" in sites:
            chains.append([do.skip(**here)])
    chains += [
        [do.scale("K", 2.0, token=do.generated(0, 2)), do.zero("V", token=do.generated(3), **here)],
        [do.scale("K", 1.5), do.scale("K", 1.5, **here), do.scale("V", -1.0, token=[1, 7])],
    ]
    if model.config.to_dict().get("architecture") != "inkling2_loop_text":
        chains.append([do.knock_out_sink(**here)])
    for chain in chains:
        tokens, logits = written(model, *chain)
        assert not torch.allclose(logits[:, :5], plain[:, :5]) or "generated" in repr(chain), chain
        with vl.intervene(model, *chain, prompt=5), torch.no_grad():
            whole = model(tokens)[:, :-1]
        torch.testing.assert_close(logits, whole, **NEAR)


@pytest.mark.parametrize("model", ["native", "dory"], indirect=True)
def test_a_generated_token_is_addressed_with_its_visit(model: Any) -> None:
    """Adding at (generated token 2, layer 1, visit 2) moves that value and nothing before it."""
    sites = ("resid", "attn_write")
    plain = capture_generation(model, PROMPT, 4, sites)
    with vl.intervene(model, do.add("attn_write", 1.0, layer=1, visit=2, token=do.generated(2))):
        moved = capture_generation(model, PROMPT, 4, sites)  # its check runs the whole text under the same intervention
    for n in (0, 1):
        assert torch.equal(moved.get("resid", 1, 2, generated=n), plain.get("resid", 1, 2, generated=n))
    assert torch.equal(moved.get("attn_write", 1, 1, generated=2), plain.get("attn_write", 1, 1, generated=2))
    after = plain.get("attn_write", 1, 2, generated=2) + 1.0
    assert torch.equal(moved.get("attn_write", 1, 2, generated=2), after)


@pytest.mark.parametrize("model", ["native", "dory"], indirect=True)
def test_nested_interventions_each_keep_the_keys_they_made(model: Any) -> None:
    one, two = do.scale("K", 2.0), do.scale("K", 0.5, visit=2)
    together = written(model, one, two)
    with vl.intervene(model, one):
        nested = written(model, two)
    assert torch.equal(together[0], nested[0]) and torch.equal(together[1], nested[1])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in getattr(model, "model", model).modules())


def test_the_window_of_a_cache_keeps_the_keys_as_they_were_made(make_hf: Callable[..., Any]) -> None:
    """Dory's sliding window is 12: at 30 tokens its cache has let go of the first ones."""
    model = adapt(make_hf("dory", layer_types=["sliding_attention"] * 4))
    chain = [do.scale("K", 1.7, visit=2), do.scale("V", 0.5), do.knock_out_sink(visit=3)]
    with vl.intervene(model, *chain):
        cached = capture_generation(model, PROMPT, 25, ("resid", "K", "PV"), check=False)
        with capture(model, ("resid", "K", "PV")) as whole:
            model(cached.tokens)
        for site in ("resid", "K", "PV"):
            for step in range(len(model.plan)):
                torch.testing.assert_close(cached.at(site, step), whole.at(site, step), **NEAR)


def test_another_loop_count_generates_too(adapted: Callable[..., Any]) -> None:
    model = with_loop_count(adapted("dory"), 2)
    generation = capture_generation(model, PROMPT, 4, ["resid"])  # held against the full forward
    assert len(generation.values["resid"]) == 6 and torch.equal(generation.tokens, generate(model, PROMPT, 4))


@pytest.mark.parametrize("model", ["native", "dory"], indirect=True)
def test_what_cannot_be_done_token_by_token_is_refused(model: Any) -> None:
    for chain, instead in (
        (do.mean("PV"), r"mean\(\.\.\., over=site_means"),
        (do.resample("PV"), r"replace\(site, RUN\)"),
    ):
        said = rf"also those that aren't written yet: .* Instead: {instead}"
        with vl.intervene(model, chain), pytest.raises(InputError, match=said):
            generate(model, PROMPT, 2)
    sample = pack([row.numpy() for row in PROMPT], 16, 0, 2)
    with vl.intervene(model, do.mean("PV", over=site_means(model, sample, ["PV"]))):
        generate(model, PROMPT, 2)
    first, eighth = (do.zero("PV", token=do.generated(n)) for n in (0, 7))
    message = r"no token was generated here: .* intervene\(\.\.\., prompt=5\)"
    with vl.intervene(model, first, must_match=False), pytest.raises(InputError, match=message):
        model(PROMPT)
    message = r"zero\('PV', token=generated\(7\)\) matched nothing"
    with pytest.raises(InputError, match=message), vl.intervene(model, eighth):
        generate(model, PROMPT, 2)
    with pytest.raises(InputError, match="expected numbers of generated tokens, counted from 0, got -1"):
        do.generated(-1)
    begun = model.new_cache()
    model(PROMPT, cache=begun)
    with vl.intervene(model, do.swap("V")), pytest.raises(InputError, match="begin with a new cache"):
        model(PROMPT[:, :1], cache=begun)
    with pytest.raises(InputError, match="pass no segment ids with it"):
        model(PROMPT, torch.zeros_like(PROMPT), cache=model.new_cache())
    with pytest.raises(InputError, match="65 positions exceed the model's context of 64"):
        model(PROMPT[:, :1].expand(2, 65), cache=model.new_cache())


def test_a_cache_doesnt_outlive_what_changed_its_keys(adapted: Callable[..., Any]) -> None:
    model = adapted("dory")
    cache = model.new_cache()
    with vl.intervene(model, do.scale("K", 2.0)):
        model(PROMPT, cache=cache)
    with pytest.raises(InputError, match="changed inside an `intervene` that has ended: begin with a new cache"):
        model(PROMPT[:, :1], cache=cache)


@pytest.mark.parametrize("model", ["native", "dory"], indirect=True)
def test_a_cache_that_an_error_left_half_filled_is_refused(model: Any) -> None:
    cache = model.new_cache()
    model(PROMPT, cache=cache)
    with (
        pytest.raises(InputError, match="expected a value that fits"),
        vl.intervene(model, do.replace("attn_write", torch.zeros(7), layer=1)),
    ):
        model(PROMPT[:, :1], cache=cache)
    with pytest.raises(InputError, match="ended in an error and left it half filled: begin with a new cache"):
        model(PROMPT[:, :1], cache=cache)
    model(PROMPT, cache=model.new_cache())


@pytest.mark.parametrize("model", ["native", "dory"], indirect=True)
def test_a_mask_of_the_prompt_chooses_nothing_after_it(model: Any) -> None:
    one = PROMPT[:, :1]
    by_mask, by_number = (
        do.replace("resid", 3.0, layer=2, token=token) for token in (torch.ones(2, 1, dtype=torch.bool), 0)
    )
    with vl.intervene(model, by_number):
        expected = generate(model, one, 4)
    with vl.intervene(model, by_mask):
        assert torch.equal(generate(model, one, 4), expected)
    with capture(model, ["resid"]) as captured:
        model(one)
    with (
        vl.intervene(model, do.replace("resid", captured, layer=2)),
        pytest.raises(InputError, match="expected values of at least 2 tokens, of the whole text, got 1"),
    ):
        generate(model, one, 4)


@pytest.mark.parametrize("model", ["native", "dory"], indirect=True)
def test_nested_swaps_each_keep_their_run_without_interventions(model: Any) -> None:
    with vl.intervene(model, do.swap("V")), vl.intervene(model, do.swap("K")):
        tokens = generate(model, PROMPT, 3)
        with torch.no_grad():
            whole = model(tokens)[:, PROMPT.shape[1] - 1 : -1]
    assert torch.equal(whole.argmax(-1), tokens[:, PROMPT.shape[1] :])


def test_a_cached_forward_gives_what_is_asked_for(adapted: Callable[..., Any]) -> None:
    model = adapted("dory")
    loss = model(PROMPT, cache=model.new_cache(), return_type="loss")
    torch.testing.assert_close(loss, model(PROMPT, return_type="loss"), **NEAR)
    with pytest.raises(InputError, match="expected return_type 'logits', 'loss' or 'none', got 'nonsense'"):
        model(PROMPT, cache=model.new_cache(), return_type="nonsense")
