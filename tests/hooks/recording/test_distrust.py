"""Archives that would write without end, parts that are damaged, and shards in a folder that nobody vouches for."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from tests.hooks.hostile.mutations import blocks_of, lookup3
from tests.hooks.hostile.structures import chunk_of

from visitlens.errors import RecordingError
from visitlens.hooks.recording.format.gate import passed
from visitlens.hooks.recording.maintain import pack as packing
from visitlens.hooks.recording.maintain.merge import merge
from visitlens.hooks.recording.maintain.pack import pack, unpack
from visitlens.hooks.recording.maintain.validate import validate
from visitlens.hooks.recording.read.recording import Recording, read_manifest

SHARD = "shards/w00-000000.h5"


@pytest.fixture(scope="module")
def valid(make_model, make_text, make_recording, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("valid") / "r.vlens"
    return make_recording(make_model(2), make_text(seed=6), path, level="tokens", shard_tokens=100).recording.path


@pytest.fixture
def copy(valid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(valid, tmp_path / "copy.vlens"))


def with_count(path: Path, change: int) -> None:
    """The count of a b-tree of links changed, under a right checksum."""
    data = bytearray(path.read_bytes())
    (block, *_) = [b for b in blocks_of(data, (b"BTHD",)) if data[b.start + 5] == 5]
    count = int.from_bytes(data[block.start + 26 : block.start + 34], "little")
    data[block.start + 26 : block.start + 34] = ((count + change) % 2**64).to_bytes(8, "little")
    block.sealed(data)
    path.write_bytes(data)


@pytest.mark.parametrize("change", [20, -1, 10**9, "all"])
def test_a_link_count_that_lies_is_a_refusal(copy: Path, change: int | str) -> None:
    file = copy / "summary.h5"
    with passed(file) as gated:
        measures = len({name.split("/")[1] for name in gated.arrays if name.startswith("summary/")})
    assert measures > 8, "fewer lie in the group's own header"
    with_count(file, -measures if change == "all" else int(change))
    with pytest.raises(RecordingError, match=r"summary\.h5.*(b-tree|counts)"):
        _ = Recording(copy).totals
    assert validate(copy).exit_code == 1


def test_the_checksum_is_that_of_the_source() -> None:
    assert lookup3(b"Four score and seven years ago") == 0x17770551  # lookup3.c, its driver5
    assert lookup3(b"") == 0xDEADBEEF


def archived(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for member, data in members:
            archive.addfile(member, io.BytesIO(data))
    return path


def member(name: str, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
    about = tarfile.TarInfo(name)
    about.size = len(data)
    return about, data


def test_a_sparse_member_of_a_tar_is_refused_before_its_holes_are_written(tmp_path: Path) -> None:
    header = bytearray(tarfile.TarInfo("manifest.json").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:410] = b"%011o\0" % 0 + b"%011o\0" % 0
    header[483:495] = b"%011o\0" % (3 * 10**9)  # what it says to be when unpacked
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    file = tmp_path / "r.tar"
    file.write_bytes(bytes(header) + bytes(1024))
    with tarfile.open(file) as archive:
        assert [m.issparse() for m in archive] == [True], "not the attack that it is meant to be"
    with pytest.raises(RecordingError, match="no file of a recording"):
        unpack(file, tmp_path / "out.vlens")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.tar"]


def test_an_archive_of_too_many_members_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_MAX_MEMBERS", 5)
    file = archived(tmp_path / "r.tar", [member(f"analyses/a{n}.json", b"{}") for n in range(6)])
    with pytest.raises(RecordingError, match="more than 5 files"):
        unpack(file, tmp_path / "out.vlens")


@pytest.mark.parametrize("name", ["shards/w00-000099.h5", "shards/w٠٠-٠٠٠٠٠٠.h5"])
def test_what_the_manifest_does_not_list_is_refused(valid: Path, tmp_path: Path, name: str) -> None:
    whole = [p for p in sorted(valid.rglob("*")) if p.is_file() and p.suffix in (".h5", ".json")]
    members = [member(p.relative_to(valid).as_posix(), p.read_bytes()) for p in whole]
    assert unpack(archived(tmp_path / "good.tar", members), tmp_path / "good.vlens").is_dir()
    file = archived(tmp_path / "r.tar", [*members, member(name, (valid / SHARD).read_bytes())])
    with pytest.raises(RecordingError, match=r"doesn't list|no file of a recording"):
        unpack(file, tmp_path / "out.vlens")
    assert not (tmp_path / "out.vlens").exists()


def flipped(folder: Path, name: str) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[chunk_of(data, name) + 9] ^= 1
    (folder / SHARD).write_bytes(data)


def test_a_damaged_part_is_neither_merged_nor_packed(valid: Path, copy: Path, tmp_path: Path) -> None:
    flipped(copy, "routing/ids")
    for act in (
        lambda: merge([valid, copy], tmp_path / "merged.vlens"),
        lambda: merge([copy, valid], tmp_path / "merged.vlens"),
        lambda: pack(copy, tmp_path / "packed.tar"),
    ):
        with pytest.raises(RecordingError, match=r"w00-000000.*damaged"):
            act()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.vlens"]


def test_a_damaged_chunk_under_a_fitting_hash_is_not_merged(valid: Path, copy: Path, tmp_path: Path) -> None:
    flipped(copy, "routing/ids")
    manifest = json.loads((copy / "manifest.json").read_text())
    import hashlib

    for shard in manifest["shards"]:
        shard["sha256"] = hashlib.sha256((copy / "shards" / shard["name"]).read_bytes()).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RecordingError, match=r"routing/ids.*damaged"):
        merge([valid, copy], tmp_path / "merged.vlens")


@pytest.mark.parametrize("short", [True, False], ids=["short-chunk", "bomb"])
def test_going_on_does_not_trust_the_shards_that_it_finds(
    copy: Path, make_model, make_text, make_recording, short: bool
) -> None:
    import zlib

    (copy / "manifest.json").unlink()
    with h5py.File(copy / SHARD, "r+", libver=("v110", "v110")) as file:
        name = next(n for n in file["summary"] if file[f"summary/{n}/total"].chunks)
        total = file[f"summary/{name}/total"]
        stored = zlib.compress(bytes(8) if short else bytes(2**26))
        shape, chunks = total.shape, total.chunks
        del file[f"summary/{name}/total"]
        made = file.create_dataset(f"summary/{name}/total", shape, "f8", chunks=chunks, compression="gzip")
        for at in np.ndindex(*(-(-n // c) for n, c in zip(shape, chunks, strict=True))):
            made.id.write_direct_chunk(tuple(i * c for i, c in zip(at, chunks, strict=True)), stored)
    before = (copy / SHARD).read_bytes()
    with pytest.raises(RecordingError, match=r"w00-000000\.h5"):
        make_recording(make_model(2), make_text(seed=6), copy, level="tokens", shard_tokens=100)
    assert (copy / SHARD).read_bytes() == before, "nothing that is there is lost"


def test_a_manifest_with_tokens_beyond_its_run_is_refused(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["shards"][-1]["token_start"] += 1_000_000
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RecordingError, match="more tokens than the run has"):
        read_manifest(copy)


def test_shards_of_other_widths_do_not_lie_together(copy: Path) -> None:
    names = [shard["name"] for shard in read_manifest(copy)["shards"]]
    assert len(names) > 1
    with h5py.File(copy / "shards" / names[-1], "r+", libver=("v110", "v110")) as file:
        for name in ("routing/ids", "routing/gate"):
            data = file[name][..., :1]
            del file[name]
            file.create_dataset(name, data=data)
    said = validate(copy).damage
    assert any("aren't of one recording" in problem for problem in said), said
