"""validate, repair, pack, unpack and merge: what is wrong is named, what is right comes back whole."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from visitlens.errors import InputError, RecordingError, StorageError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.maintain.merge import merge
from visitlens.hooks.recording.maintain.pack import pack, unpack
from visitlens.hooks.recording.maintain.validate import check_file, repair, validate
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.store.commit import sole_writer

MEASURES = ("resid_rms", "sink_mass", "expert_transitions")


@pytest.fixture(scope="module")
def record(make_model, make_text, make_recording, tmp_path_factory) -> Callable[..., Recording]:
    """`record(seed, lengths)`: shards of two contexts, with activations of a token range."""
    model, root = make_model(2), tmp_path_factory.mktemp("recordings")

    def run(seed: int = 6, name: str = "r", **options) -> Recording:
        text = make_text(seed=seed, **{key: options.pop(key) for key in ("lengths",) if key in options})
        options = {"level": "activations", "sites": ("Q",), "activation_tokens": (30, 95), **options}
        path = root / f"{name}-{seed}.vlens"
        return make_recording(model, text, path, measures=MEASURES, shard_tokens=60, **options).recording

    return run


@pytest.fixture(scope="module")
def whole(record) -> Recording:
    return record()


@pytest.fixture
def copy(whole: Recording, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.path, tmp_path / "copy.vlens"))


def shard(path: Path, seq: int) -> Path:
    return path / "shards" / f"w00-{seq:06d}.h5"


def flip(path: Path) -> None:
    with h5py.File(path) as file:
        at = file["tokens/id"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[at + 12] ^= 1
    path.write_bytes(data)


def edit_run(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["run"].update(changes)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_whole_recording_and_a_single_file_are_valid(whole: Recording) -> None:
    report = validate(whole.path)
    assert (report.exit_code, report.damage, report.unfinished) == (0, [], [])
    assert (report.shards, report.tokens) == (len(whole.shards), whole.tokens)
    assert any("provenance lacks command" in note for note in report.notes)
    assert validate(shard(whole.path, 0)).exit_code == validate(whole.path / "summary.h5").exit_code == 0
    with pytest.raises(InputError, match="nothing there"):
        validate(whole.path / "nowhere")


def swap_totals(path: Path) -> None:
    with h5py.File(path / "summary.h5", "r+") as file:
        file["summary/resid_rms/total"][...] *= 1.001


DAMAGE = {
    "a flipped bit": (lambda p: flip(shard(p, 1)), "w00-000001.h5.* wrong checksum"),
    "a lost shard": (lambda p: shard(p, 1).unlink(), "w00-000001.h5: in the manifest and not on disk"),
    "a shard cut short": (lambda p: shard(p, 1).write_bytes(shard(p, 1).read_bytes()[:-9]), "w00-000001.h5"),
    "a shard under another name": (lambda p: shutil.copy(shard(p, 1), shard(p, 9)), "hold the same tokens"),
    "a summary of other sums": (swap_totals, "summary.h5: resid_rms isn't the sum over the shards"),
    "a lost summary": (lambda p: (p / "summary.h5").unlink(), "summary.h5"),
    "a lost manifest": (lambda p: (p / "manifest.json").unlink(), "`visitlens repair` rebuilds it"),
    "a manifest of another run": (lambda p: edit_run(p, run_uuid="other"), "of another run than the shards"),
    "another configuration": (lambda p: edit_run(p, config_sha256="0"), r"config_sha256\)"),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_damage_is_named(name: str, copy: Path) -> None:
    damage, says = DAMAGE[name]
    damage(copy)
    report = validate(copy)
    assert report.exit_code == 1
    assert any(re.search(says, found) for found in report.damage), report.damage


def test_a_run_killed_before_its_first_manifest_is_unfinished_not_damaged(copy: Path, whole: Recording) -> None:
    for name in ("manifest.json", "summary.h5", *(f"shards/w00-{seq:06d}.h5" for seq in range(1, len(whole.shards)))):
        (copy / name).unlink()
    report = validate(copy)
    assert (report.exit_code, report.damage, report.shards) == (3, [], 1)
    assert "`visitlens repair` rebuilds it from the shards, as recording on does" in report.unfinished[0]
    repair(copy)
    assert validate(copy).exit_code == 3 and Recording(copy).tokens == report.tokens


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_file_locks_is_said_and_written_to(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level("WARNING"), sole_writer(tmp_path / "r.vlens"), sole_writer(tmp_path / "r.vlens", "w01"):
        (tmp_path / "r.vlens" / "written").touch()
    [message] = caplog.messages
    assert str(tmp_path) in message and "no file locks" in message and "no second process" in message


def test_what_is_sound_but_unfinished_says_which_tokens_are_missing(copy: Path, whole: Recording) -> None:
    shard(copy, 1).unlink()
    repair(copy)
    report = validate(copy)
    start, count = whole.shards[1]["token_start"], whole.shards[1]["token_count"]
    assert (report.exit_code, report.damage) == (3, [])
    assert f"missing are tokens {start:,}-{start + count - 1:,}" in report.unfinished[0]


def test_a_shard_that_the_manifest_does_not_know_yet_is_no_damage(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["shards"].pop()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    report = validate(copy)
    assert report.exit_code == 3 and "not yet in the manifest; recording on adds it" in report.unfinished[0]
    repair(copy)
    assert validate(copy).exit_code == 0


def test_repair_rebuilds_what_was_there(copy: Path, whole: Recording) -> None:
    (copy / "manifest.json").write_text("{")
    (copy / "summary.h5").unlink()
    repair(copy)
    assert validate(copy).exit_code == 0
    again = Recording(copy)
    assert again.shards == whole.shards and again.run == whole.run
    for name, totals in whole.totals.items():
        np.testing.assert_allclose(again.totals[name].total, totals.total, rtol=1e-12)


def test_repair_refuses_damage_or_sets_it_aside(copy: Path) -> None:
    flip(shard(copy, 1))
    with pytest.raises(RecordingError, match=r"wrong checksum.* --set-aside"):
        repair(copy)
    report = repair(copy, set_aside=True)
    assert report.shards == len(Recording(copy).shards) and "set aside" in report.notes[0]
    assert (copy / "shards" / "w00-000001.h5.damaged").is_file() and validate(copy).exit_code == 3
    with sole_writer(copy), pytest.raises(StorageError, match="another process is writing"):
        repair(copy)


# Packing


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.zst"])
def test_a_packed_recording_unpacks_to_the_same_files(suffix: str, copy: Path, tmp_path: Path) -> None:
    if suffix == ".tar.zst":
        pytest.importorskip("zstandard", reason="zstd packing is optional")
    (copy / "analyses").mkdir()
    (copy / "analyses" / "a.json").write_text("[1]")
    (copy / "writer.lock").touch()
    out = unpack(pack(copy, tmp_path / f"r{suffix}"), tmp_path / "again.vlens")
    names = sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(copy) for p in copy.rglob("*") if p.is_file() and p.suffix != ".lock")
    assert all((out / name).read_bytes() == (copy / name).read_bytes() for name in names)
    with pytest.raises(InputError, match="exists"):
        pack(copy, tmp_path / f"r{suffix}")
    with pytest.raises(InputError, match="exists"):
        unpack(tmp_path / f"r{suffix}", out)


def archive(path: Path, *members: tuple[str, bytes, bytes]) -> Path:
    """A tar of (name, type, data or link target)."""
    with tarfile.open(path, "w") as tar:
        for name, kind, data in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.REGTYPE:
                member.size = len(data)
            else:
                member.linkname = data.decode()
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("name", "kind", "data"),
    [
        ("../escaped.json", tarfile.REGTYPE, b"x"),
        ("/tmp/escaped.json", tarfile.REGTYPE, b"x"),
        ("shards/../../escaped.h5", tarfile.REGTYPE, b"x"),
        ("summary.h5", tarfile.SYMTYPE, b"/etc/passwd"),
        ("summary.h5", tarfile.LNKTYPE, b"/etc/passwd"),
        ("shards", tarfile.SYMTYPE, b"/tmp"),
        ("summary.h5", tarfile.FIFOTYPE, b""),
        ("summary.h5", tarfile.CHRTYPE, b""),
        ("evil.py", tarfile.REGTYPE, b"x"),
        ("analyses/.hidden.json", tarfile.REGTYPE, b"x"),
    ],
)
def test_an_archive_with_anything_else_is_refused_and_leaves_nothing(name, kind, data, tmp_path: Path) -> None:
    file = archive(tmp_path / "r.tar", ("manifest.json", tarfile.REGTYPE, b"{}"), (name, kind, data))
    with pytest.raises(RecordingError, match=r"refused: holds .*, which is no file of a recording"):
        unpack(file, tmp_path / "out" / "r.vlens")
    assert not list((tmp_path / "out").iterdir()) and not list(tmp_path.rglob("escaped*"))


def test_a_file_twice_a_bomb_and_a_torn_archive_are_refused(whole: Recording, tmp_path: Path) -> None:
    twice = archive(tmp_path / "twice.tar", *[("manifest.json", tarfile.REGTYPE, b"{}")] * 2)
    bomb = tmp_path / "bomb.tar.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        member = tarfile.TarInfo("summary.h5")
        member.size = 600 * 2**20
        file.write(member.tobuf())
        for _ in range(70):
            file.write(bytes(2**20))
    torn = pack(whole.path, tmp_path / "torn.tar.gz")
    flipped = tmp_path / "flipped.tar.gz"
    data = bytearray(torn.read_bytes())
    torn.write_bytes(data[:-5000])
    data[len(data) // 2] ^= 0xFF
    flipped.write_bytes(data)
    hostile = {
        twice: "no file of a recording",
        bomb: "far more than its size",
        torn: "or damaged",
        flipped: "damaged|checksum|is no file|refused",
    }
    for file, says in hostile.items():
        with pytest.raises(RecordingError, match=says):
            unpack(file, tmp_path / "out.vlens")
        assert not (tmp_path / "out.vlens").exists()
    with pytest.raises(InputError, match="ends in"):
        pack(whole.path, tmp_path / "r.zip")


def test_a_packed_recording_that_would_not_pass_is_not_unpacked(copy: Path, tmp_path: Path) -> None:
    with h5py.File(shard(copy, 0), "r+", libver=schema.LIBVER) as file:
        file["tokens/extra"] = h5py.SoftLink("/tokens/id")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["shards"][0]["bytes"] = shard(copy, 0).stat().st_size
    manifest["shards"][0]["sha256"] = hashlib.sha256(shard(copy, 0).read_bytes()).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RecordingError, match="soft or external link"):
        pack(copy, tmp_path / "r.tar")
    with tarfile.open(tmp_path / "r.tar", "w") as archive:  # as somebody else would
        for name in ("manifest.json", "summary.h5", *(f"shards/{s['name']}" for s in manifest["shards"])):
            archive.add(copy / name, name)
    with pytest.raises(RecordingError, match="soft or external link"):
        unpack(tmp_path / "r.tar", tmp_path / "out.vlens")
    assert not (tmp_path / "out.vlens").exists()


# Merging


def test_parts_of_one_run_make_the_whole(copy: Path, whole: Recording, tmp_path: Path) -> None:
    other = Path(shutil.copytree(copy, tmp_path / "other.vlens"))
    shard(copy, 1).unlink()
    for seq in (0, 2):
        shard(other, seq).unlink()
    for part in (copy, other):
        repair(part)
    merged = Recording(merge([other, copy, copy], tmp_path / "merged.vlens"))
    assert validate(merged.path).exit_code == 0 and merged.complete and merged.run == whole.run
    np.testing.assert_array_equal(merged.token_table()["id"], whole.token_table()["id"])
    np.testing.assert_array_equal(merged.activation("Q", 2, 2), whole.activation("Q", 2, 2))
    for name, totals in whole.totals.items():
        np.testing.assert_allclose(merged.totals[name].total, totals.total, rtol=1e-12)


@pytest.mark.parametrize("groups", [128, 4], ids=["a group a document", "groups by hash"])
def test_runs_over_different_text_follow_one_another(groups: int, record, tmp_path: Path) -> None:
    one, two = (
        record(6, f"g{groups}", groups=groups, lengths=(2, 8, 70, 17, 30, 12)),
        record(7, f"g{groups}", groups=groups, lengths=(40, 9, 70, 3, 8, 9)),
    )
    merged = Recording(merge([one.path, two.path], tmp_path / "merged.vlens"))
    assert validate(merged.path).exit_code == 0 and merged.complete
    assert merged.warnings == ()
    assert merged.tokens == one.tokens + two.tokens and merged.documents == one.documents + two.documents
    tables = [r.token_table() for r in (one, two, merged)]
    for key in ("id", "pos"):
        np.testing.assert_array_equal(tables[2][key], np.concatenate([tables[0][key], tables[1][key]]))
    segments = np.concatenate([tables[0]["segment"], tables[1]["segment"] + tables[0]["segment"].max() + 1])
    np.testing.assert_array_equal(tables[2]["segment"], segments)
    q = [r.activation("Q", 2, 2) for r in (one, two, merged)]
    np.testing.assert_array_equal(q[2], np.concatenate(q[:2]))
    np.testing.assert_array_equal(merged.activation("Q", 2, 2, tokens=(one.tokens + 30, one.tokens + 40)), q[1][:10])
    for name in MEASURES:
        parts = [r.totals[name] for r in (one, two, merged)]
        np.testing.assert_allclose(parts[2].total.sum(0), parts[0].total.sum(0) + parts[1].total.sum(0), rtol=1e-12)
    counts = [r.totals["resid_rms"].count[:, 0] for r in (one, two, merged)]
    hashes = [r.document_hashes for r in (one, two, merged)]
    np.testing.assert_array_equal(hashes[2], np.union1d(hashes[0], hashes[1]))
    if groups == 128:  # as one run over all of the text: a group a document, by its hash
        whole = np.zeros(len(hashes[2]))
        for own, count in zip(hashes[:2], counts[:2], strict=True):
            whole[np.searchsorted(hashes[2], own)] = count
        np.testing.assert_array_equal(counts[2], whole)
    else:
        np.testing.assert_array_equal(counts[2], counts[0] + counts[1])


def test_few_documents_merged_with_many_take_their_groups(record, tmp_path: Path) -> None:
    """Two documents, each its own group of at most four, and eight in groups by hash."""
    few, many = record(6, "few", groups=4, lengths=(20, 40)), record(7, "many", groups=4, lengths=(40, 9, 70, 3, 8, 9))
    merged = Recording(merge([few.path, many.path], tmp_path / "merged.vlens"))
    assert validate(merged.path).exit_code == 0
    expected = np.zeros(4)
    np.add.at(expected, (few.document_hashes % 4).astype(int), few.totals["resid_rms"].count[:, 0])
    expected[: len(many.totals["resid_rms"].count)] += many.totals["resid_rms"].count[:, 0]
    np.testing.assert_array_equal(merged.totals["resid_rms"].count[:, 0], expected[: len(expected)])


def test_a_document_that_two_hold_is_refused_or_counted_twice_on_request(record, tmp_path: Path) -> None:
    one, two = record(6, "one", lengths=(20, 40)), record(6, "two", lengths=(20, 40, 12))
    with pytest.raises(RecordingError, match=r"^2 documents are in more than one .* --allow-duplicates"):
        merge([one.path, two.path], tmp_path / "m.vlens")
    assert not list(tmp_path.iterdir())
    merged = Recording(merge([one.path, two.path], tmp_path / "m.vlens", allow_duplicates=True))
    assert merged.warnings == ("2 documents of the merged parts count more than once",)
    counts = [r.totals["resid_rms"].count.sum(0) for r in (one, two, merged)]
    np.testing.assert_array_equal(counts[2], counts[0] + counts[1])
    assert len(merged.document_hashes) == 3


def test_recordings_without_hashes_line_their_groups_up_and_warn(record, monkeypatch, tmp_path: Path) -> None:
    """As version 1.0 wrote them."""
    one, two = record(6, "one", lengths=(20, 40)), record(6, "two", lengths=(20, 40, 12))
    monkeypatch.setattr(schema, "read_documents", lambda gated: None)
    merged = Recording(merge([one.path, two.path], tmp_path / "m.vlens"))
    assert merged.warnings == (
        "merged parts name the same text (random): a document that two of them hold counts twice",
    )
    counts = [r.totals["resid_rms"].count[:, 0] for r in (one, two, merged)]
    np.testing.assert_array_equal(counts[2], np.concatenate(counts[:2]))
    assert validate(merged.path).exit_code == 0


def test_what_can_not_be_merged_is_refused(whole: Recording, record, copy: Path, tmp_path: Path) -> None:
    other = record(6, "other", batch=2)
    with pytest.raises(RecordingError, match="of another configuration: options differ"):
        merge([whole.path, other.path], tmp_path / "m.vlens")
    with pytest.raises(InputError, match="two recordings or more"):
        merge([whole.path], tmp_path / "m.vlens")
    with pytest.raises(InputError, match="exists"):
        merge([whole.path, whole.path], copy)
    shard(copy, 1).unlink()
    repair(copy)
    with pytest.raises(RecordingError, match="unfinished; finish it before"):
        merge([copy, record(8).path], tmp_path / "m.vlens")
    assert not (tmp_path / "m.vlens").exists() and not list(tmp_path.glob("*.merging"))


def test_every_shard_of_a_merge_passes_the_gate(whole: Recording, record, tmp_path: Path) -> None:
    for path in merge([whole.path, record(7).path], tmp_path / "m.vlens", allow_duplicates=True).rglob("*.h5"):
        check_file(path)
