"""What the tests of live runs share: a tokenizer of bytes, prompts, runs through the service, a model that waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from visitlens.app.live.service import LiveService
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.token_texts import byte_alphabet
from visitlens.probe.live.live_run import LiveRun
from visitlens.probe.model.model import Model

PROMPT = "The visit <b>sees</b>\nthe token; näive."
"""41 tokens with BOS: markup, a newline, a character of two bytes."""
TYPED = "Two visits.\nOne head!"
"""22 tokens with BOS, as a person types them."""
HOSTILE = '<img src=x onerror="window.hurt=1"><b>bold</b>&lt;br&gt;\n{{7*7}}</script>'
LONG = 300.0
"""Seconds that a job may take on a busy machine."""
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
    points: list[Any] = [m for m in model.modules() if hasattr(m, "fwd_hooks")]
    return sum(len(p.fwd_hooks) + len(p._forward_hooks) for p in points) + len(model.ln_final._forward_hooks)


def ran(live: LiveService, prompt: str = TYPED) -> str:
    """The id of a finished run."""
    id_ = live.probe("test", prompt)
    assert live.jobs.wait(id_, LONG).status == "done"
    return id_


class Held:
    """The model of a service, held at its first layer until let go."""

    def __init__(self, model: Model) -> None:
        self.model, self.config = model, model.config
        self.gate, self.steps = threading.Event(), 0

    def trace(self, prompt: str, *, on_progress: Callable[[int, int], None]) -> Any:
        while not self.gate.is_set():
            on_progress(40, 100)
            self.steps += 1
            time.sleep(0.005)
        return self.model.trace(prompt, on_progress=on_progress)
