"""Head ablation: equal to one plain forward a head, bit-identical where nothing is ablated, for any visits and metric."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.analyses.ablation.ablate_recording import ablate
from visitlens.probe.analyses.ablation.heads import Task, ablate_heads, nll, text_task

LENGTHS = (17, 9, 30, 2, 12, 25, 40, 6)


@pytest.fixture(scope="module")
def task(make_text) -> Task:
    return text_task(make_text(seed=2, lengths=LENGTHS, context=48))


def one_forward(
    model: LoopedMoE, task: Task, layer: int, head: int, visits: tuple[int, ...], value: Callable
) -> np.ndarray:
    """[target] loss by a plain hook on a whole forward: what the fast way must equal."""

    def put(z: Tensor, hook) -> Tensor:
        z = z.clone()
        z[:, :, head] = value(hook.name, z)[..., head, :]
        return z

    tokens = torch.from_numpy(task.tokens).long()
    segments = None if task.segments is None else torch.from_numpy(task.segments)
    hooks = [(f"blocks.{layer}.visit.{visit}.attn.hook_z", put) for visit in visits]
    with torch.inference_mode():
        logits = model.run_with_hooks(tokens, segments, fwd_hooks=hooks)
        return nll(logits[task.context, task.position - 1], tokens[task.context, task.position]).double().numpy()


def by_group(values: np.ndarray, task: Task) -> np.ndarray:
    return np.bincount(task.group, weights=values)


@pytest.mark.parametrize("visits", [1, 2, 3])
@pytest.mark.parametrize("tokens_at_once", [40, 4096])
def test_zero_equals_one_forward_a_head(visits: int, tokens_at_once: int, make_model, task: Task) -> None:
    model = make_model(visits, dtype=torch.float64)
    found = ablate_heads(model, task, tokens_at_once=tokens_at_once)
    assert found.visits == {1: ((1,),), 2: ((1,), (2,), (1, 2)), 3: ((1,), (2,), (3,), (1, 2, 3))}[
        visits
    ] and found.layers == ((0, 1, 2, 3) if visits == 1 else (1, 2))
    plain = one_forward(model, task, 0, 0, (), lambda *_: 0)
    np.testing.assert_allclose(found.intact, by_group(plain, task), rtol=1e-12)
    np.testing.assert_array_equal(found.count, np.bincount(task.group))
    for c, choice in enumerate(found.visits):
        for at, layer in enumerate(found.layers):
            for head in (0, 3):
                expected = one_forward(model, task, layer, head, choice, lambda _, z: torch.zeros_like(z))
                np.testing.assert_allclose(found.change[:, c, at, head], by_group(expected - plain, task), atol=1e-9)
    assert np.abs(found.change).max() > 1e-3


def test_mean_and_resample_take_the_intact_models_values(make_model, task: Task) -> None:
    model = make_model(2, dtype=torch.float64)
    with torch.inference_mode():
        _, cache = model.run_with_cache(torch.from_numpy(task.tokens).long(), torch.from_numpy(task.segments))
    real = torch.from_numpy(task.document >= 0)
    means = {f"blocks.2.visit.{v}.attn.hook_z": cache[f"blocks.2.visit.{v}.attn.hook_z"][real].mean(0) for v in (1, 2)}
    plain = one_forward(model, task, 0, 0, (), lambda *_: 0)
    found = ablate_heads(model, task, mode="mean", layers=[2], tokens_at_once=200)
    for c, choice in enumerate(found.visits):
        expected = one_forward(model, task, 2, 1, choice, lambda name, z: means[name].expand_as(z))
        np.testing.assert_allclose(found.change[:, c, 0, 1], by_group(expected - plain, task), atol=1e-9)
    one, other = (ablate_heads(model, task, mode="resample", seed=seed).change for seed in (0, 1))
    again = ablate_heads(model, task, mode="resample", seed=0, tokens_at_once=150).change
    np.testing.assert_allclose(one, again, atol=1e-9)
    assert np.abs(one - other).max() > 1e-6


def test_resampling_takes_every_token_from_another_document_at_its_position(task: Task) -> None:
    from visitlens.probe.analyses.ablation.heads import _donors

    donors = _donors(task, seed=3)
    flat = task.document.ravel()
    real = flat >= 0
    giver = flat[donors.ravel()]
    assert (giver[real] != flat[real]).all() and (giver[real] >= 0).all()
    assert (donors.ravel()[~real] == np.flatnonzero(~real)).all()
    for document in range(task.documents):
        assert len(set(giver[flat == document])) == 1
        own, others = np.flatnonzero(flat == document), np.flatnonzero(flat == giver[flat == document][0])
        np.testing.assert_array_equal(donors.ravel()[own], others[np.arange(len(own)) % len(others)])


# Identities


def test_running_on_from_a_step_is_bit_identical_to_the_whole_forward(make_model, make_text) -> None:
    text = make_text(seed=5, context=32)
    tokens, segments = torch.from_numpy(text.tokens).long(), torch.from_numpy(text.segments)
    for visits in (1, 2, 3):
        model = make_model(visits)
        with torch.inference_mode():
            logits, cache = model.run_with_cache(tokens, segments)
            for step in model.plan.steps:
                before = cache[f"blocks.{step.layer}.visit.{step.visit}.hook_resid_pre"]
                after = model.run_steps(before, segments, start=step.index)
                assert torch.equal(model.logits(after.flatten(0, 1)).view_as(logits), logits)
                one = model.run_steps(before, segments, start=step.index, stop=step.index + 1)
                assert torch.equal(one, cache[f"blocks.{step.layer}.visit.{step.visit}.hook_resid_post"])


def test_patching_a_run_with_its_own_values_changes_nothing(make_model, make_text) -> None:
    text = make_text(seed=5, context=32)
    tokens, segments = torch.from_numpy(text.tokens).long(), torch.from_numpy(text.segments)
    model = make_model(2)
    with torch.inference_mode():
        logits, cache = model.run_with_cache(tokens, segments)
        for visit in (1, 2):
            name = f"blocks.1.visit.{visit}.attn.hook_z"
            before = cache[f"blocks.1.visit.{visit}.hook_resid_pre"]
            with model.hooks(fwd_hooks=[(name, lambda z, hook: cache[hook.name].clone())]):
                after = model.run_steps(before, segments, start=model.plan.step(1, visit).index)
            assert torch.equal(model.logits(after.flatten(0, 1)).view_as(logits), logits)


def test_ablating_no_head_changes_nothing(make_model, task: Task) -> None:
    found = ablate_heads(make_model(2), task, heads=[])
    assert found.change.shape == (len(found.intact), 3, 2, 0)
    model = make_model(2)
    dead = [p for name, p in model.named_parameters() if re.fullmatch(r"blocks\.[12]\.attn\.W_O", name)]
    for w in dead:
        w.data.zero_()  # no head writes anything: each ablation must change nothing at all
    found = ablate_heads(model, task, tokens_at_once=task.tokens.size * 8)
    np.testing.assert_allclose(found.change, 0, atol=1e-4)


def test_all_visits_of_a_layer_that_runs_once_is_the_plain_ablation(make_model, task: Task) -> None:
    model = make_model(1, dtype=torch.float64)
    result = ablate(model, task)
    assert result.effect.labels["visits"] == ["1"] == [result.every_visit]
    expected = one_forward(model, task, 3, 2, (1,), lambda _, z: torch.zeros_like(z))
    plain = one_forward(model, task, 3, 2, (), lambda *_: 0)
    np.testing.assert_allclose(
        result.effect.sel(visits="1", layer=3, head=2).values, (expected - plain).mean(), atol=1e-9
    )


def test_the_ablated_unit_is_a_query_head_that_shares_its_keys(make_model, task: Task) -> None:
    """Four query heads over two key/value heads: each has an effect of its own."""
    effect = ablate(make_model(2), task).effect.sel(visits="1+2", layer=1).values
    assert effect.shape == (4,) and len(set(np.round(effect, 9))) == 4


# Metrics and names


def test_any_function_of_the_logits_is_a_metric(make_model, task: Task) -> None:
    def wrong(logits: Tensor, truth: Tensor) -> Tensor:
        return (logits.argmax(-1) != truth).double()

    result = ablate(make_model(2), task, metric=wrong, metric_name="error rate", mode="mean")
    assert result.name == "error-rate-mean" and 0 <= result.intact.values <= 1
    scaled = np.asarray(result.effect.values) * result.grouped_effect.count.sum(0)[0, 0, 0]
    np.testing.assert_allclose(scaled, np.round(scaled), atol=1e-6)


def test_wrong_arguments_are_refused(make_model, task: Task, make_text) -> None:
    model = make_model(2)
    with pytest.raises(InputError, match="zero, mean, resample"):
        ablate_heads(model, task, mode="half")
    with pytest.raises(InputError, match=r"layers among 0\.\.3"):
        ablate_heads(model, task, layers=[4])
    with pytest.raises(InputError, match="equally often"):
        ablate_heads(model, task, layers=[0, 1])
    with pytest.raises(InputError, match="two documents"):
        ablate_heads(model, text_task(make_text(lengths=(20,))), mode="resample")
    with pytest.raises(InputError, match="steps"):
        model.run_steps(torch.zeros(1, 4, 16), start=5, stop=3)
    with pytest.raises(InputError, match="don't fit"):
        model.run_steps(torch.zeros(1, 4, 16), torch.zeros(1, 5))
