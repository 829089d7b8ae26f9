"""Recordings in an object store, read at their address: what is fetched, once, and only what is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import visitlens as vl
from visitlens.app.view.registry import Registry
from visitlens.errors import RecordingError
from visitlens.hooks.recording.format.schema import check_run
from visitlens.hooks.recording.maintain.pull import pull
from visitlens.hooks.recording.maintain.validate import validate
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.store.lease import LEASE
from visitlens.hooks.recording.store.object_store import ObjectStore
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.pair_grid import pair_grid

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def local(make_model, make_text, make_recording, tmp_path_factory) -> Path:
    """Three shards at level tokens."""
    path = tmp_path_factory.mktemp("local") / "r.vlens"
    make_recording(make_model(2), make_text(seed=6), path, measures=("resid_rms", "sink_mass"), shard_tokens=50)
    return path


@pytest.fixture
def stored(local: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same in a store; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = ObjectStore(url)
    for file in (*local.glob("*.*"), *local.glob("shards/*")):
        if file.suffix != ".lock":
            store.put(str(file.relative_to(local)), file.read_bytes())
    return url


def shards_here(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.glob("cache/visitlens/fetched/*/*/*/shards/*")}


def test_a_recording_is_read_at_its_address_and_only_what_is_asked_for_comes(
    stored: str, local: Path, tmp_path: Path
) -> None:
    there, here = vl.open(stored), vl.open(local)
    np.testing.assert_array_equal(there.stat("sink_mass").values, here.stat("sink_mass").values)
    assert (
        there.name == tmp_path.name and there.recording.complete and there.recording.warnings == here.recording.warnings
    )
    assert shards_here(tmp_path) == set()
    first, second, *_ = names = [shard["name"] for shard in here.recording.shards]
    assert len(names) == 3
    start = here.recording.shards[1]["token_start"]
    tokens = (start, start + 5)
    np.testing.assert_array_equal(
        there.recording.token_stat("sink_mass", tokens), here.recording.token_stat("sink_mass", tokens)
    )
    assert shards_here(tmp_path) == {second}
    np.testing.assert_array_equal(there.recording.token_table()["id"], here.recording.token_table()["id"])
    assert shards_here(tmp_path) == set(names)
    ObjectStore(stored).delete(f"shards/{first}")
    again = Recording(stored)
    np.testing.assert_array_equal(again.token_table()["id"], here.recording.token_table()["id"])  # it was here
    assert again.damaged == (f"{first}: missing, not {here.recording.shards[0]['bytes']:,}",)


def test_of_a_recording_that_grew_only_what_is_new_is_fetched(stored: str, local: Path, tmp_path: Path) -> None:
    store = ObjectStore(stored)
    manifest, summary = store.get("manifest.json") or b"", store.get("summary.h5") or b""
    said = json.loads(manifest)
    store.put("manifest.json", json.dumps({**said, "shards": said["shards"][:-1]}).encode())
    early = Recording(stored)  # its summary counts more: a writer died between the two
    assert not early.complete and len(early.token_table()["id"]) == early.tokens
    for shard in said["shards"][:-1]:
        store.delete(f"shards/{shard['name']}")
    store.put("manifest.json", manifest)
    late = Recording(stored)
    assert late.path != early.path and late.complete
    np.testing.assert_array_equal(late.token_table()["id"], Recording(local).token_table()["id"])
    assert not early.complete and store.get("summary.h5") == summary


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_what_is_wrong_is_never_kept(stored: str, tmp_path: Path) -> None:
    store, name = ObjectStore(stored), "shards/w00-000001.h5"
    data = store.get(name) or b""
    for wrong, why in ((data[:-9], "bytes, the manifest says"), (data[:-1] + b"?", "another hash")):
        store.put(name, wrong)
        with pytest.raises(RecordingError, match=why):
            Recording(stored).token_table()
        assert shards_here(tmp_path) == {"w00-000000.h5"}
    with pytest.raises(RecordingError, match=r"memory://.*nowhere: no recording there"):
        vl.open("memory://bucket/nowhere")
    store.put("manifest.json", b"{")
    with pytest.raises(RecordingError, match=r"memory://.*manifest\.json: not readable JSON"):
        vl.open(stored)


def test_the_commands_that_read_take_an_address(run: Run, stored: str, local: Path, tmp_path: Path) -> None:
    code, out, err = run("info", stored)
    assert code == 0 and f"{stored}  (complete)" in out and "no shard in it yet" in out
    assert err.count("fetched") == 2 and f"{stored}: " in err and "of manifest and summary fetched into" in err
    assert shards_here(tmp_path) == set()
    assert run("info", stored)[2] == ""  # nothing is fetched twice
    mine, theirs = tmp_path / "mine.csv", tmp_path / "theirs.csv"
    for what in (["sink_mass"], ["tokens", "--tokens", "0:60"]):
        assert run("export", local, *what, "-o", mine)[0] == 0 and run("export", stored, *what, "-o", theirs)[0] == 0
        assert mine.read_text() == theirs.read_text()
    code, out, _ = run("compare", stored, local, "--json")
    assert code == 0 and all(row["difference"] == 0 for row in json.loads(out)["rows"])
    pair = pair_grid([stored])
    assert isinstance(pair, Pair) and pair.looped is not None and pair.looped.recording.place == stored
    code, _, err = run("info", f"{stored}.nowhere")
    assert code == 1 and "no recording there" in err and err.count("error:") == 1


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_validate_reads_what_is_in_the_store(run: Run, stored: str, tmp_path: Path) -> None:
    code, out, _ = run("validate", stored)
    assert code == 0 and out.startswith(f"{stored}: whole (")
    assert shards_here(tmp_path) == set()
    store, name = ObjectStore(stored), "shards/w00-000001.h5"
    store.put(LEASE, b"{}")
    assert any("a process writes this recording" in note for note in validate(stored).notes)
    data, manifest = store.get(name) or b"", json.loads(store.get("manifest.json") or b"")
    store.put(name, data[:-1] + b"?")
    code, out, err = run("validate", stored, "--quick")
    assert code == 1 and "damaged or refused" in out and name in err and "/tmp" not in err
    store.delete(name)
    report = validate(stored)
    assert report.damage == ["w00-000001.h5: in the manifest and not on disk"] and report.exit_code == 1
    store.put(name, data)
    store.put("manifest.json", json.dumps({**manifest, "shards": manifest["shards"][:-1]}).encode())
    assert validate(stored).exit_code == 3
    code, _, err = run("validate", "memory://bucket/nowhere.vlens")
    assert code == 1 and "nothing there" in err


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_commands_that_write_into_a_recording_say_pull(run: Run, stored: str) -> None:
    for command in (("repair",), ("ablate", "-m", "smelt")):
        code, _, err = run(command[0], stored, *command[1:])
        assert code == 1 and "`visitlens pull` it first" in err and err.count("error:") == 1


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_the_dashboard_takes_an_address(stored: str, local: Path) -> None:
    registry = Registry([stored, local])
    one, two = registry.entries()
    assert one.run is not None and one.run.recording.place == stored and one.error == ""
    assert (one.id, two.id) == (one.name.lower().strip("-._"), "r") and registry[one.id].run is one.run
    with pytest.raises(RecordingError, match="no recording there"):
        Registry(["memory://bucket/nowhere.vlens"])


def test_what_is_larger_than_a_reader_takes_is_not_fetched(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("visitlens.hooks.recording.store.fetched_copies.MAX_UNPACKED", 100)
    for way in (lambda: pull(stored, tmp_path / "copy.vlens"), lambda: validate(stored)):
        with pytest.raises(RecordingError, match=r"summary\.h5: [\d,]+ bytes; expected at most 100"):
            way()
    assert not (tmp_path / "copy.vlens").exists()


@pytest.mark.parametrize(
    "strange",
    [{"left_out": ["x"]}, {"regrouped": {"sha": [0]}, "groups": None}, {"config": {"model": {"notes": 5}}}],
    ids=str,
)
def test_a_strange_description_of_a_run_is_refused(strange: dict, local: Path) -> None:
    run = Recording(local).run
    model = {**run["config"]["model"], **strange.get("config", {}).get("model", {})}
    run = {**run, **strange, "config": {**run["config"], "model": model}}
    with pytest.raises(RecordingError, match="a field of the wrong type or value"):
        check_run({name: value for name, value in run.items() if value is not None}, "manifest.json")
