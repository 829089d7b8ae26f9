"""From a checkpoint folder and some text to a recording, by one process or by several."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from visitlens.errors import InputError, PlanError
from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.hooks.audit.guards import conditions, rows_of_length, sample_tokens
from visitlens.hooks.core.loop_plan import ExecutionPlan
from visitlens.hooks.core.model_interface import InstrumentedModel, ModelConfig, ModelFacts
from visitlens.hooks.loading.load_model import code_sha256, load_model, model_type, resolve, weights_sha256
from visitlens.hooks.models.checkpoint import DTYPES, load_config, load_tokenizer
from visitlens.hooks.models.checkpoint import load_model as load_native
from visitlens.hooks.models.checkpoint_files import sha256_of
from visitlens.hooks.models.expert_parallel import leading
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.store.commit import readable_bytes
from visitlens.hooks.recording.store.object_store import is_url
from visitlens.hooks.recording.write import record as recorder
from visitlens.hooks.recording.write.record import bytes_per_token
from visitlens.hooks.recording.write.shard_writer import ShardWriter
from visitlens.hooks.text.documents import PackedTokens, pack, read_documents
from visitlens.hooks.text.encoder import Documents, TextEncoder
from visitlens.probe.jobs.continue_prompts import continue_prompts
from visitlens.probe.jobs.document_groups import begun_groups, begun_in_other_groups, most_groups
from visitlens.probe.jobs.request import RunRequest
from visitlens.probe.measures.collector import StatisticsCollector
from visitlens.probe.measures.statistic import Geometry
from visitlens.probe.model import load as models
from visitlens.probe.reading.recorded_run import RecordedRun, open_recording

_LONG = 2048
_NARROW = 512  # below this width one thread is faster than several


@dataclass(frozen=True)
class PlannedModel:
    """What must be known of a model before it runs."""

    config: ModelConfig
    plan: ExecutionPlan
    dtype: torch.dtype


class PreparedRun:
    """Packed text, statistics and sizes, ready to record; the weights are read when a process first needs them.

    Raises:
        CheckpointError, InputError: what `load_config` and `read_documents` raise.
    """

    def __init__(self, request: RunRequest, contexts: PackedTokens | None = None) -> None:
        self.request = request
        self.planned = self._plan()
        config = self.planned.config
        torch.set_num_threads(request.threads or (1 if config.hidden_size < _NARROW else torch.get_num_threads()))
        self.notes: list[str] = []
        """What is said before recording, and not kept."""
        self.warnings = [f"synthetic: {request.synthetic}"] if request.synthetic else []
        if contexts is None:
            documents = encoded_text(request, self.encoder)
            self.warnings += [*self.encoder.warnings, *documents.notes]
            if request.generate:
                self.notes += _one_prompt(request)
                contexts, whole = self._continued(documents)
            else:
                contexts, whole = packed_text(request, config, documents.ids, self.encoder)
            if contexts.num_tokens < whole:
                self.warnings.append(f"truncated: the first {contexts.num_tokens:,} of the text's {whole:,} tokens")
        self.contexts = contexts
        geometry = Geometry.of(self.planned.plan, config.to_dict())
        written = contexts.generated is not None
        one_group = StatisticsCollector(geometry, 1, request.measures, written=written)
        options = request.keep.settled(begun_groups(request.out) or most_groups(one_group.bytes_per_group))
        self.request = request = replace(request, keep=options)
        groups = int(contexts.document_groups(options.group_count).max()) + 1
        self.statistics = StatisticsCollector(geometry, groups, request.measures, written=written)
        self.bytes_per_token = bytes_per_token(self.planned, self.statistics, request.keep)
        self.bytes_needed = self.bytes_per_token * contexts.num_tokens

    @cached_property
    def model(self) -> InstrumentedModel:
        """The loaded model."""
        request = self.request
        if request.mesh is not None:
            return load_native(
                resolve(request.model.checkpoint), request.model.dtype, request.model.device, request.mesh
            )
        return load_model(request.model.checkpoint, request.model.dtype, request.model.device, **request.model.options)

    @cached_property
    def encoder(self) -> TextEncoder:
        """What makes token ids of the text, and says which token leads."""
        return encoder_of(self.request, self.planned.config)

    def _continued(self, documents: Documents) -> tuple[PackedTokens, int]:
        """The text's documents as prompts, continued by the model."""
        request, config = self.request, self.planned.config
        asked = request.generate
        assert asked is not None
        closed = self.encoder.eos.id is not None
        prompts = [ids[:-1] if closed else ids for ids in documents.ids]
        length = config.context_length
        if request.text.context_length is not None:
            length = min(length, request.text.context_length)
        packed = continue_prompts(
            self.model, prompts, asked.new_tokens, length, check=request.checks, sampling=asked.sampling
        )
        chosen = packed if request.text.max_tokens is None else packed.first_contexts(request.text.max_tokens)
        return chosen, packed.num_tokens

    @cached_property
    def guards(self) -> list[dict[str, Any]]:
        """What must hold of an adapted model, checked on a few tokens; nothing of the native one, whose tests say so.

        Raises:
            PlanError: some of it doesn't.
        """
        if not self.request.checks or not isinstance(self.model, AdaptedModel):
            return []
        found = conditions(self.model, sample_tokens(self.model))
        found.append(rows_of_length(self.model, self.contexts.longest_segment))
        # Its cache matters where it generates, and is checked there.
        failed = [guard for guard in found if guard.ok is False and guard.name != "cached generation"]
        if failed:
            said = "; ".join(f"{guard.name}: {guard.detail}" for guard in failed)
            raise PlanError(
                f"{self.model.config.family} fails its guards ({said}): its numbers wouldn't mean what they say. `visitlens inspect` "
                "shows all of them; --no-checks records anyway"
            )
        return [guard.to_dict() for guard in found]

    def _plan(self) -> PlannedModel:
        """A native model's from its configuration; another's from the model itself, which must be loaded to be known."""
        folder = resolve(self.request.model.checkpoint)
        if model_type(folder) is None and not self.request.model.options:
            config = load_config(folder)
            return PlannedModel(config, config.loop_spec.plan(), DTYPES[self.request.model.dtype])
        return PlannedModel(self.model.config, self.model.plan, DTYPES[self.request.model.dtype])

    def __str__(self) -> str:
        """What will be written."""
        size = "a summary of a few MB"
        if self.bytes_needed:
            size = f"about {readable_bytes(self.bytes_needed)} and a summary"
        tokens, documents = self.contexts.num_tokens, len(self.contexts.document_hash)
        of = f"{tokens:,} token{'s' * (tokens != 1)}, {documents:,} document{'s' * (documents != 1)}"
        return f"{of}; writes {size} to {self.request.url or self.request.out}"

    def __repr__(self) -> str:
        return f"PreparedRun({self}, level {self.request.keep.level})"

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Of this run."""
        guards = {"guards": self.guards} if self.guards else {}
        made = provenance(self.request, self.warnings)
        return {**made, "special_tokens": self.encoder.to_dict(), **guards}

    def record(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Path:
        """Writes or continues the recording; returns its path."""
        request = self.request
        if request.engine == "ray":
            from visitlens.probe.jobs.ray_engine import record_on_ray

            record_on_ray(self, on_progress)
        elif request.workers > 1:
            from visitlens.probe.jobs.workers import record_with_workers

            record_with_workers(self, on_progress)
        else:
            with nullcontext() if request.mesh is None else leading(cast(LoopedMoE, self.model)):
                recorder.record(
                    self.model,
                    self.contexts,
                    request.out,
                    self.statistics,
                    request.keep,
                    provenance=self.provenance,
                    attention_implementation=request.attention,
                    on_progress=on_progress,
                    url=request.url,
                )
        return request.out

    def describe(self) -> dict[str, Any]:
        """The run's description, as every file of it carries."""
        return recorder.describe_run(self.planned, self.contexts, self.statistics, self.request.keep, self.provenance)

    def shard_writer(self) -> ShardWriter:
        """What computes and commits shards in this process."""
        request = self.request
        return ShardWriter(
            self.model, self.contexts, request.out, self.statistics, request.keep, request.attention, request.url
        )


def record(
    checkpoint: str | Path,
    text: str | Path,
    out: str | Path,
    *,
    level: str = "summary",
    sites: Sequence[str] = (),
    **changes: Any,
) -> RecordedRun:
    """Records a model over text, as `visitlens record` does, and opens the recording; `prepare_recording` says before how
    large it will be. `checkpoint` is a folder, a hub name, or a bundled model (`smelt`, `baseline`).

    `changes` are further options of `RunRequest.of`, for example `max_tokens=10_000`, `dtype="bfloat16"`,
    `workers=4` or `batch=8`.

    Raises:
        CheckpointError, InputError, RecordingError, StorageError: as the command.

    Examples:
        >>> rec = vl.record("smelt", "text.jsonl", "new.vlens", max_tokens=256)
        >>> rec.recording.complete
        True
    """
    return open_recording(prepare_recording(checkpoint, text, out, level=level, sites=sites, **changes).record())


def prepare_recording(
    checkpoint: str | Path,
    text: str | Path,
    out: str | Path = "run.vlens",
    *,
    level: str = "summary",
    sites: Sequence[str] = (),
    **changes: Any,
) -> PreparedRun:
    """What `record` would do, not done yet: tokens, documents and bytes; its `record()` does it.

    Raises:
        As `record`.

    Examples:
        >>> planned = vl.prepare_recording("smelt", "text.jsonl", level="tokens")
        >>> planned.contexts.num_tokens > 0, planned.bytes_needed > 0
        (True, True)
    """
    if is_url(out):
        raise InputError(
            f"{out}: expected a folder; `visitlens record` writes into object stores, and `visitlens.open` reads there"
        )
    return PreparedRun(
        RunRequest.of(models.checkpoint(checkpoint), text, out, level=level, sites=tuple(sites), **changes)
    )


def encoder_of(request: RunRequest, config: ModelConfig) -> TextEncoder:
    """What makes token ids of a request's text."""
    tokenizer = load_tokenizer(resolve(request.model.checkpoint))
    return TextEncoder.of(tokenizer, config, bos=request.text.bos, special_as_text=request.text.special_as_text)


def encoded_text(request: RunRequest, encoder: TextEncoder) -> Documents:
    """The documents of a request's text as token ids."""
    return encoder.documents([d.text for d in read_documents(request.text.path, by_line=request.text.by_line)])


def pack_text(request: RunRequest, config: ModelConfig) -> tuple[PackedTokens, int]:
    """The text in the model's tokens, packed and cut after the context in which `max_tokens` falls; its whole length."""
    encoder = encoder_of(request, config)
    return packed_text(request, config, encoded_text(request, encoder).ids, encoder)


def packed_text(
    request: RunRequest, config: ModelConfig, documents: Sequence[np.ndarray], encoder: TextEncoder
) -> tuple[PackedTokens, int]:
    """`pack_text` of documents that are token ids already."""
    length = request.text.context_length
    if length is None:  # models of transformers claim contexts of 100,000 tokens and more
        length = min(config.context_length, _LONG) if isinstance(config, ModelFacts) else config.context_length
    packed = pack(documents, length, encoder.bos.id, encoder.pad, near_copies=True)
    if begun_in_other_groups(request.out, packed):
        packed = pack(documents, length, encoder.bos.id, encoder.pad)
    return packed if request.text.max_tokens is None else packed.first_contexts(
        request.text.max_tokens
    ), packed.num_tokens


def _one_prompt(request: RunRequest) -> list[str]:
    """Says so where a text file of several lines is one prompt."""
    file = request.text.path
    if request.text.by_line or file.suffix not in (".txt", ".md") or not file.is_file():
        return []
    with file.open(encoding="utf-8") as lines:
        several = sum(1 for line in lines if line.strip()) > 1
    return [f"{file.name} is one document, so one prompt; --by-line takes each line as one"] if several else []


def provenance(request: RunRequest, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Where a recording comes from: hashes, versions, command, and what to be warned of."""
    asked = request.generate
    packages = ("visitlens", "torch", "transformers", "transformer-lens", "h5py", "numpy", "tokenizers")
    return {
        "checkpoint": request.model.checkpoint.resolve().name,
        "weights_sha256": weights_sha256(request.model.checkpoint),
        **({"code_sha256": code} if (code := code_sha256(request.model.checkpoint)) else {}),
        "tokenizer_sha256": sha256_of(resolve(request.model.checkpoint) / "tokenizer.json"),
        "text": request.text.path.name,
        "device": request.model.device
        if request.mesh is None
        else f"{request.mesh.size()} x {request.model.device.split(':')[0]}",
        "threads": torch.get_num_threads(),
        "seed": asked.sampling.seed
        if asked and asked.sampling.temperature
        else None,  # recording itself draws nothing at random
        **({"model_options": dict(request.model.options)} if request.model.options else {}),
        **({"generation": {"new_tokens": asked.new_tokens, **asked.sampling.to_dict()}} if asked else {}),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "git_revision": _git_revision(),
        "warnings": list(warnings),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that isn't installed
        return None


def _git_revision() -> str | None:
    """Of the source checkout, if this is one."""
    here = Path(__file__).resolve().parent
    try:
        result = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except OSError:
        return None
    return result.stdout.strip() or None
