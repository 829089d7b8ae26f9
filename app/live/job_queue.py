"""JobQueue: one thread that runs one job after the other, so that a model has one user; progress, cancel, results that
expire. No torch.

    jobs = JobQueue()
    id_ = jobs.submit(tab, lambda on_progress: live.run(prompt, on_progress=on_progress))
    jobs.state(id_)       # waiting, running (done of total), done, failed, cancelled, gone
    jobs.result(id_)
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from visitlens.errors import InputError, VisitlensError
from visitlens.kernels.memory import give_back_freed_memory

Status = Literal["waiting", "running", "done", "failed", "cancelled", "gone"]
OnProgress = Callable[[int, int], None]
_log = logging.getLogger(__name__)


class QueueFullError(VisitlensError, RuntimeError):
    """Too many jobs wait already."""


class Cancelled(Exception):
    """Raised from a job's progress call, to end the job there."""


@dataclass(frozen=True)
class JobState:
    """A job as it stands. `ahead` jobs come before a waiting one; `message` says what failed, or why it is gone."""

    id: str
    status: Status
    ahead: int = 0
    done: int = 0
    total: int = 0
    message: str = ""

    @property
    def over(self) -> bool:
        return self.status not in ("waiting", "running")


@dataclass(eq=False)
class _Job:
    id: str
    owner: str
    work: Callable[[OnProgress], Any] | None
    asked: float
    """When its owner, or anyone with its id, last asked after it."""
    status: Status = "waiting"
    done: int = 0
    total: int = 0
    message: str = ""
    result: Any = None
    size: int = 0
    stop: bool = False


class JobQueue:
    """Jobs of several owners (browser tabs), run one at a time in the order they came.

    `waiting` jobs may wait, `per_owner` of one owner be unfinished. Results are kept `keep` seconds after they were last
    asked for, and up to `result_bytes` together (by their `nbytes`; the one longest unasked for goes first). A job that
    nobody asked after for `abandoned` seconds is cancelled: its tab was closed. Ids are not guessable: who has one may
    see the result; only the owner may cancel. Every method may be called from any thread.
    """

    def __init__(
        self,
        *,
        waiting: int = 16,
        per_owner: int = 3,
        keep: float = 1800.0,
        results: int = 64,
        result_bytes: int = 512_000_000,
        abandoned: float = 180.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_waiting, self._per_owner, self._keep = waiting, per_owner, keep
        self._most_results, self._most_bytes, self._abandoned, self._clock = results, result_bytes, abandoned, clock
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, _Job] = OrderedDict()
        self._running: _Job | None = None
        self._over: OrderedDict[str, _Job] = OrderedDict()  # the longest unasked for first
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, owner: str, work: Callable[[OnProgress], Any]) -> str:
        """The id of a new job. `work` gets a function to call with (done, total) now and then: there it can be cancelled.

        Raises:
            QueueFullError: too many jobs wait, of all or of this owner.
        """
        with self._changed:
            if self._closed:
                raise QueueFullError("the server is shutting down")
            self._sweep()
            unfinished = [*self._waiting.values(), *([self._running] if self._running else [])]
            mine = sum(job.owner == owner and not job.stop for job in unfinished)
            if mine >= self._per_owner:
                raise QueueFullError(f"{mine} jobs of this tab are unfinished: wait for them or cancel one")
            if len(self._waiting) >= self._most_waiting:
                raise QueueFullError(f"{len(self._waiting)} jobs wait already: try again in a moment")
            job = _Job(secrets.token_urlsafe(9), owner, work, self._clock())
            self._waiting[job.id] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="visitlens-jobs", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return job.id

    def state(self, id_: str) -> JobState:
        """What became of a job; asking keeps it alive."""
        with self._changed:
            job = self._ask(id_)
            if job is None:
                minutes = round(self._keep / 60)
                return JobState(
                    id_,
                    "gone",
                    message=f"this result is no longer kept (after {minutes} minutes unused, or to save memory)",
                )
            ahead = 0
            if job.status == "waiting":
                ahead = list(self._waiting).index(id_) + (self._running is not None)
            return JobState(id_, job.status, ahead, job.done, job.total, job.message)

    def result(self, id_: str) -> Any:
        """What the job returned.

        Raises:
            InputError: it isn't done, failed, was cancelled or is no longer kept.
        """
        with self._changed:
            job = self._ask(id_)
            if job is not None and job.status == "done":
                return job.result
        state = self.state(id_)
        raise InputError(state.message or f"this job has no result: it is {state.status}")

    def cancel(self, owner: str) -> bool:
        """Ends an owner's jobs: at once what waits, at its next progress call what runs. False: there was nothing to end."""
        with self._changed:
            unfinished = (*self._waiting.values(), *([self._running] if self._running else []))
            mine = [job for job in unfinished if job.owner == owner and not job.stop]
            for job in mine:
                self._stop(job)
            return bool(mine)

    def wait(self, id_: str, timeout: float | None = None) -> JobState:
        """The state once the job is over, or after `timeout` seconds: for scripts and tests."""
        with self._changed:
            self._changed.wait_for(lambda: (job := self._find(id_)) is None or job.status in _OVER, timeout)
        return self.state(id_)

    def close(self, timeout: float = 5.0) -> None:
        """Cancels everything and waits for the thread to end."""
        with self._changed:
            self._closed = True
            for job in (*self._waiting.values(), *([self._running] if self._running else [])):
                self._stop(job)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    # Under the lock

    def _find(self, id_: str) -> _Job | None:
        if self._running is not None and self._running.id == id_:
            return self._running
        return self._waiting.get(id_) or self._over.get(id_)

    def _ask(self, id_: str) -> _Job | None:
        self._sweep()
        job = self._find(id_)
        if job is not None:
            job.asked = self._clock()
            if id_ in self._over:
                self._over.move_to_end(id_)
        return job

    def _stop(self, job: _Job) -> None:
        job.stop = True
        if job.status == "waiting":
            del self._waiting[job.id]
            self._finish(job, "cancelled")

    def _finish(self, job: _Job, status: Status, message: str = "", result: Any = None) -> None:
        size = int(getattr(result, "nbytes", 0))
        if size > self._most_bytes:
            status, result, size = "failed", None, 0
            message = f"the result is larger than {self._most_bytes // 1_000_000:,} MB, the most that is kept: shorten the prompt"
        job.status, job.message, job.result, job.size, job.work = status, message, result, size, None
        self._over[job.id] = job
        self._sweep()
        self._changed.notify_all()

    def _sweep(self) -> None:
        """Lets go of what is too old, too much or abandoned."""
        now = self._clock()
        unfinished = (*self._waiting.values(), *([self._running] if self._running else []))
        for job in [j for j in unfinished if not j.stop and now - j.asked > self._abandoned]:
            self._stop(job)
        held = sum(job.size for job in self._over.values())
        for job in list(self._over.values()):
            if now - job.asked <= self._keep and held <= self._most_bytes and len(self._over) <= self._most_results:
                break
            del self._over[job.id]
            held -= job.size

    # The thread

    def _work(self) -> None:
        while (job := self._next()) is not None:
            work, status, message, result = job.work, "done", "", None
            try:
                assert work is not None
                result = work(lambda done, total, job=job: self._report(job, done, total))
            except Cancelled:
                status = "cancelled"
            except VisitlensError as error:
                status, message = "failed", str(error)
            except BaseException as error:
                # Also what is no Exception, such as a Rust library's panic: the queue goes on.
                _log.exception("a job failed")
                status, message = "failed", f"{type(error).__name__}: {error} (unexpected; the server's log has more)"
            with self._changed:
                self._running = None
                if job.stop and status == "done":
                    status, result = "cancelled", None
                self._finish(job, status, message, result)
            del job, work, result  # not held while waiting for the next one
            if not self._waiting:
                give_back_freed_memory()

    def _next(self) -> _Job | None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return None
                self._sweep()
                if self._waiting:
                    _, job = self._waiting.popitem(last=False)
                    job.status, self._running = "running", job
                    self._changed.notify_all()
                    return job

    def _report(self, job: _Job, done: int, total: int) -> None:
        with self._changed:
            self._sweep()
            if job.stop:
                raise Cancelled
            job.done, job.total = done, total


_OVER = ("done", "failed", "cancelled", "gone")
