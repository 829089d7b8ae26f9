"""Runs a model over packed contexts and writes a recording: shards, then summary and manifest, resumable at any point."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import h5py
import numpy as np
import torch
from torch import Tensor

from visitlens.hooks import schema
from visitlens.hooks.capture import StepValues, capture
from visitlens.hooks.contexts import PackedTokens
from visitlens.hooks.instrumented import InstrumentedModel, ModelFacts
from visitlens.hooks.recording import read_manifest, shard_names
from visitlens.hooks.schema import GroupTotals
from visitlens.hooks.shards import check_room, commit, commit_json, sole_writer
from visitlens.hooks.sites import ACTIVATION_SITES, SITES, check_sites
from visitlens.kernels.errors import InputError, RecordingError

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
    recorder = _Recorder(model, contexts, path, statistics, options, provenance, attention_implementation)
    recorder.refuse_foreign()
    with sole_writer(path, worker=0):
        recorder.run_all(on_progress)


def bytes_per_token(
    model: LoopedMoE | InstrumentedModel, statistics: TokenStatistics, options: RecordingOptions
) -> int:
    """What a token costs in the shards, before compression; the summary's few MB come on top."""
    return sum(_token_bytes(model, statistics, options).values())


def _token_bytes(
    model: LoopedMoE | InstrumentedModel, statistics: TokenStatistics, options: RecordingOptions
) -> dict[str, int]:
    steps, config = len(model.plan), model.config
    if options.level == "summary":
        return {}
    parts = {"tokens": 12, "routing": steps * config.experts_per_token * 4}
    parts["stats"] = 4 * sum(int(np.prod(shape)) for shape in statistics.stored_shapes().values())
    widths = {
        "hidden": config.hidden_size,
        "head": config.num_heads,
        "kv_head": config.num_kv_heads,
        "d": config.head_dim,
    }
    item = next(model.parameters()).element_size()
    for name in options.sites:
        axes = SITES[name].axes
        width = config.width(name) if isinstance(config, ModelFacts) else [widths[axis] for axis in axes]
        parts[name] = steps * item * int(np.prod(width))
    if options.level == "maps":
        parts["maps"] = steps * config.num_heads * schema.MAX_MAP_CONTEXT * 2
    return parts


class _Recorder:
    def __init__(
        self,
        model: LoopedMoE | InstrumentedModel,
        contexts: PackedTokens,
        path: Path,
        statistics: TokenStatistics,
        options: RecordingOptions,
        provenance: Mapping[str, Any],
        attention_implementation: str,
    ) -> None:
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
        self.dtype = next(model.parameters()).dtype
        config = {
            "model": model.config.to_dict(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "data_sha256": contexts.sha256,
            "weights_sha256": provenance.get("weights_sha256"),
            "options": {k: v for k, v in asdict(options).items() if k != "shard_tokens"},
            "measures": sorted(statistics.measures),
        }
        config = json.loads(json.dumps(config))
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        self.run = {
            "run_uuid": str(uuid.uuid4()),
            "config_sha256": digest,
            "config": config,
            "layers": [step.layer for step in model.plan.steps],
            "tokens": contexts.num_tokens,
            "documents": len(contexts.document_hash),
            "provenance": dict(provenance),
            "left_out": dict(getattr(statistics, "left_out", {})),
        }
        groups = contexts.document_groups(options.groups)
        self.segment_group = torch.from_numpy(groups[contexts.segment_document])
        self.real_tokens = (contexts.segments >= 0).sum(1)
        per_token = max(bytes_per_token(model, statistics, options), 1)
        self.shard_tokens = max(1, min(options.shard_tokens, MAX_SHARD_BYTES // per_token))

    def run_all(self, on_progress: Callable[[int, int], None]) -> None:
        """From the first context not yet recorded to the last."""
        shards, context, totals = self._resume()
        done, total = int(self.real_tokens[:context].sum()), self.contexts.num_tokens
        if context == len(self.contexts.tokens):
            on_progress(total, total)
            return
        left = total - done
        check_room(self.path, left * bytes_per_token(self.model, self.statistics, self.options))
        sites = self.statistics.sites | set(self.options.sites)
        if self.options.level != "summary" and self.model.config.experts_per_token:
            sites |= {"experts", "gates"}
        if self.options.level == "maps":
            sites |= {"P"}
        try:
            with _interrupt_between_contexts() as interrupted:
                while context < len(self.contexts.tokens) and not interrupted:
                    shard = _Shard(len(shards), context, done)
                    with capture(self.model, sorted(sites)) as captured, torch.inference_mode():
                        while (
                            context < len(self.contexts.tokens) and shard.tokens < self.shard_tokens and not interrupted
                        ):
                            rows = slice(context, context + self.options.batch)
                            self._forward(rows, captured, shard)
                            context += len(self.contexts.tokens[rows])
                            on_progress(done + shard.tokens, total)
                    if shard.contexts:
                        done += shard.tokens
                        shards.append(self._commit_shard(shard, totals))
                        self._commit_summary(shards, totals, done)
            if interrupted:
                raise KeyboardInterrupt
        finally:
            self.statistics.take()  # an error leaves nothing half-counted behind

    def _forward(self, rows: slice, captured: Any, shard: _Shard) -> None:
        tokens = torch.from_numpy(self.contexts.tokens[rows])
        segment_ids = torch.from_numpy(self.contexts.segments[rows])
        device = next(self.model.parameters()).device
        self.model(tokens.to(device), segment_ids.to(device), return_type="none")
        values = StepValues(captured, segment_ids, self.attention)
        real = segment_ids[segment_ids >= 0].long()
        stored = self.statistics.update(values, self.segment_group[real])
        if self.options.level != "summary":
            shard.keep("tokens/id", tokens[segment_ids >= 0].numpy().astype(np.uint32))
            shard.keep("tokens/segment", real.numpy().astype(np.uint32))
            shard.keep("tokens/pos", values.segments.positions().numpy().astype(np.uint32))
            steps = range(len(self.model.plan))
            if self.model.config.experts_per_token:
                ids, gates = (torch.stack([values.site(n, s) for s in steps]).cpu() for n in ("experts", "gates"))
                shard.keep("routing/ids", ids.numpy().astype(np.uint16))
                shard.keep("routing/gate", gates.float().numpy().astype(np.float16))
            for name, value in stored.items():
                shard.keep(f"stats/{name}", value.movedim(0, 1).cpu().float().numpy())
            for name in self.options.sites:
                self._keep_activation(name, values, shard)
            if self.options.level == "maps":
                shard.keep("attn/p", torch.stack([captured.at("P", s) for s in steps], dim=1).cpu().half().numpy())
        shard.tokens += len(real)
        shard.contexts += len(tokens)

    def _keep_activation(self, name: str, values: StepValues, shard: _Shard) -> None:
        first = shard.token_start + shard.tokens
        start, stop = self.options.activation_tokens or (0, self.contexts.num_tokens)
        start, stop = max(start - first, 0), min(stop - first, values.segments.num_tokens)
        if start < stop:
            stacked = torch.stack([values.site(name, s)[start:stop] for s in range(len(self.model.plan))]).cpu()
            # NumPy has no bfloat16: the bits are kept as u2, with the logical dtype beside them.
            array = stacked.view(torch.uint16) if stacked.dtype == torch.bfloat16 else stacked
            shard.keep(str(SITES[name].dataset), array.numpy(), token_start=first + start)

    def _commit_shard(self, shard: _Shard, totals: dict[str, GroupTotals]) -> dict[str, Any]:
        part = self.statistics.take()
        buffer = io.BytesIO()
        with h5py.File(buffer, "w", libver=schema.LIBVER) as file:
            numbers = {
                "worker": 0,
                "seq": shard.seq,
                "token_start": shard.token_start,
                "token_count": shard.tokens,
                "context_start": shard.context_start,
                "context_count": shard.contexts,
            }
            schema.write_header(file, self.run, {**numbers, "complete": 1})
            for axis in ("layer", "visit", "index"):
                name = "step" if axis == "index" else axis
                file[f"axes/{name}"] = np.array([getattr(s, axis) for s in self.model.plan.steps], dtype=np.uint16)
            shard.write(file, self.dtype)
            schema.write_totals(file, part)
        name = f"w00-{shard.seq:06d}.h5"
        data = buffer.getbuffer()
        digest = commit(self.path / schema.SHARDS / name, data)
        schema.add_totals(totals, part)
        return {"name": name, "bytes": len(data), "sha256": digest, **numbers}

    def _commit_summary(self, shards: list[dict[str, Any]], totals: dict[str, GroupTotals], done: int) -> None:
        buffer = io.BytesIO()
        with h5py.File(buffer, "w", libver=schema.LIBVER) as file:
            schema.write_header(file, self.run, {"token_count": done, "shard_count": len(shards)})
            schema.write_totals(file, totals)
        commit(self.path / schema.SUMMARY, buffer.getbuffer())
        manifest = {"format": schema.FORMAT, "schema_version": schema.SCHEMA_VERSION, "run": self.run, "shards": shards}
        commit_json(self.path / schema.MANIFEST, manifest)

    def _resume(self) -> tuple[list[dict[str, Any]], int, dict[str, GroupTotals]]:
        """Committed shards, the next context and the totals so far. The shards are the truth, the manifest a cache."""
        folder = self.path / schema.SHARDS
        folder.mkdir(exist_ok=True)
        for stale in folder.glob("w00-*.tmp"):
            stale.unlink()
        known = (
            {s["name"]: s for s in read_manifest(self.path)["shards"]}
            if (self.path / schema.MANIFEST).is_file()
            else {}
        )
        shards: list[dict[str, Any]] = []
        totals: dict[str, GroupTotals] = {}
        context = 0
        for name in shard_names(self.path):
            data = (folder / name).read_bytes()
            with h5py.File(io.BytesIO(data), "r") as file:
                run = schema.read_header(file, str(folder / name))
                if run["config_sha256"] != self.run["config_sha256"]:
                    raise RecordingError(
                        f"{self.path}: holds a recording with another configuration ({_difference(run['config'], self.run['config'])}). "
                        "Choose another path, or remove it"
                    )
                self.run = run
                numbers = {k: int(v) for k, v in file.attrs.items() if isinstance(v, np.integer) and k != "complete"}
                schema.add_totals(totals, schema.read_totals(file, name))
            entry = {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **numbers}
            if numbers["context_start"] != context or known.get(name, entry)["sha256"] != entry["sha256"]:
                raise RecordingError(
                    f"{folder / name}: doesn't follow the shard before it, or has changed since it was written"
                )
            shards.append(entry)
            context += numbers["context_count"]
        # The process may have died between a shard and its entry in summary and manifest.
        if shards and (len(known) != len(shards) or not (self.path / schema.SUMMARY).is_file()):
            self._commit_summary(shards, totals, int(self.real_tokens[:context].sum()))
        return shards, context, totals

    def refuse_foreign(self) -> None:
        """Before anything is written there: raises RecordingError where the path is a file or holds something else."""
        if self.path.exists() and not self.path.is_dir():
            raise RecordingError(f"{self.path}: a file, not a recording; choose another path")
        ours = {schema.MANIFEST, schema.SUMMARY, schema.SHARDS}
        names = [p.name for p in self.path.iterdir()] if self.path.exists() else []
        foreign = [n for n in names if n.removesuffix(".tmp") not in ours and not n.endswith(".lock")]
        if foreign:
            raise RecordingError(
                f"{self.path}: not an empty folder nor a recording (holds {foreign[0]}); choose another path"
            )


class _Shard:
    """Arrays of a token range, gathered context by context."""

    def __init__(self, seq: int, context_start: int, token_start: int) -> None:
        self.seq, self.context_start, self.token_start = seq, context_start, token_start
        self.tokens = self.contexts = 0
        self._parts: dict[str, list[np.ndarray]] = {}
        self._token_starts: dict[str, int] = {}

    def keep(self, name: str, part: np.ndarray, token_start: int | None = None) -> None:
        self._parts.setdefault(name, []).append(part)
        if token_start is not None:
            self._token_starts.setdefault(name, token_start)

    def write(self, file: h5py.File, dtype: torch.dtype) -> None:
        for name in list(self._parts):
            parts = self._parts.pop(name)
            vector = name.startswith(("resid/", "vec/"))
            array = np.concatenate(parts, axis=0 if name.startswith(("tokens/", "attn/")) else 1)
            if name.startswith("tokens/"):
                chunks = (min(len(array), 65_536),)
            elif name.startswith("attn/"):
                chunks = (1, 1, *array.shape[2:])
            else:
                chunks = (1, min(array.shape[1], 256 if vector else 4096), *array.shape[2:])
            filters = schema.VECTOR_FILTERS if vector else schema.TEXT_FILTERS
            dataset = file.create_dataset(name, data=array, chunks=chunks, **filters)
            if name in self._token_starts:
                dataset.attrs["token_start"] = np.int64(self._token_starts[name])
                if dtype == torch.bfloat16:
                    schema.set_text(dataset.attrs, "logical_dtype", "bfloat16")


@contextmanager
def _interrupt_between_contexts() -> Iterator[list[int]]:
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


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The first fields that differ, for a message."""
    fields = [key for key in ours if theirs.get(key) != ours[key]]
    return ", ".join(f"{key} differs" for key in fields) or "written by another version"
