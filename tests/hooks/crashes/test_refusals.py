"""Nothing that is somebody else's is touched, and what is damaged is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tests.hooks.crashes.conftest import MEASURES, MakeRecording
from tests.hooks.crashes.wholeness import Crash, assert_whole, contents, crash_after

import visitlens
from visitlens.errors import InputError, RecordingError, StorageError, VisitlensError
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.write.record import RecordingOptions, record
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.reading.recorded_run import RecordedRun

# Other people's folders, other runs, other writers


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"level": "summary"}, "options"),
        ({"groups": 4}, "options"),
        ({"batch": 2}, "options"),
        ({"level": "activations", "sites": ("Q",)}, "options"),
        ({"measures": ("sink_mass",)}, "measures"),
    ],
)
def test_another_configuration_is_refused_by_name_and_nothing_is_touched(
    options: dict, named: str, resume, tmp_path: Path
) -> None:
    path = tmp_path / "r.vlens"
    resume(path)
    before = contents(path)
    with pytest.raises(RecordingError, match=rf"another configuration \({named} differs\)\. Choose another path"):
        resume(path, **options)
    assert contents(path) == before


def test_another_model_or_text_is_refused_by_name_and_nothing_is_touched(
    resume, make_model, make_text, model, text, make_recording: MakeRecording, tmp_path: Path
) -> None:
    path = tmp_path / "r.vlens"
    with pytest.raises(Crash):
        resume(path, on_progress=crash_after(3))
    before = contents(path)
    with pytest.raises(RecordingError, match=r"\(model \(visits\) differs"):
        make_recording(make_model(3), text, path, measures=MEASURES)
    with pytest.raises(RecordingError, match=r"\(data_sha256 differs\)"):
        make_recording(model, make_text(seed=7), path, measures=MEASURES)
    with pytest.raises(RecordingError, match=r"\(dtype differs\)"):
        make_recording(make_model(2, dtype=torch.float64), text, path, measures=MEASURES)
    assert contents(path) == before


def test_a_second_writer_is_refused_and_the_first_is_unharmed(
    resume, unbroken: Recording, text: PackedTokens, tmp_path: Path
) -> None:
    path, refused = tmp_path / "r.vlens", []

    def barge_in(done: int, total: int) -> None:
        before = contents(path)
        with pytest.raises(StorageError, match="another process is writing this recording; wait for it") as caught:
            resume(path)
        kept = {name: digest for name, digest in before.items() if name.startswith("shards/") and name.endswith(".h5")}
        assert contents(path).items() >= kept.items()  # the first one goes on with its own next file meanwhile
        refused.append(caught.value)

    assert_whole(resume(path, on_progress=barge_in), unbroken, text)
    assert len(refused) == len(text.tokens)


def test_a_folder_that_holds_something_else_is_refused_and_not_touched(resume, tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.tex").write_text("years of work")
    with pytest.raises(RecordingError, match=r"not an empty folder nor a recording \(holds chapter1\.tex\)"):
        resume(folder)
    assert [p.name for p in folder.iterdir()] == ["chapter1.tex"]
    assert (folder / "chapter1.tex").read_text() == "years of work"


def test_a_path_that_is_a_file_is_refused_and_not_touched(resume, tmp_path: Path) -> None:
    file = tmp_path / "notes.vlens"
    file.write_text("notes")
    with pytest.raises(VisitlensError, match=r"notes\.vlens"):
        resume(file)
    assert file.read_text() == "notes"


def test_an_empty_folder_and_a_deep_new_path_are_fine(resume, unbroken, text, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_whole(resume(tmp_path / "empty"), unbroken, text)
    assert_whole(resume(tmp_path / "a" / "b" / "r.vlens"), unbroken, text)


def test_an_error_in_the_model_leaves_the_collector_clean(
    model: LoopedMoE, text: PackedTokens, make_collector, tmp_path: Path
) -> None:
    collector = make_collector(model, text)
    with pytest.raises(Crash):
        record(
            model,
            text,
            tmp_path / "r",
            collector,
            RecordingOptions(),
            provenance={},
            on_progress=crash_after(2),
            attention_implementation="torch",
        )
    assert not any(t.count.any() for t in collector.take().values())
    assert not any(point.has_hooks() for point in model.hook_dict.values())


# Damaged recordings


@pytest.fixture
def recorded(unbroken: Recording, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(unbroken.path, tmp_path / "copy.vlens"))


def test_a_missing_path_says_how_to_make_a_recording(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"nowhere: no recording there; make one with `visitlens record`"):
        visitlens.open(tmp_path / "nowhere")
    with pytest.raises(RecordingError, match=r"a recording is a folder with manifest\.json and shards/"):
        visitlens.open(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"format": "other"}',
        '{"format": "visitlens-recording", "schema_version": "1.0.0"}',
    ],
)
def test_a_damaged_manifest_is_refused(content: str, recorded: Path) -> None:
    (recorded / "manifest.json").write_text(content)
    with pytest.raises(RecordingError, match=r"manifest\.json"):
        visitlens.open(recorded)


def test_a_manifest_of_another_major_version_is_refused(recorded: Path) -> None:
    manifest = json.loads((recorded / "manifest.json").read_text())
    (recorded / "manifest.json").write_text(json.dumps({**manifest, "schema_version": "2.0.0"}))
    with pytest.raises(RecordingError, match=r"schema version 2\.0\.0 needs another visitlens; this one reads 1\."):
        visitlens.open(recorded)
    (recorded / "manifest.json").write_text(json.dumps({**manifest, "schema_version": "1.7.3"}))
    assert visitlens.open(recorded).recording.tokens


def test_files_of_another_major_version_are_refused(recorded: Path, resume) -> None:
    for name in ("summary.h5", "shards/w00-000000.h5"):
        with h5py.File(recorded / name, "r+") as file:
            file.attrs.modify("schema_version", np.bytes_("3.1.0"))  # in place: no gap among the attributes
    with pytest.raises(RecordingError, match=r"schema version 3\.1\.0"):
        _ = visitlens.open(recorded).measures
    with pytest.raises(RecordingError, match=r"schema version 3\.1\.0"):
        resume(recorded)


@pytest.mark.parametrize("damage", ["longer", "shorter", "gone"])
def test_a_shard_of_the_wrong_size_is_refused_by_name(damage: str, recorded: Path) -> None:
    shard = recorded / "shards" / "w00-000001.h5"
    data = shard.read_bytes()
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(data + b"\0" if damage == "longer" else data[:-100])
    run = visitlens.open(recorded)
    assert run.stat("sink_mass").values.shape  # the summary is another file
    with pytest.raises(RecordingError, match=r"w00-000001\.h5"):
        run.recording.token_table()


def test_a_flipped_bit_in_a_shard_is_refused_by_name(recorded: Path) -> None:
    shard = recorded / "shards" / "w00-000001.h5"
    with h5py.File(shard) as file:
        offset = file["tokens/id"].id.get_chunk_info(0).byte_offset
    data = bytearray(shard.read_bytes())
    data[offset + 12] ^= 1
    shard.write_bytes(data)
    with pytest.raises(RecordingError, match=r"w00-000001\.h5"):
        visitlens.open(recorded).recording.token_table()


def test_resuming_refuses_a_shard_that_has_changed(recorded: Path, unbroken: Recording, resume) -> None:
    shard = recorded / "shards" / "w00-000001.h5"
    with h5py.File(shard, "r+") as file:
        file["tokens/id"][0] = 60
    with pytest.raises(RecordingError, match=r"w00-000001\.h5: .*has changed since it was written"):
        resume(recorded)


def test_resuming_refuses_a_lost_shard_and_fills_the_gap_after_a_repair(
    recorded: Path, resume, unbroken: Recording, text: PackedTokens
) -> None:
    (recorded / "shards" / "w00-000001.h5").unlink()
    with pytest.raises(RecordingError, match=r"w00-000001\.h5: in the manifest and not on disk\. Restore it, or run"):
        resume(recorded)
    (recorded / "manifest.json").unlink()
    assert_whole(resume(recorded), unbroken, text)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "gone"])
def test_a_damaged_summary_is_refused_by_name(damage: str, recorded: Path) -> None:
    summary = recorded / "summary.h5"
    data = summary.read_bytes()
    summary.unlink()
    if damage != "gone":
        summary.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"garbage" * 100)
    with pytest.raises(RecordingError, match=r"summary\.h5"):
        _ = visitlens.open(recorded).measures


def test_a_summary_of_another_run_is_refused(recorded: Path, looped_recording: RecordedRun) -> None:
    shutil.copy(looped_recording.recording.path / "summary.h5", recorded / "summary.h5")
    with pytest.raises(RecordingError, match="belongs to another run than the manifest"):
        _ = visitlens.open(recorded).measures


def test_an_hdf5_file_that_is_no_recording_is_refused(recorded: Path) -> None:
    with h5py.File(recorded / "summary.h5", "w") as file:
        file["x"] = np.arange(3)
    with pytest.raises(RecordingError, match="an HDF5 file, but not of a visitlens recording"):
        _ = visitlens.open(recorded).measures


def test_every_error_is_a_visitlens_error_and_a_builtin_one() -> None:
    assert issubclass(StorageError, OSError) and issubclass(RecordingError, ValueError)
    assert all(issubclass(error, VisitlensError) for error in (StorageError, RecordingError, InputError))
