"""From a checkpoint folder and some text to a recording."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from visitlens.hooks import recorder
from visitlens.hooks.instrumented import ModelFacts
from visitlens.hooks.loading import load_model, resolve, weights_sha256
from visitlens.hooks.models.checkpoint import load_tokenizer
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.recorder import RecordingOptions, bytes_per_token
from visitlens.probe.collect import StatisticsCollector
from visitlens.probe.ladder.documents import PackedTokens, encode, pack, read_documents
from visitlens.probe.opened import RecordedRun
from visitlens.probe.opened import open as open_recording
from visitlens.probe.statistics.base import Geometry

_LONG = 2048
_NARROW = 512  # below this width one thread is faster than several


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to record and how. `context_length=None` is the model's (at most 2048 of a transformers model); `max_tokens` ends after the context it falls in."""

    checkpoint: Path
    text: Path
    out: Path
    options: RecordingOptions = field(default_factory=RecordingOptions)
    dtype: str = "float32"
    device: str = "cpu"
    context_length: int | None = None
    max_tokens: int | None = None
    measures: tuple[str, ...] | None = None
    attention: str = "auto"
    threads: int | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    """For models other than the native one: `trust_remote_code`, and what its adapter takes, such as `steps`."""


class PreparedRun:
    """A loaded model and packed text, ready to record; `bytes_needed` is known before it starts.

    Raises:
        CheckpointError, InputError: what `load_model` and `read_documents` raise.
    """

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.model = load_model(request.checkpoint, request.dtype, request.device, **request.model_options)
        config = self.model.config
        torch.set_num_threads(request.threads or (1 if config.hidden_size < _NARROW else torch.get_num_threads()))
        self.contexts = pack_text(request, config)
        groups = int(self.contexts.document_groups(request.options.groups).max()) + 1
        geometry = Geometry.of(self.model.plan, config.to_dict())
        self.statistics = StatisticsCollector(geometry, groups, request.measures)
        per_token = bytes_per_token(self.model, self.statistics, request.options)
        self.bytes_needed = per_token * self.contexts.num_tokens

    def record(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Path:
        """Writes or continues the recording; returns its path."""
        request = self.request
        recorder.record(
            self.model,
            self.contexts,
            request.out,
            self.statistics,
            request.options,
            provenance=provenance(request),
            attention_implementation=request.attention,
            on_progress=on_progress,
        )
        return request.out


def record(
    checkpoint: str | Path,
    text: str | Path,
    out: str | Path,
    *,
    level: str = "summary",
    sites: Sequence[str] = (),
    **changes: Any,
) -> RecordedRun:
    """Records a model over text, as `visitlens record` does, and opens the recording.

    `changes` are further fields of `RunRequest`, for example `max_tokens=10_000` or `dtype="bfloat16"`.

    Raises:
        CheckpointError, InputError, RecordingError, StorageError: as the command.
    """
    options = RecordingOptions(level=level, sites=tuple(sites))
    request = RunRequest(checkpoint=Path(checkpoint), text=Path(text), out=Path(out), options=options, **changes)
    return open_recording(PreparedRun(request).record())


def pack_text(request: RunRequest, config: LoopedMoEConfig | ModelFacts) -> PackedTokens:
    """The text in the model's tokens, packed; cut after the context in which `max_tokens` falls."""
    tokenizer = load_tokenizer(resolve(request.checkpoint))
    texts = [document.text for document in read_documents(request.text)]
    documents = encode(texts, tokenizer, config.bos_token_id, config.eos_token_id)
    length = request.context_length or config.context_length
    if request.context_length is None and isinstance(config, ModelFacts):
        length = min(length, _LONG)  # such models claim contexts of 100,000 tokens and more
    packed = pack(documents, length, config.bos_token_id, config.pad_token_id)
    return packed if request.max_tokens is None else packed.first_contexts(request.max_tokens)


def provenance(request: RunRequest) -> dict[str, Any]:
    """Where a recording comes from: hashes, versions, command."""
    packages = ("visitlens", "torch", "transformer-lens", "h5py", "numpy", "tokenizers")
    return {
        "checkpoint": request.checkpoint.resolve().name,
        "weights_sha256": weights_sha256(request.checkpoint),
        "text": request.text.name,
        "device": request.device,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "git_revision": _git_revision(),
    }


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
