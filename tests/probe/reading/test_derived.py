"""Derived numbers: one register for `rec.derived`, exports and the page; pairs of visits; regrouped recordings keep their phase."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import visitlens as vl
from visitlens import plugins
from visitlens.errors import InputError, RecordingError
from visitlens.probe.measures import derived
from visitlens.probe.measures.measure import Measure
from visitlens.probe.reading.recorded_run import RecordedRun
from visitlens.probe.report.export import choose

PAGE = (Path(__file__).parents[3] / "docs" / "measures.md").read_text(encoding="utf-8")


@pytest.fixture
def register() -> Iterator[None]:
    yield
    plugins._registered.clear()
    plugins._forget()


@pytest.mark.parametrize("name", derived.registered())
def test_each_is_had_by_name_exported_and_documented(name: str, looped_recording: RecordedRun) -> None:
    stat = looped_recording.derived(name)
    assert stat.measure.name == name and stat.axes == derived.find(name).measure.axes
    np.testing.assert_array_equal(choose(looped_recording, name).arrays["value"], stat.values)
    assert f"| `{name}` | {', '.join(stat.axes)} | {stat.measure.unit} |" in PAGE


def test_the_methods_are_those_of_the_register(three_visit_recording: RecordedRun) -> None:
    rec, visits = three_visit_recording, (2, 3)
    for name in ("expert_overlap", "expert_overlap_chance_by_load", "update_cosine_same_layer"):
        got, wanted = getattr(rec, name)(visits), rec.derived(name, visits)
        np.testing.assert_array_equal(got.values, wanted.values)
    earlier, later = rec.both_visits("moe_write_rms", visits)
    np.testing.assert_array_equal(rec.norm_ratio("moe_write", visits).values, later.values / earlier.values)


@pytest.mark.usefixtures("register")
def test_one_of_a_notebook_is_registered_and_its_name_is_taken_then(looped_recording: RecordedRun) -> None:
    measure = Measure(
        "sink_change", "Change of the sink", ("layer", "head"), "share of mass", "Later - earlier.", "ours"
    )

    def change(run: RecordedRun, visits: tuple[int, int] | None, measure: Measure) -> vl.StatArray:
        earlier, later = run.both_visits("sink_mass", visits)
        return later.combine(earlier, np.subtract, measure)

    vl.register(vl.Derived(measure, change))
    first, second = (looped_recording.at_visit("sink_mass", visit) for visit in (1, 2))
    np.testing.assert_array_equal(looped_recording.derived("sink_change").values, second.values - first.values)
    assert choose(looped_recording, "sink_change").axes == ("layer", "head")
    with pytest.raises(InputError, match="the name load_imbalance is taken"):
        vl.register(vl.Derived(derived.find("load_imbalance").measure, change))


def test_an_unknown_name_and_an_unlooped_recording_are_refused(
    looped_recording: RecordedRun, baseline_recording: RecordedRun
) -> None:
    with pytest.raises(InputError, match="no derived number 'expert_overlp'; did you mean 'expert_overlap'"):
        looped_recording.derived("expert_overlp")
    with pytest.raises(RecordingError, match="unlooped"):
        baseline_recording.derived("norm_ratio_update")


def test_regrouping_keeps_means_and_joins_sums(looped_recording: RecordedRun) -> None:
    groups = looped_recording.groups
    joined = looped_recording.regrouped(np.arange(groups) // 2, -(-groups // 2), "in twos")
    assert joined.groups == -(-groups // 2) and joined.group_names == "in twos"
    before, after = looped_recording.sums("sink_mass"), joined.sums("sink_mass")
    np.testing.assert_array_equal(after.count[0], before.count[:2].sum(0))
    # float64 sums of at most 60 groups in another order
    np.testing.assert_allclose(joined.stat("sink_mass").values, looped_recording.stat("sink_mass").values, rtol=1e-13)
