"""What a model has learnt: loss by text category, and Dyck completion by number of shots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from visitlens.probe.dyck import SHOTS, dyck_prompt
from visitlens.probe.ladder.documents import PackedTokens

if TYPE_CHECKING:
    from visitlens.hooks.models.looped_moe import LoopedMoE


@torch.no_grad()
def text_loss(model: LoopedMoE, packed: PackedTokens, contexts_at_once: int = 2) -> float:
    """Mean nats per predicted token."""
    total, count = 0.0, 0
    for at in range(0, len(packed.tokens), contexts_at_once):
        rows = slice(at, at + contexts_at_once)
        loss = model(torch.from_numpy(packed.tokens[rows]), torch.from_numpy(packed.segments[rows]), return_type="loss")
        total += float(loss.nansum())
        count += int((~loss.isnan()).sum())
    return total / count


@torch.no_grad()
def dyck_by_shots(
    model: LoopedMoE, tokenizer: Any, *, prompts: int, seed: int, shots: Iterable[int] = SHOTS
) -> dict[int, dict[str, float]]:
    """For each number of shots over `prompts` prompts: `exact_match` (every answer token is the most likely one given
    those before it, which is what greedy decoding would write), `accuracy` and `nll` (nats) per answer token, and
    `closer_accuracy`, the accuracy on the closing brackets alone."""
    results = {}
    bos = model.config.bos_token_id
    for k in shots:
        exact, hits, nll, tokens, closer_hits, closers = 0, 0, 0.0, 0, 0, 0
        for index in range(prompts):
            prompt = dyck_prompt((seed, k, index), tokenizer, shots=k)
            ids = torch.from_numpy(np.concatenate([[bos], prompt.tokens])).long().unsqueeze(0)
            start, stop = prompt.answer
            log_probs = model(ids)[0, start:stop].float().log_softmax(-1)  # position i predicts token i + 1
            truth = ids[0, start + 1 : stop + 1]
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
