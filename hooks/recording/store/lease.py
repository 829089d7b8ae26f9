"""Who writes a recording in an object store: a lease beside it, instead of the lock that a folder has. No torch.

A writer renews its lease; one that gives no sign of life for four beats is taken for dead. Clocks are never compared. A dead
process of this machine is known to be dead, so nobody waits for it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from visitlens.errors import StorageError
from visitlens.hooks.recording.store.commit import wait_for_workers
from visitlens.hooks.recording.store.object_store import ObjectStore

LEASE = "writer.lease"
_log = logging.getLogger(__name__)


class Lease:
    """Sole writer at a URL for as long as the block lasts; `check` says whether it still is.

    `scratch` is the folder in which worker processes of this machine hold their locks; `scattered` where there are workers on
    other machines, which may outlive this process without anybody here knowing.
    """

    beat = 20.0
    """Seconds between two signs of life."""

    def __init__(self, store: ObjectStore, scratch: Path | None = None, *, scattered: bool = False) -> None:
        self.store, self.scattered = store, scattered
        self.owner = secrets.token_hex(8)
        self.about = {"host": socket.gethostname(), **_process()}
        if scratch is not None:
            self.about["scratch"] = str(scratch.absolute())
        self._lost, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="visitlens-lease")

    def check(self) -> None:
        """Raises StorageError once another process has taken over."""
        if self._lost.is_set() or self._holder().get("owner") != self.owner:
            raise StorageError(errno.EAGAIN, f"{self.store.url}: another process has taken this recording over")

    def __enter__(self) -> Lease:
        """Raises StorageError where another process writes."""
        if not self._put_new():
            self._succeed()
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(StorageError):  # what is raised inside is the reason, and a dead writer's lease runs out
            if not self._lost.is_set() and self._holder().get("owner") == self.owner:
                self.store.delete(LEASE)

    def _renew(self) -> None:
        beat = 0
        while not self._ended.wait(self.beat):
            beat += 1
            with suppress(StorageError):  # the next one may get through
                if self._holder().get("owner") != self.owner:
                    self._lost.set()
                    return
                self.store.put(LEASE, self._sign(beat))

    def _succeed(self) -> None:
        """Replaces a writer that is dead, or shows no life for four beats."""
        before = self._holder()
        if not before and self._put_new():
            return
        if not self._is_left(before) and self._outlive(before):
            return
        if self._holder() == before:
            self.store.put(LEASE, self._sign(0))
            time.sleep(self.beat / 4)  # of several that take it over, the last one has it
        if (holder := self._holder()).get("owner") != self.owner:
            raise self._refused(holder)

    def _is_left(self, before: dict[str, Any]) -> bool:
        """Whether its writer is known to be dead; if so, the workers that it left on this machine have ended."""
        if before.get("scattered") or not _is_dead(before):
            return False
        _log.info("%s: %s left its lease, and is dead: taking over", self.store.url, _name(before))
        scratch = Path(str(before.get("scratch", "")))
        if before.get("scratch") and scratch.is_dir():
            wait_for_workers(scratch)
        return True

    def _outlive(self, before: dict[str, Any]) -> bool:
        """Waits for four beats without a sign of life, or for the writer's death; whether the lease was given up meanwhile, and is
        this one's now."""
        until = datetime.now() + timedelta(seconds=4 * self.beat)
        _log.info(
            "%s: %s has the lease, or died without giving it up. Waiting until %s for a sign of life from it; without one this run "
            "goes on in its place. If you know that it is dead, delete %s/%s to go on at once",
            *(self.store.url, _name(before), f"{until:%H:%M:%S}", self.store.url, LEASE),
        )
        deadline = time.monotonic() + 4 * self.beat
        while time.monotonic() < deadline:
            time.sleep(self.beat / 4)
            now = self._holder()
            if not now and self._put_new():
                return True
            if now != before:
                raise self._refused(self._holder())
            if self._is_left(before):
                return False
        return False

    def _refused(self, holder: dict[str, Any]) -> StorageError:
        return StorageError(
            errno.EAGAIN,
            f"{self.store.url}: another process is writing this recording ({_name(holder)}); wait for it or choose another place",
        )

    def _sign(self, beat: int) -> bytes:
        return json.dumps({"owner": self.owner, "beat": beat, "scattered": self.scattered, **self.about}).encode()

    def _put_new(self) -> bool:
        return self.store.put(LEASE, self._sign(0), new=True)

    def _holder(self) -> dict[str, Any]:
        """What the lease says; nothing where there is none."""
        with suppress(ValueError):
            said = json.loads(self.store.get(LEASE, 2**16) or b"{}")
            return said if isinstance(said, dict) else {"owner": str(said)}
        return {"owner": "unreadable"}


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid', '?')} on {holder.get('host', 'another machine')}"


def _process() -> dict[str, Any]:
    """This process, so that another one of the same running system can tell whether it still lives (Linux; elsewhere nobody can)."""
    with suppress(OSError):
        system = [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            str(Path("/proc/self/ns/pid").readlink()),
        ]
        return {"pid": os.getpid(), "system": system, "started": _state(os.getpid())[1]}
    return {"pid": os.getpid()}


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether it was a process of this system and is none any more. A number given out again is told by its start."""
    mine, pid = _process().get("system"), holder.get("pid")
    if mine is None or holder.get("system") != mine or type(pid) is not int or pid < 1:
        return False
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    try:
        state, started = _state(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True  # since the line before
    except OSError:
        return False
    return state in "ZX" or started != holder.get("started")


def _state(pid: int) -> tuple[str, str]:
    """State (`Z`: ended, not yet waited for; `X`: being waited for) and start in ticks since boot, of /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
