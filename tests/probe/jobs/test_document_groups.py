"""How many groups of documents a recording keeps apart, and that one that was begun goes on as it began."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from visitlens.errors import InputError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.write.record import RecordingOptions
from visitlens.probe.jobs.document_groups import most_groups
from visitlens.probe.jobs.prepared_run import PreparedRun
from visitlens.probe.jobs.request import RunRequest
from visitlens.probe.model.bundled import PAIR


@pytest.mark.parametrize(
    ("kilobytes", "groups"), [(1, 1024), (256, 1024), (257, 512), (1024, 256), (2048, 128), (1_000_000, 128)]
)
def test_a_recording_keeps_1024_groups_while_their_sums_fit_in_256_mb(kilobytes: int, groups: int) -> None:
    assert most_groups(kilobytes << 10) == groups


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """200 documents, the last a near copy of the first, long enough to be told."""
    rng = np.random.default_rng(0)
    words = ["the", "of", "a", "loop", "visit", "head", "layer", "sink", "gate", "query", "key", "value"]
    texts = [" ".join(rng.choice(words, 60)) for _ in range(199)]
    lines = [json.dumps({"text": each}) for each in (*texts, f"{texts[0]} again")]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return tmp_path / "text.jsonl"


def prepared(text: Path, out: Path, options: RecordingOptions | None = None) -> PreparedRun:
    request = RunRequest.of(PAIR["looped"], text, out, measures=("resid_rms",), threads=1)
    return PreparedRun(request if options is None else replace(request, keep=options))


def test_each_document_is_a_group_and_a_near_copy_that_of_the_first(text: Path, tmp_path: Path) -> None:
    run = prepared(text, tmp_path / "new.vlens").describe()
    assert (run["documents"], run["groups"], run["config"]["options"]["groups"]) == (200, 199, 1024)
    few = prepared(text, tmp_path / "new.vlens", RecordingOptions(groups=16)).describe()
    assert (few["groups"], few["config"]["options"]["groups"]) == (16, 16)


def test_a_recording_from_before_goes_on_with_its_groups(text: Path, tmp_path: Path) -> None:
    """128 groups were the default, and a near copy was a document of its own."""
    began = prepared(text, tmp_path / "x.vlens", RecordingOptions(groups=256)).describe()
    out = tmp_path / "old.vlens"
    out.mkdir()
    began["groups"] = 200
    (out / schema.MANIFEST).write_text(json.dumps({"run": began}))
    again = prepared(text, out)
    assert again.describe()["groups"] == 200 and again.request.keep.groups == 256
    (out / schema.MANIFEST).write_text('{"run": 3}')  # nothing that could be gone on with
    assert prepared(text, out).describe()["groups"] == 199


def test_no_group_or_too_many_are_refused() -> None:
    for groups in (0, -1, schema.MAX_GROUPS + 1):
        with pytest.raises(InputError, match="groups"):
            RecordingOptions(groups=groups)
