"""The Dyck case study on a model: the ablation task, completion scores by shots, and one head's attention at the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.text.encoder import TextEncoder
from visitlens.probe.analyses.ablation.heads import Task
from visitlens.probe.analyses.results.store import DyckExample, DyckStudy
from visitlens.probe.measures.grouped import Grouped
from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import wide
from visitlens.probe.samples.dyck_prompts import SHOTS, AnswerStyle, DyckPrompt, dyck_case
from visitlens.probe.samples.scores import check_predicts, device_of

STUDY = 3
"""First word of a prompt's seed: those that models are trained and validated on begin with others."""
MAX_GROUPS = 128
_AT_ONCE = 8192
_EXAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class DyckSettings:
    """Which prompts: `style=None` draws each prompt's answer style, as the bundled models were trained."""

    prompts: int = 32
    shots: int = 4
    seed: int = 0
    kinds: int = 4
    depth: tuple[int, int] = (3, 4)
    length: tuple[int, int] = (3, 10)
    style: AnswerStyle | None = AnswerStyle()  # noqa: RUF009 (frozen)

    def draw(self, tokenizer: Any, shots: int | None = None) -> list[DyckPrompt]:
        """The prompts; the same queries for every number of shots."""
        options: dict[str, Any] = {"kinds": self.kinds, "depth": self.depth, "length": self.length, "style": self.style}
        shots = self.shots if shots is None else shots
        return [dyck_case((STUDY, self.seed, i), tokenizer, shots=shots, **options) for i in range(self.prompts)]

    def fitting(self, tokenizer: Any, context_length: int) -> tuple[DyckSettings, tuple[int, ...]]:
        """These settings with as many shots as fit the context, and every number of shots that does.

        Raises:
            InputError: not even one demonstration fits.
        """
        fits = []
        for k in sorted({*SHOTS, self.shots}):
            longest = max(len(prompt.tokens) for prompt in self.draw(tokenizer, k)) + 1
            if longest > context_length:
                break
            fits.append(k)
        if len(fits) < 2:
            raise InputError(
                f"a Dyck prompt with one demonstration doesn't fit the model's context of {context_length} tokens"
            )
        return replace(self, shots=max(k for k in fits if k <= max(self.shots, 1))), tuple(fits)


@dataclass(frozen=True)
class _Padded:
    """Prompts of like length, BOS in front, padded behind: padding comes after all that is read, so it changes nothing."""

    index: list[int]
    prompts: list[DyckPrompt]
    tokens: Tensor


def dyck_task(prompts: Sequence[DyckPrompt], bos: int | None, pad: int) -> Task:
    """The three targets of each prompt; what follows them is cut off. Each prompt is a document, in groups of prompts where
    there are more than 128. `bos` leads a prompt; None where the model has no such token."""
    leads, prompts = zip(*(prompt.led(bos) for prompt in prompts), strict=True)
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].targets[-1])
    length = prompts[order[-1]].targets[-1] + 2
    tokens = np.full((len(prompts), length), pad, dtype=np.int32)
    document = np.full((len(prompts), length), -1)
    context, position = [], []
    for row, index in enumerate(order):
        prompt = prompts[index]
        stop = prompt.targets[-1] + 1
        tokens[row, 0], tokens[row, 1 : stop + 1] = leads[index], prompt.tokens[:stop]
        document[row, : stop + 1] = index
        context += [row] * len(prompt.targets)
        position += [at + 1 for at in prompt.targets]
    return Task(tokens, None, document, np.array(context), np.array(position), document[context, 0] % MAX_GROUPS)


@torch.inference_mode()
def dyck_scores(
    model: InstrumentedModel, tokenizer: Any, settings: DyckSettings, shots: Sequence[int] = SHOTS
) -> dict[str, Grouped]:
    """By shots: `exact_match` (every answer token is the most likely one given those before it), `accuracy` and `nll` (nats)
    over the answers' tokens, `target_accuracy` and `target_nll` over the targets."""
    names = ("exact_match", "accuracy", "nll", "target_accuracy", "target_nll")
    encoder = TextEncoder.of(tokenizer, model.config)
    shape = (min(settings.prompts, MAX_GROUPS), len(shots))
    total, count = ({name: np.zeros(shape) for name in names} for _ in range(2))
    for at, k in enumerate(shots):
        for batch in _padded(settings.draw(encoder.tokenizer, k), model, encoder):
            read = _reader(model, batch.tokens)
            for row, (index, prompt) in enumerate(zip(batch.index, batch.prompts, strict=True)):
                start, stop = (
                    prompt.answer
                )  # without BOS: the token at `start` is predicted at position `start` with it
                logits = read(row, start, stop).float()
                truth = batch.tokens[row, start + 1 : stop + 1]
                nats, right = F.cross_entropy(logits, truth, reduction="none"), logits.argmax(-1) == truth
                targets = torch.tensor(prompt.targets) - start
                found = {"exact_match": right.all().view(1), "accuracy": right, "nll": nats}
                found |= {"target_accuracy": right[targets], "target_nll": nats[targets]}
                for name, values in found.items():
                    total[name][index % MAX_GROUPS, at] += float(values.double().sum())
                    count[name][index % MAX_GROUPS, at] += len(values)
    return {name: Grouped(SCORES[name], {"shots": list(shots)}, total[name], count[name]) for name in names}


@torch.inference_mode()
def study_head(
    model: InstrumentedModel,
    tokenizer: Any,
    layer: int,
    head: int,
    settings: DyckSettings,
    *,
    name: str,
    about: dict[str, Any],
    shots: Sequence[int] = SHOTS,
) -> DyckStudy:
    """Where the head looks when it predicts the targets, at each visit, against the other heads of the loop and against
    uniform attention; with scores by shots and the maps of a few prompts at `settings.shots`."""
    encoder = TextEncoder.of(tokenizer, model.config)
    visits = model.plan.visits[layer]
    without = model.config.absent.get("P", {})
    layers = [n for n, count in model.plan.visits.items() if count == visits and n not in without]
    with_answers = [k for k in shots if k > 0]
    groups = min(settings.prompts, MAX_GROUPS)
    total = np.zeros((groups, len(with_answers), 3, visits, 2))
    count = np.zeros_like(total)
    examples: list[DyckExample] = []
    for at, k in enumerate(with_answers):
        for batch in _padded(settings.draw(encoder.tokenizer, k), model, encoder):
            patterns = _target_patterns(model, batch, layers)  # [layer, visit, prompt, head, target, key]
            for row, (index, prompt) in enumerate(zip(batch.index, batch.prompts, strict=True)):
                parts = _parts(prompt, patterns.shape[-1]).to(patterns)  # [key, part]
                mass = patterns[:, :, row] @ parts  # [layer, visit, head, target, part]
                own = mass[layers.index(layer), :, head]
                others = (mass.sum((0, 2)) - own) / (mass.shape[0] * mass.shape[2] - 1)
                seen = torch.arange(patterns.shape[-1]) < torch.tensor(prompt.targets).unsqueeze(1) + 1
                uniform = (seen.to(parts) / seen.sum(1, keepdim=True)) @ parts
                for of, values in enumerate((own, others, uniform.expand_as(own))):
                    total[index % groups, at, of] += values.sum(1).cpu().double().numpy()
                count[index % groups, at] += len(prompt.targets)
                if k == settings.shots and index < _EXAMPLES:
                    maps = patterns[layers.index(layer), :, row, head, :, : len(prompt.tokens) + 1]
                    examples.append(_example(prompt, maps))
    labels = {
        "shots": with_answers,
        "heads": ["dyck head", "other heads", "uniform"],
        "visit": list(range(1, visits + 1)),
        "part": ["bos", "answers"],
    }
    scores = dyck_scores(model, encoder, settings, shots)
    return DyckStudy(name, layer, head, scores, Grouped(MASS, labels, total, count), tuple(examples), about)


def _padded(prompts: Sequence[DyckPrompt], model: InstrumentedModel, encoder: TextEncoder) -> Iterator[_Padded]:
    leads, prompts = zip(*(prompt.led(encoder.bos.id) for prompt in prompts), strict=True)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
    while order:
        length = len(prompts[order[-1]].tokens) + 1
        several = max(1, _AT_ONCE // length)
        index, order = order[-several:], order[:-several]
        tokens = torch.full((len(index), length), encoder.pad)
        tokens[:, 0] = torch.tensor([leads[i] for i in index])
        for row, i in enumerate(index):
            tokens[row, 1 : len(prompts[i].tokens) + 1] = torch.from_numpy(prompts[i].tokens)
        yield _Padded(index, [prompts[i] for i in index], tokens.to(device_of(model)))


def _reader(model: InstrumentedModel, tokens: Tensor) -> Callable[[int, int, int], Tensor]:
    """(row, start, stop) -> logits [position, vocab]; of the native model only those asked for are formed."""
    check_predicts(model)
    if model.in_parts:
        logits = model(tokens)
        assert logits is not None
        return lambda row, start, stop: logits[row, start:stop]
    with capture(model, ["resid_out"]) as captured:
        model(tokens, return_type="none")
    last = captured.at("resid_out", len(model.plan) - 1)
    return lambda row, start, stop: model.logits(last[row, start:stop])


def _target_patterns(model: InstrumentedModel, batch: _Padded, layers: Sequence[int]) -> Tensor:
    """[layer, visit, prompt, head, target, key] attention of the positions that predict the targets."""
    steps = [s for s in model.plan.steps if s.layer in layers]
    adapted = model.in_parts
    with capture(model, ["P"] if adapted else ["Q", "K"]) as captured:
        model(batch.tokens, return_type="none")
    at = torch.tensor([prompt.targets for prompt in batch.prompts], device=batch.tokens.device)
    rows = torch.arange(len(at), device=at.device).unsqueeze(1)
    # A target at index i of the prompt stands at i + 1 behind BOS, and is predicted at i.
    hidden = torch.arange(batch.tokens.shape[1], device=at.device) > at.unsqueeze(-1)
    spread = model.config.num_heads // model.config.num_kv_heads
    patterns = {}
    for step in steps:
        if adapted:
            patterns[step] = captured.at("P", step.index).transpose(1, 2)[rows, at].transpose(1, 2)
            continue
        q = captured.at("Q", step.index)[rows, at]
        k = captured.at("K", step.index).repeat_interleave(spread, dim=2)
        scores = torch.einsum("pthd,pkhd->phtk", wide(q), wide(k)) * model.config.head_dim**-0.5
        patterns[step] = scores.masked_fill(hidden.unsqueeze(1), float("-inf")).softmax(-1)
    return torch.stack([torch.stack([patterns[s] for s in steps if s.layer == layer]) for layer in layers])


def _parts(prompt: DyckPrompt, keys: int) -> Tensor:
    """[key, part] 1 on the segment start (part 0) and on the demonstrations' answers (part 1)."""
    parts = torch.zeros(keys, 2)
    parts[0, 0] = 1
    for start, stop in prompt.demonstrations:
        parts[start + 1 : stop + 1, 1] = 1
    return parts


def _example(prompt: DyckPrompt, maps: Tensor) -> DyckExample:
    """Cut behind the last target; positions count BOS."""
    stop = prompt.targets[-1] + 2
    spans = tuple((start + 1, end + 1) for start, end in prompt.demonstrations)
    targets = tuple(at + 1 for at in prompt.targets)
    pieces = (prompt.lead, *prompt.pieces)[:stop]
    return DyckExample(prompt.shots, pieces, targets, spans, maps[..., :stop].cpu().double().numpy())


_PAPER = "6.4, html Figure 27"
MASS = Measure(
    "dyck_mass",
    "Attention at the Dyck targets",
    ("shots", "heads", "visit", "part"),
    "share of mass",
    "Sum of P over the segment start (bos) or over the demonstrations' answers, at the three positions that predict a target. "
    "Other heads: mean over the loop's other heads; uniform: the same share of the visible keys.",
    _PAPER,
)


def _score(name: str, title: str, unit: str, definition: str) -> Measure:
    return Measure(name, title, ("shots",), unit, definition, "5.3 and 6.4")


SCORES = {
    m.name: m
    for m in (
        _score(
            "exact_match",
            "Dyck exact match",
            "share of prompts",
            "Every token of the answer is the most likely one, given the true tokens before it.",
        ),
        _score("accuracy", "Dyck token accuracy", "share of tokens", "Answer tokens that are the most likely one."),
        _score("nll", "Dyck loss", "nats", "Mean negative log-likelihood of the answer's tokens."),
        _score(
            "target_accuracy", "Dyck target accuracy", "share of targets", "Targets that are the most likely token."
        ),
        _score("target_nll", "Dyck target loss", "nats", "Mean negative log-likelihood of the three targets."),
    )
}
