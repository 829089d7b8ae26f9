"""Hostile and damaged files: each refused with its reason, in little time and memory, without touching another file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from tests.hooks.hostile import HOSTILE, compiled_plugin

import visitlens
from visitlens.errors import InputError, RecordingError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.chunks import fletcher32
from visitlens.hooks.recording.format.gate import open_gated, passed
from visitlens.hooks.recording.maintain.validate import check_file
from visitlens.hooks.recording.read.recording import Recording
from visitlens.probe.reading.recorded_run import RecordedRun

MAX_SECONDS, MAX_MEGABYTES = 2, 200  # of CPU time; the slowest takes 0.2

CHILD = """
import json, re, sys, time
from pathlib import Path
from visitlens.hooks.recording.maintain.validate import check_file
from visitlens.errors import RecordingError

def megabytes():  # at most so far; getrusage counts what the process had before exec, too
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

check_file(Path(sys.argv[1]))
for path in sys.argv[2:]:
    print(json.dumps({"began": path}), flush=True)
    before, began, said = megabytes(), time.process_time(), None
    try:
        check_file(Path(path))
    except RecordingError as error:
        said = str(error)
    spent = {"seconds": time.process_time() - began, "megabytes": megabytes() - before}
    print(json.dumps({"path": path, "said": said, **spent}), flush=True)
"""


@pytest.fixture(scope="module")
def valid(make_model, make_text, make_recording, tmp_path_factory) -> Path:
    """A recording with every kind of dataset but maps."""
    path = tmp_path_factory.mktemp("valid") / "r.vlens"
    options = {
        "level": "activations",
        "sites": ("Q", "resid"),
        "measures": ("resid_rms", "sink_mass"),
        "shard_tokens": 100,
    }
    return make_recording(make_model(2), make_text(seed=6), path, **options).recording.path


def first_shard(path: Path) -> Path:
    return path / "shards" / "w00-000000.h5"


@pytest.fixture(scope="module")
def refusals(valid: Path, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What a process of its own says of each hostile file. A crash or a hang is of the file at hand; the rest go on."""
    root = tmp_path_factory.mktemp("hostile")
    paths = {}
    for name, (build, _) in HOSTILE.items():
        (root / name).mkdir()
        paths[name] = root / name / "shard.h5"
        shutil.copy(first_shard(valid), paths[name])
        build(paths[name])
    library = compiled_plugin(root)
    environment = {**os.environ, "PYTHONPATH": str(Path(visitlens.__file__).parents[1]), "HDF5_PLUGIN_PATH": str(root)}
    found: dict[str, dict[str, Any]] = {"": {"library": library, "loaded": root / "loaded", "environment": environment}}
    left = list(paths)
    while left:
        command = [sys.executable, "-c", CHILD, str(first_shard(valid)), *(str(paths[name]) for name in left)]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, errors = child.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            child.kill()
            out, errors = child.communicate()
        lines = [json.loads(line) for line in out.splitlines()]
        assert lines, errors
        found |= {Path(line["path"]).parent.name: line for line in lines if "path" in line}
        if "began" in lines[-1]:
            found[Path(lines[-1]["began"]).parent.name] = {"died": child.returncode, "errors": errors}
        left = [name for name in left if name not in found]
    return found


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_file_is_refused_with_its_reason(name: str, refusals: dict[str, dict[str, Any]]) -> None:
    result = refusals[name]
    assert "died" not in result, f"the process died or hung: {result}"
    assert result["said"] is not None, "it was read"

    assert re.search(HOSTILE[name][1], result["said"]), result["said"]
    assert "shard.h5" in result["said"] and result["said"].isprintable()
    assert result["seconds"] < MAX_SECONDS and result["megabytes"] < MAX_MEGABYTES


def test_there_are_many() -> None:
    assert len(HOSTILE) >= 40


def test_no_planted_plugin_was_loaded(refusals: dict[str, dict[str, Any]]) -> None:
    """And HDF5 by itself would have loaded it."""
    about = refusals[""]
    assert not about["loaded"].exists()
    if about["library"] is None:
        pytest.skip("no C compiler here to make the control's plugin with")
    naive = "import h5py, sys; h5py.File(sys.argv[1])['tokens/extra'][()]"
    environment = {k: v for k, v in about["environment"].items() if k != "HDF5_PLUGIN_PRELOAD"}
    shard = about["library"].parent / "unknown_filter" / "shard.h5"
    subprocess.run([sys.executable, "-c", naive, shard], env=environment, capture_output=True)
    assert about["loaded"].exists()


def test_a_trusted_file_is_spared_the_walk_over_its_chunks_only(valid: Path, tmp_path: Path) -> None:
    for name, opens in {
        "short_chunk": True,
        "external_link": False,
        "virtual_dataset": False,
        "two_compressors": False,
    }.items():
        path = tmp_path / name / "shard.h5"
        path.parent.mkdir()
        shutil.copy(first_shard(valid), path)
        HOSTILE[name][0](path)
        if opens:
            open_gated(path, trusted=True).close()
        else:
            with pytest.raises(RecordingError, match=HOSTILE[name][1]):
                open_gated(path, trusted=True)


def test_a_file_is_what_was_checked_even_if_another_takes_its_place(valid: Path, tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    shutil.copy(first_shard(valid), path)
    with passed(path) as gated:
        path.unlink()
        path.write_bytes(b"another file")
        assert len(gated.read("tokens/id")) == gated.file.attrs["token_count"]


def test_every_selection_is_what_hdf5_reads(valid: Path) -> None:
    with passed(first_shard(valid)) as ours, h5py.File(first_shard(valid)) as theirs:
        selections = [
            (),
            (slice(3, 9),),
            (2,),
            (slice(None), slice(5, 40)),
            (1, slice(0, 1)),
            (slice(0, 2), 3),
            (slice(9, 4),),
        ]
        for name in ("tokens/id", "routing/ids", "stats/sink_mass", "vec/q", "summary/sink_mass/total"):
            for selection in selections[: 3 if ours.array(name).shape[1:] == () else None]:
                got = ours.read(name, selection)
                np.testing.assert_array_equal(got, theirs[name][selection], err_msg=f"{name}{selection}")
                assert got.dtype == theirs[name].dtype


@pytest.mark.parametrize("chunks", [(1, 7), (3, 3), (5, 20)])
def test_selections_across_ragged_chunks(chunks: tuple[int, int], valid: Path, tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    shutil.copy(first_shard(valid), path)
    values = np.arange(100, dtype=np.float32).reshape(5, 20)
    with h5py.File(path, "r+", libver=schema.LIBVER) as file:
        file.create_dataset("extra", data=values, chunks=chunks, **schema.TEXT_FILTERS)
    with passed(path) as gated:
        for a in range(5):
            for b in range(0, 20, 3):
                np.testing.assert_array_equal(
                    gated.read("extra", (slice(a, None), slice(b, b + 8))), values[a:, b : b + 8]
                )
                np.testing.assert_array_equal(gated.read("extra", (a, slice(b, 20))), values[a, b:])


def test_fletcher32_is_hdf5s(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 359, 360, 361, 4001, 300_001):
        for data in (rng.bytes(size), bytes(size), b"\xff" * size):
            with h5py.File(tmp_path / "f.h5", "w") as file:
                d = file.create_dataset("d", data=np.frombuffer(data, np.uint8), chunks=(size,), fletcher32=True)
                file.flush()
                stored = d.id.read_direct_chunk((0,))[1][-4:]
            assert fletcher32(data) == int.from_bytes(stored, "little"), size


# The folder around the files


@pytest.fixture
def copy(valid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(valid, tmp_path / "copy.vlens"))


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a shard elsewhere": (lambda m: m["shards"][0].update(name="../../secret.h5"), "not a readable manifest"),
    "a shard by an absolute path": (lambda m: m["shards"][0].update(name="/etc/passwd"), "not a readable manifest"),
    "one shard twice": (
        lambda m: m["shards"].append(dict(m["shards"][0], token_start=10**6)),
        "not a readable manifest",
    ),
    "shards that overlap": (lambda m: m["shards"][1].update(token_start=3), "hold the same tokens"),
    "a negative count": (lambda m: m["shards"][0].update(token_count=-5), "not a readable manifest"),
    "a count that is text": (lambda m: m["shards"][0].update(token_count="12"), "not a readable manifest"),
    "a count that is true": (lambda m: m["shards"][0].update(seq=True), "not a readable manifest"),
    "shards that are no list": (lambda m: m.update(shards={"a": 1}), "not a readable manifest"),
    "a plan without steps": (lambda m: m["run"].update(layers=[]), "wrong type or value"),
    "a plan of 10,000 steps": (lambda m: m["run"].update(layers=[*range(10_000)]), "wrong type or value"),
    "a plan of a million pairs": (lambda m: m["run"].update(layers=[0] * 2000), "wrong type or value"),
    "a plan of text": (lambda m: m["run"].update(layers="abc"), "wrong type or value"),
    "an unknown level": (lambda m: m["run"]["config"]["options"].update(level="all"), "wrong type or value"),
    "no provenance": (lambda m: m["run"].pop("provenance"), "lacks a field"),
    "a run that is a number": (lambda m: m.update(run=3), "lacks a field"),
}


@pytest.mark.parametrize("name", list(MANIFESTS))
def test_a_hostile_manifest_is_refused(name: str, copy: Path) -> None:
    change, says = MANIFESTS[name]
    edit_manifest(copy, change)
    with pytest.raises(RecordingError, match=says):
        Recording(copy)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" * 200_000, "not readable JSON"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": ' + b"9" * 50_000 + b"}", "not readable JSON"),
        (b"\xff\xfe", "not readable JSON"),
        (b"[" + b"{}," * 1_100_000 + b"{}]", "more than 1,000,000 values"),
        (b" " * (16 * 2**20 + 1), "expected JSON of at most"),
    ],
    ids=["nested", "nan", "digits", "bytes", "values", "size"],
)
def test_json_without_bounds_is_refused_in_little_time(content: bytes, says: str, copy: Path) -> None:
    (copy / "manifest.json").write_bytes(content)
    began = time.process_time()
    with pytest.raises(RecordingError, match=says):
        Recording(copy)
    assert time.process_time() - began < MAX_SECONDS


@pytest.mark.parametrize("name", ["manifest.json", "summary.h5", "shards/w00-000000.h5", "shards", "analyses"])
def test_a_link_to_elsewhere_is_refused(name: str, copy: Path, tmp_path: Path) -> None:
    (copy / "analyses").mkdir()
    (copy / name).rename(tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordingError, match="symbolic link"):
        rec = Recording(copy)
        _ = rec.totals, rec.analyses
        rec.token_table()


def test_a_pipe_for_a_manifest_is_refused_and_not_waited_for(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    os.mkfifo(copy / "manifest.json")
    with pytest.raises(RecordingError, match="regular file"):
        Recording(copy)


def test_a_shard_of_another_place_in_the_run_is_refused(copy: Path) -> None:
    first, second = (copy / "shards" / f"w00-00000{n}.h5" for n in (0, 1))
    data = second.read_bytes()
    first.write_bytes(data)
    edit_manifest(copy, lambda m: m["shards"][0].update(bytes=len(data)))
    with pytest.raises(RecordingError, match=r"not the shard that the manifest lists \(seq, token_start"):
        Recording(copy).token_table()


def test_analyses_beside_a_recording_are_bounded_json(copy: Path) -> None:
    (copy / "analyses").mkdir()
    (copy / "analyses" / "neurons.json").write_text('{"a": [1, 2]}')
    (copy / "analyses" / "bad.json").write_text("[" * 200_000)
    (copy / "analyses" / "notes.txt").write_text("not ours")
    rec = Recording(copy)
    assert rec.analyses == ("bad.json", "neurons.json") and rec.analysis("neurons.json") == {"a": [1, 2]}
    with pytest.raises(RecordingError, match="not readable JSON"):
        rec.analysis("bad.json")
    with pytest.raises(InputError, match=r"no analysis '\.\./manifest\.json'"):
        rec.analysis("../manifest.json")


def test_a_valid_file_passes_quickly(looped_recording: RecordedRun) -> None:
    """CPU time, the best of five; a busy machine only ever makes it longer. The benchmark has the real figure."""
    shard = looped_recording.recording.path / "shards" / looped_recording.recording.shards[0]["name"]
    spent = []
    for _ in range(5):
        began = time.process_time()
        open_gated(shard).close()
        spent.append(time.process_time() - began)
    check_file(shard)
    assert min(spent) < 0.15
