"""Computes a shard: runs a model over some contexts, gathers what a recording keeps of them, writes the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch

from visitlens.errors import InputError, RecordingError
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.capture.generation import replay
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.core.sites import SITES, token_shape
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.gate import passed
from visitlens.hooks.recording.format.totals import read_totals, write_totals
from visitlens.hooks.recording.store.commit import committing
from visitlens.hooks.recording.store.object_store import ObjectStore
from visitlens.hooks.recording.write.ledger import Shard, ShardTask
from visitlens.hooks.recording.write.remote_ledger import put_shard
from visitlens.hooks.recording.write.shard_arrays import ShardArrays
from visitlens.hooks.text.packed_tokens import PackedTokens

if TYPE_CHECKING:
    from visitlens.hooks.recording.write.record import RecordingOptions, TokenStatistics


def dtype_of(model: Any) -> torch.dtype:
    """The model's own word for it, or its first parameter's."""
    declared = getattr(model, "dtype", None)
    return declared if isinstance(declared, torch.dtype) else next(model.parameters()).dtype


def check_readable(written: Path) -> None:
    """Raises RecordingError: the reader's own rules refuse a file that is about to be committed."""
    try:
        with passed(written) as gated:
            read_totals(gated)
    except RecordingError as error:
        raise RecordingError(
            f"{error}. This is what was just written, and nothing of it is kept; what was committed before stays. Please report it"
        ) from error


class ShardWriter:
    """Computes shards and commits their files, one after another; keeps no state between them.

    Raises:
        InputError: the contexts are too long for attention maps.
    """

    def __init__(
        self,
        model: InstrumentedModel,
        contexts: PackedTokens,
        path: Path,
        statistics: TokenStatistics,
        options: RecordingOptions,
        attention_implementation: str = "auto",
        url: str | None = None,
    ) -> None:
        if options.level == "maps" and contexts.tokens.shape[1] > schema.MAX_MAP_CONTEXT:
            raise InputError(
                f"level 'maps' keeps contexts of at most {schema.MAX_MAP_CONTEXT} tokens, got {contexts.tokens.shape[1]}: pack shorter ones"
            )
        model.check_sites(options.sites)
        if options.level == "maps" and "P" in {**model.config.missing, **model.config.absent}:
            raise InputError(f"level 'maps' needs attention at every step, which {model.config.family} doesn't have")
        self.model, self.contexts, self.path = model, contexts, path
        self.statistics, self.options, self.attention = statistics, options, attention_implementation
        self.dtype, self.store = dtype_of(model), None if url is None else ObjectStore(url)
        self.stopped: Callable[[], bool] = lambda: False
        """As of the ledger."""
        groups = contexts.document_groups(options.group_count)
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
            with capture(self.model, self.sites) as captured, torch.inference_mode():
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
            if self.model.config.ragged:
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
            expected = token_shape(name, self.model.config)
            if tuple(stacked.shape[2:]) != expected:
                raise InputError(
                    f"{name} of this model is {tuple(stacked.shape[2:])} a token, and a recording keeps {expected}: leave {name} out of "
                    "the sites"
                )
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
        with committing(path, shard.nbytes) as aside:
            with h5py.File(aside, "w", libver=schema.LIBVER) as file:
                for axis in ("layer", "visit", "index"):
                    name = "step" if axis == "index" else axis
                    file[f"axes/{name}"] = np.array([getattr(s, axis) for s in self.model.plan.steps], dtype=np.uint16)
                shard.write(file, self.dtype)
                write_totals(file, totals)
                schema.write_documents(file, documents)
                schema.write_header(file, run, {**numbers, "complete": 1})
            if aside.error is None:
                check_readable(aside.partial)
        entry = {"name": task.name, "bytes": aside.size, "sha256": aside.sha256, **numbers}
        shard_ = Shard(entry, dict(run), totals, documents)
        if self.store is None:
            return shard_
        try:
            return self.store.outlast(partial(put_shard, self.store, path, shard_), self.stopped)
        finally:
            path.unlink()
