"""A model whose answers are known beforehand, through the whole pipeline: forward, recording, statistics, ablation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.planted import EXPERTS, HEAD, LAYER, Planted, plant

from visitlens.hooks.text.documents import pack
from visitlens.hooks.text.encoder import TextEncoder
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.analyses.ablation.ablate_recording import ablate
from visitlens.probe.analyses.ablation.dyck_study import DyckSettings, dyck_scores, dyck_task, study_head
from visitlens.probe.analyses.results.store import DyckStudy
from visitlens.probe.gallery.figure import find
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun
from visitlens.probe.samples.dyck_prompts import dyck_prompt

NO_CLOSER_IN_THE_INPUT = DyckSettings(prompts=12, depth=(3, 3), length=(3, 3))


@pytest.fixture(scope="module")
def planted() -> Planted:
    return plant()


@pytest.fixture(scope="module")
def text(planted: Planted) -> PackedTokens:
    prompts = [dyck_prompt((i,), planted.tokenizer, shots=1 + i % 3).text for i in range(40)]
    return pack(TextEncoder.of(planted.tokenizer, planted.model.config).documents(prompts).ids, 128, 0, 2)


@pytest.fixture(scope="module")
def recorded(
    planted: Planted,
    text: PackedTokens,
    make_recording: Callable[..., RecordedRun],
    tmp_path_factory: pytest.TempPathFactory,
) -> RecordedRun:
    return make_recording(planted.model, text, tmp_path_factory.mktemp("planted") / "planted.vlens")


@pytest.fixture(scope="module")
def study(planted: Planted) -> DyckStudy:
    return study_head(planted.model, planted.tokenizer, LAYER, HEAD, NO_CLOSER_IN_THE_INPUT, name="zero", about={})


def positions(text: PackedTokens) -> np.ndarray:
    """[token] of the real tokens."""
    return np.concatenate([np.arange((text.segments == s).sum()) for s in range(text.segments.max() + 1)])


@pytest.mark.parametrize("component", ["update", "attn_write", "moe_write"])
def test_the_second_write_is_one_and_a_half_times_the_first(
    component: str, recorded: RecordedRun, planted: Planted
) -> None:
    ratio = recorded.norm_ratio(component)
    np.testing.assert_allclose(ratio.values, [planted.ratio], rtol=1e-9)
    np.testing.assert_allclose(ratio.interval(), [[planted.ratio]] * 2, rtol=1e-9)
    each = recorded.between_visits("token_norm_ratio").sel(component=component)
    np.testing.assert_allclose(each.values, [planted.ratio], rtol=1e-9)


def test_the_writes_have_their_planted_sizes(recorded: RecordedRun, planted: Planted) -> None:
    size = math.sqrt(planted.model.config.hidden_size)
    attention = recorded.at_visit("attn_write_rms", 1).values * size
    experts = recorded.at_visit("moe_write_rms", 2).values * size
    np.testing.assert_allclose(attention, [planted.first_attention_write])
    np.testing.assert_allclose(experts, [planted.ratio * planted.first_expert_write])


@pytest.mark.parametrize("shared", [0, 3, 8])
def test_the_visits_share_the_planted_number_of_experts(
    shared: int, text: PackedTokens, make_recording: Callable[..., RecordedRun], tmp_path: Path
) -> None:
    rec = make_recording(
        plant(shared=shared).model, text, tmp_path / "run.vlens", measures=["shared_experts", "expert_load"]
    )
    histogram = rec.shared_experts().values[0]
    assert histogram.tolist() == [float(s == shared) for s in range(9)]
    assert rec.expert_overlap_chance_by_load().values[0] == pytest.approx(shared / 8)  # always the same experts
    data = find("expert-overlap").data(Pair(rec))["series"]
    assert data["observed"]["values"] == histogram.tolist()
    assert data["uniform_chance"]["values"] == 64 / EXPERTS


def test_the_head_rests_on_the_start_at_visit_1_and_leaves_it_at_visit_2(
    recorded: RecordedRun, text: PackedTokens, planted: Planted
) -> None:
    first, second = (recorded.at_visit("sink_mass", v).sel(layer=LAYER).values for v in (1, 2))
    closers = {planted.tokenizer.token_to_id(c) for c in ")]}>"}
    real = text.segments >= 0
    tokens, segments, at = text.tokens[real], text.segments[real], positions(text)
    seen = np.array(
        [bool(closers & set(tokens[(segments == s) & (at <= p)])) for s, p in zip(segments, at, strict=True)]
    )
    queries = at > 0
    assert first[HEAD] == pytest.approx(1)
    assert second[HEAD] == pytest.approx(1 - seen[queries].mean())
    # The other heads attend to all they see alike: 1/n on the start.
    uniform = (1 / (at[queries] + 1)).mean()
    for head in {0, 1, 2, 3} - {HEAD}:
        assert first[head] == pytest.approx(uniform) and second[head] == pytest.approx(uniform)
    drawn = find("sink-heads").data(Pair(recorded))["series"]
    np.testing.assert_allclose(drawn["visit_2"]["values"][0], second)


def test_stages_are_as_alike_as_planted(recorded: RecordedRun, planted: Planted) -> None:
    stages = recorded.stage_cosine().sel(layer=LAYER)
    assert stages.sel(stage="X").values == pytest.approx(planted.x_cosine)
    assert stages.sel(stage="Q").values == pytest.approx(planted.q_cosine)
    assert stages.sel(stage="K").values == pytest.approx(1)
    same = recorded.attended("mass_overlap").sel(layer=LAYER).values
    assert same[[0, 1, 3]] == pytest.approx(1) and same[HEAD] < 1  # uniform attention twice is the same attention


# Ablation and the case study


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_ablation_names_the_planted_head(mode: str, planted: Planted) -> None:
    prompts = NO_CLOSER_IN_THE_INPUT.draw(planted.tokenizer)
    result = ablate(planted.model, dyck_task(prompts, 0, 2), mode=mode, metric_name="Dyck target loss")
    assert result.intact.values == pytest.approx(planted.nll)
    top = result.top()
    assert (top.layer, top.head) == (LAYER, HEAD)
    assert f"layer {LAYER}, head {HEAD}" in result.note() and "4 heads" in result.note()
    effect = result.effect.sel(layer=LAYER).values  # [visits, head]
    if mode == "zero":
        cost = planted.nll_without - planted.nll
        assert effect[1, HEAD] == pytest.approx(cost) and effect[2, HEAD] == pytest.approx(cost)
        assert abs(effect[0, HEAD]) < 0.1 * cost  # what it reads at visit 1 is never used
    others = np.delete(effect, HEAD, axis=1)
    np.testing.assert_allclose(others, 0, atol=1e-12)
    assert top.lead is not None and top.lead.interval()[0] > 0


def test_another_prompts_values_cost_nothing_where_all_prompts_give_the_same(planted: Planted) -> None:
    """Every prompt has read its closers at its targets, so what another has read there is as good."""
    prompts = NO_CLOSER_IN_THE_INPUT.draw(planted.tokenizer)
    result = ablate(planted.model, dyck_task(prompts, 0, 2), mode="resample")
    np.testing.assert_allclose(result.effect.values, 0, atol=1e-2 * (planted.nll_without - planted.nll))


def test_the_study_finds_the_sink_at_visit_1_and_the_answers_at_visit_2(study: DyckStudy) -> None:
    mass = study.mass.sel(heads="dyck head")
    for shots in (1, 2, 4, 8):
        # Target t sees the 3 closers of each demonstration and the t closers before it.
        answers = np.mean([3 * shots / (3 * shots + t) for t in range(3)])
        np.testing.assert_allclose(mass.sel(shots=shots).values, [[1, 0], [0, answers]], atol=1e-9)


def test_uniform_attention_is_the_studys_control(study: DyckStudy, planted: Planted) -> None:
    """The other heads attend uniformly, so both controls agree, and with a count by hand."""
    others, uniform = (study.mass.sel(heads=of, shots=4).values for of in ("other heads", "uniform"))
    np.testing.assert_allclose(others, uniform)
    keys, answers = [], []
    for prompt in NO_CLOSER_IN_THE_INPUT.draw(planted.tokenizer):
        keys += [at + 1 for at in prompt.targets]
        answers += [sum(stop - start for start, stop in prompt.demonstrations)] * 3
    expected = [np.mean(1 / np.array(keys)), np.mean(np.array(answers) / np.array(keys))]
    np.testing.assert_allclose(uniform, [expected] * 2)


def test_maps_show_one_row_a_target(study: DyckStudy) -> None:
    assert len(study.examples) == 2
    for example in study.examples:
        assert example.maps.shape == (2, 3, len(example.pieces)) and example.pieces[0] == "BOS"
        np.testing.assert_allclose(example.maps.sum(-1), 1)
        np.testing.assert_allclose(example.maps[0, :, 0], 1)
        assert all(example.pieces[at] in ")]}>" for at in example.targets)
        for row, at in enumerate(example.targets):
            seen = [i for i, piece in enumerate(example.pieces[:at]) if piece in ")]}>"]
            np.testing.assert_allclose(example.maps[1, row, seen], 1 / len(seen))
            spans = [i for a, b in example.demonstrations for i in range(a, b)]
            assert set(seen) - set(spans) == set(example.targets[:row])


def test_scores_follow_from_the_planted_logits(planted: Planted) -> None:
    scores = dyck_scores(planted.model, planted.tokenizer, NO_CLOSER_IN_THE_INPUT, (0, 1))
    nats = scores["target_nll"].stat().values
    assert nats[1] == pytest.approx(planted.nll)
    # Without demonstrations the first target sees no closer, the others do.
    assert nats[0] == pytest.approx((planted.nll_without + 2 * planted.nll) / 3)
    assert scores["exact_match"].stat().values.tolist() == [0, 0]  # it never writes the space between closers


def test_prompts_may_be_padded_and_batched_in_any_way(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DyckSettings(prompts=5)
    whole = dyck_scores(planted.model, planted.tokenizer, settings, (2,))["nll"].total
    monkeypatch.setattr("visitlens.probe.analyses.ablation.dyck_study._AT_ONCE", 1)
    np.testing.assert_allclose(dyck_scores(planted.model, planted.tokenizer, settings, (2,))["nll"].total, whole)
    prompt = settings.draw(planted.tokenizer, 2)[3]
    with torch.inference_mode():
        logits = planted.model(torch.tensor([[0, *prompt.tokens]]).long())[0].log_softmax(-1)
    start, stop = prompt.answer
    alone = -sum(float(logits[i, prompt.tokens[i]]) for i in range(start, stop))
    assert whole[3, 0] == pytest.approx(alone)
