"""The job queue: order, progress, cancel at any moment, two tabs, limits, expiry, errors as messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from visitlens.app.live.job_queue import JobQueue, QueueFullError
from visitlens.errors import InputError

WAIT = 60.0
"""Seconds that a busy machine may take for what is soon there."""


class Gate:
    """A job that starts, then reports progress until it is let through."""

    def __init__(self, result: Any = "through") -> None:
        self.started, self.open, self.result, self.steps = threading.Event(), threading.Event(), result, 0

    def __call__(self, on_progress: Callable[[int, int], None]) -> Any:
        self.started.set()
        while not self.open.is_set():
            on_progress(self.steps, 100)
            self.steps += 1
            time.sleep(0.001)
        return self.result


@dataclass
class Sized:
    nbytes: int


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make_queue() -> Iterator[Callable[..., JobQueue]]:
    queues = []

    def build(**options: Any) -> JobQueue:
        queues.append(JobQueue(**options))
        return queues[-1]

    yield build
    for queue in queues:
        queue.close(WAIT)
        assert queue._thread is None or not queue._thread.is_alive(), "a job can't be ended"


def returning(value: Any) -> Callable[..., Any]:
    return lambda on_progress: value


def test_jobs_run_one_at_a_time_in_the_order_they_came(make_queue: Callable[..., JobQueue]) -> None:
    queue, ran, inside = make_queue(waiting=50, per_owner=50), [], []

    def work(number: int) -> Callable[..., int]:
        def run(on_progress: Callable[[int, int], None]) -> int:
            inside.append(number)
            assert len(inside) == 1
            time.sleep(0.001)
            inside.remove(number)
            ran.append(number)
            return number

        return run

    ids = [queue.submit("tab", work(n)) for n in range(20)]
    assert [queue.wait(id_, WAIT).status for id_ in ids] == ["done"] * 20
    assert ran == list(range(20)) == [queue.result(id_) for id_ in ids]


def test_progress_and_place_in_the_queue(make_queue: Callable[..., JobQueue]) -> None:
    queue, gate = make_queue(), Gate()
    first, second, third = queue.submit("a", gate), queue.submit("b", returning(2)), queue.submit("a", returning(3))
    assert gate.started.wait(WAIT)
    while queue.state(first).done < 3:
        time.sleep(0.001)
    state = queue.state(first)
    assert (state.status, state.total, state.over) == ("running", 100, False)
    assert [queue.state(id_).ahead for id_ in (first, second, third)] == [0, 1, 2]
    with pytest.raises(InputError, match="it is waiting"):
        queue.result(third)
    gate.open.set()
    assert queue.wait(third, WAIT).status == "done" and queue.result(first) == "through"


def test_cancel_while_queued_never_runs_it(make_queue: Callable[..., JobQueue]) -> None:
    queue, gate, ran = make_queue(), Gate(), []
    queue.submit("b", gate)
    waiting = queue.submit("a", lambda on_progress: ran.append(1))
    assert gate.started.wait(WAIT)
    assert queue.cancel("a") and queue.state(waiting).status == "cancelled"
    assert not queue.cancel("a"), "nothing is left to cancel"
    gate.open.set()
    assert queue.wait(queue.submit("a", returning(0)), WAIT).status == "done"
    assert not ran
    with pytest.raises(InputError, match="cancelled"):
        queue.result(waiting)


def test_cancel_while_running_ends_it_and_the_next_one_runs(make_queue: Callable[..., JobQueue]) -> None:
    queue, gate = make_queue(), Gate()
    running, next_ = queue.submit("a", gate), queue.submit("b", returning(7))
    assert gate.started.wait(WAIT) and queue.cancel("a")
    assert queue.wait(running, WAIT).status == "cancelled"
    assert queue.wait(next_, WAIT).status == "done" and queue.result(next_) == 7


def test_a_job_cancelled_as_it_returns_has_no_result(make_queue: Callable[..., JobQueue]) -> None:
    """The race between the last progress call and the return: who cancelled isn't shown a result."""
    queue, started, go = make_queue(), threading.Event(), threading.Event()

    def deaf(on_progress: Callable[[int, int], None]) -> str:
        started.set()
        go.wait(WAIT)
        return "too late"

    id_ = queue.submit("a", deaf)
    assert started.wait(WAIT) and queue.cancel("a")
    go.set()
    assert queue.wait(id_, WAIT).status == "cancelled"


def test_two_tabs_cancel_only_their_own(make_queue: Callable[..., JobQueue]) -> None:
    queue, gate = make_queue(), Gate()
    mine, theirs = queue.submit("mine", gate), queue.submit("theirs", returning(1))
    assert gate.started.wait(WAIT)
    more = queue.submit("mine", returning(2))
    assert not queue.cancel("nobody's") and queue.cancel("mine") and not queue.cancel("mine")
    assert {queue.wait(id_, WAIT).status for id_ in (mine, more)} == {"cancelled"}
    assert queue.wait(theirs, WAIT).status == "done" and mine != theirs


def test_submitting_and_cancelling_from_many_threads(make_queue: Callable[..., JobQueue]) -> None:
    queue = make_queue(waiting=400, per_owner=400, results=400)
    ids: list[str] = []

    def tab(name: str) -> None:
        for number in range(30):
            owner = f"{name}, {number}"
            id_ = queue.submit(owner, lambda on_progress, n=number: (on_progress(0, 1), n)[1])
            ids.append(id_)
            if number % 3 == 0:
                queue.cancel(owner)
            queue.state(id_)

    threads = [threading.Thread(target=tab, args=(f"tab {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    states = [queue.wait(id_, WAIT).status for id_ in ids]
    assert len(states) == len(set(ids)) == 120
    assert set(states) <= {"done", "cancelled"} and states.count("done") >= 80


def test_freed_memory_is_given_back_once_nothing_waits(
    make_queue: Callable[..., JobQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, gate, given = make_queue(), Gate(), threading.Semaphore(0)
    monkeypatch.setattr("visitlens.app.live.job_queue.give_back_freed_memory", given.release)
    queue.submit("a", gate)
    last = queue.submit("b", returning(1))
    gate.open.set()
    assert given.acquire(timeout=WAIT) and queue.state(last).over
    assert not given.acquire(blocking=False), "not between the two"


def test_the_queue_is_bounded_for_all_and_for_each_tab(make_queue: Callable[..., JobQueue]) -> None:
    queue, gate = make_queue(waiting=2, per_owner=2), Gate()
    queue.submit("a", gate)
    assert gate.started.wait(WAIT)
    second = queue.submit("a", returning(0))
    with pytest.raises(QueueFullError, match="2 jobs of this tab"):
        queue.submit("a", returning(0))
    queue.submit("b", returning(0))
    with pytest.raises(QueueFullError, match="2 jobs wait already"):
        queue.submit("c", returning(0))
    queue.cancel("a")
    assert queue.state(second).status == "cancelled"
    queue.submit("c", returning(0))


def test_an_error_becomes_a_message(make_queue: Callable[..., JobQueue], caplog: pytest.LogCaptureFixture) -> None:
    queue = make_queue()

    def refuse(on_progress: object) -> None:
        raise InputError("the prompt is empty")

    def fail(on_progress: object) -> None:
        raise ZeroDivisionError("by zero")

    expected, unexpected = queue.submit("a", refuse), queue.submit("a", fail)
    assert queue.wait(expected, WAIT).message == "the prompt is empty"
    state = queue.wait(unexpected, WAIT)
    assert state.status == "failed" and "ZeroDivisionError: by zero" in state.message
    assert "ZeroDivisionError" in caplog.text and "the prompt is empty" not in caplog.text
    with pytest.raises(InputError, match="the prompt is empty"):
        queue.result(expected)
    assert queue.wait(queue.submit("a", returning(1)), WAIT).status == "done", "the thread goes on"


def test_results_expire_unless_asked_for(make_queue: Callable[..., JobQueue]) -> None:
    clock = Clock()
    queue = make_queue(keep=60.0, clock=clock)
    used, unused = queue.submit("a", returning(1)), queue.submit("a", returning(2))
    assert {queue.wait(id_, WAIT).status for id_ in (used, unused)} == {"done"}
    clock.now = 50.0
    assert queue.result(used) == 1
    clock.now = 100.0
    assert queue.state(unused).status == "gone" and queue.result(used) == 1
    with pytest.raises(InputError, match="no longer kept"):
        queue.result(unused)


def test_results_are_bounded_in_bytes_and_in_number(make_queue: Callable[..., JobQueue]) -> None:
    queue = make_queue(result_bytes=100, results=3, per_owner=10)
    ids = []
    for size in (60, 40, 30):
        ids.append(queue.submit("a", returning(Sized(size))))
        queue.wait(ids[-1], WAIT)
    assert [queue.state(id_).status for id_ in ids] == ["gone", "done", "done"]
    huge = queue.submit("a", returning(Sized(101)))
    assert "larger than" in queue.wait(huge, WAIT).message
    more = [queue.submit("a", returning(n)) for n in range(3)]
    assert [queue.wait(id_, WAIT).status for id_ in more] == ["done"] * 3
    assert [queue.state(id_).status for id_ in ids] == ["gone"] * 3


def test_jobs_of_a_closed_tab_are_cancelled(make_queue: Callable[..., JobQueue]) -> None:
    clock = Clock()
    queue, gate = make_queue(abandoned=30.0, clock=clock), Gate()
    running, waiting, watched = (
        queue.submit("gone", gate),
        queue.submit("gone", Gate()),
        queue.submit("b", returning(5)),
    )
    assert gate.started.wait(WAIT)
    clock.now = 20.0
    queue.state(watched)
    clock.now = 40.0
    assert queue.wait(watched, WAIT).status == "done"
    assert [queue.state(id_).status for id_ in (running, waiting)] == ["cancelled"] * 2


def test_closing_ends_what_runs_and_refuses_more(make_queue: Callable[..., JobQueue]) -> None:
    queue, gate = make_queue(), Gate()
    id_ = queue.submit("a", gate)
    assert gate.started.wait(WAIT)
    queue.close(WAIT)
    assert queue.state(id_).status == "cancelled"
    with pytest.raises(QueueFullError, match="shutting down"):
        queue.submit("a", returning(0))
