"""Sampling: how the next token of a generation is chosen from the logits; greedy, or drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visitlens.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the likeliest token. Else a token is drawn from `softmax(logits / temperature)`, cut to the fewest
    tokens whose probabilities sum to `top_p`; what is drawn is the `seed`'s, whatever else draws.

    Raises:
        InputError: a temperature below 0, a `top_p` outside (0, 1], or one that greedy generation wouldn't use.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"expected a temperature of at least 0 (greedy), got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"expected top_p in (0, 1], got {self.top_p}")
        if self.top_p < 1 and not self.temperature:
            raise InputError(f"top_p {self.top_p} is of sampling: give a temperature above 0 too")
        if self.seed < 0:
            raise InputError(f"expected a seed of at least 0, got {self.seed}")

    def chooser(self, text: int = 0) -> Callable[[Tensor], Tensor]:
        """From the logits [context, vocab] at the last position to the next token [context, 1], for the `text`-th prompt: each
        prompt draws from a stream of its own, so that it doesn't matter which others there are."""
        if not self.temperature:
            return lambda logits: logits.argmax(-1, keepdim=True)
        state = np.random.SeedSequence([self.seed, text]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(state >> np.uint64(1)))

        def draw(logits: Tensor) -> Tensor:
            # On the CPU in float64, so that devices draw alike where their logits are.
            p, tokens = (logits.detach().cpu().double() / self.temperature).softmax(-1).sort(-1, descending=True)
            p = p.masked_fill(p.cumsum(-1) - p >= self.top_p, 0.0)  # the likeliest always stays
            return tokens.gather(-1, torch.multinomial(p, 1, generator=generator)).to(logits.device)

        return draw

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


GREEDY = Sampling()
