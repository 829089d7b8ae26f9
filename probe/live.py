"""A model under a prompt that someone types: LiveModel runs it, and silences its heads on the spot.

from visitlens.probe.live import LiveModel

live = LiveModel.load("assets/models/smelt")
run = live.run("Input: ( [ {\\nOutput:")
run.plot(layer=4, head=2)
live.ablate(run, layer=4, head=2, visits=(2,)).changes()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from visitlens.hooks.capture import Captured, StepValues, capture
from visitlens.hooks.loop_plan import Step, visit_choices
from visitlens.hooks.models.checkpoint import load_model, load_tokenizer, weights_sha256
from visitlens.kernels.errors import InputError, MemoryLimitError
from visitlens.probe.live_ablation import KINDS, HeadScan, SilencedHead, check_target, divergence
from visitlens.probe.live_prompts import TOKEN_LIMIT, DyckPreset, TokenTexts, dyck_presets, encode
from visitlens.probe.live_run import LiveRun, empty_lens, log_softmax

if TYPE_CHECKING:
    from visitlens.hooks.models.looped_moe import LoopedMoE
    from visitlens.probe.live_run import Lens

OnProgress = Callable[[int, int], None]
"""Called with (done, total) between layers; an exception from it ends the run there, and leaves no hook behind."""
_SITES = ("resid", "Q", "K", "PV", "experts", "gates", "attn_write", "moe_write")
_LENS_ELEMENTS = 2**22  # logits of a lens that are held at once
_SCAN_TOKENS = 2048  # tokens of a scan that run at once


def _nothing(done: int, total: int) -> None:
    """Progress that nobody watches."""


class LiveModel:
    """A native looped MoE (or its Baseline) with its tokenizer. Not for several threads at once.

    `limit` is the most tokens a prompt may have, BOS included; the model's own context length bounds it too.
    """

    def __init__(
        self,
        model: LoopedMoE,
        tokenizer: Any,
        *,
        name: str = "model",
        weights_sha256: str | None = None,
        limit: int = TOKEN_LIMIT,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.plan, self.config = model.plan, model.config
        self.limit = min(limit, model.config.context_length)
        self.text_of = TokenTexts(tokenizer)
        self._weights = weights_sha256

    @classmethod
    def load(
        cls, checkpoint: str | Path, *, dtype: str = "float32", device: str = "cpu", limit: int = TOKEN_LIMIT
    ) -> LiveModel:
        """From a checkpoint folder.

        Raises:
            CheckpointError: a file is missing or damaged.
            InputError: an unknown dtype.
        """
        folder = Path(checkpoint)
        model = load_model(folder, dtype, device)
        name = folder.resolve().name
        return cls(model, load_tokenizer(folder), name=name, weights_sha256=weights_sha256(folder), limit=limit)

    @cached_property
    def presets(self) -> tuple[DyckPreset, ...]:
        """Few-shot Dyck prompts that fit the limit; none where the tokenizer can't write them."""
        try:
            found = dyck_presets(self.tokenizer)
        except InputError:
            return ()
        return tuple(p for p in found if len(self._ids(p.text, 2**31)) <= self.limit)

    @torch.no_grad()
    def run(self, prompt: str, *, coda_lens: bool = True, top: int = 5, on_progress: OnProgress = _nothing) -> LiveRun:
        """One forward over a prompt, with everything a LiveRun holds; `top` tokens a lens row are kept.

        Raises:
            InputError: an empty prompt, or one above the limit.
            MemoryLimitError: the machine's or the device's memory doesn't suffice.
        """
        began = time.perf_counter()
        ids = self._ids(prompt, self.limit)
        steps, tokens = len(self.plan), len(ids)
        coda = self._coda() if coda_lens else []
        through = [step.index for step in self.plan.steps[: steps - len(coda)]] if coda else []
        chunk = max(1, _LENS_ELEMENTS // self.config.vocab_size)
        reads = -(-tokens // chunk)
        progress = _Progress(on_progress, steps + len(through) + reads * (1 + bool(coda)))
        with _memory_as_message(tokens):
            batch = self._batch(ids)
            with capture(self.model, _SITES) as captured, self._watched(progress):
                logits = cast(Tensor, self.model(batch))
            arrays = self._arrays(captured, batch)
            states = self._states(captured)
            lens = self._read(states, range(steps), states[-1], chunk, top, progress)
            carried = []
            for index in through:
                carried.append(self.model.run_steps(states[index].unsqueeze(0), start=coda[0].index)[0])
                progress.advance()
            final = states[-1]
            through_coda = self._read(carried, through, final, chunk, top, progress) if coda else None
            return LiveRun(
                model={"name": self.name, "config": self.config.to_dict(), "weights_sha256": self._weights},
                plan=self.plan,
                prompt=prompt,
                tokens=ids,
                text_of=self.text_of,
                logits=_numpy(logits[0]),
                lens=lens,
                coda_lens=through_coda,
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
            with self._silenced(places, [head], instead), self._watched(progress):
                logits = cast(Tensor, self.model(self._batch(run.tokens)))
        return SilencedHead(run, layer, head, tuple(visits), kind, _numpy(logits[0]))

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
        check_target(target, self.config.vocab_size)
        self._places(run, 0, 0, (1,), kind)
        places = tuple(
            (layer, visits)
            for layer in range(len(self.plan.visits))
            for visits in visit_choices(self.plan.visits[layer])
        )
        together = max(1, _SCAN_TOKENS // len(run))
        groups = [range(at, min(at + together, run.heads)) for at in range(0, run.heads, together)]
        starts = [self.plan.step(layer, visits[0]).index for layer, visits in places]
        once = len(self.plan) * (1 + (kind == "resample"))
        total = once + len(groups) * sum(len(self.plan) - start for start in starts)
        progress = _Progress(on_progress, total)
        before = run.log_probs(position)
        after = np.empty((len(places), run.heads, self.config.vocab_size), dtype=np.float64)
        with _memory_as_message(len(run)):
            instead = self._instead(run, kind, progress)
            with capture(self.model, ("resid",)) as captured, self._watched(progress):
                self.model(self._batch(run.tokens), return_type="none")
            for row, ((layer, visits), start) in enumerate(zip(places, starts, strict=True)):
                state = captured.at("resid", start)
                steps = [self.plan.step(layer, visit) for visit in visits]
                for heads in groups:
                    with self._silenced(steps, heads, instead), self._watched(progress):
                        x = self.model.run_steps(state.expand(len(heads), -1, -1), start=start)
                    last = x[:, position]
                    after[row, heads.start : heads.stop] = log_softmax(_numpy(self.model.logits(last)))
        kl = np.array([[divergence(before, head) for head in heads] for heads in after])
        return HeadScan(run, position, target, kind, places, after[:, :, target] - before[target], kl)

    def __repr__(self) -> str:
        loop = f"layers {self.plan.looped_layers}" if self.plan.looped_layers else "no layer looped"
        return f"LiveModel({self.name!r}, {len(self.plan)} steps, {loop}, up to {self.limit} tokens)"

    # What one run is made of

    def _ids(self, prompt: str, limit: int) -> np.ndarray:
        return encode(prompt, self.tokenizer, self.config.bos_token_id, limit)

    def _batch(self, tokens: np.ndarray) -> Tensor:
        return torch.from_numpy(tokens).unsqueeze(0).to(self._device)

    @property
    def _device(self) -> torch.device:
        return self.model.rotary_cos.device

    def _arrays(self, captured: Captured, batch: Tensor) -> dict[str, np.ndarray]:
        """The arrays of a LiveRun that are made of captured sites."""
        values = StepValues(captured, torch.zeros_like(batch))
        each = range(len(self.plan))

        def stacked(site: str) -> Tensor:
            return torch.stack([values.site(site, step) for step in each])

        def rms(x: Tensor) -> np.ndarray:
            return np.sqrt(np.square(_numpy(x), dtype=np.float64).mean(-1)).astype(np.float32)

        attn, moe = stacked("attn_write"), stacked("moe_write")
        rows = values.attention_rows
        pairs = [
            values.attention_overlaps[p.layer].across[p.earlier.visit - 1, p.later.visit - 1].mass_overlap
            for p in self.plan.pairs
        ]
        return {
            "queries": _numpy(stacked("Q")),
            "keys": _numpy(stacked("K")),
            "experts": stacked("experts").cpu().numpy(),
            "gates": _numpy(stacked("gates")),
            "resid_rms": rms(stacked("resid")),
            "update_rms": rms(attn + moe),
            "attn_write_rms": rms(attn),
            "moe_write_rms": rms(moe),
            "sink_mass": _numpy(torch.stack([row.sink_mass for row in rows])),
            "attention_entropy": _numpy(torch.stack([row.entropy for row in rows])),
            "mass_overlap": _numpy(torch.stack(pairs))
            if pairs
            else np.empty((0, *rows[0].sink_mass.shape), dtype=np.float32),
            "mean_context": _numpy(stacked("PV")).mean(1),
        }

    def _states(self, captured: Captured) -> list[Tensor]:
        """Residual stream [token, hidden] after each step, bit for bit as the model had it."""
        last = len(self.plan) - 1
        inputs = [captured.at("resid", step)[0] for step in range(1, len(self.plan))]
        return [
            *inputs,
            captured.at("resid", last)[0] + captured.at("attn_write", last)[0] + captured.at("moe_write", last)[0],
        ]

    def _coda(self) -> list[Step]:
        """The steps after the last looped one; none where nothing is looped."""
        looped = [step.index for step in self.plan.steps if step.layer in self.plan.looped_layers]
        return list(self.plan.steps[looped[-1] + 1 :]) if looped else []

    def _read(
        self, states: Sequence[Tensor], at: Sequence[int], final: Tensor, chunk: int, top: int, progress: _Progress
    ) -> Lens:
        """The lens from `states`, which belong to the steps `at`; a chunk of tokens at a time."""
        lens = empty_lens(len(self.plan), len(final), min(top, self.config.vocab_size))
        for start in range(0, len(final), chunk):
            tokens = slice(start, start + chunk)
            end = self.model.logits(final[tokens]).float().log_softmax(-1)
            probable, answer = end.exp(), end.argmax(-1, keepdim=True)
            for step, state in zip(at, states, strict=True):
                here = self.model.logits(state[tokens]).float().log_softmax(-1)
                probability = here.exp()
                best = probability.topk(lens.tokens.shape[-1], dim=-1)
                lens.tokens[step, tokens] = best.indices.cpu().numpy()
                lens.probability[step, tokens] = best.values.cpu().numpy()
                lens.entropy[step, tokens] = -(probability * here).sum(-1).cpu().numpy()
                lens.kl[step, tokens] = (probable * (end - here)).sum(-1).clamp(min=0).cpu().numpy()
                lens.answer[step, tokens] = probability.gather(-1, answer).squeeze(-1).cpu().numpy()
            progress.advance()
        return lens

    # Hooks

    @contextmanager
    def _watched(self, progress: _Progress) -> Iterator[None]:
        """Progress before each step: where a run can be stopped."""

        def step(value: Tensor, hook: Any) -> None:
            progress.advance()

        names = [f"blocks.{s.layer}.visit.{s.visit}.hook_resid_pre" for s in self.plan.steps]
        with self.model.hooks(fwd_hooks=[(name, step) for name in names]):
            yield

    def _instead(self, run: LiveRun, kind: str, progress: _Progress) -> Tensor:
        """What a silenced head carries, [step, token or 1, head, d]."""
        if kind != "resample":
            return torch.from_numpy(run.mean_context).unsqueeze(1) * (kind == "mean")
        if len(run) < 3:
            raise InputError("resampling shuffles the tokens after BOS and needs two at least: use zero or mean")
        order = np.random.default_rng(0).permutation(np.arange(1, len(run)))
        with capture(self.model, ("PV",)) as captured, self._watched(progress):
            self.model(self._batch(run.tokens[np.append(0, order)]), return_type="none")
        return torch.stack([captured.at("PV", step.index)[0] for step in self.plan.steps])

    @contextmanager
    def _silenced(self, steps: Sequence[Step], heads: Sequence[int], instead: Tensor) -> Iterator[None]:
        """Context i of the batch runs without head `heads[i]` at these steps."""

        def silence(z: Tensor, hook: Any, step: int) -> Tensor:
            z = z.clone()
            for context, head in enumerate(heads):
                z[context, :, head] = instead[step, :, head].to(z)
            return z

        with ExitStack() as stack:
            for step in steps:
                name = f"blocks.{step.layer}.visit.{step.visit}.attn.hook_z"
                stack.enter_context(self.model.hooks(fwd_hooks=[(name, partial(silence, step=step.index))]))
            yield

    def _places(self, run: LiveRun, layer: int, head: int, visits: Sequence[int], kind: str) -> list[Step]:
        if run.model["config"] != self.config.to_dict() or run.model["weights_sha256"] != self._weights:
            raise InputError(f"the run is of {run.model['name']!r}, not of this model: run the prompt again")
        if kind not in KINDS:
            raise InputError(f"expected a kind of ablation among {', '.join(KINDS)}, got {kind!r}")
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
        self.report(self.done, self.total)
        self.done += 1


def _numpy(x: Tensor) -> np.ndarray:
    """float32 (float64 stays)."""
    return (x if x.dtype == torch.float64 else x.float()).cpu().numpy()


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
