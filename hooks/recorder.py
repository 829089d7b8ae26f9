"""Runs a model over packed contexts and writes a recording: shards, then summary and manifest, resumable at any point."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import h5py
import numpy as np
import torch
from torch import Tensor

from visitlens.hooks import schema
from visitlens.hooks.capture import StepValues, capture
from visitlens.hooks.contexts import PackedTokens
from visitlens.hooks.generation import replay
from visitlens.hooks.instrumented import InstrumentedModel, ModelFacts
from visitlens.hooks.ledger import Ledger, Shard, ShardTask
from visitlens.hooks.loop_plan import ExecutionPlan
from visitlens.hooks.schema import GroupTotals
from visitlens.hooks.shard_arrays import ShardArrays
from visitlens.hooks.shards import check_room, committing, sole_writer, wait_for_workers
from visitlens.hooks.sites import ACTIVATION_SITES, SITES, check_sites
from visitlens.kernels.errors import InputError

if TYPE_CHECKING:
    from visitlens.hooks.models.looped_moe import LoopedMoE

MAX_SHARD_BYTES = 256_000_000


class TokenStatistics(Protocol):
    """What the recorder needs of the statistics: it never looks at their definitions."""

    sites: frozenset[str]

    @property
    def measures(self) -> Mapping[str, Any]:
        """By name."""
        ...

    def update(self, values: StepValues, groups: Tensor) -> dict[str, Tensor]:
        """Adds a batch; returns per-token scalars [token, *axes] by measure, for level `tokens`."""
        ...

    def take(self) -> dict[str, GroupTotals]:
        """The totals since the last call, and a fresh start."""
        ...

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Measure -> [*axes] of the per-token scalars that `update` returns."""
        ...


class RunnableModel(Protocol):
    """What sizes and descriptions need of a model: a driver whose workers hold the weights has no more than this."""

    @property
    def plan(self) -> ExecutionPlan: ...

    @property
    def config(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """What is kept. `activation_tokens` is a range of token ordinals; None = all. `batch` is contexts per forward:
    in float32 another batch changes roundings, so it is part of the run's identity."""

    level: str = "summary"
    sites: tuple[str, ...] = ()
    activation_tokens: tuple[int, int] | None = None
    groups: int = 128
    batch: int = 1
    shard_tokens: int = 131_072

    def __post_init__(self) -> None:
        if self.level not in schema.LEVELS:
            raise InputError(f"expected a level among {', '.join(schema.LEVELS)}, got {self.level!r}")
        check_sites(self.sites, ACTIVATION_SITES)
        if self.sites and self.level != "activations":
            raise InputError(f"sites are kept at level 'activations'; the level is {self.level!r}")
        if self.level == "activations" and not self.sites:
            raise InputError(f"level 'activations' needs sites: some of {', '.join(ACTIVATION_SITES)}")
        if min(self.groups, self.batch, self.shard_tokens) < 1:
            raise InputError("groups, batch and shard_tokens must be at least 1")
        if self.groups > schema.MAX_GROUPS:
            raise InputError(f"expected at most {schema.MAX_GROUPS} groups, got {self.groups}")


def record(
    model: LoopedMoE | InstrumentedModel,
    contexts: PackedTokens,
    path: Path,
    statistics: TokenStatistics,
    options: RecordingOptions,
    *,
    provenance: Mapping[str, Any],
    attention_implementation: str = "auto",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Records every context; an unfinished recording of the same run at `path` is continued, a finished one left alone.

    Ctrl-C commits what is complete and raises KeyboardInterrupt.

    Raises:
        RecordingError: `path` holds something else, or a run with another configuration.
        StorageError: no room, or another writer.
    """
    run = describe_run(model, contexts, statistics, options, provenance)
    per_token = bytes_per_token(model, statistics, options)
    writer = ShardWriter(model, contexts, path, statistics, options, attention_implementation)
    with open_ledger(path, run, contexts, options.batch, per_token) as ledger:
        total = contexts.num_tokens
        done = ledger.tokens
        if done == total:
            on_progress(total, total)
        with interrupt_between_contexts() as interrupted, _Committer(writer, ledger) as committer:
            for task in ledger.tasks(tokens_per_shard(options, per_token)):
                if interrupted:
                    break
                progress = partial(_report, on_progress, done, total)
                shard = writer.compute(task, progress, stop=lambda: bool(interrupted) or committer.failed)
                committer.hand_over(shard)
                done += shard.tokens
        if interrupted:
            raise KeyboardInterrupt


class _Committer:
    """Writes a shard in a thread of its own while the model runs over the next one (h5py, zlib, SHA-256 and fsync let
    Python go on meanwhile). One at a time, in order; leaving waits for the last one, whatever is raised."""

    def __init__(self, writer: ShardWriter, ledger: Ledger) -> None:
        self.writer, self.ledger = writer, ledger
        self.pool = ThreadPoolExecutor(1, "visitlens-commit")
        self.pending: Future[None] | None = None

    @property
    def failed(self) -> bool:
        return self.pending is not None and self.pending.done() and self.pending.exception() is not None

    def hand_over(self, shard: ShardArrays) -> None:
        """Waits for the shard before; raises what kept that one from being committed."""
        self._wait()
        self.pending = self.pool.submit(self._commit, shard)

    def _commit(self, shard: ShardArrays) -> None:
        self.ledger.take(self.writer.commit(shard, self.ledger.run))
        self.ledger.commit()

    def _wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> _Committer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.pool.shutdown()
        if kind is None:
            self._wait()


def _report(on_progress: Callable[[int, int], None], before: int, total: int, tokens: int) -> None:
    on_progress(before + tokens, total)


@contextmanager
def open_ledger(
    path: Path, run: Mapping[str, Any], contexts: PackedTokens, batch: int, per_token: int
) -> Iterator[Ledger]:
    """The recording's state, under its writer's lock, once there is room for what is left.

    Raises:
        RecordingError: `path` holds something else, or a run with another configuration.
        StorageError: no room, or another writer.
    """
    ledger = Ledger(path, run, (contexts.segments >= 0).sum(1), batch, contexts)
    ledger.refuse_foreign()
    with sole_writer(path):
        wait_for_workers(path)
        ledger.resume()
        left = contexts.num_tokens - ledger.tokens
        if left:
            check_room(path, left * per_token)
        yield ledger


def describe_run(
    model: RunnableModel,
    contexts: PackedTokens,
    statistics: TokenStatistics,
    options: RecordingOptions,
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """What every file of the run carries."""
    config = {
        "model": model.config.to_dict(),
        "dtype": str(dtype_of(model)).removeprefix("torch."),
        "data_sha256": contexts.sha256,
        "weights_sha256": provenance.get("weights_sha256"),
        "options": {k: v for k, v in asdict(options).items() if k != "shard_tokens"},
        "measures": sorted(statistics.measures),
    }
    if contexts.generated is not None:
        config["generated"] = True
    config = json.loads(json.dumps(config))
    return {
        "run_uuid": str(uuid.uuid4()),
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "config": config,
        "layers": [step.layer for step in model.plan.steps],
        "tokens": contexts.num_tokens,
        "documents": len(contexts.document_hash),
        "provenance": dict(provenance),
        "left_out": dict(getattr(statistics, "left_out", {})),
    }


def tokens_per_shard(options: RecordingOptions, per_token: int) -> int:
    """`shard_tokens`, or fewer so that a shard stays at 256 MB."""
    return max(1, min(options.shard_tokens, MAX_SHARD_BYTES // max(per_token, 1)))


def bytes_per_token(model: RunnableModel, statistics: TokenStatistics, options: RecordingOptions) -> int:
    """What a token costs in the shards, before compression; the summary's few MB come on top."""
    if options.level == "summary":
        return 0
    steps, config = len(model.plan), model.config
    total = 12 + steps * config.experts_per_token * 4
    total += 4 * sum(int(np.prod(shape)) for shape in statistics.stored_shapes().values())
    widths = {
        "hidden": config.hidden_size,
        "head": config.num_heads,
        "kv_head": config.num_kv_heads,
        "d": config.head_dim,
    }
    for name in options.sites:
        axes = SITES[name].axes
        width = config.width(name) if isinstance(config, ModelFacts) else [widths[axis] for axis in axes]
        total += steps * dtype_of(model).itemsize * int(np.prod(width))
    if options.level == "maps":
        total += steps * config.num_heads * schema.MAX_MAP_CONTEXT * 2
    return total


def dtype_of(model: Any) -> torch.dtype:
    """The model's own word for it, or its first parameter's."""
    declared = getattr(model, "dtype", None)
    return declared if isinstance(declared, torch.dtype) else next(model.parameters()).dtype


class ShardWriter:
    """Computes shards and commits their files, one after another; keeps no state between them.

    Raises:
        InputError: the contexts are too long for attention maps.
    """

    def __init__(
        self,
        model: LoopedMoE | InstrumentedModel,
        contexts: PackedTokens,
        path: Path,
        statistics: TokenStatistics,
        options: RecordingOptions,
        attention_implementation: str = "auto",
    ) -> None:
        if options.level == "maps" and contexts.generated is not None:
            raise InputError("attention maps aren't kept of generated texts; record the finished texts at level 'maps'")
        if options.level == "maps" and contexts.tokens.shape[1] > schema.MAX_MAP_CONTEXT:
            raise InputError(
                f"level 'maps' keeps contexts of at most {schema.MAX_MAP_CONTEXT} tokens, got {contexts.tokens.shape[1]}: pack shorter ones"
            )
        if isinstance(model, InstrumentedModel):
            model.check_sites(options.sites)
            if options.level == "maps" and "P" in {**model.config.missing, **model.config.absent}:
                raise InputError(
                    f"level 'maps' needs attention at every step, which {model.config.family} doesn't have"
                )
        self.model, self.contexts, self.path = model, contexts, path
        self.statistics, self.options, self.attention = statistics, options, attention_implementation
        self.dtype = dtype_of(model)
        groups = contexts.document_groups(options.groups)
        self.segment_group = torch.from_numpy(groups[contexts.segment_document])
        sites = statistics.sites | set(options.sites)
        if options.level != "summary" and model.config.experts_per_token:
            sites |= {"experts", "gates"}
        if options.level == "maps":
            sites |= {"P"}
        self.sites = sorted(sites)

    def write(
        self,
        task: ShardTask,
        run: Mapping[str, Any],
        on_progress: Callable[[int], None] = lambda tokens: None,
        stop: Callable[[], bool] = lambda: False,
        before_commit: Callable[[], None] = lambda: None,
    ) -> Shard:
        """Computes a shard and commits it. What `before_commit` raises keeps it from being committed."""
        shard = self.compute(task, on_progress, stop)
        before_commit()
        return self.commit(shard, run)

    def compute(
        self,
        task: ShardTask,
        on_progress: Callable[[int], None] = lambda tokens: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> ShardArrays:
        """Runs the model over the task's contexts (`on_progress` counts their tokens). Where `stop` says so, it ends
        after the context at hand and holds those before."""
        shard = ShardArrays(task)
        try:
            # In inference mode nothing says whether a model has overwritten what was read, and all of it would be copied.
            mode = torch.no_grad if isinstance(self.model, InstrumentedModel) else torch.inference_mode
            with capture(self.model, self.sites) as captured, mode():
                for context in range(task.start, task.stop, self.options.batch):
                    rows = slice(context, min(context + self.options.batch, task.stop))
                    self._forward(rows, captured, shard)
                    on_progress(shard.tokens)
                    if stop():
                        break
            shard.totals = self.statistics.take()
            return shard
        finally:
            self.statistics.take()  # an error leaves nothing half-counted behind

    def _forward(self, rows: slice, captured: Any, shard: ShardArrays) -> None:
        tokens = torch.from_numpy(self.contexts.tokens[rows])
        segment_ids = torch.from_numpy(self.contexts.segments[rows])
        device = next(self.model.parameters()).device
        written = None
        if self.contexts.generated is None:
            self.model(tokens.to(device), segment_ids.to(device), return_type="none")
        else:
            generated = torch.from_numpy(self.contexts.generated[rows])
            captured = replay(self.model, captured, tokens.to(device), generated.masked_fill(segment_ids < 0, -1))
            written = generated[segment_ids >= 0]
        values = StepValues(captured, segment_ids, self.attention)
        values.written = None if written is None else written > 0
        real = segment_ids[segment_ids >= 0].long()
        stored = self.statistics.update(values, self.segment_group[real])
        if self.options.level != "summary":
            shard.keep("tokens/id", tokens[segment_ids >= 0].numpy().astype(np.uint32))
            shard.keep("tokens/segment", real.numpy().astype(np.uint32))
            if written is not None:
                shard.keep("tokens/generated", written.numpy().astype(np.uint32))
            shard.keep("tokens/pos", values.segments.positions().numpy().astype(np.uint32))
            steps = range(len(self.model.plan))
            if self.model.config.experts_per_token:
                ids, gates = (torch.stack([values.site(n, s) for s in steps]).cpu() for n in ("experts", "gates"))
                shard.keep("routing/ids", ids.numpy().astype(np.uint16))
                shard.keep("routing/gate", gates.float().numpy().astype(np.float16))
            if isinstance(self.model, InstrumentedModel) and self.model.config.ragged:
                there = [values.visited(step) for step in steps]
                everyone = torch.ones(len(real), dtype=torch.bool)
                visited = torch.stack([everyone if t is None else t for t in there])
                shard.keep("routing/visited", visited.numpy().astype(np.uint8))
            for name, value in stored.items():
                shard.keep(f"stats/{name}", value.movedim(0, 1).cpu().float().numpy())
            for name in self.options.sites:
                self._keep_activation(name, values, shard)
            if self.options.level == "maps":
                shard.keep("attn/p", torch.stack([captured.at("P", s) for s in steps], dim=1).cpu().half().numpy())
        shard.tokens += len(real)
        shard.contexts += len(tokens)

    def _keep_activation(self, name: str, values: StepValues, shard: ShardArrays) -> None:
        first = shard.task.token_start + shard.tokens
        start, stop = self.options.activation_tokens or (0, self.contexts.num_tokens)
        start, stop = max(start - first, 0), min(stop - first, values.segments.num_tokens)
        if start < stop:
            stacked = torch.stack([values.site(name, s)[start:stop] for s in range(len(self.model.plan))]).cpu()
            # NumPy has no bfloat16: the bits are kept as u2, with the logical dtype beside them.
            array = stacked.view(torch.uint16) if stacked.dtype == torch.bfloat16 else stacked
            shard.keep(str(SITES[name].dataset), array.numpy(), token_start=first + start)

    def commit(self, shard: ShardArrays, run: Mapping[str, Any]) -> Shard:
        """Writes what was computed, and gives its arrays away. Needs the model's plan alone, so another thread may do it."""
        task, totals, documents = shard.task, shard.totals, self.contexts.documents_in(shard.rows)
        numbers = {
            "worker": task.worker,
            "seq": task.seq,
            "token_start": task.token_start,
            "token_count": shard.tokens,
            "context_start": task.start,
            "context_count": shard.contexts,
        }
        path = self.path / schema.SHARDS / task.name
        with committing(path, shard.nbytes) as aside, h5py.File(aside, "w", libver=schema.LIBVER) as file:
            for axis in ("layer", "visit", "index"):
                name = "step" if axis == "index" else axis
                file[f"axes/{name}"] = np.array([getattr(s, axis) for s in self.model.plan.steps], dtype=np.uint16)
            shard.write(file, self.dtype)
            schema.write_totals(file, totals)
            schema.write_documents(file, documents)
            schema.write_header(file, run, {**numbers, "complete": 1})
        entry = {"name": task.name, "bytes": aside.size, "sha256": aside.sha256, **numbers}
        return Shard(entry, dict(run), totals, documents)


@contextmanager
def interrupt_between_contexts() -> Iterator[list[int]]:
    """Ctrl-C fills the list instead of raising: the current context ends first, so that a shard holds whole contexts.
    A second Ctrl-C raises at once. Only the main thread gets signals; elsewhere this does nothing."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def press(number: int, frame: Any) -> None:
        if pressed:
            signal.default_int_handler(number, frame)
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
