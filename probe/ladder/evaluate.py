"""What a model has learnt: loss by text category and by document length, and Dyck completion by number of shots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.samples.dyck_prompts import SHOTS, dyck_prompt

if TYPE_CHECKING:
    from visitlens.hooks.models.config import LoopedMoEConfig

_PROMPTS_AT_ONCE = 20
LENGTHS = (64, 256, 1024)
"""Bounds of the document-length buckets, in tokens with BOS and EOS."""


class Evaluated(Protocol):
    """A LoopedMoE, or what stands for one that is divided over processes."""

    @property
    def config(self) -> LoopedMoEConfig: ...
    def __call__(self, *args: Any, **options: Any) -> Any: ...


@torch.no_grad()
def token_losses(model: Evaluated, packed: PackedTokens, contexts_at_once: int = 2, device: str = "cpu") -> np.ndarray:
    """Nats per predicted token [context, position - 1]; NaN where the next token begins a segment or is padding."""
    parts = []
    for at in range(0, len(packed.tokens), contexts_at_once):
        rows = slice(at, at + contexts_at_once)
        tokens, segments = (torch.from_numpy(a[rows]).to(device) for a in (packed.tokens, packed.segments))
        parts.append(model(tokens, segments, return_type="loss").float().cpu().numpy())
    return np.concatenate(parts)


def text_loss(model: Evaluated, packed: PackedTokens, contexts_at_once: int = 2) -> float:
    """Mean nats per predicted token."""
    return float(np.nanmean(token_losses(model, packed, contexts_at_once), dtype=np.float64))


@dataclass(frozen=True)
class MeanLoss:
    """Nats per predicted token, and over how many."""

    loss: float
    tokens: int
    documents: int


def loss_by_length(
    losses: np.ndarray, packed: PackedTokens, lengths: np.ndarray, bounds: Sequence[int] = LENGTHS
) -> dict[str, MeanLoss]:
    """`losses` of `token_losses`, by the length [document] of the whole document a token is in: `<64`, `64-255`, ...

    A document longer than a context is split, so its later pieces are predicted without what came before.
    """
    bucket = np.searchsorted(bounds, lengths, side="right")
    names = [f"<{bounds[0]}", *(f"{a}-{b - 1}" for a, b in pairwise(bounds)), f">={bounds[-1]}"]
    owner = packed.segment_document[np.maximum(packed.segments[:, 1:], 0)]
    known = ~np.isnan(losses)
    result = {}
    for index, name in enumerate(names):
        mine = known & (bucket[owner] == index)
        if mine.any():
            result[name] = MeanLoss(
                float(losses[mine].mean(dtype=np.float64)), int(mine.sum()), len(np.unique(owner[mine]))
            )
    return result


def loss_by_part(
    losses: np.ndarray, packed: PackedTokens, part: np.ndarray, names: Sequence[str]
) -> dict[str, MeanLoss]:
    """`losses` of `token_losses`, by the part [document] of the text that a token's document is of, an index into `names` (-1: none)."""
    if not len(names):
        return {}
    owner = packed.segment_document[np.maximum(packed.segments[:, 1:], 0)]
    known, of = ~np.isnan(losses), part[owner]
    result = {}
    for index, name in enumerate(names):
        if (mine := known & (of == index)).any():
            result[name] = MeanLoss(
                float(losses[mine].mean(dtype=np.float64)), int(mine.sum()), len(np.unique(owner[mine]))
            )
    return result


@torch.no_grad()
def dyck_by_shots(
    model: Evaluated, tokenizer: Any, *, prompts: int, seed: int, shots: Iterable[int] = SHOTS, device: str = "cpu"
) -> dict[int, dict[str, float]]:
    """For each number of shots over `prompts` prompts: `exact_match` (every answer token is the most likely one given
    those before it, which is what greedy decoding would write), `accuracy` and `nll` (nats) per answer token, and
    `closer_accuracy`, the accuracy on the closing brackets alone."""
    results = {}
    bos = model.config.bos_token_id
    for k in shots:
        exact, hits, nll, tokens, closer_hits, closers = 0, 0, 0.0, 0, 0, 0
        drawn = [dyck_prompt((seed, k, index), tokenizer, shots=k) for index in range(prompts)]
        for at in range(0, prompts, _PROMPTS_AT_ONCE):
            batch = drawn[at : at + _PROMPTS_AT_ONCE]
            # Padded behind: what follows a prompt changes nothing in it.
            ids = torch.full((len(batch), 1 + max(len(p.tokens) for p in batch)), bos)
            for row, prompt in zip(ids, batch, strict=True):
                row[1 : len(prompt.tokens) + 1] = torch.from_numpy(prompt.tokens)
            logits = model(ids.to(device)).float().cpu()
            for row, prompt, scores in zip(ids, batch, logits, strict=True):
                start, stop = prompt.answer
                log_probs = scores[start:stop].log_softmax(-1)  # position i predicts token i + 1
                truth = row[start + 1 : stop + 1]
                right = log_probs.argmax(-1) == truth
                at_closers = right[[position - start for position in prompt.closers]]
                exact += bool(right.all())
                hits += int(right.sum())
                nll -= float(log_probs.gather(1, truth.unsqueeze(1)).sum())
                tokens += stop - start
                closer_hits += int(at_closers.sum())
                closers += len(prompt.closers)
        results[k] = {
            "exact_match": exact / prompts,
            "accuracy": hits / tokens,
            "nll": nll / tokens,
            "closer_accuracy": closer_hits / closers,
        }
    return results
