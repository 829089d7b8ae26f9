"""From a recording and its model's checkpoint to stored analyses: head ablation, and the Dyck head's case study."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import visitlens
from visitlens.errors import InputError, RecordingError
from visitlens.hooks.loading.load_model import code_sha256, load_model, resolve, weights_sha256
from visitlens.hooks.models.checkpoint import load_tokenizer
from visitlens.hooks.recording.format import schema
from visitlens.hooks.text.encoder import TextEncoder
from visitlens.probe.analyses.ablation.dyck_study import DyckSettings, dyck_task, study_head
from visitlens.probe.analyses.ablation.heads import (
    AblationSums,
    Metric,
    Task,
    ablate_heads,
    nll,
    sample_task,
    text_task,
)
from visitlens.probe.analyses.results import store as analyses
from visitlens.probe.analyses.results.head_ablation import HeadAblation
from visitlens.probe.analyses.results.modes import MODES
from visitlens.probe.jobs.as_recorded import as_recorded, recorded_bos
from visitlens.probe.jobs.prepared_run import encoded_text, packed_text
from visitlens.probe.jobs.request import RunRequest
from visitlens.probe.measures.grouped import Grouped
from visitlens.probe.measures.measure import Measure
from visitlens.probe.reading.recorded_run import RecordedRun, open_recording
from visitlens.probe.samples.dyck_prompts import check_brackets, missing_brackets
from visitlens.probe.samples.sample import EvalSet
from visitlens.probe.tasks.task_file import read_task

METRICS = ("dyck", "text", "task")


@dataclass(frozen=True, kw_only=True)
class AblationRequest:
    """What to ablate and how it is judged. `text` and `max_tokens` are for the metric text, `dyck` for the metric dyck,
    `task` (a task file) and `where` (a label of its facets: only those examples) for the metric task."""

    recording: Path
    checkpoint: Path
    metric: str = "dyck"
    mode: str = "zero"
    dyck: DyckSettings = field(default_factory=DyckSettings)
    text: Path | None = None
    max_tokens: int = 4096
    task: Path | None = None
    where: str = ""
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    replace: bool = False
    layers: tuple[int, ...] = ()
    """Those of the loop by default."""
    model_options: Mapping[str, Any] = field(default_factory=dict)
    """As of `RunRequest`; what isn't said is as the recording says (`as_recorded`)."""

    @property
    def name(self) -> str:
        """Of the stored analysis."""
        if self.metric != "task" or self.task is None:
            return f"{self.metric}-{self.mode}"
        words = re.findall(r"[A-Za-z0-9]+", f"{self.task.stem} {self.where}")
        return "-".join([*words, self.mode])


def ablate_recording(
    request: AblationRequest, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Path]:
    """Ablates every head, stores the result in the recording and, for the metric dyck, the found head's case study.

    An analysis that is there already with the same settings is left alone.

    Raises:
        InputError: the checkpoint isn't the recorded model's or would be read in another way, an unknown metric or mode, no text
            for the metric text, no readable task file for the metric task, or no brackets in the tokenizer for the metric dyck.
        RecordingError, CheckpointError, StorageError: what can't be read or written.
    """
    if request.metric not in METRICS or request.mode not in MODES:
        raise InputError(
            f"expected a metric among {', '.join(METRICS)} and a mode among {', '.join(MODES)}, got {request.metric!r} and {request.mode!r}"
        )
    if request.metric == "task":
        if request.task is None:
            raise InputError("the metric task needs a task file: JSON lines with prompt and answer, or text and scored")
        read_task(request.task)
    rec = open_recording(request.recording)
    weights, recorded = weights_sha256(request.checkpoint), rec.provenance["weights_sha256"]
    if recorded != weights:
        raise InputError(
            f"{request.checkpoint}: its weights ({weights[:12]}) aren't those of {request.recording} ({str(recorded)[:12]}); "
            "give the checkpoint that was recorded"
        )
    if code_sha256(request.checkpoint) != rec.recording.run["config"].get("code_sha256"):
        raise InputError(
            f"{request.checkpoint}: the code in this folder (*.py, config.json) has changed since {request.recording} was made: "
            "put it back, or record again"
        )
    options = as_recorded(rec, request.model_options)
    settings = _settings(request)
    kinds = {analyses.ABLATION: request.name} | ({analyses.DYCK: request.mode} if request.metric == "dyck" else {})
    files = [request.recording / schema.ANALYSES / f"{kind}-{name}.json" for kind, name in kinds.items()]
    if not request.replace and _same(request.recording, kinds, settings):
        return files
    torch.set_num_threads(request.threads or 1)
    model = load_model(request.checkpoint, request.dtype, request.device, **options)
    if model.plan != rec.plan:
        raise InputError(
            f"{request.recording} has {len(rec.plan)} steps, the model as loaded {len(model.plan)}: read it as it was recorded (--steps, --family, --tie-copies)"
        )
    encoder = TextEncoder.of(load_tokenizer(resolve(request.checkpoint)), model.config, bos=recorded_bos(rec))
    dyck, shots = request.dyck, ()
    if request.metric == "dyck":
        check_brackets(encoder.tokenizer)
        dyck, shots = dyck.fitting(encoder.tokenizer, model.config.context_length)
        task = dyck_task(dyck.draw(encoder.tokenizer), encoder.bos.id, encoder.pad)
    else:
        task = _read(request, encoder, model.config)
    layers = request.layers or None
    sums = ablate_heads(model, task, mode=request.mode, layers=layers, seed=request.seed, on_progress=on_progress)
    about = _about(rec, task, settings)
    ablation = head_ablation(sums, name=request.name, metric=_title(request), mode=request.mode, about=about)
    written = [analyses.store(request.recording, ablation)]
    if request.metric == "dyck":
        top = ablation.top()
        study = study_head(model, encoder, top.layer, top.head, dyck, name=request.mode, about=about, shots=shots)
        written.append(analyses.store(request.recording, study))
    return written


def with_metric(request: AblationRequest) -> tuple[AblationRequest, str]:
    """The request with a metric where it names none (""), and why it isn't Dyck's: the model's tokenizer has no brackets.

    Raises:
        CheckpointError: no readable tokenizer.
    """
    if request.metric:
        return request, ""
    missing = missing_brackets(load_tokenizer(resolve(request.checkpoint)))
    if not missing:
        return replace(request, metric="dyck"), ""
    why = f"the model's tokenizer has no token for {' '.join(missing)}: heads are judged by the loss on text, not on Dyck prompts"
    return replace(request, metric="text"), why


def _read(request: AblationRequest, encoder: TextEncoder, config: Any) -> Task:
    """The targets in text, or in a task file."""
    if request.metric == "text":
        if request.text is None:
            raise InputError("the metric text needs text: give --text")
        text = RunRequest.of(request.checkpoint, request.text, request.recording, max_tokens=request.max_tokens)
        return text_task(packed_text(text, config, encoded_text(text, encoder).ids, encoder)[0])
    assert request.task is not None  # `ablate_recording` has refused it
    examples = read_task(request.task)
    labels = {label for example in examples for label in example.facets.values()}
    if request.where and request.where not in labels:
        raise InputError(
            f"{request.task} has no examples labelled {request.where!r}; there are {', '.join(sorted(labels)) or 'no facets'}"
        )
    chosen = [e for e in examples if not request.where or request.where in e.facets.values()]
    return sample_task(EvalSet.of_task(chosen, encoder, config, name=request.task.stem))


def ablate(
    model: Any,
    task: Task | EvalSet,
    *,
    metric: Metric = nll,
    metric_name: str = "loss",
    unit: str = "",
    mode: str = "zero",
    **options: Any,
) -> HeadAblation:
    """Head ablation in a notebook, by any metric of the logits at the targets; not stored.

    `model` is what `vl.load` gives, or the model inside it; `task` an EvalSet, whose counted predictions are the targets.
    `unit` is the metric's, nats for the loss. `options` go to `ablate_heads`.

    Examples:
        >>> model = vl.load("smelt")
        >>> result = vl.ablate(model, model.sample(max_tokens=256), layers=(3,))
        >>> result.effect.axes  # what silencing a head adds to the loss
        ('visits', 'layer', 'head')
    """
    model = getattr(model, "native", model)
    task = sample_task(task) if isinstance(task, EvalSet) else task
    sums = ablate_heads(model, task, mode=mode, metric=metric, **options)
    about = {"documents": task.documents, "tokens": int((task.document >= 0).sum()), "settings": {"mode": mode}}
    name = f"{metric_name.replace(' ', '-')}-{mode}"
    unit = unit or ("nats" if metric is nll else "units")
    return head_ablation(sums, name=name, metric=metric_name, mode=mode, about=about, unit=unit)


def head_ablation(
    sums: AblationSums, *, name: str, metric: str, mode: str, about: dict[str, Any], unit: str = "nats"
) -> HeadAblation:
    """The result that is stored, from sums by group; `unit` is the metric's."""
    labels = {
        "visits": ["+".join(map(str, choice)) for choice in sums.visits],
        "layer": list(sums.layers),
        "head": list(sums.heads),
    }
    intact = Measure("intact", f"{metric}, intact model", (), unit, f"Mean of {metric} over targets.", "6.4")
    effect = Measure(
        "ablation_effect",
        f"Change of {metric} when a head is ablated ({mode})",
        ("visits", "layer", "head"),
        unit,
        f"{metric} with one head's PV {_MEANINGS[mode]} before W_O at these visits, minus that of the intact model.",
        "6.4; each visit alone ours",
    )
    count = np.broadcast_to(sums.count[:, None, None, None], sums.change.shape)
    return HeadAblation(
        name,
        metric,
        mode,
        Grouped(intact, {}, sums.intact, sums.count),
        Grouped(effect, labels, sums.change, count),
        about,
    )


def _settings(request: AblationRequest) -> dict[str, Any]:
    """What decides the numbers, JSON-ready."""
    settings: dict[str, Any] = {
        "metric": request.metric,
        "mode": request.mode,
        "seed": request.seed,
        "dtype": request.dtype,
    } | ({"layers": list(request.layers)} if request.layers else {})
    if request.metric == "dyck":
        return settings | {"dyck": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(request.dyck).items()}}
    if request.metric == "task" and request.task is not None:
        digest = hashlib.sha256(request.task.read_bytes()).hexdigest()
        return settings | {"task": request.task.name, "task_sha256": digest, "where": request.where}
    return settings | {"text": None if request.text is None else request.text.name, "max_tokens": request.max_tokens}


def _same(recording: Path, kinds: dict[str, str], settings: dict[str, Any]) -> bool:
    """Whether all analyses are there, made with these settings."""
    try:
        return all(
            name in analyses.stored(recording, kind)
            and analyses.load(recording, kind, name).about.get("settings") == settings
            for kind, name in kinds.items()
        )
    except RecordingError:  # damaged: it is made anew
        return False


def _about(rec: RecordedRun, task: Task, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "documents": task.documents,
        "tokens": int((task.document >= 0).sum()),
        "targets": len(task.position),
        "settings": settings,
        "provenance": rec.provenance,
        "visitlens": visitlens.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _title(request: AblationRequest) -> str:
    if request.metric == "task" and request.task is not None:
        return f"{request.task.stem} loss" + (f", {request.where}" if request.where else "")
    return {"dyck": "Dyck target loss", "text": "text loss"}[request.metric]


_MEANINGS = {
    "zero": "set to zero",
    "mean": "set to its mean over the sample",
    "resample": "taken from another document",
}
