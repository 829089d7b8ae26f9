"""Prompts continued by the model, as contexts to record: one text a context, the tokens it wrote told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from visitlens.errors import InputError
from visitlens.hooks.capture.generation import check_generation, generate
from visitlens.hooks.capture.sampling import GREEDY, Sampling
from visitlens.hooks.text.packed_tokens import PackedTokens, document_hashes

if TYPE_CHECKING:
    from visitlens.hooks.core.model_interface import InstrumentedModel

_CHECKED = ("resid", "Q", "K")
_CHECKED_TOKENS = 64


def continue_prompts(
    model: InstrumentedModel,
    prompts: Sequence[np.ndarray],
    new_tokens: int,
    context_length: int,
    *,
    check: bool = True,
    sampling: Sampling = GREEDY,
) -> PackedTokens:
    """Continues each prompt, greedily or as `sampling` says, by up to `new_tokens`, to the model's EOS at most; contexts as long as the longest.

    `check` holds the first text's cached run against one forward over it, at every (token, visit).

    Raises:
        InputError: no prompt, one too long for the model's context, a model that doesn't generate.
        PlanError: the model's cached generation isn't the full forward.
    """
    if not prompts:
        raise InputError("no prompt has a token")
    longest = max(map(len, prompts))
    if longest + new_tokens > context_length:
        raise InputError(
            f"a prompt of {longest} tokens and {new_tokens} more exceed the context of {context_length}: generate fewer, or "
            "shorten the prompts"
        )
    device, config = next(model.parameters()).device, model.config
    texts = []
    for number, prompt in enumerate(prompts):
        tokens = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0).to(device)
        text = generate(model, tokens, new_tokens, config.eos_token_id, sampling.chooser(number))
        texts.append(text[0].cpu().numpy().astype(np.int32))
    if check:
        first = torch.from_numpy(texts[0][:_CHECKED_TOKENS].astype(np.int64)).unsqueeze(0).to(device)
        check_generation(
            model,
            first,
            min(len(prompts[0]), first.shape[1] - 1),
            [site for site in _CHECKED if site not in config.missing],
        )
    shape = (len(texts), max(map(len, texts)))
    contexts, segments, generated = (
        np.full(shape, config.pad_token_id, np.int32),
        np.full(shape, -1, np.int32),
        np.zeros(shape, np.int32),
    )
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        contexts[row, : len(text)], segments[row, : len(text)] = text, row
        generated[row, len(prompt) : len(text)] = np.arange(1, len(text) - len(prompt) + 1)
    owners = np.arange(len(texts), dtype=np.int32)
    return PackedTokens(contexts, segments, owners, document_hashes(texts), generated)
