"""Each experiment against the same quantity worked out by hand on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.interventions.gradients import site_gradients
from visitlens.hooks.interventions.intervene import intervene, scale, skip, with_loop_count
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.experiments import Results, find, options, question, registered, run_experiment
from visitlens.probe.experiments.attribution import attribute, rank_correlation, spread
from visitlens.probe.ladder.evaluate import text_loss
from visitlens.probe.samples.sample import ROLES, EvalSet
from visitlens.probe.samples.scores import score

ModelFactory = Callable[..., LoopedMoE]


@pytest.fixture(scope="module")
def packed(make_text: Callable[..., PackedTokens]) -> PackedTokens:
    return make_text(lengths=(9, 20, 3, 30, 12, 2, 14, 8, 8))


@pytest.fixture(scope="module")
def sample(packed: PackedTokens) -> EvalSet:
    return EvalSet.of_contexts(packed)


@pytest.fixture(scope="module")
def text(packed: PackedTokens) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(packed.tokens), torch.from_numpy(packed.segments)


@pytest.fixture(scope="module")
def looped(make_model: ModelFactory) -> LoopedMoE:
    """In float64: an experiment's batches have other shapes than `text`, and a forward of another shape rounds otherwise."""
    return make_model(2, dtype=torch.float64)


@pytest.fixture(scope="module")
def prompts(sample: EvalSet) -> EvalSet:
    """The text as if it were prompts: the second half of each document is another in the corrupted version."""
    tokens, document_of = sample.contexts.tokens, sample.document_of
    roles = np.full(tokens.shape, -1, dtype=np.int8)
    corrupted, counted = tokens.copy(), np.zeros(tokens.shape, dtype=bool)
    for segment in range(int(sample.contexts.segments.max()) + 1):
        row, at = np.nonzero(sample.contexts.segments == segment)
        half = len(at) // 2
        roles[row[0], at] = np.where(np.arange(len(at)) < half, 1, 3)
        roles[row[0], at[-1:]] = 4
        changed = (np.arange(len(at)) >= half) & (np.arange(len(at)) < len(at) - 1) & (np.arange(len(at)) > 0)
        corrupted[row[0], at[changed]] = (tokens[row[0], at[changed]] + 5) % 55 + 3
        counted[row[0], at[-1]] = changed.any()
    assert document_of.max() == sample.documents - 1
    return EvalSet(sample.contexts, counted, sample.facets, corrupted=corrupted, roles=roles)


def test_every_experiment_is_found_by_its_file_and_says_what_it_answers() -> None:
    assert {"mechanism_ledger", "skip_visit", "loop_count", "patching", "attribution", "readout"} <= set(registered())
    assert all(question(name).endswith(".") and len(question(name)) < 140 for name in registered())
    assert set(options("attribution")) == {"ablation", "exact"}
    with pytest.raises(InputError, match=r"no experiment 'mechanism_leger'.*Did you mean 'mechanism_ledger'"):
        find("mechanism_leger")


def test_an_unknown_option_is_refused(looped, sample) -> None:
    with pytest.raises(InputError, match="readout has no option loops; it has none"):
        run_experiment("readout", looped, sample, loops=3)


def test_every_result_has_a_definition_an_interval_and_survives_json(looped, sample, prompts) -> None:
    for name in registered():
        chosen = {"attribution": {"exact": 3}, "loop_count": {"loops": (1, 2)}}.get(name, {})
        ticks: list[tuple[int, int]] = []
        results = run_experiment(
            name,
            looped,
            prompts if name == "patching" else sample,
            on_progress=lambda a, b, t=ticks: t.append((a, b)),
            **chosen,
        )
        assert ticks and ticks[-1][0] == ticks[-1][1], name
        for stat in results.values():
            assert stat.measure.definition and stat.measure.unit and stat.documents == sample.documents
            assert stat.replicates is not None or not stat.measure.grouped
        assert set(results.to_dict()["results"]) == set(results)
        assert name in repr(results) and "definition" in results._repr_html_()


def test_results_are_items_and_attributes(looped, sample) -> None:
    results = run_experiment("skip_visit", looped, sample)
    assert isinstance(results, Results) and results.skip_block is results["skip_block"] and "skip_visit" in dir(results)
    with pytest.raises(InputError, match="has no result 'loss'; it has skip_visit, skip_block"):
        results["loss"]
    with pytest.raises(AttributeError, match="skip_block"):
        _ = results.loss


def test_a_skipped_block_is_the_model_run_once_whichever_visit_is_skipped(looped, sample, packed) -> None:
    results = run_experiment("skip_visit", looped, sample)
    worth = text_loss(with_loop_count(looped, 1, "kept"), packed) - text_loss(looped, packed)
    np.testing.assert_allclose(results.skip_block.sel(slice="text").values, [worth, worth], atol=1e-6)
    one = results.skip_visit.sel(slice="text", step=lambda s: (s.layer, s.visit) == (2, 1))
    with intervene(looped, skip(layer=2, visit=1)):
        skipped = text_loss(looped, packed)
    assert float(one.values[0]) == pytest.approx(skipped - text_loss(looped, packed), abs=1e-6)


def test_loop_counts_are_models_of_that_many_visits(looped, sample, packed) -> None:
    results = run_experiment("loop_count", looped, sample, loops=[1, 2, 3])
    loss = results.loss.sel(slice="text")
    for scale_name in ("rescaled", "kept"):
        expected = [text_loss(with_loop_count(looped, r, scale_name), packed) for r in (1, 2, 3)]
        np.testing.assert_allclose(loss.sel(scale=scale_name).values, expected, rtol=1e-6)
    accuracy = results.accuracy.sel(slice="text", scale="kept").values
    assert ((accuracy >= 0) & (accuracy <= 1)).all()


def test_patching_the_whole_difference_wins_all_back_and_one_head_what_a_hook_does(looped, prompts) -> None:
    by_part = run_experiment("patching", looped, prompts, by="part")
    first = by_part.recovered.sel(step=lambda s: s.index == 0)
    np.testing.assert_allclose(first.values[0, ROLES.index("last input")], 1.0, atol=1e-5)
    np.testing.assert_allclose(first.values[0, [0, 1, 2]], 0.0, atol=1e-5)
    heads = run_experiment("patching", looped, prompts).recovered
    tokens, segments = torch.from_numpy(prompts.contexts.tokens), torch.from_numpy(prompts.contexts.segments)
    other = torch.from_numpy(prompts.corrupted)
    counted = torch.from_numpy(prompts.counted[:, 1:])

    def loss(logits: Tensor) -> float:
        logits = logits.detach()
        nll = -logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None].long())[..., 0]
        return float(nll[counted].double().sum())

    name = "blocks.2.visit.2.attn.hook_z"
    clean = looped.run_with_cache(tokens, segments)[1][name]

    def patch(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[:, :, 1] = clean[:, :, 1]
        return value

    patched = looped.run_with_hooks(other, segments, fwd_hooks=[(name, patch)])
    cost = loss(looped(other, segments)) - loss(looped(tokens, segments))
    expected = (loss(looped(other, segments)) - loss(patched)) / cost
    got = heads.sel(step=lambda s: (s.layer, s.visit) == (2, 2)).values[0, 1]
    assert got == pytest.approx(expected, abs=1e-4)
    assert float(by_part.corruption.values) == pytest.approx(cost / prompts.counts.sum(), rel=1e-4)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [({"by": "layer"}, "by='head' or by='part'"), ({"site": "resid"}, "no heads"), ({"site": "Z"}, "no site 'Z'")],
)
def test_patching_refuses_what_it_cannot_do(chosen, said, looped, prompts, sample) -> None:
    with pytest.raises(InputError, match=said):
        run_experiment("patching", looped, prompts, **chosen)
    with pytest.raises(InputError, match="of_dyck"):
        run_experiment("patching", looped, sample)


def test_attribution_is_the_derivative_of_the_loss_in_a_units_strength(make_model, sample) -> None:
    """By head and expert, against central differences of the exact intervention."""
    model = make_model(2, dtype=torch.float64)
    heads, experts = attribute(model, sample).values()

    def slope(site: str, step: Any, **unit: int) -> np.ndarray:
        up, down = (scale(site, 1 + e, layer=step.layer, visit=step.visit, **unit) for e in (1e-5, -1e-5))
        a, b = score(model, sample, [[up], [down]])
        return -(a.loss - b.loss) / 2e-5

    for step in (model.plan.steps[0], model.plan.steps[4]):
        for head in (0, 3):
            np.testing.assert_allclose(heads[:, step.index, head], slope("PV", step, head=head), atol=1e-6)
        for expert in (1, 8):
            np.testing.assert_allclose(experts[:, step.index, expert], slope("gates", step, expert=expert), atol=1e-6)


def test_what_is_checked_spans_the_ranking_and_is_exact(looped, sample) -> None:
    total = np.array([[0.1, -0.5, 0.3], [0.0, 0.2, 0.9]])
    picked = spread(total, 3)
    assert picked[0] == (0, 1) and picked[2] == (1, 2) and picked[1] in ((0, 0), (1, 1))  # least, a middle one, most
    assert len(spread(total, 99)) == 6
    results = run_experiment("attribution", looped, sample, exact=4, ablation="mean")
    assert results.heads_checked.values.shape == (2, 4)
    worst = np.abs(np.subtract(*results.heads_checked.values)).max()
    assert float(results.heads_worst_error.values) == pytest.approx(worst)
    assert -1 <= float(results.experts_rank_correlation.values) <= 1
    with pytest.raises(InputError, match="'zero' or 'mean'"):
        run_experiment("attribution", looped, sample, ablation="resample")


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation(np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 4])) == pytest.approx(0.8)
    assert rank_correlation(np.array([1.0, 1, 2]), np.array([5.0, 5, 9])) == pytest.approx(1)
    assert np.isnan(rank_correlation(np.ones(3), np.arange(3.0)))


def test_the_gradient_at_a_pattern_is_the_slope_and_at_expert_numbers_there_is_none(make_model, text) -> None:
    model = make_model(2, dtype=torch.float64)
    found = site_gradients(model, *text, ["P"], lambda logits: logits.square().sum())
    value, gradient = (found_in["P", 1][0, 2] for found_in in (found.values, found.gradients))

    def metric(change: float) -> float:
        with torch.no_grad(), intervene(model, scale("P", 1 + change, layer=1, visit=1, head=2, token=range(32))):
            return float(model(*text)[0].square().sum())

    assert float((value * gradient).sum()) == pytest.approx((metric(1e-5) - metric(-1e-5)) / 2e-5, rel=1e-4)
    with pytest.raises(InputError, match="no gradient"):
        site_gradients(model, *text, ["experts"], lambda logits: logits.sum())


def test_the_lenses_end_where_the_model_does(looped, sample, packed, text) -> None:
    results = run_experiment("readout", looped, sample)
    loss = results.loss
    np.testing.assert_allclose(loss.sel(step=lambda s: s.index == 5).values[:, 0], text_loss(looped, packed), rtol=1e-6)
    assert np.isnan(results.flips.values[:, 0]).all()
    np.testing.assert_allclose(results.divergence.values[:, -1], 0, atol=1e-6)
    coda = results.final_answer.sel(lens="coda lens").values
    np.testing.assert_array_equal(coda[4:], 1.0)
    with intervene(looped, skip(layer=2, visit=1), skip(layer=(1, 2), visit=2)):
        expected = text_loss(looped, packed)  # the coda on the state after step 1
    assert float(loss.sel(lens="coda lens").values[1]) == pytest.approx(expected, rel=1e-6)
    with intervene(looped, skip(layer=(1, 2)), skip(layer=3)):
        expected = text_loss(looped, packed)
    assert float(loss.sel(lens="logit lens").values[0]) == pytest.approx(expected, rel=1e-6)


def test_steps_visits_and_what_is_left_to_go(looped, sample, text) -> None:
    results = run_experiment("convergence", looped, sample)
    with capture(looped, ["resid"]) as captured:
        looped(*text)
    chosen = torch.from_numpy(sample.counted)
    x = [captured.at("resid", i)[chosen].double() for i in range(6)]
    size = ((x[3] - x[2]).norm(dim=-1) / x[2].norm(dim=-1)).mean()
    assert float(results.step_size.values[2]) == pytest.approx(float(size), rel=1e-9)
    cosine = torch.nn.functional.cosine_similarity(x[3] - x[1], x[5] - x[3], dim=-1)
    assert float(results.visit_angle.values[1]) == pytest.approx(float(cosine.arccos().rad2deg().mean()), rel=1e-6)
    assert results.visit_distance.values[-1] == results.step_distance.values[-1] == 0
    longer = run_experiment("convergence", looped, sample, loops=5)
    assert longer.visit_size.labels["visit"] == [1, 2, 3, 4, 5] and len(longer.step_size.values) == 12


def test_nulls_hold_the_observed_likeness_and_less_of_it_between_documents(looped, sample, text) -> None:
    results = run_experiment("nulls", looped, sample)
    with capture(looped, ["V", "experts"]) as captured:
        looped(*text)
    chosen = torch.from_numpy(sample.counted)
    first, second = (captured.get("V", 1, v)[chosen].flatten(1).double() for v in (1, 2))
    expected = torch.nn.functional.cosine_similarity(first, second, dim=-1).mean()
    at = {"site": "V", "layer": 1}
    assert float(results.cosine.sel(null="observed", **at).values) == pytest.approx(float(expected), rel=1e-6)
    assert float(results.cosine.sel(null="tokens shuffled", **at).values) < 0.5 * float(expected)
    first, second = (captured.get("experts", 2, v)[chosen] for v in (1, 2))
    shared = (first.unsqueeze(2) == second.unsqueeze(1)).sum((1, 2)).double().mean() / 3
    overlap = results.expert_overlap.sel(layer=2).values
    assert overlap[0] == pytest.approx(float(shared)) and overlap[1] < overlap[0]


def test_routing_counts_add_up(looped, sample, text) -> None:
    results = run_experiment("routing_dynamics", looped, sample, tokens=3, at_least=1)
    np.testing.assert_allclose(results.load.values.sum(1), 3.0)
    together, moved = results.together.values, results.transitions.values
    np.testing.assert_allclose(np.diagonal(together, axis1=1, axis2=2), results.load.values)
    np.testing.assert_allclose(moved.sum((1, 2)), 9.0)
    np.testing.assert_allclose(np.trace(moved, axis1=1, axis2=2) / 3, results.kept.values)
    rates = results.changed_tokens.values
    assert len(rates) == 3 and (np.diff(rates) >= 0).all() and results.changed_tokens.replicates is None


@pytest.mark.parametrize("name", ["skip_visit", "loop_count", "nulls", "mechanism_ledger"])
def test_an_unlooped_model_is_refused_where_visits_matter(name, make_model, sample) -> None:
    with pytest.raises(InputError, match="unlooped"):
        run_experiment(name, make_model(1), sample)


def test_an_unlooped_model_has_routing_readout_and_attribution_all_the_same(make_model, sample) -> None:
    model = make_model(1)
    assert set(run_experiment("routing_dynamics", model, sample)) == {"entropy", "load", "together"}
    assert run_experiment("attribution", model, sample, exact=0).heads.values.shape == (4, 4)
    lenses = run_experiment("readout", model, sample).loss.values
    np.testing.assert_array_equal(lenses[0], lenses[1])  # nothing follows a loop, so the two lenses are one
