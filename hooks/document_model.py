"""DocumentModel: a model that runs packed documents one by one, and puts what it finds back into their contexts.

Documents of equal length run in one batch, each as its own unpadded sequence from position 0: what no family gets wrong.
(Position ids, masks and caches leak between documents in several families; see `guards`.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from visitlens.hooks.capture import Captured
from visitlens.hooks.instrumented import InstrumentedModel
from visitlens.hooks.loop_plan import Step
from visitlens.hooks.sites import SITES
from visitlens.kernels.errors import InputError, VisitlensError
from visitlens.kernels.segments import Segments

Change = Callable[[str, Step, Tensor], Tensor | None]
"""(site, step, value [context, position, ...]) -> what takes its place; None leaves it."""


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


class OverwrittenError(VisitlensError, RuntimeError):
    """A model changed values in place after they were read; they are copied from then on."""


class DocumentModel(InstrumentedModel):
    """`part` is the batch of documents at work, None where the model is run past `__call__`. `copied` are sites that the model
    overwrites in place after they are read: found out at the first forward, and kept as copies."""

    part: Part | None = None
    copied: frozenset[str] = frozenset()

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
        if return_type not in ("logits", "loss", "none"):
            raise InputError(f"expected return_type 'logits', 'loss' or 'none', got {return_type!r}")
        self._check(tokens, segments)
        logits = None
        for part in _parts(tokens, segments):
            self.part = part
            documents = tokens.flatten()[part.index.to(tokens.device)].long()
            try:
                piece = self.run_documents(documents, return_type)
            except OverwrittenError:
                piece = self.run_documents(documents, return_type)
            finally:
                self.part = None
            if piece is None:
                continue
            if part.whole:
                logits = piece.flatten(0, 1)
                break
            if logits is None:
                logits = piece.new_full((tokens.numel(), piece.shape[-1]), float("nan"))
            logits[part.index.flatten().to(piece.device)] = piece.flatten(0, 1)
        if logits is None:
            return None
        logits = logits.unflatten(0, tuple(tokens.shape))
        return logits if return_type == "logits" else _loss(logits, tokens, segments)

    def place(self, captured: Captured, site: str, step: int, value: Tensor, batch: tuple[int, ...]) -> None:
        """Stores a site's value of the batch at work. What is padding is NaN (0 in a pattern, and for expert ids)."""
        value = value.detach()
        if site in SITES and value.ndim == 1 + len(SITES[site].axes):  # routers and experts see flat tokens
            value = value.unflatten(0, batch)
        part = self.part
        if part is not None and not part.fits(site):
            captured.store(site, step, _placed(part, captured.held(site, step), site, value))
            return
        if site in self.copied or value.is_inference():
            value = value.clone()
        if part is not None and site != "P" and value.shape[:2] != (part.contexts, part.length):
            value = value.flatten(0, 1).unflatten(0, (part.contexts, part.length))
        captured.store(site, step, value)

    def check_kept(self, captured: Captured) -> None:
        """At the end of a forward: what was read is what is kept.

        Raises:
            OverwrittenError: the model has changed some of it in place.
        """
        if found := captured.overwritten():
            self.copied |= found
            raise OverwrittenError(
                f"{self.config.family} overwrites {', '.join(sorted(found))} in place after they were read; they are copied from now "
                "on: run the forward again"
            )

    def changed(self, change: Change, site: str, step: Step, value: Tensor, batch: tuple[int, ...]) -> Tensor | None:
        """What `change` makes of a site's value of the batch at work, in the value's own shape; None where nothing changes.

        Raises:
            InputError: the model is run past `__call__`, so that its documents aren't known.
        """
        if self.part is None:
            raise InputError("call the adapted model itself inside `intervene`: only it says which tokens run")
        laid = value.unflatten(0, batch) if value.ndim == 1 + len(SITES[site].axes) else value
        after = change(site, step, _in_contexts(self.part, site, laid))
        if after is None:
            return None
        new = _of_documents(self.part, site, after).reshape(value.shape)
        return None if not new.requires_grad and torch.equal(new, value) else new

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


def _placed(part: Part, buffer: Tensor | None, site: str, value: Tensor, fill: float = float("nan")) -> Tensor:
    """Documents [document, position, ...] in their places among the contexts; of a pattern [document, head, query, key]."""
    if site == "P":
        if buffer is None:
            buffer = value.new_zeros(part.contexts, value.shape[1], part.length, part.length)
        for document, (context, span) in zip(value, _spans(part), strict=True):
            buffer[context, :, span, span] = document
        return buffer
    if buffer is None:
        buffer = value.new_full(
            (part.contexts, part.length, *value.shape[2:]), fill if value.is_floating_point() else 0
        )
    buffer.flatten(0, 1)[part.index.flatten().to(value.device)] = value.flatten(0, 1)
    return buffer


def _spans(part: Part) -> Iterator[tuple[int, slice]]:
    """Context and positions of each document."""
    for start in part.index[:, 0].tolist():
        context, at = divmod(start, part.length)
        yield context, slice(at, at + part.index.shape[1])


def _in_contexts(part: Part, site: str, value: Tensor) -> Tensor:
    """As `_placed` in a buffer of zeros, the value itself where it has the contexts' shape already."""
    if part.fits(site):
        return value if site == "P" else value.flatten(0, 1).unflatten(0, (part.contexts, part.length))
    return _placed(part, None, site, value, 0.0)


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
