"""The table against the paper: verdicts, notes, and agreement with the recordings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.jackknife import replicates_within

from visitlens.probe.measures.estimate import mean_of
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun
from visitlens.probe.report.finding import FAILS, HOLDS, OPEN, UNMEASURED, Finding, in_family, number_tested, verdict
from visitlens.probe.report.findings import CLAIMS, findings


@pytest.fixture(scope="module")
def pair(looped_recording: RecordedRun, baseline_recording: RecordedRun) -> Pair:
    return Pair(looped_recording, baseline_recording)


def difference(value: float, spread: float = 0.1, replicates: bool = True) -> StatArray:
    """A scalar with an interval of about `value` +- 2 `spread`."""
    left_out = replicates_within(np.asarray(value), 2 * spread) if replicates else None
    return StatArray(Measure("d", "D", (), "ratio", "", "ours"), np.asarray(value), {}, left_out)


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
        "there is no interval: one total for all documents",
    )
    assert verdict(difference(float("nan")), 1)[0] == UNMEASURED


def test_verdict_on_the_edge_of_zero_is_open() -> None:
    touching = StatArray(Measure("d", "D", (), "ratio", "", "ours"), np.asarray(0.0), {}, np.zeros(100))
    assert verdict(touching, 1)[0] == verdict(touching, -1)[0] == OPEN


def test_many_claims_are_corrected_for_their_number_and_both_verdicts_kept() -> None:
    """p of 0.001, 0.03 and 0.5: times 3, 2 and 1 by Holm. The second is decided alone and not among all."""
    claim = CLAIMS[0]
    alone = [Finding(claim, HOLDS, "", p=0.001), Finding(claim, FAILS, "", p=0.03), Finding(claim, OPEN, "", p=0.5)]
    found = in_family([*alone, Finding(claim, UNMEASURED, "")])
    assert [round(each.p_family, 6) for each in found[:3]] == [0.003, 0.06, 0.5]
    assert [each.verdict for each in found] == [HOLDS, FAILS, OPEN, UNMEASURED]
    assert [each.family_verdict for each in found] == [HOLDS, OPEN, OPEN, UNMEASURED] and number_tested(found) == 3
    data = found[1].to_dict()
    assert (data["verdict"], data["verdict_among_all"], data["p"], data["p_among_all"]) == (FAILS, OPEN, 0.03, 0.06)


def test_of_null_claims_one_page_in_twenty_decides_any_wrongly() -> None:
    """300 pages of 21 null claims over 40 documents, which go together by half: one by one, four pages in ten decide some."""
    rng, alone, together = np.random.default_rng(0), 0, 0
    measure = Measure("d", "D", ("claim",), "ratio", "", "ours")
    for _ in range(300):
        x = rng.normal(size=(40, 1)) + rng.normal(size=(40, 21))
        stat = mean_of(measure, (x, np.ones_like(x)), {"claim": range(21)})
        found = in_family([Finding(CLAIMS[0], HOLDS if p < 0.05 else OPEN, "", p=float(p)) for p in stat.p_values()])
        alone += any(finding.verdict != OPEN for finding in found)
        together += any(finding.family_verdict != OPEN for finding in found)
    assert alone / 300 > 0.3 and together / 300 < 0.09  # 0.05, three standard errors above it


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
