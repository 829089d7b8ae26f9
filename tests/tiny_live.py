"""What the tests of live runs share: a tokenizer of bytes, a prompt, and how many hooks a model carries."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.live_prompts import byte_alphabet
from visitlens.probe.live_run import LiveRun

PROMPT = "The visit <b>sees</b>\nthe token; näive."
"""41 tokens with BOS: markup, a newline, a character of two bytes."""
_SPECIAL = ["<bos>", "<eos>", "<pad>"]


def byte_tokenizer() -> Tokenizer:
    """One token a byte after three special ones, BOS, EOS and padding: 259."""
    vocabulary = {name: at for at, name in enumerate([*_SPECIAL, *sorted(byte_alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    return tokenizer


def ids_of(run: LiveRun) -> torch.Tensor:
    """Its tokens, as a batch of one."""
    return torch.from_numpy(run.tokens).unsqueeze(0)


def hooks_left(model: LoopedMoE) -> int:
    """Hooks that a model carries."""
    points = [m for m in model.modules() if hasattr(m, "fwd_hooks")]
    return sum(len(p.fwd_hooks) + len(p._forward_hooks) for p in points) + len(model.ln_final._forward_hooks)
