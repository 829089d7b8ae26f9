"""AdaptedModel: any decoder of a known family as an `InstrumentedModel`, by hooks; its code and weights stay as they are.

Packed documents run one by one, those of equal length in one batch, each as its own unpadded sequence from position 0: what
no family gets wrong. (Position ids, masks and caches leak between documents in several families; see `guards`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visitlens.hooks.adapters.attention_calls import watch_registry, watch_sdpa
from visitlens.hooks.adapters.family import Family
from visitlens.hooks.adapters.observer import StepObserver
from visitlens.hooks.capture import Captured
from visitlens.hooks.instrumented import InstrumentedModel
from visitlens.hooks.loop_plan import ExecutionPlan
from visitlens.kernels.errors import InputError
from visitlens.kernels.segments import Segments


@dataclass(frozen=True)
class Part:
    """Documents of one length, run together as part of a forward over contexts: `index [document, position]` are their
    places among the flat tokens. `whole`: they are all of them, in order."""

    index: Tensor
    contexts: int
    length: int
    first: bool
    whole: bool


class AdaptedModel(InstrumentedModel):
    """`model` is the model as its library made it, in evaluation mode; `plan` and `config` follow from its family."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        self.model, self.family = model.eval(), family
        self.anatomy = family.anatomy(model)
        self.plan = ExecutionPlan.from_layers(self.anatomy.order)
        self.config = family.facts(model, self.anatomy)
        self.body = family.body(model)
        self.part: Part | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __call__(self, tokens: Tensor, segments: Tensor | None = None, *, return_type: str = "logits") -> Tensor | None:
        """As `InstrumentedModel`.

        Raises:
            InputError: ids outside the vocabulary, shapes that disagree, a document longer than the model's context.
            PlanError: the model left its plan, where someone observes.
        """
        if return_type not in ("logits", "loss", "none"):
            raise InputError(f"expected return_type 'logits', 'loss' or 'none', got {return_type!r}")
        self._check(tokens, segments)
        run = self.body if return_type == "none" else self.model
        logits = None
        for part in _parts(tokens, segments):
            documents = tokens.flatten()[part.index.to(tokens.device)].long()
            self.part = part
            try:
                result = run(documents, **self.family.call, **self.family.start(self.model, documents))
            finally:
                self.part = None
            if return_type == "none":
                continue
            piece = _logits(result)
            if logits is None:
                logits = piece.new_full((tokens.numel(), piece.shape[-1]), float("nan"))
            logits[part.index.flatten().to(piece.device)] = piece.flatten(0, 1)
        if logits is None:
            return None
        logits = logits.unflatten(0, tuple(tokens.shape))
        return logits if return_type == "logits" else _loss(logits, tokens, segments)

    @contextmanager
    def observing(self, captured: Captured) -> Iterator[None]:
        observer = StepObserver(self, captured)
        watch = watch_registry if self.family.attention_calls == "registry" else watch_sdpa
        with ExitStack() as undo:
            undo.callback(observer.remove)
            observer.install()
            undo.enter_context(watch(observer.attention_observers()))
            yield

    def _check(self, tokens: Tensor, segments: Tensor | None) -> None:
        if tokens.ndim != 2 or tokens.numel() == 0:
            raise InputError(f"expected token ids [context, position], at least one, got shape {tuple(tokens.shape)}")
        if segments is not None and segments.shape != tokens.shape:
            raise InputError(
                f"segment ids {tuple(segments.shape)} and token ids {tuple(tokens.shape)} must have one shape"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab_size:
            raise InputError(
                f"token ids must lie in 0..{self.config.vocab_size - 1}, got {low}..{high}: is this the model's tokenizer?"
            )
        if tokens.shape[1] > self.config.context_length:
            raise InputError(f"{tokens.shape[1]} positions exceed the model's context of {self.config.context_length}")


def _parts(tokens: Tensor, segment_ids: Tensor | None) -> Iterator[Part]:
    contexts, length = tokens.shape
    if segment_ids is None:
        spans = Segments.whole_contexts(contexts, length).spans
    else:
        real = (segment_ids >= 0).flatten().tolist()
        spans = [span for span in Segments.from_ids(segment_ids).spans if real[span[0]]]
    if not spans:
        raise InputError("every token is padding: expected at least one document")
    by_length: dict[int, list[int]] = {}
    for start, end in spans:
        by_length.setdefault(end - start, []).append(start)
    for number, (n, starts) in enumerate(sorted(by_length.items())):
        index = torch.tensor(starts).unsqueeze(1) + torch.arange(n)
        yield Part(index, contexts, length, number == 0, index.numel() == tokens.numel())


def _logits(result: Any) -> Tensor:
    logits = getattr(result, "logits", None)
    if logits is None:
        raise InputError(
            "this model has no language-model head, so there are no logits: load its ...ForCausalLM class, "
            "or ask for return_type='none'"
        )
    return logits


def _loss(logits: Tensor, tokens: Tensor, segments: Tensor | None) -> Tensor:
    """[context, position - 1] nats; NaN where the next token is another document's or padding."""
    targets = tokens[:, 1:].flatten().long().to(logits.device)
    wide = logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(wide if wide.dtype == torch.float64 else wide.float(), targets, reduction="none")
    loss = loss.view(tokens.shape[0], -1)
    if segments is None:
        return loss
    segments = segments.to(loss.device)
    return loss.masked_fill((segments[:, 1:] != segments[:, :-1]) | (segments[:, 1:] < 0), float("nan"))
