"""A store that stops answering: while a recording is written there, and while one is read."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import visitlens as vl
from visitlens.app.server import layout
from visitlens.app.view.registry import Registry
from visitlens.app.view.view import Context
from visitlens.errors import StorageError
from visitlens.hooks.recording.maintain.validate import validate
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.store.lease import LEASE, Lease
from visitlens.hooks.recording.store.object_store import ObjectStore
from visitlens.probe.jobs.workers import _Crew, _Worker

pytestmark = pytest.mark.parametrize("url", ["memory"], indirect=True)


class Outage:
    """Of every call to the store from now on, or of those that write."""

    def __init__(self) -> None:
        self.reads, self.writes, self.refused = False, False, 0

    def begin(self) -> None:
        self.reads = self.writes = True

    def end(self) -> None:
        self.reads = self.writes = False


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    now = Outage()

    def failing(name: str, kind: str) -> Callable[..., Any]:
        plain = getattr(MemoryFileSystem, name)

        def call(*args: Any, **options: Any) -> Any:
            if getattr(now, kind):
                now.refused += 1
                raise ConnectionError("could not connect to the endpoint")
            return plain(*args, **options)

        return call

    for name in ("find", "cat_file", "get_file"):
        monkeypatch.setattr(MemoryFileSystem, name, failing(name, "reads"))
    for name in ("pipe_file", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, failing(name, "writes"))
    return now


def at_context(number: int, do: Callable[[], None]) -> Callable[[int, int], None]:
    calls: list[int] = []

    def on_progress(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == number:
            do()

    return on_progress


def test_a_run_outlasts_a_short_outage(
    put, url: str, outage: Outage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ObjectStore, "patience", 60.0)  # 1 s to the second try
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "visitlens")

    def go_down() -> None:
        outage.begin()
        threading.Thread(target=end_once_noticed, daemon=True).start()

    def end_once_noticed() -> None:
        wait_for(lambda: "could not connect to the endpoint; trying again in 1 s" in caplog.text)
        outage.end()

    put(at_context(2, go_down))
    assert not outage.reads
    assert validate(url).exit_code == 0 and LEASE not in ObjectStore(url).sizes() and Recording(url).complete


@pytest.mark.parametrize("reads", [True, False])
def test_a_long_outage_is_one_error_that_says_what_is_kept(
    reads: bool,
    put,
    url: str,
    outage: Outage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`reads=False`: what is there can be seen, and nothing written."""
    caplog.set_level(logging.INFO, "visitlens")
    monkeypatch.setattr(ObjectStore, "patience", 0.6)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def go_down() -> None:
        wait_for(lambda: "manifest.json" in ObjectStore(url).sizes())  # the first shard is acknowledged
        outage.reads, outage.writes = reads, True

    with pytest.raises(StorageError) as caught:
        put(at_context(4, go_down))
    tries = sum("trying again" in record.message for record in caplog.records)
    assert tries < 20, "for its patience once, which is well before a lease runs out"
    outage.end()
    kept = Recording(url)
    assert 0 < kept.tokens < kept.run["tokens"] and str(caught.value) == (
        f"{url}: could not connect to the endpoint. {kept.tokens:,} tokens are committed there and stay; the same command goes "
        "on from them"
    )
    before = {shard["name"]: shard["sha256"] for shard in kept.shards}
    put()
    after = Recording(url)
    assert after.complete and validate(url).exit_code == 0
    assert {shard["name"]: shard["sha256"] for shard in after.shards}.items() >= before.items()


def test_ctrl_c_ends_the_waiting_and_says_what_is_kept(
    put, url: str, outage: Outage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ObjectStore, "patience", 36_000.0)  # 600 s to the second try
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "visitlens")
    pressed: list[float] = []

    def go_down() -> None:
        wait_for(lambda: "manifest.json" in ObjectStore(url).sizes())
        outage.begin()
        threading.Thread(target=press, daemon=True).start()

    def press() -> None:
        wait_for(lambda: "trying again in 600 s" in caplog.text)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        put(at_context(4, go_down))
    assert pressed and time.monotonic() - pressed[0] < 300, "not the pause, nor the outage"
    outage.end()
    kept = Recording(url)
    assert 0 < kept.tokens < kept.run["tokens"] and str(caught.value) == (
        f"stopped while the store failed ({url}: could not connect to the endpoint). {kept.tokens:,} tokens are committed there and "
        "stay; the same command goes on from them"
    )
    put()
    assert Recording(url).complete


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_waiting_does_not_mend_is_told_at_once(put, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStore, "patience", 300.0)
    store, tries = ObjectStore(url), list[int]()

    def refused() -> None:
        tries.append(1)
        raise PermissionError("Access Denied")  # as s3fs does, without a number

    with pytest.raises(StorageError, match="Access Denied"):
        store.outlast(lambda: store._try(refused))
    assert len(tries) == 1

    def take_over() -> None:
        store.put(LEASE, b'{"owner": "another", "beat": 0}')

    with pytest.raises(StorageError, match=r"taken this recording over$"):
        put(at_context(1, take_over))


def test_a_lease_that_can_not_be_given_back_hides_no_error(url: str, outage: Outage) -> None:
    with pytest.raises(ZeroDivisionError), Lease(ObjectStore(url)):
        outage.begin()
        raise ZeroDivisionError
    with pytest.raises(StorageError, match="could not connect"), Lease(ObjectStore(url)):
        pass


def test_workers_driver_does_not_swallow_what_the_store_says(url: str) -> None:
    """StorageError is an OSError, as is a pipe that breaks."""

    def commit() -> None:
        raise StorageError(11, f"{url}: another process has taken this recording over")

    ours, theirs = multiprocessing.Pipe()
    worker: Any = _Worker(0, SimpleNamespace(), ours)  # type: ignore[arg-type]  # no process is needed
    ledger: Any = SimpleNamespace(take=lambda shard: None, commit=commit)
    crew = _Crew(SimpleNamespace(), ledger, [], lambda done, total: None)  # type: ignore[arg-type]  # nor a model
    theirs.send(("shard", "a shard"))
    with pytest.raises(StorageError, match="taken this recording over"):
        crew._listen(worker)
    theirs.close()
    crew._listen(worker)  # it died: nothing more is heard


def test_reading_says_that_the_store_does_not_answer(
    put, run, url: str, outage: Outage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    put()
    monkeypatch.setattr(ObjectStore, "outlast", None)  # who reads, or begins to write, doesn't wait
    opened, context, later = vl.open(url), Context(Registry([url])), Context(Registry([url]))
    assert opened.stat("sink_mass").values.size and "by-layer" in str(layout.render(context, "http://x/layers").content)
    outage.begin()
    for command in (
        ["info", url],
        ["validate", url],
        ["pull", url],
        ["export", url, "tokens", "-o", tmp_path / "t.csv"],
    ):
        code, _, err = run(*command)
        assert code == 1 and f"{url}: could not connect to the endpoint" in err.replace("\n", " ")
        assert err.count("error:") == 1 and "Traceback" not in err
    code, _, err = run("record", "smelt", put_text(tmp_path), "-o", f"{url}.new", "--max-tokens", 20)
    assert code == 1 and "could not connect" in err and err.count("error:") == 1
    with pytest.raises(StorageError, match="could not connect"):
        opened.recording.token_table()
    assert opened.stat("resid_rms").values.size, "the summary is here"
    page = str(layout.render(context, "http://x/tokens").content)
    assert "Tokens: can't be read now" in page and "could not connect to the endpoint" in page
    assert "by-layer" in str(layout.render(context, "http://x/layers").content)
    page = str(layout.render(later, "http://x/layers").content)  # its first look
    assert "This recording can't be read" in page and "could not connect to the endpoint" in page
    outage.end()
    assert "by-layer" in str(layout.render(later, "http://x/layers").content)
    assert opened.recording.token_table()["id"].size
    assert "can't be read" not in str(layout.render(context, "http://x/tokens").content)


def put_text(folder: Path) -> Path:
    (folder / "text.txt").write_text("A short text. " * 20)
    return folder / "text.txt"
