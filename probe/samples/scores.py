"""Scores: what a model predicts of a sample's tokens, document by document, as it is or intervened on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.interventions.intervene import Intervention, intervene
from visitlens.hooks.interventions.intervention import flatten
from visitlens.probe.samples.sample import EvalSet, Progress, silent


@dataclass(frozen=True, eq=False)
class Batch:
    """Some contexts of a sample. `row` and `position` are those of the counted tokens, `document` theirs."""

    tokens: Tensor
    segments: Tensor
    row: Tensor
    position: Tensor
    document: np.ndarray
    rows: slice

    @property
    def truth(self) -> Tensor:
        """[counted] token ids to predict."""
        return self.tokens[self.row, self.position].long()

    def at(self, logits: Tensor) -> Tensor:
        """[counted, vocab] of logits [context, position, vocab]: those by which they are predicted, at least float32."""
        rows = logits[self.row, self.position - 1]
        return rows if rows.dtype == torch.float64 else rows.float()

    def read(self, model: InstrumentedModel, final: Tensor) -> Tensor:
        """The same from the native model's last residual stream."""
        rows = model.logits(final[self.row, self.position - 1])
        return rows if rows.dtype == torch.float64 else rows.float()

    def add(self, values: Tensor, total: np.ndarray) -> None:
        """Adds values [counted, *axes] to totals [document, *axes]."""
        np.add.at(total, self.document, values.detach().double().cpu().numpy())


def batches(sample: EvalSet, at_once: int = 1, device: torch.device | str = "cpu") -> Iterator[Batch]:
    """The sample's contexts, `at_once` at a time."""
    contexts = sample.contexts
    for first in range(0, len(contexts.tokens), at_once):
        rows = slice(first, first + at_once)
        row, position = np.nonzero(sample.counted[rows])
        yield Batch(
            torch.from_numpy(contexts.tokens[rows]).long().to(device),
            torch.from_numpy(contexts.segments[rows]).to(device),
            torch.from_numpy(row).to(device),
            torch.from_numpy(position).to(device),
            sample.document_of[rows][row, position],
            rows,
        )


@dataclass(frozen=True, eq=False)
class Scores:
    """Sums over each document's counted predictions: `loss` in nats, `hits` where the most likely token is right."""

    loss: np.ndarray
    hits: np.ndarray

    def __sub__(self, other: Scores) -> Scores:
        return Scores(self.loss - other.loss, self.hits - other.hits)


Chain = Sequence[Intervention | Sequence[Intervention]]


@torch.no_grad()
def score(
    model: InstrumentedModel,
    sample: EvalSet,
    chains: Sequence[Chain] = ((),),
    on_progress: Progress = silent,
) -> list[Scores]:
    """One Scores a chain of interventions; the empty chain is the model as it is.

    What comes before a chain's first step is run once for all chains of the native model, which changes no bit.

    Raises:
        InputError: as `intervene`; an intervention that chose no token or expert in a batch leaves that batch as it is.
    """
    flat = [flatten(chain) for chain in chains]
    totals = [Scores(np.zeros(sample.documents), np.zeros(sample.documents)) for _ in flat]
    done, jobs = 0, len(flat) * len(sample.contexts.tokens)
    for batch in batches(sample, device=device_of(model)):
        plain = None if model.in_parts else _shared(model, batch, flat)
        for chain, scores in zip(flat, totals, strict=True):
            logits = predictions(model, batch, chain, plain)
            batch.add(F.cross_entropy(logits, batch.truth, reduction="none"), scores.loss)
            batch.add((logits.argmax(-1) == batch.truth).double(), scores.hits)
            done += 1
            on_progress(done, jobs)
    return totals


def predictions(
    model: InstrumentedModel,
    batch: Batch,
    chain: Sequence[Intervention] = (),
    plain: Captured | None = None,
    tokens: Tensor | None = None,
) -> Tensor:
    """[counted, vocab] logits of a batch with a chain of interventions.

    `plain`, of the native model: the run without them (STATE, and what the chain takes), from which it starts; `tokens`:
    those that run instead of the batch's own.
    """
    tokens = batch.tokens if tokens is None else tokens
    check_predicts(model)
    if model.in_parts:
        with intervene(model, chain, must_match=False):
            logits = model(tokens, batch.segments)
        assert logits is not None
        return batch.at(logits)
    if plain is not None and not chain:
        return batch.read(model, state_after(plain, -1))
    if plain is None or any(i.needs_reference or callable(i.place.token) for i in chain):
        with intervene(model, chain, must_match=False), capture(model, ["resid_out"]) as captured:
            model(tokens, batch.segments, return_type="none")
        return batch.read(model, state_after(captured, -1))
    start = min(step.index for i in chain for step in i.place.steps(model.plan))
    with intervene(model, chain, earlier=plain, must_match=False):
        return batch.read(model, model.run_steps(plain.at("resid", start), batch.segments, start=start))


def _shared(model: InstrumentedModel, batch: Batch, chains: Sequence[Sequence[Intervention]]) -> Captured:
    sites = {*STATE} | {site for chain in chains for i in chain for site, _ in i.stored(model.plan)}
    with capture(model, sites) as plain:
        model(batch.tokens, batch.segments, return_type="none")
    return plain


def check_predicts(model: InstrumentedModel) -> None:
    """Raises InputError: the model's logits aren't of the next token, so that it has no loss on text."""
    if why := model.config.missing.get("next token"):
        raise InputError(f"{model.config.family} has no loss on text: {why}")


def device_of(model: InstrumentedModel) -> torch.device:
    return next(iter(model.parameters())).device


STATE = ("resid", "resid_out")
"""The residual stream before and after every step."""


def state_after(captured: Captured, step: int) -> Tensor:
    """[context, position, H] the residual stream after a step (-1: the last)."""
    return captured.at("resid_out", step % len(captured.plan))
