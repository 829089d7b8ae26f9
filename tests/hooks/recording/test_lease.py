"""The lease of a writer in an object store: who is waited for, who isn't, and what is said meanwhile."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from visitlens.errors import StorageError
from visitlens.hooks.recording.store import lease as leases
from visitlens.hooks.recording.store.commit import sole_writer
from visitlens.hooks.recording.store.lease import LEASE, Lease
from visitlens.hooks.recording.store.object_store import ObjectStore

SIGN = "import json; from visitlens.hooks.recording.store.lease import _process; print(json.dumps(_process()), flush=True); input()"

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/ns/pid").exists(), reason="only Linux tells whether a process lives"
)


class Clock:
    """The time that who waits for a lease has: it goes on while they sleep, and something may happen then."""

    def __init__(self) -> None:
        self.now, self.due = 0.0, list[tuple[float, Callable[[], object]]]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.due and self.due[0][0] <= self.now:
            self.due.pop(0)[1]()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    return clock


@pytest.fixture
def store(clock: Clock, tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"memory://bucket/{tmp_path.name}.vlens")


@pytest.fixture
def left(store: ObjectStore) -> Iterator[Callable[..., tuple[dict[str, Any], subprocess.Popen]]]:
    """`left(killed)`: a lease that another process of this machine doesn't renew; what it says, and the process."""
    processes = []

    def leave(killed: bool, **changes: Any) -> tuple[dict[str, Any], subprocess.Popen]:
        process = subprocess.Popen(
            [sys.executable, "-c", SIGN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        said = {"owner": "left", "beat": 3, "host": "here", "scattered": False, **json.loads(process.stdout.readline())}
        if killed:
            process.kill()
            ended(process)
        store.put(LEASE, json.dumps({**said, **changes}).encode())
        return said, process

    yield leave
    for process in processes:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen) -> None:
    """Waits until it is a zombie, which is as dead."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    while leases._state(process.pid)[0] != "Z":
        time.sleep(0.01)


def seconds_to_take(store: ObjectStore, clock: Clock) -> float:
    with Lease(store) as lease:
        spent = clock.now
        lease.check()
    assert store.get(LEASE) is None
    return spent


def test_a_dead_process_of_this_machine_is_not_waited_for(store, left, clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "visitlens")
    said, _ = left(killed=True)
    assert seconds_to_take(store, clock) < 2 * Lease.beat
    assert f"process {said['pid']} on here left its lease, and is dead: taking over" in caplog.text


def test_one_that_dies_meanwhile_is_waited_for_no_longer(store, left, clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "visitlens")
    said, process = left(killed=False)
    clock.due = [(Lease.beat, lambda: (process.kill(), ended(process)))]
    assert Lease.beat <= seconds_to_take(store, clock) < 2.5 * Lease.beat
    assert f"process {said['pid']} on here left its lease, and is dead: taking over" in caplog.text


def test_one_that_is_gone_between_two_looks_is_dead(store, left, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there when it is asked for, and waited for by its parent before its state is read."""
    said, process = left(killed=True)
    process.wait()
    monkeypatch.setattr(leases.os, "kill", lambda pid, signal: None)
    assert leases._is_dead(said)


def test_a_number_given_out_again_is_another_process(store, left, clock) -> None:
    left(killed=False, started="1")
    assert seconds_to_take(store, clock) < 2 * Lease.beat


@pytest.mark.parametrize(
    "changes", [{}, {"system": ["another boot", "pid:[1]"]}, {"scattered": True}, {"pid": -1}, {"pid": 10**30}]
)
def test_who_may_live_is_waited_for_and_it_is_said_until_when(
    store, left, clock, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "visitlens")
    before = datetime.now()
    left(killed=bool(changes), **changes)
    assert seconds_to_take(store, clock) >= 4 * Lease.beat
    assert f"delete {store.url}/{LEASE}" in caplog.text
    said = re.search(r"Waiting until (\d+:\d+:\d+)", caplog.text)
    until = {f"{before + timedelta(seconds=4 * Lease.beat + second):%H:%M:%S}" for second in range(600)}
    assert said and said[1] in until


def test_a_lease_that_is_deleted_meanwhile_ends_the_wait(store, left, clock) -> None:
    left(killed=False)
    clock.due = [(Lease.beat, lambda: store.delete(LEASE))]
    assert seconds_to_take(store, clock) < 2.5 * Lease.beat


def test_one_that_gives_a_sign_of_life_is_named(store, left, clock) -> None:
    said, _ = left(killed=False)
    clock.due = [(Lease.beat, lambda: store.put(LEASE, json.dumps({**said, "beat": 4}).encode()))]
    with pytest.raises(
        StorageError, match=f"another process is writing this recording .process {said['pid']} on here."
    ):
        seconds_to_take(store, clock)


def test_workers_that_outlive_their_driver_are_waited_for(store, left, clock, tmp_path: Path) -> None:
    """They may be about to put a shard."""
    left(killed=True, scratch=str(tmp_path))
    began, done = threading.Event(), threading.Event()

    def work() -> None:
        with sole_writer(tmp_path, "w00"):
            began.set()
            time.sleep(0.8)
            done.set()

    threading.Thread(target=work).start()
    began.wait()
    seconds_to_take(store, clock)
    assert done.is_set()


@pytest.mark.parametrize("data", [b"", b"[1]", b"\xff{", b'{"pid": "1"}'])
def test_a_lease_that_says_nothing_readable_is_only_waited_for(store, clock, data: bytes) -> None:
    store.put(LEASE, data)
    assert not leases._is_dead(Lease(store)._holder())
    assert seconds_to_take(store, clock) < 6 * Lease.beat
