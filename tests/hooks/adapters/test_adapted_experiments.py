"""Experiments, scores and the notebook's model on adapted models: against sums by hand, and refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from visitlens.errors import InputError
from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.interventions.intervene import intervene, replace, scale, skip, take
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.experiments import run_experiment
from visitlens.probe.experiments.attribution import attribute
from visitlens.probe.samples.sample import EvalSet
from visitlens.probe.samples.scores import score

Adapted = Callable[..., AdaptedModel]
LOOPED = ("dory", "inkling2_loop_text")


@pytest.fixture(scope="module")
def sample(make_text: Callable[..., PackedTokens]) -> EvalSet:
    return EvalSet.of_contexts(make_text(lengths=(10,) * 6))  # of one length, so that a context is one forward


def mean(model: AdaptedModel, sample: EvalSet, *chain: Any) -> float:
    return float(score(model, sample, [chain])[0].loss.sum() / sample.counts.sum())


def test_scores_are_the_models_own_loss(family: str, adapted: Adapted, sample: EvalSet) -> None:
    model = adapted(family)
    if family == "albert":
        with pytest.raises(InputError, match="albert has no loss on text: it fills in masked tokens"):
            score(model, sample)
        return
    tokens, segments = (torch.from_numpy(x) for x in (sample.contexts.tokens, sample.contexts.segments))
    loss = model(tokens, segments, return_type="loss")
    assert loss is not None and mean(model, sample) == pytest.approx(float(loss.nanmean()), rel=1e-5)


@pytest.mark.parametrize("kind", LOOPED)
def test_the_ledger_of_a_looped_family(kind: str, adapted: Adapted, sample: EvalSet) -> None:
    model = adapted(kind)
    layers = model.plan.looped_layers
    ledger = run_experiment("mechanism_ledger", model, sample, visits=(1, 2)).mechanism_ledger.sel(slice="text")
    value = {
        (form, name): float(ledger.sel(form=form, mechanism=name).values)
        for form in ledger.labels["form"]
        for name in ledger.labels["mechanism"]
    }
    plain = mean(model, sample)
    whole = mean(model, sample, *(take(s, layer=layers, visit=2) for s in ("attn_write", "moe_write"))) - plain
    assert value["alone", "whole update"] == pytest.approx(whole) == value["left in", "whole update"]
    assert value["alone", "keys"] == pytest.approx(mean(model, sample, take("K", layer=layers, visit=2)) - plain)
    assert value["alone", "visit skipped"] == pytest.approx(mean(model, sample, *skip(layer=layers, visit=2)) - plain)
    routed = kind == "inkling2_loop_text"
    assert (("alone", "gates") in value) == routed and (("alone", "feed-forward input") in value) != routed
    # each of them gates its attention output by what the layer reads
    assert "the rest of attention" in ledger.labels["mechanism"]
    assert "the rest of the feed-forward layer" not in ledger.labels["mechanism"]


@pytest.mark.parametrize("kind", LOOPED)
def test_every_experiment_gives_numbers_or_the_reason(kind: str, adapted: Adapted, sample: EvalSet) -> None:
    model = adapted(kind)
    refused = {"patching": "patching needs prompts"}
    if kind == "inkling2_loop_text":
        refused |= dict.fromkeys(("readout", "convergence"), "no site 'resid'")
    else:
        refused["routing_dynamics"] = "no site 'experts': its feed-forward layers are dense"
    chosen: dict[str, dict[str, Any]] = {"loop_count": {"loops": (1, 2)}, "attribution": {"exact": 2}}
    for name in (
        "skip_visit",
        "loop_count",
        "attribution",
        "readout",
        "convergence",
        "routing_dynamics",
        "nulls",
        "patching",
    ):
        if name in refused:
            with pytest.raises(InputError, match=refused[name]):
                run_experiment(name, model, sample)
            continue
        for stat in run_experiment(name, model, sample, **chosen.get(name, {})).values():
            assert np.isfinite(stat.values).any() or not stat.values.size, (name, stat.measure.name)
            assert stat.documents == sample.documents, (name, stat.measure.name)


def test_queries_keys_values_and_input_are_all_where_nothing_else_is(
    make_hf: Callable[..., Any], sample: EvalSet
) -> None:
    raw = make_hf("llama")
    raw.model.layers[2] = raw.model.layers[1]  # one layer, run twice
    ledger = run_experiment("mechanism_ledger", adapt(raw), sample).mechanism_ledger.sel(slice="text")
    assert not [name for name in ledger.labels["mechanism"] if "rest" in name]
    assert abs(float(ledger.sel(form="left in", mechanism="values").values)) > 1e-5


def test_a_loop_count_is_the_loss_of_the_model_run_so(adapted: Adapted, sample: EvalSet) -> None:
    model = adapted("dory")
    loss = run_experiment("loop_count", model, sample, loops=(1, 3)).loss.sel(slice="text")
    assert loss.labels["scale"] == ("kept",)
    for count in (1, 3):
        expected = mean(model.with_loop_count(count), sample)
        assert float(loss.sel(scale="kept", loops=count).values) == pytest.approx(expected)
    with pytest.raises(InputError, match="no loop count that is read when it runs"):
        run_experiment("loop_count", adapted("zamba"), sample)
    with pytest.raises(InputError, match=r"no site 'attn_write'.*isn't added to the residual"):
        run_experiment("mechanism_ledger", adapted("zamba"), sample)
    with pytest.raises(InputError, match="unlooped"):
        run_experiment("skip_visit", adapted("llama"), sample)


def test_the_lenses_end_where_the_model_does(adapted: Adapted, sample: EvalSet) -> None:
    model = adapted("dory")
    found = run_experiment("readout", model, sample)
    plain = mean(model, sample)
    assert np.allclose(found.loss.values[:, -1], plain) and np.allclose(found.divergence.values[:, -1], 0, atol=1e-6)
    coda = len(model.plan) - 1  # its one output layer
    assert float(found.loss.values[1, coda - 1]) == pytest.approx(plain)
    assert not np.allclose(found.loss.values[0, :-1], plain, atol=1e-3)


@pytest.mark.parametrize("kind", ["hrm_text", "dory", "olmoe"])
def test_attribution_is_the_slope_of_the_loss(kind: str, adapted: Adapted, sample: EvalSet) -> None:
    """Also where the family's code would cut gradients short: HRM-Text's first low cycles run without."""
    model = adapted(kind)
    found = attribute(model, sample)
    assert set(found) == ({"heads", "experts"} if kind == "olmoe" else {"heads"})
    for step in (model.plan.steps[0], model.plan.steps[-1]):
        up, down = (scale("PV", 1 + e, layer=step.layer, visit=step.visit, head=1) for e in (2e-3, -2e-3))
        a, b = score(model, sample, [[up], [down]])
        slope = -(a.loss - b.loss).sum() / 4e-3
        assert found["heads"][:, step.index, 1].sum() == pytest.approx(slope, rel=0.05, abs=0.02)


def test_patching_an_adapted_model(adapted: Adapted, sample: EvalSet) -> None:
    model, contexts = adapted("dory"), sample.contexts
    tokens, segments = torch.from_numpy(contexts.tokens).long(), torch.from_numpy(contexts.segments)
    other = torch.where((torch.arange(tokens.shape[1]) % 4 == 2) & (segments >= 0), (tokens + 7) % 50 + 3, tokens)
    roles = np.where(contexts.segments >= 0, 3, -1).astype(np.int8)
    prompts = EvalSet(contexts, sample.counted, sample.facets, corrupted=other.int().numpy(), roles=roles)
    whole = run_experiment("patching", model, prompts, by="part").recovered
    assert float(whole.values[1, 3]) < float(whole.values[0, 3]) == pytest.approx(1, abs=1e-5)
    found = run_experiment("patching", model, prompts, site="V")
    step, counted = model.plan.steps[4], torch.from_numpy(sample.counted)

    def loss(inputs: torch.Tensor, *chain: Any) -> float:
        with intervene(model, *chain):
            logits = model(inputs, segments)
        assert logits is not None
        log_p = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return -float(log_p[counted[:, 1:]].double().sum())

    with capture(model, ["V"]) as clean:
        model(tokens, segments)
    patched = loss(other, replace("V", clean, layer=step.layer, visit=step.visit, head=1))
    expected = (loss(other) - patched) / (loss(other) - loss(tokens))
    assert float(found.recovered.values[step.index, 1]) == pytest.approx(expected, rel=1e-3)
