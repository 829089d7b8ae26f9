"""Recordings in an object store: whole, resumable, one writer, nothing overwritten. In fsspec's memory, and on S3 (moto's
server) where s3fs and moto are installed."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.hooks.crashes.wholeness import Crash, crash_after

from visitlens.errors import InputError, RecordingError, StorageError, UnavailableError
from visitlens.hooks.recording.maintain.pull import pull
from visitlens.hooks.recording.maintain.validate import validate
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.store.lease import LEASE, Lease
from visitlens.hooks.recording.store.object_store import ObjectStore, is_url

MEASURES = ("resid_rms", "sink_mass")


@pytest.fixture(scope="module")
def local(model, text, make_recording, tmp_path_factory) -> Recording:
    path = tmp_path_factory.mktemp("local") / "r.vlens"
    return make_recording(model, text, path, measures=MEASURES, shard_tokens=60).recording


def assert_same(url: str, local: Recording, out: Path) -> None:
    rec = Recording(pull(url, out))
    assert rec.complete and validate(out).exit_code == 0 and rec.run["config_sha256"] == local.run["config_sha256"]
    np.testing.assert_array_equal(rec.token_table()["id"], local.token_table()["id"])
    np.testing.assert_array_equal(rec.token_stat("sink_mass"), local.token_stat("sink_mass"))
    for name, totals in local.totals.items():
        np.testing.assert_allclose(rec.totals[name].total, totals.total, rtol=1e-12)
        np.testing.assert_array_equal(rec.totals[name].count, totals.count)
    np.testing.assert_array_equal(rec.document_hashes, local.document_hashes)


def test_what_is_recorded_there_is_what_a_folder_has(put, url: str, local: Recording, tmp_path: Path) -> None:
    put()
    assert set(ObjectStore(url).sizes()) == {
        "manifest.json",
        "summary.h5",
        *(f"shards/{shard['name']}" for shard in local.shards),
    }
    assert_same(url, local, tmp_path / "pulled.vlens")
    seen: list[tuple[int, int]] = []
    before = ObjectStore(url).sizes()
    put(lambda *at: seen.append(at))  # a finished one is left alone
    assert len(seen) == 1 and ObjectStore(url).sizes() == before
    with pytest.raises(RecordingError, match="another configuration"):
        put(groups=3)


@pytest.mark.parametrize("url", ["memory"], indirect=True)
@pytest.mark.parametrize("lost", [(), ("summary.h5",)])
def test_more_of_the_text_goes_on_though_documents_get_other_groups(
    lost: tuple[str, ...], put, make_text, url: str, local: Recording, tmp_path: Path
) -> None:
    text = make_text(seed=6)
    for tokens in (40, 90, text.num_tokens):
        put(text=text.first_contexts(tokens))
        for name in lost:
            ObjectStore(url).delete(name)
    put()
    assert_same(url, local, tmp_path / "pulled.vlens")
    assert len(Recording(url).run["extends"]) == 2 and validate(url).exit_code == 0


@pytest.mark.parametrize("lost", [(), ("summary.h5",)])
def test_another_machine_goes_on_whatever_caches_are_there(
    lost: tuple[str, ...], put, url: str, local: Recording, tmp_path: Path
) -> None:
    with pytest.raises(Crash):
        put(crash_after(5))
    store = ObjectStore(url)
    shards = {name: size for name, size in store.sizes().items() if name.startswith("shards/")}
    assert len(shards) == 2 and LEASE not in store.sizes()
    for name in lost:
        store.delete(name)
    put()
    assert_same(url, local, tmp_path / "pulled.vlens")
    assert store.sizes().items() >= shards.items()


def test_a_summary_of_another_moment_than_the_manifest_is_not_believed(
    put, url: str, local: Recording, tmp_path: Path
) -> None:
    with pytest.raises(Crash):
        put(crash_after(3))
    older = ObjectStore(url).get("summary.h5")
    with pytest.raises(Crash):
        put(crash_after(3))
    ObjectStore(url).put("summary.h5", older or b"")
    put()
    assert_same(url, local, tmp_path / "pulled.vlens")


def test_a_second_writer_is_refused_and_a_dead_one_replaced(
    put, url: str, local: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(url)
    with (
        monkeypatch.context() as patched
    ):  # who waits for a sign of life has a clock that lets even a busy machine give it
        slow = SimpleNamespace(monotonic=lambda: time.monotonic() / 300, sleep=time.sleep)
        patched.setattr("visitlens.hooks.recording.store.lease.time", slow)
        with Lease(store) as lease:
            with pytest.raises(StorageError, match="another process is writing this recording"):
                put()
            lease.check()
    assert store.sizes() == {}
    store.put(LEASE, json.dumps({"owner": "killed", "beat": 3}).encode())  # nobody renews it
    put()
    assert_same(url, local, tmp_path / "pulled.vlens")


def test_of_many_that_replace_a_dead_writer_one_has_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them see that it is dead before the first one puts its lease, and put theirs before the first one looks again."""
    monkeypatch.setattr(Lease, "beat", 1000.0)  # nobody renews meanwhile
    clock = itertools.count(step=1000)
    monkeypatch.setattr(
        "visitlens.hooks.recording.store.lease.time",
        SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None),
    )
    ObjectStore(url).put(LEASE, json.dumps({"owner": "killed", "beat": 3}).encode())
    put, together, decided = ObjectStore.put, threading.Barrier(4, timeout=300), threading.Event()

    def put_together(store: ObjectStore, name: str, data: bytes, *, new: bool = False) -> bool:
        together.wait()
        done = put(store, name, data, new=new)
        together.wait()
        return done

    monkeypatch.setattr(ObjectStore, "put", put_together)
    came_in: list[int] = []
    refused: list[int] = []

    def try_it(number: int) -> None:
        try:
            with Lease(ObjectStore(url)):
                came_in.append(number)
                decided.wait(300)
        except StorageError:
            refused.append(number)
        if len(refused) == 3:
            decided.set()

    threads = [threading.Thread(target=try_it, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(came_in) == 1 and len(refused) == 3


def test_a_writer_that_was_replaced_commits_nothing_more(put, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, renew, noticed = ObjectStore(url), Lease._renew, threading.Event()
    monkeypatch.setattr(Lease, "_renew", lambda lease: (renew(lease), noticed.set()))

    def take_over(done: int, total: int) -> None:
        for _ in range(300):  # a sign of life on its way may still come after it
            store.put(LEASE, json.dumps({"owner": "another", "beat": 0}).encode())
            if noticed.wait(0.2):
                return
        pytest.fail("the writer never noticed")

    with pytest.raises(StorageError, match="another process has taken this recording over"):
        put(take_over)
    assert "manifest.json" not in store.sizes() and json.loads(store.get(LEASE) or b"")["owner"] == "another"


def test_no_shard_is_overwritten(put, url: str, local: Recording, tmp_path: Path) -> None:
    """An attempt that was thought lost and wasn't: the shard that is there counts; a stranger's is an error."""
    with pytest.raises(Crash):
        put(crash_after(3))
    store, name = ObjectStore(url), "shards/w00-000000.h5"
    there = store.get(name)
    for cache in ("manifest.json", "summary.h5"):
        store.delete(cache)
    store.delete(name)

    def return_it(done: int, total: int) -> None:
        store.put(name, there or b"", new=True)

    with pytest.raises(StorageError, match="another writer has put it there"):
        put(return_it)  # of the run before, whose identity is gone with its last shard
    assert store.get(name) == there
    put()
    assert_same(url, local, tmp_path / "pulled.vlens")


def test_what_is_not_whole_is_not_pulled(put, url: str, tmp_path: Path) -> None:
    store, out = ObjectStore(url), tmp_path / "pulled.vlens"
    with pytest.raises(RecordingError, match=r"no recording there; expected manifest\.json"):
        pull(url, out)
    put()
    data = store.get("shards/w00-000001.h5") or b""
    for damaged, why in ((data[:-9], "bytes, the manifest says"), (data[:-1] + b"?", "another hash|damaged|refused")):
        store.put("shards/w00-000001.h5", damaged)
        with pytest.raises(RecordingError, match=why):
            pull(url, out)
        assert not list(tmp_path.glob("pulled*"))
    store.put("shards/w00-000001.h5", data[:-9])
    with pytest.raises(RecordingError, match=r"expected \d+ bytes, got"):
        put()
    store.put("note.txt", b"mine")
    with pytest.raises(RecordingError, match=r"no recording \(holds note\.txt\)"):
        put()


def test_a_place_that_does_not_answer_is_one_error(tmp_path: Path) -> None:
    assert is_url("s3://bucket/r.vlens") and not is_url("runs/r.vlens")
    with pytest.raises((UnavailableError, InputError), match="nowhere://bucket"):
        ObjectStore("nowhere://bucket/r.vlens")
    with pytest.raises(InputError, match="exists"):
        pull("memory://bucket/r.vlens", tmp_path)


def test_the_commands(run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from visitlens.probe.model.bundled import PAIR, SAMPLE

    monkeypatch.chdir(tmp_path)
    options = ("--context", 64, "--max-tokens", 200, "--shard-tokens", 100)
    code, out, err = run("record", PAIR["looped"], SAMPLE, "-o", url, *options)
    assert code == 0 and out == f"{url}\n" and "documents; writes a summary of a few MB to" in err
    code, out, _ = run("pull", url)
    assert code == 0 and Path(out.strip()).name == url.rpartition("/")[2]
    assert run("validate", out.strip())[0] == 0
    code, _, err = run("pull", url)
    assert code == 1 and "exists; choose another path" in err
