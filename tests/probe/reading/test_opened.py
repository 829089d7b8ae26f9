"""A recording opened: the paper's statistics from its totals, worked out by hand and against the raw routing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import visitlens
from visitlens.errors import InputError, RecordingError
from visitlens.hooks.core.loop_plan import ExecutionPlan, LoopSpec
from visitlens.hooks.recording.format.totals import GroupTotals
from visitlens.probe.measures.measure import Measure
from visitlens.probe.reading.recorded_run import RecordedRun, step_label

TWO_LAYERS_TWICE = LoopSpec(3, range(1, 3), 2).plan()
"""Steps: 0, then layers 1 and 2 at visit 1, then at visit 2."""


def made_up(plan: ExecutionPlan, means: dict[str, tuple[str, object]], **config: int) -> RecordedRun:
    """A run whose measures have these means: name -> (axes, values); two groups of one token, alike."""
    totals = {}
    for name, (axes, values) in means.items():
        total = np.stack([np.array(values, dtype=float)] * 2)
        nothing = np.zeros(total.shape[1:], np.int64)
        attributes = Measure(name, name, tuple(axes.split()), "", "", "").to_attributes()
        totals[name] = GroupTotals(attributes, total, np.ones_like(total), nothing, nothing)
    run = {
        "run_uuid": "u",
        "config_sha256": "c",
        "config": {"weights_sha256": "w", "data_sha256": "d"},
    }
    sizes = {"experts_per_token": 2, "num_experts": 4, **config}
    recording = SimpleNamespace(
        path=Path("made-up.vlens"), plan=plan, totals=totals, config=sizes, tokens=2, documents=2, run=run
    )
    return RecordedRun(recording)


# By hand


def test_expert_overlap_is_the_shared_count_over_k() -> None:
    run = made_up(TWO_LAYERS_TWICE, {"shared_expert_count": ("pair", [1.0, 2.0])})
    overlap = run.expert_overlap()
    assert overlap.values.tolist() == [0.5, 1.0] and overlap.labels == {"layer": [1, 2]}
    assert run.expert_overlap_chance() == 0.5


def test_chance_by_load_is_the_sum_of_the_products_of_loads_over_k() -> None:
    """Layer 1: 1 * .5 + .5 * .5 + .5 * 1 + 0 = 1.25, over k = 2: 0.625. Layer 2: always the same two experts: 1."""
    first, second = [[1, 0.5, 0.5, 0], [1, 1, 0, 0]], [[0.5, 0.5, 1, 0], [1, 1, 0, 0]]
    run = made_up(TWO_LAYERS_TWICE, {"expert_load": ("step expert", [[0.5] * 4, *first, *second])})
    chance = run.expert_overlap_chance_by_load()
    np.testing.assert_allclose(chance.values, [0.625, 1.0])
    assert chance.labels == {"layer": [1, 2]} and chance.axes == ("layer",)


def test_uniform_loads_have_the_uniform_chance_level() -> None:
    run = made_up(TWO_LAYERS_TWICE, {"expert_load": ("step expert", [[0.5] * 4] * 5)})
    np.testing.assert_allclose(run.expert_overlap_chance_by_load().values, run.expert_overlap_chance())
    np.testing.assert_allclose(run.load_imbalance().values, 1)


def test_load_imbalance_is_e_over_k_if_the_same_k_experts_take_everything() -> None:
    """E sum (f/k)^2 = 4 * (1/4 + 1/4) = 2; of k = 1 it's E."""
    plan = LoopSpec(1, range(0), 1).plan()
    loads = {"expert_load": ("step expert", [[1, 1, 0, 0]])}
    np.testing.assert_allclose(made_up(plan, loads).load_imbalance().values, [2])
    one = {"expert_load": ("step expert", [[1, 0, 0, 0]])}
    np.testing.assert_allclose(made_up(plan, one, experts_per_token=1).load_imbalance().values, [4])


def test_norm_ratio_is_the_ratio_of_means_and_norm_output_the_mean_of_both_norms() -> None:
    means = {
        "update_rms": ("step", [9, 2, 4, 3, 2]),
        "norm_output_attn_rms": ("step", [9, 1, 1, 1.5, 2]),
        "norm_output_moe_rms": ("step", [9, 2, 2, 1, 2]),
    }
    run = made_up(TWO_LAYERS_TWICE, means)
    assert run.norm_ratio().values.tolist() == [1.5, 0.5]
    assert run.norm_ratio("norm_output_attn").values.tolist() == [1.5, 2]
    assert run.norm_ratio("norm_output").values.tolist() == [1.0, 1.5]
    assert run.norm_ratio("norm_output").labels == {"layer": [1, 2]}


def test_update_cosine_cells_are_the_cross_visit_diagonal_and_the_rest_of_its_block() -> None:
    """Steps 1, 2 are visit 1 of layers 1, 2 and steps 3, 4 visit 2; the cell (s, s') holds 10 s + s'."""
    matrix = [[10 * a + b for b in range(5)] for a in range(5)]
    run = made_up(TWO_LAYERS_TWICE, {"update_cosine": ("step later_step", matrix)})
    same, other = run.update_cosine_same_layer(), run.update_cosine_other_layers()
    assert same.values.tolist() == [13, 24] and same.labels == {"layer": [1, 2]}
    assert other.values.tolist() == [14, 23] and other.labels == {"layer_pair": [(1, 2), (2, 1)]}


def test_the_control_is_averaged_over_the_two_visits() -> None:
    values = [[np.nan, np.nan], [0.2, 0.4], [0.1, 0.1], [0.4, 0.8], [0.3, 0.5]]
    run = made_up(TWO_LAYERS_TWICE, {"top1_match_control": ("step head", values)})
    np.testing.assert_allclose(run.attended_control("top1_match").values, [[0.3, 0.6], [0.2, 0.3]])


def test_of_three_visits_each_pair_can_be_asked_for_and_the_first_and_last_are_the_default() -> None:
    plan = LoopSpec(2, range(2), 3).plan()  # pairs: layer 0 (1,2) (1,3) (2,3), then layer 1
    run = made_up(plan, {"gate_overlap": ("pair", [12, 13, 23, 112, 113, 123]), "resid_rms": ("step", range(6))})
    assert run.between_visits("gate_overlap").values.tolist() == [13, 113]
    assert run.between_visits("gate_overlap", (1, 2)).values.tolist() == [12, 112]
    assert run.between_visits("gate_overlap", (2, 3)).values.tolist() == [23, 123]
    assert run.at_visit("resid_rms", 2).values.tolist() == [2, 3]
    with pytest.raises(InputError, match=r"1 <= a < b <= 3 for layer 0, got \(2, 4\)"):
        run.between_visits("gate_overlap", (2, 4))
    with pytest.raises(InputError, match="no looped layer has a visit 4"):
        run.at_visit("resid_rms", 4)


def test_layers_that_come_back_in_another_order_are_matched_by_layer() -> None:
    """A plan 0 1 1 0: layer 1's second visit runs before layer 0's."""
    plan = ExecutionPlan.from_layers([0, 1, 1, 0])
    run = made_up(plan, {"update_rms": ("step", [2, 10, 30, 8]), "expert_load": ("step expert", [[1, 1, 0, 0]] * 4)})
    ratio = run.norm_ratio()
    assert dict(zip(ratio.labels["layer"], ratio.values.tolist(), strict=True)) == {0: 4.0, 1: 3.0}


def test_layers_with_different_numbers_of_visits_compare_each_ones_first_and_last() -> None:
    """Layer 0 runs three times, layer 1 twice."""
    plan = ExecutionPlan.from_layers([0, 0, 0, 1, 1])
    run = made_up(plan, {"update_rms": ("step", [1, 2, 3, 10, 50]), "gate_overlap": ("pair", [12, 13, 23, 112])})
    assert run.between_visits("gate_overlap").values.tolist() == [13, 112]
    assert run.norm_ratio().values.tolist() == [3, 5]


# Real recordings


def test_overlaps_of_a_recording_are_those_of_its_raw_routing(
    looped_recording: RecordedRun, three_visit_recording: RecordedRun
) -> None:
    for run, pairs in ((looped_recording, [(1, 2)]), (three_visit_recording, [(1, 2), (1, 3), (2, 3)])):
        for a, b in pairs:
            overlap, histogram = run.expert_overlap((a, b)), run.shared_experts((a, b))
            chance = run.expert_overlap_chance_by_load((a, b))
            for at, layer in enumerate((1, 2)):
                one, two = (run.recording.experts(layer, visit)[0] for visit in (a, b))
                shared = [len(set(x) & set(y)) for x, y in zip(one.tolist(), two.tolist(), strict=True)]
                assert overlap.values[at] == pytest.approx(np.mean(shared) / 8)
                np.testing.assert_allclose(histogram.values[at], np.bincount(shared, minlength=9) / len(shared))
                loads = [np.bincount(x.ravel(), minlength=16) for x in (one, two)]
                totals, steps = run.sums("expert_load"), [run.plan.step(layer, visit).index for visit in (a, b)]
                for load, step in zip(loads, steps, strict=True):
                    np.testing.assert_array_equal(totals.total[:, step].sum(0), load)
                first, second = (totals.total[:, step] for step in steps)
                tokens = totals.count[:, steps[0], 0]
                pairs = ~np.eye(len(tokens), dtype=bool)  # of different documents
                expected = (first @ second.T)[pairs].sum() / np.outer(tokens, tokens)[pairs].sum() / 8
                assert chance.values[at] == pytest.approx(expected)


def test_the_default_pair_of_visits_is_the_first_and_the_last(three_visit_recording: RecordedRun) -> None:
    for method in ("expert_overlap", "norm_ratio", "stage_cosine", "update_cosine_same_layer"):
        default, named = getattr(three_visit_recording, method)(), getattr(three_visit_recording, method)(visits=(1, 3))
        np.testing.assert_array_equal(default.values, named.values)
        assert not np.array_equal(default.values, getattr(three_visit_recording, method)(visits=(1, 2)).values)


def test_every_measure_can_be_read_with_its_labels_and_interval(recordings: dict[str, RecordedRun]) -> None:
    for run in recordings.values():
        for name in run.measures:
            stat = run.stat(name)
            low, high = stat.interval()
            known = ~np.isnan(stat.values)
            assert known.any() and stat.values.shape == tuple(len(stat.labels[a]) for a in stat.axes)
            if name == "expert_transitions":
                assert np.isnan(low).all()
                continue
            within = (low[known] <= stat.values[known] + 1e-12) & (stat.values[known] <= high[known] + 1e-12)
            assert within.mean() > 0.97, name
            assert (stat.documents, stat.tokens) == (60, run.recording.tokens)
            assert stat.provenance["data_sha256"] == run.recording.run["config"]["data_sha256"]


def test_axes_are_labelled_by_steps_pairs_and_stages(three_visit_recording: RecordedRun) -> None:
    run = three_visit_recording
    assert run.stat("sink_mass").labels["step"] == list(run.plan.steps)
    assert run.stat("stage_cosine").labels["pair"] == list(run.plan.pairs)
    assert run.stage_cosine().labels == {"layer": [1, 2], "stage": ["X", "Q", "K", "V", "PV", "O"]}
    assert run.attended("top8_overlap").labels == {"layer": [1, 2], "head": [0, 1, 2, 3]}
    assert run.stat("update_cosine").labels["later_step"] == list(run.plan.steps)
    assert [step_label(s) for s in run.plan.steps[:4]] == ["0·1", "1·1", "2·1", "1·2"]


def test_two_openings_of_one_recording_have_paired_replicates(looped_recording: RecordedRun) -> None:
    again = visitlens.open(looped_recording.recording.path)
    difference = looped_recording.sink_mass().combine(again.sink_mass(), np.subtract, again.sink_mass().measure)
    low, high = difference.mean("head").interval()
    assert not low.any() and not high.any()


def test_the_update_cosine_is_symmetric_with_a_diagonal_of_1(looped_recording: RecordedRun) -> None:
    matrix = looped_recording.update_cosine().values
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-6)
    np.testing.assert_allclose(np.diag(matrix), 1, atol=1e-6)


def test_an_unlooped_model_has_steps_but_nothing_to_compare(baseline_recording: RecordedRun) -> None:
    run = baseline_recording
    assert not run.looped and run.sink_mass().values.shape == (4, 4)
    assert run.update_cosine().values.shape == (4, 4) and run.load_imbalance().values.shape == (4,)
    for compare in (run.expert_overlap, run.norm_ratio, run.stage_cosine, run.update_cosine_same_layer):
        with pytest.raises(RecordingError, match="an unlooped model has one visit a layer"):
            compare()
    with pytest.raises(RecordingError, match=r"no measure 'gate_overlap' .*unlooped model has one visit"):
        run.stat("gate_overlap")


def test_a_measure_that_is_not_there_is_refused_with_near_names(looped_recording: RecordedRun) -> None:
    with pytest.raises(RecordingError, match="no measure 'zzz'; it has attention_entropy, "):
        looped_recording.stat("zzz")
    with pytest.raises(RecordingError, match="no measure 'sink_mas'; did you mean sink_mass"):
        looped_recording.stat("sink_mas")
    with pytest.raises(InputError, match=r"component among norm_output, update, .*got 'writes'"):
        looped_recording.norm_ratio("writes")
    with pytest.raises(InputError, match=r"1 <= a < b <= 2 for layer 1, got \(1, 3\)"):
        looped_recording.expert_overlap((1, 3))


def test_a_run_says_what_it_is(recordings: dict[str, RecordedRun]) -> None:
    tokens = f"{recordings['three'].recording.tokens:,}"
    expected = (
        f"RecordedRun(three: 4 layers, 2 layers run 3 times, {tokens} tokens of 60 documents, level tokens, complete)"
    )
    assert repr(recordings["three"]) == expected
    assert "4 layers, unlooped," in repr(recordings["baseline"])
    assert recordings["looped"].name == "looped" and recordings["looped"].looped
