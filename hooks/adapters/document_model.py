"""DocumentModel: a model that runs packed documents one by one, and puts what it finds back into their contexts.

Documents of equal length run in one batch, each as its own unpadded sequence from position 0: what no family gets wrong.
(Position ids, masks and caches leak between documents in several families; see `guards`.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import RLock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import VISITED, Captured
from visitlens.hooks.core.loop_plan import Step
from visitlens.hooks.core.model_interface import InstrumentedModel, check_tensor
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.interventions.intervention import per_token
from visitlens.kernels.segments import Segments

Change = Callable[[str, Step, Tensor, Tensor | None], Tensor | None]
"""(site, step, value [context, position, ...], tokens there [context, position] or None for all) -> what takes its place;
None leaves it."""


@dataclass(frozen=True)
class Part:
    """Documents of one length, run together as part of a forward over contexts: `index [document, position]` are their
    places among the flat tokens. `whole`: they are all of them, in order."""

    index: Tensor
    contexts: int
    length: int
    first: bool
    whole: bool

    def fits(self, site: str) -> bool:
        """Whether a site's value of the documents is that of the contexts, in another shape at most."""
        return self.whole and (site != "P" or self.index.shape[1] == self.length)


_TURNS: WeakKeyDictionary[DocumentModel, RLock] = WeakKeyDictionary()
"""Threads run a model one after another."""


class DocumentModel(InstrumentedModel):
    """`part` is the batch of documents at work, None where the model is run past `__call__`."""

    in_parts = True
    part: Part | None = None

    @abstractmethod
    def run_documents(self, documents: Tensor, return_type: str) -> Tensor | None:
        """Logits [document, position, vocab] of one batch of token ids; None for "none"."""

    def __call__(self, tokens: Tensor, segments: Tensor | None = None, *, return_type: str = "logits") -> Tensor | None:
        return self.forward(tokens, segments, return_type=return_type)

    def forward(self, tokens: Tensor, segments: Tensor | None = None, *, return_type: str = "logits") -> Tensor | None:
        """As `InstrumentedModel.__call__`.

        Raises:
            InputError: ids outside the vocabulary, shapes that disagree, a document longer than the model's context.
            PlanError: the model left its plan, where someone observes.
        """
        self.check_turn()
        check_return_type(return_type)
        self._check(tokens, segments)
        with _TURNS.setdefault(self, RLock()):  # `part` is of one forward
            return self._run(tokens, segments, return_type)

    def _run(self, tokens: Tensor, segments: Tensor | None, return_type: str) -> Tensor | None:
        logits = None
        for part in _parts(tokens, segments):
            self.part = part
            documents = tokens.flatten()[part.index.to(tokens.device)].long()
            try:
                piece = self.run_documents(documents, return_type)
            finally:
                self.part = None
            if piece is None:
                continue
            if piece.shape[:2] != documents.shape:
                raise InputError(
                    f"{self.config.family} gave logits of shape {tuple(piece.shape)} for tokens of shape {tuple(documents.shape)}; expected "
                    "one row a token. A model that computes the last position's alone is asked for all by an argument of its forward "
                    "(`Family.call`), or run with return_type='none'"
                )
            if part.whole:
                logits = piece.flatten(0, 1)
                break
            if logits is None:
                logits = piece.new_full((tokens.numel(), piece.shape[-1]), float("nan"))
            logits[part.index.flatten().to(piece.device)] = piece.flatten(0, 1)
        if logits is None:
            return None
        return read_out(logits.unflatten(0, tuple(tokens.shape)), tokens, segments, return_type)

    def begin(self, captured: Captured, whole: tuple[int, int] | None = None) -> None:
        """Before documents run: where they are the first of a forward, the last one's values go. `whole` is the shape of a
        forward past `__call__`, where it is known."""
        shape = whole if self.part is None else (self.part.contexts, self.part.length)
        if shape is None:
            captured.clear()
        elif self.part is None or self.part.first:
            captured.begin(*shape, next(iter(self.parameters())))

    def place(self, captured: Captured, site: str, step: int, value: Tensor, batch: tuple[int, ...]) -> None:
        """Stores a site's value of the batch at work. What is padding is NaN (0 in a pattern, and for expert ids)."""
        value, part = value.detach(), self.part
        if site in SITES and value.ndim == 1 + len(SITES[site].axes):  # routers and experts see flat tokens
            value = value.unflatten(0, batch)
        if part is None or (site == "P" and part.fits(site)):  # behind a cache a pattern has more keys than queries
            captured.store(site, step, value)
            return
        buffer, everywhere = captured.held(site, step), part.fits(site)
        if buffer is None:
            buffer = captured.room(site, step, _laid(part, site, value), value)
            if not everywhere:
                buffer.fill_(float("nan") if value.is_floating_point() and site != "P" else 0)
        if everywhere:
            buffer.view(value.shape).copy_(value)
        else:
            _put(part, buffer, site, value)
        captured.hold(site, step, buffer)

    def changed(
        self,
        change: Change,
        site: str,
        step: Step,
        value: Tensor,
        batch: tuple[int, ...],
        there: Tensor | None = None,
    ) -> Tensor | None:
        """What `change` makes of a site's value of the batch at work, in the value's own shape; None where nothing changes.

        Raises:
            InputError: the model is run past `__call__`, so that its documents aren't known.
        """
        if self.part is None:
            raise InputError("call the adapted model itself inside `intervene`: only it says which tokens run")
        laid = value.unflatten(0, batch) if value.ndim == 1 + len(SITES[site].axes) else value
        at = None if there is None else _in_contexts(self.part, VISITED, there.to(value.device))
        before = _in_contexts(self.part, site, laid)
        after = change(site, step, before, at)
        if after is None:
            return None
        if at is not None:
            after = torch.where(per_token(at, site, before), after.to(before), before)
        new = _of_documents(self.part, site, after).reshape(value.shape)
        return None if not new.requires_grad and torch.equal(new, value) else new

    def _check(self, tokens: Tensor, segments: Tensor | None) -> None:
        check_tensor(tokens)
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


def _laid(part: Part, site: str, value: Tensor) -> tuple[int, ...]:
    """Shape among the contexts of documents [document, position, ...], of a pattern [document, head, query, key]."""
    if site == "P":
        return (part.contexts, value.shape[1], part.length, part.length)
    return (part.contexts, part.length, *value.shape[2:])


def _put(part: Part, buffer: Tensor, site: str, value: Tensor) -> None:
    """Documents in their places among the contexts."""
    if site == "P":
        for document, (context, span) in zip(value, _spans(part), strict=True):
            buffer[context, :, span, span] = document
    else:
        buffer.flatten(0, 1)[part.index.flatten().to(value.device)] = value.flatten(0, 1)


def _spans(part: Part) -> Iterator[tuple[int, slice]]:
    """Context and positions of each document."""
    for start in part.index[:, 0].tolist():
        context, at = divmod(start, part.length)
        yield context, slice(at, at + part.index.shape[1])


def _in_contexts(part: Part, site: str, value: Tensor) -> Tensor:
    """Documents among the contexts, zeros elsewhere; the value itself where it has the contexts' shape already."""
    if part.fits(site):
        return value if site == "P" else value.flatten(0, 1).unflatten(0, (part.contexts, part.length))
    buffer = value.new_zeros(_laid(part, site, value))
    _put(part, buffer, site, value)
    return buffer


def _of_documents(part: Part, site: str, value: Tensor) -> Tensor:
    """The inverse of `_in_contexts`."""
    if part.fits(site):
        return value
    if site == "P":
        return torch.stack([value[context, :, span, span] for context, span in _spans(part)])
    return value.flatten(0, 1)[part.index.to(value.device)]


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


def check_return_type(return_type: str) -> None:
    """Raises InputError: none of those that there are."""
    if return_type not in ("logits", "loss", "none"):
        raise InputError(f"expected return_type 'logits', 'loss' or 'none', got {return_type!r}")


def read_out(logits: Tensor, tokens: Tensor, segments: Tensor | None, return_type: str) -> Tensor:
    """Logits [context, position, vocab] or, for "loss", what they lose."""
    return logits if return_type == "logits" else _loss(logits, tokens, segments)


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
