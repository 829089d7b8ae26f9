"""Capture keeps each site's value of each step; StepValues lays them flat over real tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from visitlens.errors import InputError, PlanError
from visitlens.hooks.capture.attention_rule import AttentionRule
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.core.loop_plan import ExecutionPlan, LoopSpec
from visitlens.hooks.core.sites import ACTIVATION_SITES, SITES, check_sites
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.kernels.attention.rows import row_statistics

ModelFactory = Callable[..., LoopedMoE]


@pytest.mark.parametrize("visits", [1, 2, 3])
def test_every_site_is_the_value_at_its_hook_point(
    visits: int, make_model: ModelFactory, make_text: Callable[..., PackedTokens]
) -> None:
    text = make_text()
    inputs = torch.from_numpy(text.tokens), torch.from_numpy(text.segments)
    model = make_model(visits)
    cache = model.run_with_cache(*inputs)[1]
    with capture(model, SITES) as captured:
        assert f" at 0 of {len(model.plan)} steps)" in repr(captured)
        logits = model(*inputs)
    assert repr(captured) == f"Captured({', '.join(SITES)} at {len(model.plan)} of {len(model.plan)} steps)"
    assert torch.equal(logits, model(*inputs))
    for step in model.plan.steps:
        for name, site in SITES.items():
            expected = cache[f"blocks.{step.layer}.visit.{step.visit}.{site.hook}"]
            assert torch.equal(captured.at(name, step.index), expected)
            assert torch.equal(captured.get(name, step.layer, step.visit), expected)
            assert expected.ndim == 2 + len(site.axes)


def test_the_last_forward_counts_and_hooks_are_gone_afterwards(make_model: ModelFactory) -> None:
    model = make_model(2)
    one, two = torch.tensor([[0, 5]]), torch.tensor([[0, 9, 7]])
    with capture(model, ["resid"]) as captured:
        model(one)
        model(two)
    model(one)
    assert captured.at("resid", 3).shape[:2] == (1, 3)
    assert not any(point.has_hooks() for point in model.hook_dict.values()) and not model.ln_final._forward_hooks


def test_hooks_are_gone_after_an_error_too(make_model: ModelFactory) -> None:
    model = make_model(2)
    with pytest.raises(ZeroDivisionError), capture(model, ["resid"]):
        model(torch.tensor([[0, 5]]))
        raise ZeroDivisionError
    assert not any(point.has_hooks() for point in model.hook_dict.values()) and not model.ln_final._forward_hooks


def test_a_model_that_leaves_its_plan_is_refused(make_model: ModelFactory) -> None:
    model = make_model(2)
    executed, claimed = model.plan, LoopSpec(4, range(1, 3), 2).plan()
    steps = list(executed.steps)
    model.plan = claimed
    with capture(model, ["resid"]), pytest.raises(PlanError, match=r"layer 2 ran where step 1 \(layer 1, visit 1\)"):
        model.plan = ExecutionPlan((steps[0], steps[2], steps[1], *steps[3:]))
        model(torch.tensor([[0, 5]]))
    model.plan = claimed
    with capture(model, ["resid"]), pytest.raises(PlanError, match=r"ended before step 5 \(layer 3, visit 1\)"):
        model.plan = ExecutionPlan(tuple(steps[:-1]))
        model(torch.tensor([[0, 5]]))


def test_a_forward_that_failed_does_not_spoil_the_next_one(make_model: ModelFactory) -> None:
    model = make_model(2)

    def fail(value: torch.Tensor, hook: object) -> None:
        raise ZeroDivisionError

    with capture(model, ["resid"]) as captured:
        with pytest.raises(ZeroDivisionError):
            model.run_with_hooks(torch.tensor([[0, 5]]), fwd_hooks=[("blocks.2.visit.1.hook_mlp_out", fail)])
        model(torch.tensor([[0, 5, 7]]))
    assert captured.at("resid", 5).shape[1] == 3


def test_capture_goes_together_with_transformerlens_own_hooks_and_cache(make_model: ModelFactory) -> None:
    """`run_with_hooks` calls `forward` directly, past the hooks on the model."""
    model, tokens = make_model(2), torch.tensor([[0, 5, 7]])
    silence = ("blocks.1.visit.2.attn.hook_z", lambda value, hook: torch.zeros_like(value))
    with capture(model, ["attn_write"]) as captured:
        model.run_with_hooks(tokens, fwd_hooks=[silence])
        assert not captured.get("attn_write", 1, 2).any()
        cache = model.run_with_cache(tokens)[1]
        assert torch.equal(captured.get("attn_write", 1, 2), cache["blocks.1.visit.2.hook_attn_out"])
        model.run_with_hooks(tokens, fwd_hooks=[silence])
        assert captured.get("attn_write", 1, 1).any() and not captured.get("attn_write", 1, 2).any()


def test_what_was_not_captured_is_refused_by_name(make_model: ModelFactory) -> None:
    model = make_model(2)
    with pytest.raises(InputError, match="no site 'R'; expected some of resid, X, Q"), capture(model, ["R"]):
        pass
    with capture(model, ["Q"]) as captured:
        with pytest.raises(InputError, match="'Q' has no value at step 0: run the model inside the capture first"):
            captured.at("Q", 0)
        model(torch.tensor([[0, 5]]))
    with pytest.raises(InputError, match="no site 'K'; expected some of Q"):
        captured.get("K", 1, 1)
    with pytest.raises(InputError, match="no visit 3 of layer 1"):
        captured.get("Q", 1, 3)


def test_the_catalogue_of_sites_names_real_places() -> None:
    assert check_sites(["Q", "PV"]) == ("Q", "PV")
    assert set(ACTIVATION_SITES) <= set(SITES) and all(SITES[name].dataset for name in ACTIVATION_SITES)
    datasets = [site.dataset for site in SITES.values() if site.dataset]
    assert len(set(datasets)) == len(datasets)


def test_step_values_leave_padding_out_and_restart_positions() -> None:
    """Two contexts of 4: documents of 3 and 1, then 2 and padding; the second layer has a sliding window of 2."""
    plan = LoopSpec(2, range(0), 1).plan()
    captured = Captured(plan, ("resid",))
    captured.rules[1] = AttentionRule(1.0, window=2)
    captured.store("resid", 0, torch.arange(8.0).view(2, 4, 1))
    values = StepValues(captured, torch.tensor([[0, 0, 0, 1], [2, 2, -1, -1]]))
    assert values.site("resid", 0).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert values.segments.bounds == (0, 3, 4, 6)
    assert values.keys_seen.tolist() == [[1, 1], [2, 2], [3, 2], [1, 1], [1, 1], [2, 2]]


def test_step_values_compute_the_rows_of_each_step_from_its_own_queries_and_keys(
    make_model: ModelFactory, make_text: Callable[..., PackedTokens]
) -> None:
    text = make_text()
    segments = torch.from_numpy(text.segments)
    model = make_model(3, dtype=torch.float64)
    with capture(model, ["Q", "K"]) as captured:
        model(torch.from_numpy(text.tokens), segments)
    values = StepValues(captured, segments, "torch")
    assert sorted(values.attention_overlaps) == [1, 2]
    assert sorted(values.attention_overlaps[1].across) == [(0, 1), (0, 2), (1, 2)]
    for step in range(len(model.plan)):
        alone = row_statistics(values.site("Q", step), values.site("K", step), values.segments, implementation="torch")
        torch.testing.assert_close(values.attention_rows[step].entropy, alone.entropy, atol=1e-12, rtol=0)
        torch.testing.assert_close(values.attention_rows[step].sink_mass, alone.sink_mass, atol=1e-12, rtol=0)
