"""The main job: record a looped model and its Baseline on the same text, draw the figures, write the report."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING

from visitlens.kernels.errors import InputError

if TYPE_CHECKING:
    from visitlens.probe.run import RunRequest


def record_all(requests: dict[str, RunRequest], on_progress: Callable[[str, int, int], None]) -> dict[str, Path]:
    """Records each request in a process of its own, as many at once as there are requests and cores.

    Raises whatever the first failing one raised; the others finish, and what is recorded stays.
    """
    outs = [request.out.resolve() for request in requests.values()]
    if len(set(outs)) < len(outs):
        raise InputError(f"each recording needs a path of its own, got {', '.join(map(str, outs))}")
    workers = min(len(requests), multiprocessing.cpu_count())
    context = multiprocessing.get_context("spawn")  # torch's threads don't survive a fork
    with context.Manager() as manager, ProcessPoolExecutor(workers, mp_context=context) as pool:
        progress = manager.Queue()
        jobs = {
            name: pool.submit(_record_one, name, replace(r, threads=r.threads or 1), progress)
            for name, r in requests.items()
        }
        while any(job.running() for job in jobs.values()) or not all(job.done() for job in jobs.values()):
            wait(jobs.values(), timeout=0.1)
            _drain(progress, on_progress)
        _drain(progress, on_progress)
        return {name: job.result() for name, job in jobs.items()}


def _drain(progress: Queue[tuple[str, int, int]], on_progress: Callable[[str, int, int], None]) -> None:
    while True:
        try:
            on_progress(*progress.get_nowait())
        except Empty:
            return


def _record_one(name: str, request: RunRequest, progress: Queue[tuple[str, int, int]]) -> Path:
    from visitlens.probe.run import PreparedRun

    return PreparedRun(request).record(lambda done, total: progress.put((name, done, total)))
