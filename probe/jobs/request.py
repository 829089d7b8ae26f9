"""RunRequest: what to record and how, in groups: the model, its text, what is kept, what is generated, and who does the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visitlens.errors import InputError
from visitlens.hooks.capture.sampling import GREEDY, Sampling
from visitlens.hooks.models.checkpoint import DTYPES
from visitlens.hooks.recording.write.record import RecordingOptions
from visitlens.probe.jobs.engines import ENGINES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Which model, and how it is read."""

    checkpoint: Path
    dtype: str = "float32"
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)
    """For models other than the native one: `trust_remote_code`, and what its adapter takes, such as `steps`."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"expected a dtype among {', '.join(DTYPES)}, got {self.dtype!r}")


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """Which text, and how it becomes contexts of tokens."""

    path: Path
    context_length: int | None = None
    """None: the model's (at most 2048 of a transformers model)."""
    max_tokens: int | None = None
    """Ends after the context in which this token falls."""
    bos: str | int | None = None
    """The token that leads a document: an id, a name or "none"; None: what configuration and tokenizer say (`TextEncoder`)."""
    special_as_text: bool = False
    """Whether special tokens written out in the text (`<eos>`) are taken as text."""
    by_line: bool = False
    """Whether each line of a .txt or .md file is a document (where text is generated: a prompt) of its own."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Each document is a prompt that the model continues by so many tokens at most."""

    new_tokens: int
    sampling: Sampling = GREEDY

    def __post_init__(self) -> None:
        if self.new_tokens < 1:
            raise InputError(f"expected a number of tokens to generate, got {self.new_tokens}")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to record and how.

    `workers` processes (or, with `engine="ray"`, tasks at a time on the cluster at `ray_address`) record shards side by side.
    `checks` runs the guards of an adapted model before it is recorded. `synthetic` says in words that weights or text aren't
    real; it stays with the recording as a warning.
    """

    model: ModelSpec
    text: TextSpec
    out: Path
    keep: RecordingOptions = field(default_factory=RecordingOptions)
    generate: Generation | None = None
    measures: tuple[str, ...] | None = None
    attention: str = "auto"
    threads: int | None = None
    workers: int = 1
    engine: str = "process"
    ray_address: str | None = None
    synthetic: str = ""
    url: str | None = None
    """The recording's place in an object store (`s3://bucket/run.vlens`); `out` is a scratch folder then."""
    checks: bool = True
    mesh: DeviceMesh | None = None
    """Of `torchrun`'s processes, over which the native model's experts are spread: `visitlens.probe.jobs.torchrun`."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InputError(f"expected at least one worker, got {self.workers}")
        if self.engine not in ENGINES:
            raise InputError(f"expected an engine among {', '.join(ENGINES)}, got {self.engine!r}")
        if self.threads is not None and self.threads < 1:
            raise InputError(f"expected at least one thread, got {self.threads}")

    @classmethod
    def of(cls, checkpoint: Path | str, text: Path | str, out: Path | str, **options: Any) -> RunRequest:
        """From options by their own names, whichever group each is of: `max_tokens=10_000, dtype="bfloat16", level="tokens"`.
        `generate` is a number of tokens (0: none), `temperature`, `top_p` and `seed` its sampling, `model_options` the model's own.

        Raises:
            InputError: an unknown option, or a value that can't be.
        """
        if unknown := [name for name in options if name not in OPTIONS]:
            raise InputError(f"no option {unknown[0]!r}; there are {', '.join(OPTIONS)}")
        given = {"options": options.pop("model_options", {}), **options}
        return cls(
            model=ModelSpec(checkpoint=Path(checkpoint), **_of(ModelSpec, given)),
            text=TextSpec(path=Path(text), **_of(TextSpec, given)),
            out=Path(out),
            keep=RecordingOptions(**_of(RecordingOptions, options)),
            generate=_generation(options.get("generate", 0), _of(Sampling, options)),
            **{n: v for n, v in _of(cls, options).items() if n != "generate"},
        )


def _generation(new_tokens: int, sampling: Mapping[str, Any]) -> Generation | None:
    if new_tokens < 0:
        raise InputError(f"expected a number of tokens to generate, got {new_tokens}")
    chosen = Sampling(**sampling)
    if chosen != GREEDY and not (new_tokens and chosen.temperature):
        raise InputError(
            "a temperature, top_p or seed is of sampling: say how many tokens to generate, and give a temperature above 0"
        )
    return Generation(new_tokens=new_tokens, sampling=chosen) if new_tokens else None


def _of(group: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are a group's own."""
    names = {f.name for f in fields(group)}
    return {name: value for name, value in options.items() if name in names}


_GROUPS = ("model", "text", "keep", "out", "checkpoint", "path", "options")
OPTIONS = tuple(
    sorted(
        {f.name for group in (ModelSpec, TextSpec, RecordingOptions, Sampling, RunRequest) for f in fields(group)}
        - {*_GROUPS}
        | {"model_options"}
    )
)
"""Names that `RunRequest.of` takes beside checkpoint, text and out."""
