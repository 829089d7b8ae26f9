"""A model in a notebook, as `vl.load(...)` gives it: `model.run(text)`, `run.site("V", layer=5, visit=2)`, `run.with_(...)`, `run.diff(...)`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.core.loop_plan import ExecutionPlan
from visitlens.hooks.core.model_interface import InstrumentedModel, ModelConfig
from visitlens.hooks.interventions.intervene import Intervention, with_loop_count
from visitlens.hooks.interventions.intervention import flatten
from visitlens.hooks.loading.load_model import weights_sha256
from visitlens.hooks.text.encoder import TextEncoder
from visitlens.hooks.text.token_texts import TokenTexts
from visitlens.hooks.text.tokenizer import own_tokenizer
from visitlens.probe.drawing.notebook_html import loop_svg
from visitlens.probe.experiments import Results, run_experiment
from visitlens.probe.live.head_scan import HeadScan, SilencedHead
from visitlens.probe.live.live_model import Tracer
from visitlens.probe.live.live_run import LiveRun
from visitlens.probe.live.prompts import TOKEN_LIMIT
from visitlens.probe.model.bundled import SAMPLE, task_file
from visitlens.probe.model.progress import progress
from visitlens.probe.model.run import Run
from visitlens.probe.samples.sample import EvalSet
from visitlens.probe.tasks.task_file import Example

Text = str | Sequence[str] | Sequence[int] | np.ndarray | Tensor


def model_of(model: Any, tokenizer: Any, bos: str | int | None = None, **options: Any) -> Model:
    """A model in memory to probe. `options` go to its adapter.

    Raises:
        InputError: no tokenizer, or a kind of model that no adapter knows.
    """
    if not isinstance(model, InstrumentedModel):
        from visitlens.hooks.adapters.adapt import adapt

        model, options = adapt(model, **options), {}
    if options:
        raise InputError(f"a model that is adapted already takes no options, got {', '.join(options)}")
    return Model(model, own_tokenizer(tokenizer), model.config.family, bos)


@dataclass(frozen=True, eq=False)
class Model:
    """A model and its tokenizer. `native` is the model itself: the LoopedMoE, for `run_with_hooks` and the like, or an
    adapted model."""

    native: InstrumentedModel = field(repr=False)
    tokenizer: Any = field(repr=False)
    name: str = "model"
    bos: str | int | None = None
    """The token that leads a text: an id, a name or "none"; None: what configuration and tokenizer say."""
    limit: int = field(default=TOKEN_LIMIT, repr=False)
    """The most tokens of a prompt that is traced, BOS included; the model's own context length bounds it too."""
    folder: Path | None = field(default=None, repr=False)
    """Where the weights were read; None for a model in memory."""
    weights: str | None = field(default=None, repr=False)
    """Their SHA-256, where it is known already."""
    code_sha256: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """How the model was read."""

    @cached_property
    def encoder(self) -> TextEncoder:
        """What makes token ids of a text, as recordings and samples have them."""
        return TextEncoder.of(self.tokenizer, self.config, bos=self.bos)

    @cached_property
    def text_of(self) -> TokenTexts:
        """How a token is written."""
        return TokenTexts(self.tokenizer)

    @cached_property
    def weights_sha256(self) -> str | None:
        """Of the weights that were read; None for a model in memory."""
        return weights_sha256(self.folder) if self.weights is None and self.folder is not None else self.weights

    @cached_property
    def tracer(self) -> Tracer:
        """What traces prompts, and ablates heads under them."""
        about = {"weights_sha256": self.weights_sha256, "code_sha256": self.code_sha256, "options": self.options}
        return Tracer(self.native, self.encoder, name=self.name, limit=self.limit, **about)  # pyright: ignore[reportArgumentType]

    @property
    def plan(self) -> ExecutionPlan:
        return self.native.plan

    @property
    def config(self) -> ModelConfig:
        return self.native.config

    def run(self, text: Text, *interventions: Intervention | Sequence[Intervention]) -> Run:
        """A text, several, or token ids, run with the interventions given. What it computes is computed when asked for.

        Raises:
            InputError: no token, ids outside the vocabulary, a text longer than the context.
        """
        tokens, segments = self._tokens(text)
        run = Run(self, tokens, segments, tuple(flatten(interventions)))
        _ = run.logits  # a wrong place or token is an error here, not later
        return run

    def trace(self, prompt: str | Sequence[int], **options: Any) -> LiveRun:
        """A prompt with everything about it as plain arrays: attention, experts, norms and lenses by visit, and the tables and maps
        that the dashboard's live probe shows. `run` is for interventions and for any site as a tensor.

        Args:
            options: `coda_lens=False` reads no lens through the layers after the loop; `top` tokens a lens row are kept;
                `on_progress(done, total)`.

        Raises:
            InputError: an empty prompt, or one above `limit`.
            MemoryLimitError: the machine's or the device's memory doesn't suffice.

        Examples:
            >>> import visitlens as vl
            >>> model = vl.load("smelt")
            >>> trace = model.trace("Input: ( [ {\nOutput:")
            >>> trace.pattern(layer=4, visit=2, head=2).shape == (len(trace), len(trace))
            True
        """
        return self.tracer.run(prompt, **options)

    def ablate(
        self, trace: LiveRun, layer: int, head: int, visits: Sequence[int], kind: str = "zero", **options: Any
    ) -> SilencedHead:
        """A traced prompt again, with one head ablated at these visits (`Tracer.ablate`)."""
        return self.tracer.ablate(trace, layer, head, visits, kind, **options)

    def scan(self, trace: LiveRun, **options: Any) -> HeadScan:
        """A traced prompt again with every head ablated in turn, at each visit and at all (`Tracer.scan`)."""
        return self.tracer.scan(trace, **options)

    def with_loops(self, visits: int, residual_scale: str | None = None) -> Model:
        """The same weights with the loop span run `visits` times (`hooks.interventions.intervene.with_loop_count`)."""
        view = with_loop_count(self.native, visits, residual_scale)
        scale = f", scale {residual_scale or 'rescaled'}" if "rescaled" in view.loop_scales else ""
        return replace(self, native=view, name=f"{self.name}, {visits} visit{'s' * (visits != 1)}{scale}")

    def sample(self, text: str | Path | Iterable[str] = SAMPLE, max_tokens: int | None = 4096) -> EvalSet:
        """Documents to experiment on; by default the first tokens of the bundled held-out text."""
        return EvalSet.of_text(text, self.encoder, self.config, max_tokens=max_tokens)

    def dyck(self, prompts: int = 8, shots: Sequence[int] = (0, 1, 2, 4, 8), seed: int = 0) -> EvalSet:
        """Few-shot bracket prompts to experiment on, so many for each number of shots."""
        return EvalSet.of_dyck(self.encoder, self.config, prompts=prompts, shots=shots, seed=seed)

    def task(self, task: str | Path | Sequence[Example], limit: int | None = None) -> EvalSet:
        """The examples of a task: a bundled one by name (`hops`), a file of JSON lines, or what `read_task` gives.

        Raises:
            InputError: no such task, a line that is no example, or text that the tokenizer can't spell.
        """
        named = isinstance(task, (str, Path))
        source = task_file(task) if named else task
        name = Path(task).stem if named else "task"
        return EvalSet.of_task(source, self.encoder, self.config, name=name, limit=limit)

    def experiment(self, name: str, sample: EvalSet | None = None, **options: Any) -> Results:
        """One of `visitlens.probe.experiments.registered()` on a sample, by default `model.sample()`."""
        with progress(name) as tick:
            chosen = self.sample() if sample is None else sample
            return run_experiment(name, self.native, chosen, on_progress=tick, **options)

    def _tokens(self, text: Text) -> tuple[Tensor, Tensor]:
        if isinstance(text, str):
            texts: list[list[int]] = [self.encoder.prompt(text)]
        elif isinstance(text, (np.ndarray, Tensor)):
            ids = torch.as_tensor(text)
            if ids.is_floating_point() or ids.dtype == torch.bool or not ids.numel() or ids.ndim > 2:
                raise InputError(
                    f"expected whole token ids [position] or [text, position], at least one, got {ids.dtype} {tuple(ids.shape)}"
                )
            texts = ids.long().reshape(-1, ids.shape[-1] if ids.ndim else 1).tolist()
        elif isinstance(text, Sequence) and len(text) and all(isinstance(part, str) for part in text):
            texts = [self.encoder.prompt(str(part)) for part in text]
        elif not isinstance(text, Sequence) or isinstance(text, (bytes, bytearray)) or not all(map(_is_id, text)):
            raise InputError(f"expected a text, a list of texts or token ids, got {text!r:.80}")
        else:
            texts = [[int(token) for token in text]]
        longest = max(map(len, texts), default=0)
        if not all(texts):
            raise InputError("expected at least one token in every text: nothing leads a text without one")
        tokens = torch.full((len(texts), longest), self.encoder.pad)
        segments = torch.full((len(texts), longest), -1)
        for row, ids in enumerate(texts):
            tokens[row, : len(ids)] = torch.tensor(ids)
            segments[row, : len(ids)] = row
        device = next(iter(self.native.parameters())).device
        return tokens.to(device), segments.to(device)

    def __repr__(self) -> str:
        looped = self.plan.looped_layers
        loop = (
            f"layers {min(looped)}-{max(looped)} run {max(self.plan.visits.values())} times" if looped else "unlooped"
        )
        c = self.config
        size = sum(p.numel() for p in self.native.parameters())
        experts = f"{c.experts_per_token} of {c.num_experts} experts" if c.num_experts else "no experts"
        return (
            f"Model({self.name}: {c.num_layers} layers, {loop}; hidden size {c.hidden_size}, {c.num_heads} heads, "
            f"{experts}, {size:,} parameters)"
        )

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(repr(self))}</div>{loop_svg(self.plan)}"


def _is_id(token: object) -> bool:
    return (isinstance(token, (int, np.integer)) and not isinstance(token, bool)) or (
        isinstance(token, Tensor) and token.ndim == 0
    )
