"""Tracer: one forward over a prompt as plain arrays (`LiveRun`), and the same prompt with heads ablated. `Model.trace` uses it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from visitlens.errors import InputError, MemoryLimitError
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.core.loop_plan import Step, visit_choices
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.loading.load_model import code_sha256, load_model, resolve, weights_sha256
from visitlens.hooks.models.checkpoint import load_tokenizer
from visitlens.hooks.text.encoder import TextEncoder
from visitlens.hooks.text.token_texts import CONTINUED, TokenTexts
from visitlens.hooks.text.tokenizer import Tokenizer
from visitlens.probe.live.arrays import arrays_of, as_array, lacking
from visitlens.probe.live.forward import forward_of
from visitlens.probe.live.head_scan import KINDS, HeadScan, SilencedHead, check_target, divergence
from visitlens.probe.live.live_run import LiveRun, empty_lens, log_softmax
from visitlens.probe.live.prompts import TOKEN_LIMIT, DyckPreset, dyck_presets, prompt_ids
from visitlens.probe.samples.scores import device_of

if TYPE_CHECKING:
    from visitlens.probe.live.forward import Reader
    from visitlens.probe.live.live_run import Lens

OnProgress = Callable[[int, int], None]
"""Called with (done, total) between layers; an exception from it ends the run there, and leaves no hook behind."""
_LENS_ELEMENTS = 2**22  # logits of a lens that are held at once
_SCAN_TOKENS = 2048  # tokens of a scan that run at once


def _nothing(done: int, total: int) -> None:
    """Progress that nobody watches."""


class Tracer:
    """Traces prompts through a model: native, or adapted. Not for several threads at once.

    `limit` is the most tokens a prompt may have, BOS included; the model's own context length bounds it too.
    """

    def __init__(
        self,
        model: InstrumentedModel,
        tokenizer: Tokenizer | TextEncoder,
        *,
        name: str = "model",
        weights_sha256: str | None = None,
        code_sha256: str | None = None,
        limit: int = TOKEN_LIMIT,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.name = model, name
        self.options = dict(options or {})
        self.plan, self.config = model.plan, model.config
        self.limit = min(limit, model.config.context_length)
        self.encoder = TextEncoder.of(tokenizer, model.config)
        self.tokenizer = self.encoder.tokenizer
        self.text_of = TokenTexts(self.tokenizer)
        self._weights, self._code = weights_sha256, code_sha256
        self._forward = forward_of(model)

    @cached_property
    def presets(self) -> tuple[DyckPreset, ...]:
        """Few-shot Dyck prompts that fit the limit; none where the tokenizer can't write them, or nothing follows a prompt."""
        if "next token" in self.config.missing:
            return ()
        try:
            found = dyck_presets(self.tokenizer, led=self.encoder.bos.id is not None)
        except InputError:
            return ()
        return tuple(p for p in found if len(self._ids(p.text, 2**31)) <= self.limit)

    @torch.no_grad()
    def run(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        *,
        coda_lens: bool = True,
        top: int = 5,
        on_progress: OnProgress = _nothing,
    ) -> LiveRun:
        """One forward over a prompt (a text, or token ids), with everything a LiveRun holds; `top` tokens a lens row are kept.

        Raises:
            InputError: an empty prompt, or one above the limit.
            MemoryLimitError: the machine's or the device's memory doesn't suffice.
        """
        began = time.perf_counter()
        ids = self._ids(prompt, self.limit)
        text = prompt if isinstance(prompt, str) else "".join(self.text_of.sequence(ids)).replace(CONTINUED, "")
        steps, tokens = len(self.plan), len(ids)
        lensed = not self._forward.no_lens
        coda = self._coda() if coda_lens and lensed else []
        progress = _Progress(on_progress, steps + lensed * (steps + bool(coda) * (steps - len(coda))))
        with _memory_as_message(tokens), ExitStack() as afterwards:
            afterwards.callback(self._forward.forget)
            batch = self._batch(ids)
            with capture(self.model, self._forward.sites) as captured, self._forward.watched(progress.advance):
                logits = self._forward(batch)
            arrays, lens, through_coda = arrays_of(self.model, captured, batch), None, None
            if lensed:
                states = self._forward.states(captured)
                final = self._forward.read(batch, cast(Tensor, states[-1]))
                end = torch.cat([final(some).float().log_softmax(-1) for some in self._chunks(tokens)])
                lens = self._read(states, partial(self._forward.read, batch), end, top, progress)
                if coda:
                    through = partial(self._forward.through, batch, start=coda[0].index)
                    through_coda = self._read(states[: -len(coda)], through, end, top, progress)
            return LiveRun(
                model={
                    "name": self.name,
                    "config": self.config.to_dict(),
                    "weights_sha256": self._weights,
                    "code_sha256": self._code,
                    "options": self.options,
                },
                plan=self.plan,
                prompt=text,
                tokens=ids,
                text_of=self.text_of,
                logits=as_array(logits[0]),
                lens=lens,
                coda_lens=through_coda,
                lacking=lacking(self.model, captured, self._forward.no_lens),
                seconds=time.perf_counter() - began,
                **arrays,
            )

    @torch.no_grad()
    def ablate(
        self,
        run: LiveRun,
        layer: int,
        head: int,
        visits: Sequence[int],
        kind: str = "zero",
        *,
        on_progress: OnProgress = _nothing,
    ) -> SilencedHead:
        """The same prompt with one query head's attended context (PV, before W_O) silenced at these visits.

        `kind`: "zero"; "mean" (its mean over the prompt's tokens in the run as it was, per visit); or "resample" (what it
        carries at the same place and visit when the tokens after BOS come in another order, one fixed draw).

        Raises:
            InputError: no such layer, head, visit or kind; a run of another model; too few tokens to shuffle.
            MemoryLimitError: as in `run`.
        """
        places = self._places(run, layer, head, visits, kind)
        progress = _Progress(on_progress, len(self.plan) * (1 + (kind == "resample")))
        with _memory_as_message(len(run)):
            instead = self._instead(run, kind, progress)
            with self._silenced(places, [head], instead), self._forward.watched(progress.advance):
                logits = self._forward(self._batch(run.tokens))
        return SilencedHead(run, layer, head, tuple(visits), kind, as_array(logits[0]))

    @torch.no_grad()
    def scan(
        self,
        run: LiveRun,
        *,
        position: int = -1,
        target: int | None = None,
        kind: str = "zero",
        on_progress: OnProgress = _nothing,
    ) -> HeadScan:
        """Every head silenced in turn, at each visit alone and at all: how the target's log-probability changes.

        Steps before the silenced one are not run again, and a layer's heads run side by side.

        Raises:
            InputError: no such position, target or kind; a run of another model; too few tokens to shuffle.
            MemoryLimitError: as in `run`.
        """
        position = run.at(position)
        target = run.target(position) if target is None else target
        check_target(target, run.logits.shape[1])
        having = [layer for layer in sorted(self.plan.visits) if not run.lacks("PV", layer)]
        self._places(run, having[0] if having else 0, 0, (1,), kind)
        places = tuple((layer, visits) for layer in having for visits in visit_choices(self.plan.visits[layer]))
        together = max(1, _SCAN_TOKENS // len(run))
        groups = [range(at, min(at + together, run.heads)) for at in range(0, run.heads, together)]
        costs = len(self.plan) + sum(self._forward.cost(self._steps(layer)) for layer in having)
        progress = _Progress(on_progress, len(groups) * costs + len(self.plan) * (kind == "resample"))
        before = run.log_probs(position)
        after = np.empty((len(places), run.heads, run.logits.shape[1]), dtype=np.float64)
        with _memory_as_message(len(run)):
            instead = self._instead(run, kind, progress)
            for heads in groups:
                several = self._batch(run.tokens).expand(len(heads), -1)
                silenced = self._each_silenced(several, heads, having, instead, position, progress)
                for row, logits in enumerate(silenced):
                    after[row, heads.start : heads.stop] = log_softmax(as_array(logits))
        kl = np.array([[divergence(before, head) for head in heads] for heads in after])
        return HeadScan(run, position, target, kind, places, after[:, :, target] - before[target], kl)

    def __repr__(self) -> str:
        loop = f"layers {self.plan.looped_layers}" if self.plan.looped_layers else "no layer looped"
        return f"Tracer({self.name!r}, {len(self.plan)} steps, {loop}, up to {self.limit} tokens)"

    # What one run is made of

    def _ids(self, prompt: str | Sequence[int] | np.ndarray, limit: int) -> np.ndarray:
        if isinstance(prompt, str):
            return prompt_ids(prompt, self.encoder, limit)
        ids = np.asarray(prompt, dtype=np.int64)
        if ids.ndim != 1 or not 0 < len(ids) <= limit:
            raise InputError(f"expected 1 to {limit:,} token ids [position] to trace, got shape {ids.shape}")
        return ids

    def _batch(self, tokens: np.ndarray) -> Tensor:
        return torch.from_numpy(tokens).unsqueeze(0).to(self._device)

    @property
    def _device(self) -> torch.device:
        return device_of(self.model)

    def _coda(self) -> list[Step]:
        """The steps after the last looped one; none where nothing is looped."""
        looped = [step.index for step in self.plan.steps if step.layer in self.plan.looped_layers]
        return list(self.plan.steps[looped[-1] + 1 :]) if looped else []

    def _read(
        self,
        states: Sequence[Tensor | None],
        read: Callable[[Tensor], Reader],
        end: Tensor,
        top: int,
        progress: _Progress,
    ) -> Lens:
        """The lens from the states after the first steps, against the log-probabilities `end` [token, vocab] of the output."""
        lens = empty_lens(len(self.plan), len(end), min(top, end.shape[-1]))
        answer = end.argmax(-1, keepdim=True)
        for step, state in enumerate(states):
            reader = None if state is None else read(state)
            for tokens in self._chunks(len(end)):
                if reader is None:
                    continue
                here = reader(tokens).float().log_softmax(-1)
                probability = here.exp()
                best = probability.topk(lens.tokens.shape[-1], dim=-1)
                lens.tokens[step, tokens] = best.indices.cpu().numpy()
                lens.probability[step, tokens] = best.values.cpu().numpy()
                lens.entropy[step, tokens] = -(probability * here).sum(-1).cpu().numpy()
                final = end[tokens]
                lens.kl[step, tokens] = (final.exp() * (final - here)).sum(-1).clamp(min=0).cpu().numpy()
                lens.answer[step, tokens] = probability.gather(-1, answer[tokens]).squeeze(-1).cpu().numpy()
            progress.advance()
        return lens

    def _chunks(self, tokens: int) -> list[slice]:
        """Whose logits are held at once."""
        chunk = max(1, _LENS_ELEMENTS // self.config.vocab_size)
        return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]

    # Silencing

    def _instead(self, run: LiveRun, kind: str, progress: _Progress) -> Tensor:
        """What a silenced head carries, [step, token or 1, head, d]."""
        if kind != "resample":
            return torch.from_numpy(np.nan_to_num(run.mean_context)).unsqueeze(1) * (kind == "mean")
        if len(run) < 3:
            raise InputError("resampling shuffles the tokens after BOS and needs two at least: use zero or mean")
        order = np.random.default_rng(0).permutation(np.arange(1, len(run)))
        batch = self._batch(run.tokens[np.append(0, order)])
        with capture(self.model, ("PV",)) as captured, self._forward.watched(progress.advance):
            self.model(batch, return_type="none")
        values = StepValues(captured, torch.zeros_like(batch))
        return torch.stack([values.site("PV", step.index) for step in self.plan.steps]).nan_to_num()

    def _steps(self, layer: int) -> list[int]:
        return [step.index for step in self.plan.steps if step.layer == layer]

    def _each_silenced(
        self,
        batch: Tensor,
        heads: Sequence[int],
        layers: Sequence[int],
        instead: Tensor,
        position: int,
        progress: _Progress,
    ) -> Iterator[Tensor]:
        """Logits [head, vocab] after a position, for each layer and choice of its visits; `batch` is the prompt, once a head."""
        forward = self._forward
        kept = forward.kept(batch, progress.advance)
        for layer in layers:
            for visits, resumed in forward.resumed(batch, kept, self._steps(layer)):
                steps = [self.plan.step(layer, visit) for visit in visits]
                with self._silenced(steps, heads, instead), forward.watched(progress.advance):
                    logits = resumed(position)
                yield logits

    def _silenced(self, steps: Sequence[Step], heads: Sequence[int], instead: Tensor) -> Any:
        """Context i of the batch runs without head `heads[i]` at these steps."""

        def silence(z: Tensor, step: int) -> Tensor:
            z = z.clone()
            for context, head in enumerate(heads):
                z[context, :, head] = instead[step, :, head].to(z)
            return z

        return self._forward.silenced(steps, silence)

    def _places(self, run: LiveRun, layer: int, head: int, visits: Sequence[int], kind: str) -> list[Step]:
        if run.model["config"] != self.config.to_dict() or run.model["weights_sha256"] != self._weights:
            raise InputError(f"the run is of {run.model['name']!r}, not of this model: run the prompt again")
        if kind not in KINDS:
            raise InputError(f"expected a kind of ablation among {', '.join(KINDS)}, got {kind!r}")
        if why := run.lacks("PV", layer):
            raise InputError(f"layer {layer} has no heads to silence: {why}")
        if not 0 <= head < self.config.num_heads:
            raise InputError(f"no head {head}: expected 0 to {self.config.num_heads - 1}")
        if not visits or len(set(visits)) != len(visits):
            raise InputError(f"expected at least one visit, each once, got {tuple(visits)}")
        return [self.plan.step(layer, visit) for visit in visits]


class _Progress:
    """Counts what is done; the caller's function may raise to stop."""

    def __init__(self, report: OnProgress, total: int) -> None:
        self.report, self.total, self.done = report, total, 0

    def advance(self) -> None:
        self.report(min(self.done, self.total - 1), self.total)  # a replay that finds no room runs more
        self.done += 1


@contextmanager
def _memory_as_message(tokens: int) -> Iterator[None]:
    """An allocation that fails is one clear error."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in text:
            raise
        raise MemoryLimitError(
            f"not enough memory for a prompt of {tokens:,} tokens: shorten it, or load the model with a smaller dtype"
        ) from error


class LiveModel(Tracer):
    """The older name of what `visitlens.load(...)` gives: its `trace` is this one's `run`."""

    def __init__(self, model: Any, tokenizer: Any, *, bos: str | int | None = None, **about: Any) -> None:
        warnings.warn("LiveModel is visitlens.load(...) now, and its run is trace", DeprecationWarning, stacklevel=2)
        super().__init__(model, TextEncoder.of(tokenizer, model.config, bos=bos), **about)

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        limit: int = TOKEN_LIMIT,
        weights: str | None = None,
        **options: Any,
    ) -> LiveModel:
        """From a checkpoint folder or hub name, as before."""
        folder = resolve(checkpoint)
        about = {"name": folder.resolve().name, "weights_sha256": weights or weights_sha256(folder), "options": options}
        code = code_sha256(folder)  # before it is run
        model: Any = load_model(folder, dtype, device, **options)
        return cls(model, load_tokenizer(folder), limit=limit, code_sha256=code, **about)
