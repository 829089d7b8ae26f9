"""The lease of a writer in an object store: who is waited for, who isn't, and what is said meanwhile."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from visitlens.hooks import lease as leases
from visitlens.hooks.lease import LEASE, Lease
from visitlens.hooks.object_store import ObjectStore
from visitlens.hooks.shards import sole_writer
from visitlens.kernels.errors import StorageError

SIGN = "import json; from visitlens.hooks.lease import _process; print(json.dumps(_process()), flush=True); input()"

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/ns/pid").exists(), reason="only Linux tells whether a process lives"
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ObjectStore:
    monkeypatch.setattr(Lease, "beat", 0.4)
    return ObjectStore(f"memory://bucket/{tmp_path.name}.vlens")


@pytest.fixture
def left(store: ObjectStore) -> Iterator[Callable[..., dict[str, Any]]]:
    """`left(killed)`: a lease that another process of this machine doesn't renew; what it says."""
    processes = []

    def leave(killed: bool, **changes: Any) -> dict[str, Any]:
        process = subprocess.Popen(
            [sys.executable, "-c", SIGN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        said = {"owner": "left", "beat": 3, "host": "here", "scattered": False, **json.loads(process.stdout.readline())}
        if killed:
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on, which is as dead
        store.put(LEASE, json.dumps({**said, **changes}).encode())
        return said

    yield leave
    for process in processes:
        process.kill()
        process.communicate()


def seconds_to_take(store: ObjectStore) -> float:
    began = time.monotonic()
    with Lease(store) as lease:
        spent = time.monotonic() - began
        lease.check()
    assert store.get(LEASE) is None
    return spent


def test_a_dead_process_of_this_machine_is_not_waited_for(store, left, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "visitlens")
    said = left(killed=True)
    assert seconds_to_take(store) < 2 * Lease.beat
    assert f"process {said['pid']} on here left its lease, and is dead: taking over" in caplog.text


def test_a_number_given_out_again_is_another_process(store, left) -> None:
    left(killed=False, started="1")
    assert seconds_to_take(store) < 2 * Lease.beat


@pytest.mark.parametrize(
    "changes", [{}, {"system": ["another boot", "pid:[1]"]}, {"scattered": True}, {"pid": -1}, {"pid": 10**30}]
)
def test_who_may_live_is_waited_for_and_it_is_said_until_when(
    store, left, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "visitlens")
    left(killed=bool(changes), **changes)
    assert seconds_to_take(store) >= 4 * Lease.beat
    assert f"Waiting until {time.strftime('%H:')}" in caplog.text and f"delete {store.url}/{LEASE}" in caplog.text


def test_a_lease_that_is_deleted_meanwhile_ends_the_wait(store, left) -> None:
    left(killed=False)
    threading.Timer(Lease.beat, store.delete, (LEASE,)).start()
    assert seconds_to_take(store) < 2.5 * Lease.beat


def test_one_that_gives_a_sign_of_life_is_named(store, left) -> None:
    said = left(killed=False)
    threading.Timer(0.1, store.put, (LEASE, json.dumps({**said, "beat": 4}).encode())).start()
    with pytest.raises(
        StorageError, match=f"another process is writing this recording .process {said['pid']} on here."
    ):
        seconds_to_take(store)


def test_workers_that_outlive_their_driver_are_waited_for(store, left, tmp_path: Path) -> None:
    """They may be about to put a shard."""
    left(killed=True, scratch=str(tmp_path))
    began, ended = threading.Event(), threading.Event()

    def work() -> None:
        with sole_writer(tmp_path, "w00"):
            began.set()
            time.sleep(0.8)
            ended.set()

    threading.Thread(target=work).start()
    began.wait()
    seconds_to_take(store)
    assert ended.is_set()


@pytest.mark.parametrize("data", [b"", b"[1]", b"\xff{", b'{"pid": "1"}'])
def test_a_lease_that_says_nothing_readable_is_only_waited_for(store, data: bytes) -> None:
    store.put(LEASE, data)
    assert not leases._is_dead(Lease(store)._holder())
    assert seconds_to_take(store) < 6 * Lease.beat
