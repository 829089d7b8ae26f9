"""One recording by a Ray cluster: shards are tasks over contexts, written to a folder that every node sees.

The driver keeps the books as for processes on one machine: it alone writes summary and manifest. Ray retries a task whose
node or process is lost; a shard's name is fixed by its task, and its rename is atomic, so an attempt that was thought dead
and isn't writes the same shard again and nothing twice. The folder must be shared (NFS, Lustre, a mounted bucket), or the
recording be in an object store.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from visitlens.errors import RecordingError, UnavailableError, VisitlensError
from visitlens.hooks.recording.format.schema import SHARDS
from visitlens.hooks.recording.write.ledger import Shard, ShardTask
from visitlens.hooks.recording.write.record import interrupt_between_contexts, open_ledger, tokens_per_shard
from visitlens.hooks.recording.write.shard_writer import ShardWriter
from visitlens.hooks.text.packed_tokens import PackedTokens

if TYPE_CHECKING:
    from visitlens.probe.jobs.prepared_run import PreparedRun
    from visitlens.probe.jobs.request import RunRequest

MAX_RETRIES = 3


def record_on_ray(prepared: PreparedRun, on_progress: Callable[[int, int], None]) -> None:
    """Records by at most `request.workers` tasks at a time on the cluster at `request.ray_address` (None: one on this
    machine, ended afterwards), each with one GPU where `request.model.device` is one.

    Raises:
        UnavailableError: Ray isn't installed.
        RecordingError: a task was lost too often.
    """
    try:
        import ray
        from ray.exceptions import RayError, RayTaskError
    except ImportError as error:
        raise UnavailableError("--engine ray needs Ray: pip install 'visitlens[ray]'") from error
    request, per_token, total = prepared.request, prepared.bytes_per_token, prepared.contexts.num_tokens
    request = replace(
        request,
        out=request.out.absolute(),
        model=replace(request.model, checkpoint=request.model.checkpoint.absolute()),
        threads=request.threads or 1,
    )
    started = not ray.is_initialized()
    if started:
        ray.init(address=request.ray_address, log_to_driver=False, include_dashboard=False, configure_logging=False)
    try:
        gpus = 1 if request.model.device.startswith("cuda") else 0
        remote: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=MAX_RETRIES)(write_shard)
        state = (request.out, prepared.describe(), prepared.contexts, request.keep.batch, per_token, request.url)
        with open_ledger(*state, scattered=True) as ledger:
            tasks = ledger.tasks(tokens_per_shard(request.keep, per_token), request.workers)
            shared = ray.put((request, prepared.contexts, ledger.run))
            running: list[Any] = []
            on_progress(ledger.tokens, total)
            with interrupt_between_contexts() as interrupted:
                ledger.stopped = lambda: bool(interrupted)
                while not interrupted:
                    while len(running) < request.workers and (task := next(tasks, None)) is not None:
                        running.append(remote.remote(shared, task))
                    if not running:
                        break
                    done, running = ray.wait(running, timeout=0.5)
                    for reference in done:
                        ledger.take(deepcopy(ray.get(reference)))  # Ray's own arrays are read-only
                        ledger.commit()
                        on_progress(ledger.tokens, total)
            if interrupted:
                raise KeyboardInterrupt
    except RayTaskError as error:
        if isinstance(error.cause, VisitlensError):
            raise error.cause from error
        raise RecordingError(f"a Ray task failed: {error.cause!r}") from error
    except RayError as error:
        raise RecordingError(
            f"the cluster lost a task {MAX_RETRIES + 1} times or more ({type(error).__name__}); what is committed is kept, "
            "and the same command goes on from there"
        ) from error
    finally:
        if started:
            ray.shutdown()


_writers: dict[str, tuple[ShardWriter, TemporaryDirectory[str] | None]] = {}
"""Of this worker process, by run: the model stays loaded from shard to shard, and its scratch folder with it."""


def write_shard(shared: tuple[RunRequest, PackedTokens, dict[str, Any]], task: ShardTask) -> Shard:
    """The task, in a worker process of the cluster."""
    from visitlens.probe.jobs.prepared_run import PreparedRun

    request, contexts, run = shared
    if run["run_uuid"] not in _writers:
        _writers.clear()
        scratch = TemporaryDirectory(prefix="visitlens-") if request.url is not None else None
        if scratch is not None:
            request = replace(request, out=Path(scratch.name))
            (request.out / SHARDS).mkdir()
        _writers[run["run_uuid"]] = PreparedRun(request, contexts).shard_writer(), scratch
    return _writers[run["run_uuid"]][0].write(task, run)
