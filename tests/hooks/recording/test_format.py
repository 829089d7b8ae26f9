"""Version 1 of the format is frozen: a recording of it, kept here since it was current, reads as it did."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import visitlens
from visitlens.errors import RecordingError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.maintain.pack import unpack
from visitlens.hooks.recording.maintain.validate import validate
from visitlens.hooks.recording.read.recording import Recording

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Two shards of a tiny random looped model in bfloat16, level activations, with sites Q and resid of some tokens."""
    return unpack(GOLDEN / "recording-v1.tar.gz", tmp_path / "golden.vlens")


def described(path: Path) -> dict[str, object]:
    """What readers get from it: hashes of arrays, exact values of statistics."""
    run = visitlens.open(path)
    rec = run.recording

    def digest(array: np.ndarray) -> str:
        return (
            f"{array.dtype.str} {array.shape} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]}"
        )

    arrays = {f"tokens/{name}": digest(array) for name, array in rec.token_table().items()}
    arrays |= {f"experts {layer}": digest(rec.experts(layer, 2)[0]) for layer in run.plan.looped_layers}
    arrays |= {"gates": digest(rec.experts(1, 2)[1]), "sink": digest(rec.token_stat("sink_mass"))}
    arrays |= {"Q": digest(rec.activation("Q", 2, 2)), "resid": digest(rec.activation("resid", 0, 1, tokens=(40, 60)))}
    stats = {name: run.stat(name).to_dict() for name in run.measures}
    kept = {name: {key: stats[name][key] for key in ("measure", "values", "documents", "tokens")} for name in stats}
    return json.loads(json.dumps({"arrays": arrays, "stats": kept, "run": rec.run}))


def test_the_golden_recording_reads_as_it_always_did(golden: Path) -> None:
    expected = json.loads((GOLDEN / "recording-v1.json").read_text())
    got = described(golden)
    assert got["arrays"] == expected["arrays"] and got["run"] == expected["run"]
    assert got["stats"].keys() == expected["stats"].keys()
    for name, stat in expected["stats"].items():
        assert got["stats"][name]["measure"] == stat["measure"]
        np.testing.assert_allclose(got["stats"][name]["values"], stat["values"], rtol=1e-12, err_msg=name)
    assert validate(golden).exit_code == 0


def rewrite(path: Path, version: str, extra: bool) -> None:
    """Every file of the recording under another version; `extra` adds what a later minor version may add."""
    manifest = json.loads((path / "manifest.json").read_text())
    for file in path.rglob("*.h5"):
        with h5py.File(file, "r+", libver=schema.LIBVER) as opened:
            opened.attrs["schema_version"] = np.bytes_(version)
            if extra:
                opened.attrs["later"] = 3
                opened.create_dataset("later/array", data=np.arange(10), chunks=(10,), **schema.TEXT_FILTERS)
        for entry in manifest["shards"]:
            if entry["name"] == file.name:
                entry["bytes"] = file.stat().st_size
                entry["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
                entry.update({"later": 1} if extra else {})
    manifest["schema_version"] = version
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_an_older_minor_version_reads(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "SCHEMA_VERSION", "1.7.0")
    assert Recording(golden).token_table()["id"].size and validate(golden).exit_code == 0


def test_a_newer_minor_version_reads_with_what_it_added(golden: Path) -> None:
    before = described(golden)
    rewrite(golden, "1.3.2", extra=True)
    assert described(golden) == before
    assert validate(golden).exit_code == 0


def test_an_unknown_major_version_is_refused_by_name(golden: Path) -> None:
    rewrite(golden, "2.0.0", extra=False)
    with pytest.raises(RecordingError, match=r"schema version 2\.0\.0 needs another visitlens; this one reads 1\."):
        Recording(golden)
    report = validate(golden)
    assert report.exit_code == 1 and all("2.0.0" in found for found in report.damage)


def test_what_is_written_today_has_the_golden_files_structure(
    golden: Path, make_model, make_text, make_recording, tmp_path
) -> None:
    """Names, types, filters and attributes, so that version 1 isn't changed by accident."""
    options = {"level": "activations", "sites": ("Q", "resid"), "activation_tokens": (30, 95), "shard_tokens": 60}
    measures = ("resid_rms", "sink_mass", "shared_expert_count")
    model, text = make_model(2, dtype=torch.bfloat16), make_text(seed=6, lengths=(30, 9, 25, 40))
    today = make_recording(model, text, tmp_path / "r.vlens", measures=measures, **options).recording.path

    def structure(path: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        with h5py.File(path) as file:
            found["/"] = sorted((name, str(value.dtype)[:2]) for name, value in file.attrs.items())

            def look(name: str, item: h5py.Group | h5py.Dataset) -> None:
                found[name] = sorted(item.attrs)
                if isinstance(item, h5py.Dataset):
                    layout = (item.ndim, str(item.dtype), item.chunks, item.compression, item.shuffle, item.fletcher32)
                    found[name] = (*layout, sorted(item.attrs))

            file.visititems(look)
        return found

    for name, documents in (("summary.h5", 4), ("shards/w00-000000.h5", 3)):
        added = {"documents": [], "documents/hash": (1, "uint64", (documents,), "gzip", True, True, [])}  # in 1.1
        assert structure(today / name) == structure(golden / name) | added
    assert (
        json.loads((today / "manifest.json").read_text()).keys()
        == json.loads((golden / "manifest.json").read_text()).keys()
    )
