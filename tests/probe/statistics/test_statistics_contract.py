"""What every registered statistic must hold: additive over batches, whatever their order; honest about bad numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

from visitlens.errors import InputError, RecordingError
from visitlens.hooks.capture.attention_rule import AttentionRule
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.core.loop_plan import LoopSpec
from visitlens.hooks.core.sites import SITES, check_sites
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.format.totals import GroupTotals
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.measures.collector import StatisticsCollector, registered
from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import Geometry, Statistic
from visitlens.probe.statistics.learned_sink_mass import LearnedSinkMass
from visitlens.probe.statistics.visit_share import VisitShare

STATISTICS = registered()
each_statistic = pytest.mark.parametrize("statistic", STATISTICS, ids=lambda cls: cls.__name__)
GROUPS = 128


def measures_of(statistic: type[Statistic]) -> list[str]:
    return [m.name for m in statistic.measures]


def captured_contexts(model: LoopedMoE, text: PackedTokens, rows: Iterable[int], collector: StatisticsCollector):
    """(captured, segments, groups) of one forward over these contexts; with learned sinks, or tokens that are at some
    visits only, for the statistics that need them."""
    rows = list(rows)
    tokens, segments = (torch.from_numpy(of[rows]) for of in (text.tokens, text.segments))
    with capture(model, collector.sites) as captured:
        model(tokens, segments)
    if "visit_share" in collector.measures:
        for step in model.plan.steps:
            captured.store("visited", step.index, tokens % 3 >= step.visit - 1)
    if "learned_sink_mass" in collector.measures:
        rule = AttentionRule(model.config.head_dim**-0.5, sinks=torch.arange(model.config.num_heads).double())
        captured.rules.update(dict.fromkeys(range(len(model.plan)), rule))
    groups = text.document_groups(GROUPS)[text.segment_document[segments[segments >= 0].numpy()]]
    return captured, segments, torch.from_numpy(groups)


def totals_over(
    model: LoopedMoE, text: PackedTokens, batches: list[list[int]], collector: StatisticsCollector
) -> dict[str, GroupTotals]:
    for rows in batches:
        captured, segments, groups = captured_contexts(model, text, rows, collector)
        collector.update(StepValues(captured, segments, "torch"), groups)
    return collector.take()


def assert_same(one: dict[str, GroupTotals], two: dict[str, GroupTotals], tolerance: float) -> None:
    assert one.keys() == two.keys()
    for name, a in one.items():
        b = two[name]
        for key in ("count", "left_out", "non_finite"):
            np.testing.assert_array_equal(getattr(a, key), getattr(b, key), err_msg=f"{name}.{key}")
        np.testing.assert_allclose(a.total, b.total, rtol=tolerance, atol=tolerance, err_msg=name)
        assert a.attributes == b.attributes


@each_statistic
def test_splitting_and_ordering_the_batches_changes_nothing(
    statistic: type[Statistic], make_model, make_text, make_collector
) -> None:
    model, text = make_model(3, dtype=torch.float64), make_text(seed=4)
    contexts = len(text.tokens)
    assert contexts >= 5

    def totals(batches: list[list[int]]) -> dict[str, GroupTotals]:
        return totals_over(model, text, batches, make_collector(model, text, measures_of(statistic)))

    whole = totals([list(range(contexts))])
    one_by_one = totals([[i] for i in range(contexts)])
    backwards = totals([[i] for i in reversed(range(contexts))])
    mixed = totals([[4, 1], [0, 2, *range(5, contexts)], [3]])
    for other in (one_by_one, backwards, mixed):
        assert_same(whole, other, 1e-9)
    assert all(t.count.any() for t in whole.values())


@each_statistic
def test_merging_shards_is_associative_and_equals_one_pass(
    statistic: type[Statistic], make_model, make_text, make_collector
) -> None:
    model, text = make_model(2, dtype=torch.float64), make_text(seed=4)
    parts = [[0, 1], [2], list(range(3, len(text.tokens)))]
    a, b, c = (totals_over(model, text, [p], make_collector(model, text, measures_of(statistic))) for p in parts)

    def merged(*totals: dict[str, GroupTotals]) -> dict[str, GroupTotals]:
        result = deepcopy(totals[0])
        for other in totals[1:]:
            for name, value in other.items():
                result[name].add(value)
        return result

    left, right = merged(merged(a, b), c), merged(a, merged(b, c))
    assert_same(left, right, 1e-12)
    assert_same(left, totals_over(model, text, parts, make_collector(model, text, measures_of(statistic))), 1e-12)


def test_totals_of_different_measures_or_shapes_do_not_add() -> None:
    def totals(title: str, groups: int) -> GroupTotals:
        zeros = np.zeros((groups, 2))
        return GroupTotals({"title": title}, zeros, zeros.copy(), np.zeros(2, np.int64), np.zeros(2, np.int64))

    with pytest.raises(RecordingError, match=r"'a'.*'b'"):
        totals("a", 3).add(totals("b", 3))
    with pytest.raises(RecordingError, match=r"\(3, 2\).*\(4, 2\)"):
        totals("a", 3).add(totals("a", 4))


@each_statistic
@pytest.mark.parametrize("visits", [1, 2, 3])
def test_axes_name_the_dimensions_of_totals_and_stored_values(
    statistic: type[Statistic], visits: int, make_model, make_text, make_collector
) -> None:
    model, text = make_model(visits, num_heads=6, num_kv_heads=3), make_text(lengths=(1, 2, 12, 9))
    if statistic.looped_only and visits == 1:
        with pytest.raises(InputError, match="no measure"):
            make_collector(model, text, measures_of(statistic))
        return
    collector = make_collector(model, text, measures_of(statistic))
    captured, segments, groups = captured_contexts(model, text, range(len(text.tokens)), collector)
    stored = collector.update(StepValues(captured, segments, "torch"), groups)
    totals = collector.take()
    assert set(totals) == set(measures_of(statistic)) and set(stored) == statistic.stored
    for measure in statistic.measures:
        shape = tuple(collector.geometry.size(axis) for axis in measure.axes)
        got = totals[measure.name]
        assert got.total.shape == got.count.shape == (collector.num_groups if measure.grouped else 1, *shape)
        assert got.left_out.shape == got.non_finite.shape == shape
        assert got.total.dtype == got.count.dtype == np.float64
        assert Measure.from_attributes(measure.name, got.attributes, measure.grouped) == measure
    for name, value in stored.items():
        assert value.shape == (text.num_tokens, *collector.stored_shapes()[name])


@each_statistic
def test_totals_survive_the_files_of_a_recording(
    statistic: type[Statistic], make_model, make_text, make_collector, make_recording, tmp_path: Path
) -> None:
    """Written a context at a time, read back through the gate: the same numbers, bit for bit."""
    if statistic in (LearnedSinkMass, VisitShare):
        pytest.skip("of models that tests/hooks/adapters record: test_recording.py, test_ragged.py")
    model, text = make_model(2), make_text(lengths=(1, 2, 12, 9))
    names = measures_of(statistic)
    totals = totals_over(model, text, [[i] for i in range(len(text.tokens))], make_collector(model, text, names))
    recorded = make_recording(model, text, tmp_path / "run.vlens", measures=names, groups=GROUPS)
    assert_same(recorded.recording.totals, totals, 0)


@each_statistic
def test_documents_split_across_contexts_stay_in_one_group(
    statistic: type[Statistic], make_model, make_text, make_collector
) -> None:
    """One document of 90 tokens over three contexts of 32, and a short one: two groups, sized as the documents."""
    model, text = make_model(2), make_text(lengths=(90, 4))
    assert len(text.tokens) > 2 and len(text.segment_document) > 3
    collector = make_collector(model, text, measures_of(statistic))
    totals = totals_over(model, text, [[i] for i in range(len(text.tokens))], collector)
    groups = text.document_groups(GROUPS)
    real = text.segments[text.segments >= 0]
    sizes = np.bincount(groups[text.segment_document[real]])
    for measure in statistic.measures:
        got = totals[measure.name]
        if measure.grouped and not got.left_out.any():
            np.testing.assert_array_equal(
                got.count, np.broadcast_to(sizes.reshape(-1, *[1] * (got.count.ndim - 1)), got.count.shape)
            )
        elif measure.grouped:  # every token is counted or left out
            assert (got.count.sum(0) + got.left_out == len(real)).all()
            assert (got.count <= sizes.reshape(-1, *[1] * (got.count.ndim - 1))).all()


# Bad numbers


def poisoned(captured: Captured, site: str, step: int, token: int, value: float) -> Captured:
    """A copy whose site is NaN or infinite in one entry of one token (of context 0)."""
    copy = Captured(captured.plan, captured.sites)
    copy.rules.update(captured.rules)
    for name in captured.sites:
        for s in range(len(captured.plan)):
            tensor = captured.at(name, s).clone(memory_format=torch.contiguous_format)
            if (name, s) == (site, step):
                tensor[0, token].view(-1)[1] = value
            copy.store(name, s, tensor)
    return copy


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@each_statistic
def test_a_bad_number_is_counted_and_never_averaged_in(
    statistic: type[Statistic], value: float, make_model, make_text, make_collector
) -> None:
    """Poisons one entry of each float site in turn: cells either stay as they were, or lose whole tokens."""
    model, text = make_model(2, dtype=torch.float64), make_text(lengths=(12, 15))
    measures = measures_of(statistic)
    clean_collector = make_collector(model, text, measures)
    captured, segments, groups = captured_contexts(model, text, [0], clean_collector)
    values = StepValues(captured, segments, "torch")
    clean_stored = clean_collector.update(values, groups)
    clean = clean_collector.take()
    floats = sorted(site for site in statistic.sites if site != "experts")
    for site in floats:
        collector = make_collector(model, text, measures)
        bad = poisoned(captured, site, 1, 5, value)
        stored = collector.update(StepValues(bad, segments, "torch"), groups)
        totals = collector.take()
        assert sum(int(t.non_finite.sum()) for t in totals.values()) > 0, f"{site}: nothing was counted"
        for name, got in totals.items():
            assert np.isfinite(got.total).all(), (site, name)
            lost = clean[name].count.sum(0) - got.count.sum(0)
            np.testing.assert_array_equal(lost, got.non_finite, err_msg=f"{site} {name}")
            np.testing.assert_array_equal(got.left_out, clean[name].left_out)
            touched = got.non_finite > 0
            np.testing.assert_array_equal(got.total[:, ~touched], clean[name].total[:, ~touched])
        for name, tensor in stored.items():  # token by token: the same, or NaN
            same = torch.isclose(tensor, clean_stored[name], rtol=1e-12, atol=0, equal_nan=True)
            assert bool((same | ~tensor.isfinite()).all()), (site, name)
            kept = tensor.masked_fill(~tensor.isfinite(), 0.0)[same].sum()
            assert bool(kept.isfinite())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_breaks_down_for_one_token_loses_what_depends_on_it(
    value: float, make_model, make_text, make_collector
) -> None:
    """A bad residual at step 1, token 5 of 12 in the first document: step 0 and the second document are as before; from
    the next step on every measure loses at least that token and those after it, which attend to it."""
    model, text = make_model(2, dtype=torch.float64), make_text(lengths=(12, 15))
    collectors = [make_collector(model, text) for _ in range(2)]
    clean = totals_over(model, text, [[0]], collectors[0])

    def spoil(tensor: torch.Tensor, hook: object) -> None:
        tensor[0, 5, 0] = value

    with model.hooks(fwd_hooks=[("blocks.1.visit.1.hook_resid_pre", spoil)]):
        broken = totals_over(model, text, [[0]], collectors[1])
    first, second = text.document_groups(GROUPS)
    for name, got in broken.items():
        assert np.isfinite(got.total).all(), name
        lost = clean[name].count.sum(0) - got.count.sum(0)
        np.testing.assert_array_equal(got.non_finite, lost, err_msg=name)
        measured, by_step = clean[name].count.sum(0) > 0, got.attributes["axes"].startswith("step")
        assert (lost[2:] if by_step else lost)[(measured[2:] if by_step else measured)].min() >= (
            4 if name.startswith("top8") else 7  # of the 12 queries, 4 see more than 8 keys
        ), name
        if by_step and name != "update_cosine":
            assert not lost[0].any(), name
        if got.total.shape[0] > 1:
            np.testing.assert_array_equal(got.count[second], clean[name].count[second], err_msg=name)
            np.testing.assert_allclose(got.total[second], clean[name].total[second], rtol=1e-12, err_msg=name)
    assert first != second


# The register


def test_each_file_holds_one_statistic_and_measure_names_are_unique() -> None:
    assert len({cls.__module__ for cls in STATISTICS}) == len(STATISTICS) >= 9
    names = [m.name for cls in STATISTICS for m in cls.measures]
    assert len(set(names)) == len(names)


@each_statistic
def test_a_statistic_describes_itself(statistic: type[Statistic]) -> None:
    assert statistic.__module__.startswith("visitlens.probe.statistics.")
    check_sites(statistic.sites, SITES)
    assert statistic.stored <= set(measures_of(statistic))
    for measure in statistic.measures:
        assert measure.title and measure.unit and measure.definition.endswith(".") and measure.paper
        assert measure.axes


def test_a_collector_takes_the_statistics_that_define_the_named_measures(make_model, make_text, make_collector) -> None:
    collector = make_collector(make_model(2), make_text(), ["sink_mass"])
    assert set(collector.measures) == {"sink_mass", "first4_mass", "attention_entropy"}
    assert collector.sites == {"Q", "K"}


def test_an_unknown_measure_is_refused_with_those_there_are(make_model, make_text, make_collector) -> None:
    with pytest.raises(InputError, match=r"no measure sink_mas; this model has .*sink_mass"):
        make_collector(make_model(2), make_text(), ["sink_mas"])
    with pytest.raises(InputError, match="no measure gate_overlap"):
        make_collector(make_model(1), make_text(), ["gate_overlap"])


def test_an_unlooped_model_has_no_measure_of_pairs(make_model, make_text, make_collector) -> None:
    measures = make_collector(make_model(1), make_text()).measures.values()
    assert measures and not any("pair" in m.axes or m.name.endswith("_control") for m in measures)


def test_taking_the_totals_starts_afresh(make_model, make_text, make_collector) -> None:
    model, text = make_model(2), make_text(lengths=(12, 9))
    collector = make_collector(model, text)
    first = totals_over(model, text, [[0]], collector)
    assert not any(t.count.any() for t in collector.take().values())
    assert_same(totals_over(model, text, [[0]], collector), first, 0)


def test_a_geometry_knows_every_axis(make_model: Callable[..., LoopedMoE]) -> None:
    model = make_model(3, num_heads=6, num_kv_heads=3)
    geometry = Geometry.of(model.plan, model.config.to_dict())
    axes = {axis for cls in STATISTICS for m in cls.measures for axis in m.axes}
    sizes = {axis: geometry.size(axis) for axis in axes}
    assert sizes["step"] == 8 and sizes["pair"] == len(LoopSpec(4, range(1, 3), 3).plan().pairs) == 6
    assert (sizes["head"], sizes["kv_head"], sizes["expert"], sizes["shared"]) == (6, 3, 10, 4)
