"""One recording by several processes: each computes and commits shards of its own, one driver keeps the books.

A shard is a task over contexts. The driver hands tasks out, adds up the totals that come back and writes summary and
manifest; a worker that dies is replaced and its task given out again. Nothing is shared but the folder, so a worker may
be killed at any instant: a shard is either committed, and then found, or made anew.
"""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from visitlens.errors import RecordingError, VisitlensError
from visitlens.hooks.recording.format.schema import SHARDS
from visitlens.hooks.recording.store.commit import sole_writer
from visitlens.hooks.recording.write.ledger import Ledger, ShardTask, read_shard
from visitlens.hooks.recording.write.record import interrupt_between_contexts, open_ledger, tokens_per_shard
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.jobs.processes import context, orphaned

if TYPE_CHECKING:
    from visitlens.probe.jobs.prepared_run import PreparedRun
    from visitlens.probe.jobs.request import RunRequest

MAX_ATTEMPTS = 3


def record_with_workers(prepared: PreparedRun, on_progress: Callable[[int, int], None]) -> None:
    """Records by `request.workers` processes; what an unfinished recording holds is kept, the rest is shared out.

    Raises:
        RecordingError, StorageError: as `recorder.record`; a worker's own error; a task whose workers died three times.
    """
    request, per_token = prepared.request, prepared.bytes_per_token
    state = (request.out, prepared.describe(), prepared.contexts, request.keep.batch, per_token, request.url)
    with open_ledger(*state) as ledger:
        tasks = list(ledger.tasks(tokens_per_shard(request.keep, per_token), request.workers))
        crew = _Crew(prepared, ledger, tasks, on_progress)
        try:
            with interrupt_between_contexts() as interrupted:
                ledger.stopped = lambda: bool(interrupted)
                crew.work(interrupted)
        finally:
            crew.dismiss()
        if interrupted:
            raise KeyboardInterrupt


@dataclass
class _Worker:
    number: int
    process: BaseProcess
    pipe: Connection
    task: ShardTask | None = None
    tokens: int = 0
    """Of the task, so far."""
    ready: bool = False


@dataclass
class _Crew:
    prepared: PreparedRun
    ledger: Ledger
    tasks: list[ShardTask]
    on_progress: Callable[[int, int], None]
    workers: list[_Worker] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    error: VisitlensError | None = None
    stopping: bool = False

    def work(self, interrupted: list[int]) -> None:
        """Until every task is committed, or one fails and the others have committed what they have."""
        pending = deque(self.tasks)
        self._report()
        for number in range(min(self.prepared.request.workers, len(pending))):
            self.workers.append(self._hire(number))
        while pending or any(worker.task for worker in self.workers):
            if (interrupted or self.error) and not self.stopping:
                self.stopping = True
                for worker in self.workers:
                    _send(worker, None)
            if self.stopping:
                pending.clear()
            for worker in self.workers:
                if worker.ready and worker.task is None and pending:
                    worker.task, worker.tokens = pending.popleft(), 0
                    _send(worker, worker.task)
            living = [worker for worker in self.workers if worker.process.is_alive()]
            wait([*(w.pipe for w in living), *(w.process.sentinel for w in living)], timeout=0.2)
            for index, worker in enumerate(self.workers):
                dead = not worker.process.is_alive()  # before its last words are read
                self._listen(worker)
                if dead:
                    if again := self._after_death(worker):
                        pending.appendleft(again)
                    if pending and not self.error and not self.stopping:
                        self.workers[index] = self._hire(worker.number)
        if self.error:
            raise self.error

    def dismiss(self) -> None:
        """Ends every process; one that is idle goes by itself."""
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join(timeout=10)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _hire(self, number: int) -> _Worker:
        beside: Any = context()
        ours, theirs = beside.Pipe()
        request = replace(self.prepared.request, threads=self.prepared.request.threads or 1)
        arguments = (theirs, request, self.prepared.contexts, self.ledger.run, number)
        process = beside.Process(target=_work, args=arguments, name=f"visitlens-w{number:02d}", daemon=True)
        process.start()
        theirs.close()
        return _Worker(number, process, ours)

    def _listen(self, worker: _Worker) -> None:
        for kind, value in _messages(worker):
            if kind == "ready":
                worker.ready = True
            elif kind == "tokens":
                worker.tokens = value
                self._report()
            elif kind == "shard":
                worker.task, worker.tokens = None, 0
                self.ledger.take(value)
                self.ledger.commit()
                self._report()
            else:
                worker.task, self.error = None, self.error or value

    def _after_death(self, worker: _Worker) -> ShardTask | None:
        """The task to be given out again, unless the worker had committed its shard and only not said so."""
        task, worker.task, worker.tokens = worker.task, None, 0
        if task is None and worker.ready:
            return None
        if task is not None:
            path = self.ledger.path / SHARDS / task.name
            for partial in path.parent.glob(f"{path.name}.*.tmp"):
                partial.unlink()
            if self.prepared.request.url is not None:
                path.unlink(missing_ok=True)  # if it was put into the store, the next attempt finds it there
            elif path.is_file():
                self.ledger.take(read_shard(path))
                self.ledger.commit()
                self._report()
                return None
        what = f"contexts {task.start} to {task.stop - 1}" if task else "loading the model"
        self.attempts[what] += 1
        if self.attempts[what] >= MAX_ATTEMPTS:
            self.error = self.error or RecordingError(
                f"{MAX_ATTEMPTS} workers died over {what} (last exit code {worker.process.exitcode}); is there enough memory "
                f"for {self.prepared.request.workers} models?"
            )
        return task

    def _report(self) -> None:
        done = self.ledger.tokens + sum(worker.tokens for worker in self.workers)
        self.on_progress(done, self.prepared.contexts.num_tokens)


def _messages(worker: _Worker) -> Iterator[tuple[str, Any]]:
    """What it has sent by now; one that it died in the middle of is none."""
    while True:
        try:
            if not worker.pipe.poll():
                return
            message = worker.pipe.recv()
        except (EOFError, OSError):
            return
        yield message


def _send(worker: _Worker, message: Any) -> None:
    with suppress(OSError):  # it is dead; the next look at it says so
        worker.pipe.send(message)


class _DriverGone(Exception):
    pass


def _work(pipe: Connection, request: RunRequest, contexts: PackedTokens, run: dict[str, Any], number: int) -> None:
    """The life of a worker. It ends with its driver: an orphan commits nothing."""
    from visitlens.probe.jobs.prepared_run import PreparedRun

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver gets it and says when to stop

    def check_driver() -> None:
        if orphaned():
            raise _DriverGone

    def tell(tokens: int) -> None:
        check_driver()
        pipe.send(("tokens", tokens))

    try:
        with sole_writer(request.out, f"w{number:02d}"):
            writer = PreparedRun(request, contexts).shard_writer()
            writer.stopped = pipe.poll  # the only message while it works is the one to stop
            pipe.send(("ready", None))
            while (task := pipe.recv()) is not None:
                shard = writer.write(task, run, tell, stop=writer.stopped, before_commit=check_driver)
                pipe.send(("shard", shard))
    except VisitlensError as error:
        pipe.send(("error", error))
    except (_DriverGone, EOFError, BrokenPipeError, ConnectionResetError):
        return
