"""Recordings that share some documents are compared with draws of the same documents."""

from __future__ import annotations

import numpy as np
import pytest

from visitlens.app.pages import compare as page
from visitlens.app.view.registry import Registry
from visitlens.app.view.view import Context, view_of
from visitlens.hooks.text.documents import pack
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.pairing import pair
from visitlens.probe.reading.recorded_run import RecordedRun
from visitlens.probe.report.compare import compare


@pytest.fixture(scope="module")
def record(make_model, make_documents, make_recording, tmp_path_factory):
    """`record(name, documents, groups, seed)`: some of 40 documents, by one of two models."""
    documents = make_documents(5, lengths=[16, 48, 32, 32] * 10)  # none is cut by a context of 64
    root = tmp_path_factory.mktemp("pairing")

    def run(name: str, chosen: range, groups: int = 128, seed: int = 1) -> RecordedRun:
        text = pack([documents[i] for i in chosen], 64, 0, 2)
        return make_recording(
            make_model(2, seed=seed), text, root / name, level="summary", measures=("resid_rms",), groups=groups
        )

    return run


def width(a: RecordedRun, b: RecordedRun) -> float:
    (found,) = compare(a, b, measures=["resid_rms"])
    low, high = found.difference.interval()
    return float(high - low)


def test_a_group_a_document_lines_up_by_the_documents(record) -> None:
    a, b = record("a", range(30)), record("b", range(10, 40), seed=2)
    pairing = pair(a, b)
    assert pairing.paired and pairing.words == "paired where the documents are the same: 20 of 30 and 30"
    ours, theirs = (run.sums("resid_rms") for run in (pairing.a, pairing.b))
    assert ours.count.shape == theirs.count.shape == (40, 6)
    both = (ours.count[:, 0] > 0) & (theirs.count[:, 0] > 0)
    assert both.sum() == 20
    np.testing.assert_array_equal(ours.count[both], theirs.count[both])  # a document's tokens: the same document
    np.testing.assert_allclose(pairing.a.stat("resid_rms").values, a.stat("resid_rms").values)


def test_groups_by_hash_stay_and_single_documents_join_them(record) -> None:
    few, many, all_ = (record(f"g{len(r)}", r, groups=16, seed=len(r)) for r in (range(8), range(30), range(40)))
    for one, two in ((many, all_), (few, many), (many, few)):
        pairing = pair(one, two)
        counts = [run.sums("resid_rms").count[:, 0] for run in (pairing.a, pairing.b)]
        assert pairing.paired and [len(count) for count in counts] == [16, 16]
        less, more = sorted(counts, key=lambda count: count.sum())
        assert (less <= more).all()  # the shorter text is a part of the longer


def test_shared_documents_narrow_the_interval_and_strangers_do_not_pair(record, monkeypatch) -> None:
    a, b = record("c", range(36)), record("d", range(4, 40))
    paired = width(a, b)
    monkeypatch.setitem(b.recording.__dict__, "document_hashes", None)
    assert paired < width(a, b)
    stranger, other_groups = record("e", range(36, 40), seed=2), record("f", range(30), groups=7)
    assert not pair(a, stranger).paired and not pair(record("g", range(30), groups=16), other_groups).paired


def test_recordings_of_other_numbers_of_groups_meet_in_the_fewer(record) -> None:
    many, few = record("h32", range(40), groups=32, seed=3), record("h16", range(4, 40), groups=16, seed=4)
    for one, two in ((many, few), (few, many)):
        pairing = pair(one, two)
        counts = [run.sums("resid_rms").count[:, 0] for run in (pairing.a, pairing.b)]
        assert pairing.paired and [len(count) for count in counts] == [16, 16]
        less, more = sorted(counts, key=lambda count: count.sum())
        assert (less <= more).all() and less.sum() < more.sum()  # the shorter text is a part of the longer
    assert not pair(many, record("h12", range(40), groups=12, seed=5)).paired  # 12 isn't a part of 32


def test_the_dashboards_comparison_is_the_commands(record, monkeypatch) -> None:
    """Two recordings that share 20 of 30 documents: one interval, whoever draws it."""
    a, b = record("page-a", range(30)), record("page-b", range(10, 40), seed=2)
    shown: list[StatArray] = []
    monkeypatch.setattr(page, "_difference", lambda view, difference, *rest: shown.append(difference))
    registry = Registry([a.recording.path, b.recording.path])
    first, second = registry.entries()
    view = view_of(Context(registry), page.PATH, f"?run={first.id}&other={second.id}&metric=resid_rms")
    assert "20 of 30 and 30" in str(page.layout(view))
    (found,) = compare(first.run, second.run, "step", ["resid_rms"])
    for mine, theirs in zip(shown[0].interval(), found.difference.interval(), strict=True):
        np.testing.assert_allclose(mine, theirs)
