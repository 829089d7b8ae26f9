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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.core.loop_plan import ExecutionPlan
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.core.sites import ACTIVATION_SITES, check_sites, token_shape
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.totals import GroupTotals
from visitlens.hooks.recording.store.commit import check_room, sole_writer, wait_for_workers
from visitlens.hooks.recording.store.lease import Lease
from visitlens.hooks.recording.store.object_store import ObjectStore
from visitlens.hooks.recording.write.ledger import Ledger
from visitlens.hooks.recording.write.remote_ledger import RemoteLedger
from visitlens.hooks.recording.write.shard_arrays import ShardArrays
from visitlens.hooks.recording.write.shard_writer import ShardWriter, dtype_of
from visitlens.hooks.text.packed_tokens import PackedTokens

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


FEWEST_GROUPS = 128
"""Of documents, where there are more: what intervals need at least, whatever it costs."""


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """What is kept. `activation_tokens` is a range of token ordinals; None = all. `groups` is how many groups of documents are kept
    apart, for intervals; None = what `visitlens record` chooses (`prepared_run.most_groups`), and 128 here. `batch` is contexts per forward:
    in float32 another batch changes roundings, so it is part of the run's identity."""

    level: str = "summary"
    sites: tuple[str, ...] = ()
    activation_tokens: tuple[int, int] | None = None
    groups: int | None = None
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
        if min(self.groups or 1, self.batch, self.shard_tokens) < 1 or self.groups == 0:
            raise InputError("groups, batch and shard_tokens must be at least 1")
        if self.groups is not None and self.groups > schema.MAX_GROUPS:
            raise InputError(f"expected at most {schema.MAX_GROUPS} groups, got {self.groups}")

    def settled(self, groups: int = FEWEST_GROUPS) -> RecordingOptions:
        """With this number of groups where none was chosen."""
        return self if self.groups is not None else replace(self, groups=groups)

    @property
    def group_count(self) -> int:
        """`groups`, once it is settled."""
        return FEWEST_GROUPS if self.groups is None else self.groups


def record(
    model: InstrumentedModel,
    contexts: PackedTokens,
    path: Path,
    statistics: TokenStatistics,
    options: RecordingOptions,
    *,
    provenance: Mapping[str, Any],
    attention_implementation: str = "auto",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    url: str | None = None,
) -> None:
    """Records every context; an unfinished recording of the same run at `path` is continued, a finished one left alone.
    With a URL the recording is there, in an object store, and `path` is a scratch folder.

    Ctrl-C commits what is complete and raises KeyboardInterrupt.

    Raises:
        RecordingError: `path` holds something else, or a run with another configuration.
        StorageError: no room, or another writer.
    """
    options = options.settled()
    run = describe_run(model, contexts, statistics, options, provenance)
    per_token = bytes_per_token(model, statistics, options)
    writer = ShardWriter(model, contexts, path, statistics, options, attention_implementation, url)
    with open_ledger(path, run, contexts, options.batch, per_token, url) as ledger:
        total = contexts.num_tokens
        done = ledger.tokens
        if done == total:
            on_progress(total, total)
        with interrupt_between_contexts() as interrupted, _Committer(writer, ledger) as committer:
            writer.stopped = ledger.stopped = lambda: bool(interrupted)
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
    path: Path,
    run: Mapping[str, Any],
    contexts: PackedTokens,
    batch: int,
    per_token: int,
    url: str | None = None,
    *,
    scattered: bool = False,
) -> Iterator[Ledger]:
    """The recording's state, under its writer's lock, once there is room for what is left; `scattered` where other machines
    compute shards.

    Raises:
        RecordingError: `path` holds something else, or a run with another configuration.
        StorageError: no room, or another writer.
    """
    state = (path, run, (contexts.segments >= 0).sum(1), batch, contexts)
    if url is not None:
        store = ObjectStore(url)
        with sole_writer(path), Lease(store, path, scattered=scattered) as lease:
            remote = RemoteLedger(store, lease, *state)
            remote.refuse_foreign()
            remote.resume()
            with remote.told():
                yield remote
        return
    ledger = Ledger(*state)
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
    if "code_sha256" in provenance:  # the folder's own code, and how it was asked
        config |= {"code_sha256": provenance["code_sha256"], "model_options": provenance.get("model_options")}
    config = json.loads(json.dumps(config))
    return {
        "run_uuid": str(uuid.uuid4()),
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "config": config,
        "layers": [step.layer for step in model.plan.steps],
        "tokens": contexts.num_tokens,
        "documents": len(contexts.document_hash),
        "groups": 1 + int(contexts.document_groups(options.group_count).max()),
        "ungrouped": sorted(name for name, measure in statistics.measures.items() if not measure.grouped),
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
    for name in options.sites:
        total += steps * dtype_of(model).itemsize * int(np.prod(token_shape(name, config)))
    if options.level == "maps":
        total += steps * config.num_heads * schema.MAX_MAP_CONTEXT * 2
    return total


@contextmanager
def interrupt_between_contexts() -> Iterator[list[int]]:
    """Ctrl-C, or a scheduler's SIGTERM, fills the list instead of raising: the current context ends first, so that a shard holds
    whole contexts. A second one raises at once. Only the main thread gets signals; elsewhere this does nothing."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def press(number: int, frame: Any) -> None:
        if pressed:
            signal.default_int_handler(number, frame)
        pressed.append(number)

    before = {number: signal.signal(number, press) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield pressed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
