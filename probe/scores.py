"""Scores: what a model predicts of a sample's tokens, document by document, as it is or intervened on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from visitlens.hooks.capture import Captured, capture
from visitlens.hooks.intervene import Intervention, intervene
from visitlens.hooks.interventions.intervention import flatten
from visitlens.probe.samples import Progress, Sample, silent

if TYPE_CHECKING:
    from visitlens.hooks.models.looped_moe import LoopedMoE


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

    def predictions(self, model: LoopedMoE, final: Tensor) -> Tensor:
        """[counted, vocab] logits by which they are predicted, at least float32, from the last residual stream."""
        rows = model.logits(final[self.row, self.position - 1])
        return rows if rows.dtype == torch.float64 else rows.float()

    def add(self, values: Tensor, total: np.ndarray) -> None:
        """Adds values [counted, *axes] to totals [document, *axes]."""
        np.add.at(total, self.document, values.detach().double().cpu().numpy())


def batches(sample: Sample, at_once: int = 1, device: torch.device | str = "cpu") -> Iterator[Batch]:
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
    model: LoopedMoE, sample: Sample, chains: Sequence[Chain] = ((),), on_progress: Progress = silent
) -> list[Scores]:
    """One Scores a chain of interventions; the empty chain is the model as it is.

    What comes before a chain's first step is run once for all chains, which changes no bit.

    Raises:
        InputError: as `intervene`; an intervention that chose no token or expert in a batch leaves that batch as it is.
    """
    flat = [flatten(chain) for chain in chains]
    totals = [Scores(np.zeros(sample.documents), np.zeros(sample.documents)) for _ in flat]
    sites = {*STATE} | {site for chain in flat for i in chain for site, _ in i.stored(model.plan)}
    done, jobs = 0, len(flat) * len(sample.contexts.tokens)
    for batch in batches(sample, device=model.embed.W_E.device):
        with capture(model, sites) as plain:
            model(batch.tokens, batch.segments, return_type="none")
        for chain, scores in zip(flat, totals, strict=True):
            final = _run(model, batch, chain, plain) if chain else state_after(plain, -1)
            logits = batch.predictions(model, final)
            batch.add(F.cross_entropy(logits, batch.truth, reduction="none"), scores.loss)
            batch.add((logits.argmax(-1) == batch.truth).double(), scores.hits)
            done += 1
            on_progress(done, jobs)
    return totals


STATE = ("resid", "attn_write", "moe_write")
"""The sites that `state_after` reads."""


def state_after(captured: Captured, step: int) -> Tensor:
    """[context, position, H] the residual stream after a step (-1: the last), to the bit."""
    index = step % len(captured.plan)
    return (captured.at("resid", index) + captured.at("attn_write", index)) + captured.at("moe_write", index)


def _run(model: LoopedMoE, batch: Batch, chain: list[Intervention], plain: Captured) -> Tensor:
    """The last residual stream with the interventions, run from their first step on."""
    start = min(step.index for i in chain for step in i.place.steps(model.plan))
    if any(i.needs_reference or callable(i.place.token) for i in chain):
        with intervene(model, chain, must_match=False), capture(model, STATE) as captured:
            model(batch.tokens, batch.segments, return_type="none")
        return state_after(captured, -1)
    with intervene(model, chain, earlier=plain, must_match=False):
        return model.run_steps(plain.at("resid", start), batch.segments, start=start)
