"""Huginn (remote code): prelude, a core block that runs `steps` times, coda; a post-norm sandwich in every layer.

The state that the loop starts from is random: here it is drawn from `state_seed`, by the model's own rule, once for all positions,
so that a document has the same start alone, packed, or token by token. Each loop re-enters through an adapter over [state,
prelude output]. Its code ignores attention masks, so padding isn't to be trusted; documents run unpadded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from visitlens.errors import InputError
from visitlens.hooks.adapters.family import NO_ROUTER, Anatomy, Family, Layer, Read, first_id
from visitlens.hooks.adapters.transformers_compat import output_cache, tied_to, token_ids

SANDWICH = "a norm lies on the stream after each addition, so writes don't add up to the next residual"


class Huginn(Family):
    """`steps` loops (the model's mean by default), from the initial state of `state_seed`."""

    model_types = ("huginn_raven",)
    attention_calls = "sdpa"
    mends = (tied_to("transformer.wte.weight"), output_cache, token_ids)

    def __init__(self, steps: int | None = None, state_seed: int = 0) -> None:
        if steps is not None and steps < 1:
            raise InputError(f"expected at least 1 loop, got {steps}")
        self.steps, self.state_seed = steps, state_seed
        self._state: torch.Tensor | None = None

    def body(self, model: Any) -> Any:
        return model

    def anatomy(self, model: Any) -> Anatomy:
        self.steps = self.steps or int(model.config.mean_recurrence)
        self.call = self._call(self.steps)
        reads = (
            Read("resid", "", "input", name="x"),
            Read("X", "norm_1"),
            Read("O", "attn"),
            Read("attn_write", "attn"),
            Read("moe_in", "norm_3"),
            Read("moe_write", "mlp"),
            Read("resid_out", ""),
        )
        parts = [[f"transformer.{part}.{i}" for i in range(len(model.transformer[part]))] for part in _PARTS]
        prelude, core, _ = (len(part) for part in parts)
        paths = [path for part in parts for path in part]
        order = [*range(prelude), *[*range(prelude, prelude + core)] * self.steps, *range(prelude + core, len(paths))]
        return Anatomy(
            tuple(Layer((path,), reads, attention="attn") for path in paths),
            tuple(order),
            missing={"sum of writes": SANDWICH, **NO_ROUTER},
            notes=(
                f"{self.steps} loops; the initial state is drawn with seed {self.state_seed}, the same at a position of every document",
                "each loop re-enters through a linear adapter over [state, prelude output]",
                "attention masks are ignored by the model's code: padding would move logits",
            ),
        )

    @staticmethod
    def _call(steps: int) -> dict[str, Any]:
        """Loops without a gradient and with one: of a number alone its code gives a gradient to none."""
        return {"use_cache": False, "num_steps": (0, steps)}

    @contextmanager
    def looping(self, model: Any, visits: int) -> Iterator[None]:
        before = self.steps, self.call
        self.steps, self.call = visits, self._call(visits)
        try:
            yield
        finally:
            self.steps, self.call = before

    def start(self, model: Any, tokens: torch.Tensor, position: int = 0) -> dict[str, Any]:
        like, shape = next(model.parameters()), (1, model.config.block_size, model.config.n_embd)
        held = self._state
        if held is None or (held.shape, held.dtype, held.device) != (shape, like.dtype, tokens.device):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.state_seed)
                held = model.initialize_state(torch.zeros(shape, dtype=like.dtype)).to(tokens.device)
            self._state = held
        state = held[:, position : position + tokens.shape[1]]
        # Without positions its code begins at 0, also behind a cache.
        places = {"cache_position": torch.arange(position, position + tokens.shape[1], device=tokens.device)}
        return {"input_states": state.expand(len(tokens), -1, -1), **(places if position else {})}

    def sizes(self, model: Any) -> dict[str, Any]:
        config = model.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        d = config.n_embd // heads
        ids = {name: first_id(getattr(config, name, None)) for name in ("bos_token_id", "eos_token_id")}
        return {
            "vocab_size": config.padded_vocab_size,
            "hidden_size": config.n_embd,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": d,
            "value_dim": d,
            "context_length": config.block_size,
            **ids,
            "pad_token_id": first_id(getattr(config, "pad_token_id", None)) or 0,
        }


_PARTS = ("prelude", "core_block", "coda")
