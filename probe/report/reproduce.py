"""The main job: record every model of a grid of pairs on one text, ablate heads, draw all figures, write the report.

Each model is a job of its own in a pool of processes. A job that fails is told and costs nothing but its cell; a job whose
inputs haven't changed since it last succeeded isn't run again, nor is the report drawn again. No torch, but in the workers.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing.managers import SyncManager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import visitlens
from visitlens.errors import InputError, RecordingError, VisitlensError
from visitlens.hooks.models.checkpoint_files import weight_files
from visitlens.hooks.recording.read.recording import Recording
from visitlens.probe.drawing.images import IMAGE_FORMATS, can_render
from visitlens.probe.gallery.write_figures import json_text, write_file
from visitlens.probe.jobs.processes import context, end_with_parent
from visitlens.probe.reading.grid import Grid, GridCell
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.pair_grid import PairGrid
from visitlens.probe.reading.recorded_run import open_recording
from visitlens.probe.report.report import write_report

STATE = "reproduce.json"
FORMATS = ("html", "png", "svg", "json", "csv")
Progress = Callable[[str, int, int], None]
_WORKER_BYTES = 900_000_000
"""Of a worker, beside six times its checkpoint's file: bfloat16 weights as float32, activations, statistics."""


Finished = Callable[["Job", float, str, str], None]
"""(job, CPU seconds, why it failed, what was left out)."""


@dataclass(frozen=True, kw_only=True)
class ReproduceRequest:
    """`grid` is of checkpoints. `prompts` are those of the Dyck study, 0 leaves it out; `workers=None` is as many as cores and
    memory allow. A grid of one cell is written as a pair."""

    grid: Grid
    out: Path
    text: Path
    max_tokens: int | None = None
    prompts: int = 32
    theme: str = "light"
    formats: Sequence[str] = FORMATS
    workers: int | None = None
    trust_remote_code: bool = False
    """Of the checkpoints that bring Python files."""


@dataclass(frozen=True)
class Job:
    """One model: what is recorded where, and whether its heads are ablated; `key` changes with anything that decides the result."""

    name: str
    cell: str
    side: str
    checkpoint: Path
    recording: Path
    text: Path
    max_tokens: int | None
    prompts: int
    key: str = ""
    trust_remote_code: bool = False

    @property
    def checkpoint_bytes(self) -> int:
        return sum(file.stat().st_size for file in weight_files(self.checkpoint))


@dataclass
class Reproduced:
    """By job: `failures`, `notes` on what was left out of one that succeeded, `seconds` of CPU time; those done now are in
    `ran`. `drawn` tells whether the report is new."""

    report: Path
    recordings: Grid
    failures: dict[str, str]
    notes: dict[str, str]
    seconds: dict[str, float]
    ran: list[str] = field(default_factory=list)
    drawn: bool = False


def reproduce(request: ReproduceRequest, on_progress: Progress = lambda name, done, total: None) -> Reproduced:
    """Records, ablates and draws what isn't there yet. `on_progress(job, done, total)`; the job "drawing" is the report.

    Raises:
        InputError: the grid has no looped model; the text is missing.
        VisitlensError: no looped model could be recorded (the message tells why, for each).
    """
    jobs = plan(request)
    state = _read_state(request.out)
    due = [job for job in jobs if not _is_done(job, state)]
    failures: dict[str, str] = {}

    def finished(job: Job, seconds: float, failure: str, note: str) -> None:
        if failure:
            failures[job.name] = failure
        else:
            state["jobs"][job.name], state["seconds"][job.name], state["notes"][job.name] = job.key, seconds, note
        _write_state(request.out, state)

    if due:
        _run_all(due, request.workers, on_progress, finished)
    recorded = _recorded(request, jobs, failures, state)
    source = _source(recorded, failures)
    report, key = request.out / "report" / "report.html", _report_key(request, jobs, failures)
    notes = {job.name: note for job in jobs if (note := state["notes"].get(job.name)) and job.name not in failures}
    result = Reproduced(report, recorded, failures, notes, dict(state["seconds"]), [job.name for job in due])
    if state["report"] != key or not report.is_file():
        drawing: Callable[[int, int], None] = lambda done, total: on_progress("drawing", done, total)  # noqa: E731 (typed)
        write_report(source, report.parent, formats=request.formats, theme=request.theme, on_progress=drawing)
        state["report"], result.drawn = key, True
        _write_state(request.out, state)
    return result


def plan(request: ReproduceRequest) -> list[Job]:
    """A job a model, the largest first.

    Raises:
        InputError: no looped model, or no text.
    """
    if not any(cell.looped for cell in request.grid.cells):
        raise InputError(f"grid {request.grid.name} has no looped model to record")
    if not request.text.exists():
        raise InputError(f"{request.text}: no such file or folder of text")
    shared = {"code": _code(), "text": _digest(request.text), "max_tokens": request.max_tokens}
    one = len(request.grid.cells) == 1
    jobs = []
    for cell in request.grid.cells:
        for side, checkpoint in (("looped", cell.looped), ("baseline", cell.baseline)):
            if checkpoint is None:
                continue
            folder = request.out if one else request.out / cell.name
            prompts = request.prompts if side == "looped" else 0
            name = side if one else f"{cell.name} {side}"
            key = _hash({**shared, "prompts": prompts, "checkpoint": _digest(checkpoint), "at": str(folder.resolve())})
            jobs.append(
                Job(
                    name,
                    cell.name,
                    side,
                    checkpoint,
                    folder / f"{side}.vlens",
                    request.text,
                    request.max_tokens,
                    prompts,
                    key,
                    request.trust_remote_code,
                )
            )
    return sorted(jobs, key=lambda job: -job.checkpoint_bytes)


# Running


def _run_all(jobs: list[Job], workers: int | None, on_progress: Progress, finished: Finished) -> None:
    """Runs the jobs in a pool; those that a dying worker took along run again, each alone."""
    lost = _run(jobs, workers or fitting_workers(jobs), on_progress, finished)
    for job in lost:
        for dead in _run([job], 1, on_progress, finished):
            finished(dead, 0.0, "its process died, most likely for lack of memory", "")


def _run(jobs: list[Job], workers: int, on_progress: Progress, finished: Finished) -> list[Job]:
    """Returns the jobs that got no answer because a worker died."""
    beside = context()
    lost: list[Job] = []
    manager = SyncManager(ctx=beside)
    manager.start(end_with_parent)
    with manager, ProcessPoolExecutor(workers, mp_context=beside, initializer=end_with_parent) as pool:
        progress = manager.Queue()
        waiting: dict[Future[tuple[float, str, str]], Job] = {pool.submit(_work, job, progress): job for job in jobs}
        try:
            while waiting:
                done, _ = wait(waiting, timeout=0.1, return_when="FIRST_COMPLETED")
                _drain(progress, on_progress)
                for future in done:
                    job = waiting.pop(future)
                    try:
                        finished(job, *future.result())
                    except BrokenProcessPool:
                        lost.append(job)
            _drain(progress, on_progress)
        except BaseException:  # stopped: each commits the context at hand, and no other job is begun
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
    return lost


def _work(job: Job, progress: Queue[tuple[str, int, int]]) -> tuple[float, str, str]:
    """In a worker: CPU seconds, why it failed, and what was left out."""
    note = ""
    began = time.process_time()
    try:
        from visitlens.hooks.loading.load_model import model_type, resolve
        from visitlens.probe.analyses.ablation.ablate_recording import AblationRequest, ablate_recording, with_metric
        from visitlens.probe.analyses.ablation.dyck_study import DyckSettings
        from visitlens.probe.jobs.prepared_run import PreparedRun
        from visitlens.probe.jobs.request import RunRequest

        native = model_type(resolve(job.checkpoint)) is None
        how = {"trust_remote_code": True} if job.trust_remote_code and not native else {}
        run = RunRequest.of(
            job.checkpoint,
            job.text,
            job.recording,
            level="tokens",
            max_tokens=job.max_tokens,
            threads=1,
            model_options=how,
        )
        PreparedRun(run).record(lambda done, total: progress.put((job.name, done, total)))
        if job.prompts:
            study, note = with_metric(
                AblationRequest(
                    recording=job.recording,
                    checkpoint=job.checkpoint,
                    metric="",
                    text=job.text,
                    dyck=DyckSettings(prompts=job.prompts),
                    model_options=how,
                )
            )
            try:
                ablate_recording(study, lambda done, total: progress.put((f"{job.name} heads", done, total)))
            except InputError as error:  # a context too short for brackets, a tokenizer that merges them
                note = f"heads aren't ablated: {error}"
    except VisitlensError as error:
        return time.process_time() - began, str(error) or type(error).__name__, ""
    except Exception as error:  # told with its cell; the others go on
        return time.process_time() - began, f"{type(error).__name__}: {error}", ""
    return time.process_time() - began, "", note


def fitting_workers(jobs: Sequence[Job]) -> int:
    """As many processes as there are jobs and cores, and as the free memory has room for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    largest = max((job.checkpoint_bytes for job in jobs), default=0)
    room = _free_memory() // (_WORKER_BYTES + 6 * largest)
    return max(1, min(len(jobs), cores, room))


def _free_memory() -> int:
    """Bytes; where the system doesn't say, enough for any number."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 2**62


def _drain(progress: Queue[tuple[str, int, int]], on_progress: Progress) -> None:
    while True:
        try:
            on_progress(*progress.get_nowait())
        except Empty:
            return


# What is there already


def _is_done(job: Job, state: dict[str, Any]) -> bool:
    if state["jobs"].get(job.name) != job.key:
        return False
    try:
        run = open_recording(job.recording)
        analysed = not job.prompts or state["notes"].get(job.name) or (run.ablations() and run.dyck())
        return run.recording.complete and bool(analysed)
    except RecordingError:
        return False


def _recorded(request: ReproduceRequest, jobs: Sequence[Job], failures: dict[str, str], state: dict[str, Any]) -> Grid:
    """The recordings as a grid; written as `grid.json` where there is more than one cell and it has changed."""
    paths = {(job.cell, job.side): job.recording for job in jobs if job.name not in failures}
    cells = tuple(
        replace(cell, looped=paths.get((cell.name, "looped")), baseline=paths.get((cell.name, "baseline")))
        for cell in request.grid.cells
    )
    recorded = replace(request.grid, cells=cells)
    text = json.dumps([[str(c.looped), str(c.baseline)] for c in cells])
    if len(cells) > 1 and state["grid"] != text:
        recorded.write(request.out)
        state["grid"] = text
    return recorded


def _source(recorded: Grid, failures: dict[str, str]) -> Pair | PairGrid:
    told = "; ".join(f"{name}: {why}" for name, why in failures.items())
    if not any(cell.looped for cell in recorded.cells):
        raise VisitlensError(f"no looped model was recorded. {told}")
    cell, *others = recorded.cells
    if others:
        return PairGrid.open(recorded, {c: failures[f"{c.name} looped"] for c in _failed(recorded, failures)})
    assert cell.looped is not None
    return Pair(open_recording(cell.looped), open_recording(cell.baseline) if cell.baseline else None)


def _failed(recorded: Grid, failures: dict[str, str]) -> list[GridCell]:
    return [cell for cell in recorded.cells if f"{cell.name} looped" in failures]


def _report_key(request: ReproduceRequest, jobs: Sequence[Job], failures: dict[str, str]) -> str:
    runs = {job.name: Recording(job.recording).run["run_uuid"] for job in jobs if job.name not in failures}
    pictures = can_render() and not set(IMAGE_FORMATS).isdisjoint(
        request.formats
    )  # once there is a Chromium they are made
    how = {"theme": request.theme, "formats": list(request.formats), "pictures": pictures}
    return _hash({"jobs": {job.name: job.key for job in jobs}, "runs": runs, "failures": failures, **how})


def _read_state(out: Path) -> dict[str, Any]:
    """What was done before; nothing where the file is missing or isn't ours."""
    empty: dict[str, Any] = {"jobs": {}, "seconds": {}, "notes": {}, "report": "", "grid": ""}
    try:
        state = json.loads((out / STATE).read_text(encoding="utf-8"))
        return {key: state[key] if isinstance(state[key], type(value)) else value for key, value in empty.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return empty


def _write_state(out: Path, state: dict[str, Any]) -> None:
    write_file(out / STATE, json_text(state))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    """Of a file, or of a folder's files and their names."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(str(file.relative_to(path)).encode())
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _code() -> str:
    """Of visitlens's own source, so that a newer version does its work anew where that changes anything."""
    root = Path(visitlens.__file__).resolve().parent
    return _code_of({part: _package(root, part) for part in ("kernels", "hooks", "probe")})


def _code_of(parts: dict[str, Path]) -> str:
    """By path: files of one name are in several folders."""
    return _hash(
        {
            f"{part}/{file.relative_to(folder).as_posix()}": hashlib.sha256(file.read_bytes()).hexdigest()
            for part, folder in parts.items()
            for file in folder.rglob("*")
            if file.suffix in (".py", ".css", ".js")
        }
    )


def _package(root: Path, part: str) -> Path:
    """A part of the package: beside it, or in the checkout's root."""
    return (root / part if (root / part).is_dir() else root.parents[1] / part).resolve()
