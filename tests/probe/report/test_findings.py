"""The table against the paper: verdicts, notes, and agreement with the recordings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun
from visitlens.probe.report.findings import (
    CLAIMS,
    FAILS,
    HOLDS,
    OPEN,
    UNMEASURED,
    Finding,
    findings,
    verdict,
)


@pytest.fixture(scope="module")
def pair(looped_recording: RecordedRun, baseline_recording: RecordedRun) -> Pair:
    return Pair(looped_recording, baseline_recording)


def difference(value: float, spread: float = 0.1, replicates: bool = True) -> StatArray:
    """A scalar with an interval of about `value` +- 2 `spread`."""
    samples = value + spread * np.random.default_rng(0).normal(size=1000) if replicates else None
    return StatArray(Measure("d", "D", (), "ratio", "", "ours"), np.asarray(value), {}, samples)


@pytest.mark.parametrize(
    ("value", "direction", "expected"),
    [
        (1.0, 1, HOLDS),
        (-1.0, 1, FAILS),
        (0.1, 1, OPEN),
        (-0.1, 1, OPEN),
        (-1.0, -1, HOLDS),
        (1.0, -1, FAILS),
        (0.1, -1, OPEN),
    ],
)
def test_verdict_follows_the_interval(value: float, direction: int, expected: str) -> None:
    assert verdict(difference(value), direction)[0] == expected


def test_verdict_without_interval_or_value_is_not_a_finding() -> None:
    assert verdict(difference(5.0, replicates=False), 1) == (
        OPEN,
        "there is no interval: too few groups of documents",
    )
    assert verdict(difference(float("nan")), 1)[0] == UNMEASURED


def test_verdict_on_the_edge_of_zero_is_open() -> None:
    touching = StatArray(Measure("d", "D", (), "ratio", "", "ours"), np.asarray(0.0), {}, np.zeros(100))
    assert verdict(touching, 1)[0] == verdict(touching, -1)[0] == OPEN


def test_a_direction_that_holds_without_the_phenomenon_is_noted() -> None:
    claim = next(claim for claim in CLAIMS if claim.key == "dyck-bos")  # the paper: 0.60, then 0.02
    assert Finding(claim, HOLDS, "", difference=difference(-0.02)).note.startswith("but less than a twentieth")
    assert Finding(claim, HOLDS, "", difference=difference(-0.3)).note == ""
    assert Finding(replace(claim, published=None), HOLDS, "", difference=difference(-0.02)).note == ""


def test_findings_agree_with_the_recordings(pair: Pair) -> None:
    assert pair.looped is not None and pair.baseline is not None
    found = {finding.claim.key: finding for finding in findings(pair)}
    assert list(found) == [claim.key for claim in CLAIMS]
    update = pair.looped.norm_ratio("update")
    assert_scalar(found["norm-ratio-update"].ours, update.mean("layer"))
    assert found["norm-ratio-update"].layers == (int((update.values > 1).sum()), 2)
    assert_scalar(found["update-cosine"].ours, pair.looped.update_cosine_same_layer().mean("layer"))
    assert_scalar(found["update-cosine"].against, pair.looped.update_cosine_other_layers().mean("layer_pair"))
    top8 = found["top8-overlap"]
    assert_scalar(top8.against, pair.looped.attended_control("top8_overlap").mean("head").mean("layer"))
    profile = pair.baseline.sink_mass().mean("head").values
    sink = found["sink-baseline"].difference
    assert sink is not None and float(sink.values) == pytest.approx(profile[2:].mean() - profile[:2].mean())
    for finding in found.values():
        ours, against, change = finding.ours, finding.against, finding.difference
        assert ours is not None and against is not None and change is not None
        other = against.values if isinstance(against, StatArray) else against
        assert float(change.values) == pytest.approx(float(ours.values - other), abs=1e-12)


def assert_scalar(ours: Any, expected: StatArray) -> None:
    assert isinstance(ours, StatArray)
    np.testing.assert_allclose(ours.values, expected.values)
    np.testing.assert_allclose(ours.interval(), expected.interval())


def test_findings_compare_the_first_and_the_last_visit(three_visit_recording: RecordedRun) -> None:
    found = {finding.claim.key: finding for finding in findings(Pair(three_visit_recording))}
    sink = three_visit_recording.at_visit("sink_mass", 3).mean("head").mean("layer")
    assert_scalar(found["sink-visits"].ours, sink)
    assert found["sink-baseline"].verdict == UNMEASURED
    assert found["sink-baseline"].reason == "no Baseline recording was given"


def test_a_recording_without_a_measure_loses_only_its_findings(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.looped is not None
    monkeypatch.delitem(pair.looped.recording.totals, "stage_cosine")
    unmeasured = {finding.claim.key for finding in findings(pair) if finding.verdict == UNMEASURED}
    assert unmeasured == {"stage-q", "stage-k", "stage-v", "stage-pv", "stage-o"}
