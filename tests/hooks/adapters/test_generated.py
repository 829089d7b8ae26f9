"""Generation captured by (token, visit), of the native model and through adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from visitlens.errors import InputError, PlanError
from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.capture.generation import capture_generation
from visitlens.hooks.capture.sampling import Sampling

PROMPT = torch.tensor([[0, 5, 9, 14, 7], [0, 8, 4, 30, 11]])
SITES = ("resid", "Q", "PV")


@pytest.mark.parametrize("name", ["native", "dory", "qwen3_moe", "hrm_text", "zamba"])
def test_every_token_and_visit_is_what_one_forward_says(
    name: str, make_model: Callable[..., Any], adapted: Callable[..., Any]
) -> None:
    model = make_model(2) if name == "native" else adapted(name)
    generation = capture_generation(model, PROMPT, 4, SITES)
    assert generation.tokens.shape == (2, 9) and torch.equal(generation.tokens[:, :5], PROMPT)
    with capture(model, SITES) as whole:
        logits = model(generation.tokens)
    assert torch.equal(logits[:, 4:8].argmax(-1), generation.tokens[:, 5:]), "greedy"
    for site in SITES:
        for step in generation.values[site]:
            layer, visit = model.plan.steps[step].layer, model.plan.steps[step].visit
            torch.testing.assert_close(generation.get(site, layer, visit), whole.at(site, step), atol=3e-4, rtol=3e-3)
            for n in range(4):
                last = generation.get(site, layer, visit, generated=n)
                torch.testing.assert_close(last, whole.at(site, step)[:, 5 + n], atol=3e-4, rtol=3e-3)


@pytest.mark.parametrize("name", ["native", "dory", "gpt_oss", "inkling2_loop_text"])
def test_each_generated_tokens_row_over_the_keys_so_far(
    name: str, make_model: Callable[..., Any], adapted: Callable[..., Any]
) -> None:
    """Against the maps of one forward; with windows that the text outgrows, a learned sink, weights that the model forms."""
    model = make_model(2) if name == "native" else adapted(name)
    prompt = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(3))
    generation = capture_generation(model, prompt, 5, ["P"])
    with capture(model, ["P"]) as whole:
        model(generation.tokens)
    for step in model.plan.steps:
        got, expected = generation.get("P", step.layer, step.visit), whole.at("P", step.index)
        torch.testing.assert_close(got, expected, atol=3e-5, rtol=3e-3)
        row = generation.get("P", step.layer, step.visit, generated=1)
        torch.testing.assert_close(row, expected[:, :, 12], atol=3e-5, rtol=3e-3)
        assert not row[..., 13:].any()


def test_sampled_generation_is_the_seeds(adapted: Callable[..., Any]) -> None:
    model = adapted("dory")
    hot = [
        capture_generation(model, PROMPT, 6, ["Q"], sampling=Sampling(3.0, 0.9, seed)).tokens.tolist()
        for seed in (0, 0, 1)
    ]
    greedy = capture_generation(model, PROMPT, 6, ["Q"]).tokens.tolist()
    assert hot[0] == hot[1] and hot[0] != hot[2] and greedy not in hot


def test_labels_count_tokens_and_visits_apart(make_model: Callable[..., Any]) -> None:
    """Four generated tokens at two visits: eight calls of a looped layer after the prompt, and no third visit."""
    generation = capture_generation(make_model(2), PROMPT, 4, ["resid"])
    labels = [label for label in generation.labels() if label.step.layer == 1]
    decode = [(label.generated, label.step.visit) for label in labels if label.phase == "decode"]
    assert decode == [(n, v) for n in range(4) for v in (1, 2)]
    assert {label.generated for label in labels if label.phase == "prefill"} == {None}
    assert len(labels) == 9 * 2


def test_a_cache_that_mixes_visits_is_refused(make_hf: Callable[..., Any]) -> None:
    """Dory's `last_loop` cache keeps the last loop's keys for every loop, by design."""
    model = adapt(make_hf("dory", recurrent_kv_cache_mode="last_loop"))
    with pytest.raises(PlanError, match=r"cached generation isn't the full forward: .* may share keys between visits"):
        capture_generation(model, PROMPT, 4, SITES)
    assert capture_generation(model, PROMPT, 2, SITES, check=False).tokens.shape == (2, 7)


def test_what_cannot_be_is_refused(make_model: Callable[..., Any], adapted: Callable[..., Any]) -> None:
    model = make_model(2)
    generation = capture_generation(model, PROMPT, 2, ["resid"])
    with pytest.raises(InputError, match="no generated token 2: there are 2, counted from 0"):
        generation.get("resid", 1, 1, generated=2)
    with pytest.raises(InputError, match="no site 'Q'; captured are resid"):
        generation.get("Q", 1, 1)
    with pytest.raises(InputError, match="no visit 3 of layer 1"):
        generation.get("resid", 1, 3)
    with pytest.raises(InputError, match="at least 1 new token"):
        capture_generation(model, PROMPT, 0, ["resid"])
    with pytest.raises(InputError, match="albert returns no cache"):
        capture_generation(adapted("albert"), PROMPT, 1, ["resid"])
