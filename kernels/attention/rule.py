"""How attention scores come about in real models: scale, window, soft cap, learned sinks, distance bias."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.kernels.segments import Segments


@dataclass(frozen=True)
class AttentionRule:
    """What turns q . k into a row P, the same at every visit of a layer.

        score = soft_cap * tanh(scale * q . k / soft_cap) + bias[head, i - j],     P = exp(score) / (sum + exp(sink[head]))

    Attributes:
        scale: of q . k.
        window: query i sees the keys j of its segment with i - window < j <= i; None for all up to i.
        soft_cap: as Gemma 2 has it; None for none.
        sinks: [n_h] learned logits that take mass and attend to nothing (gpt-oss), or None.
        bias: [n_h, distance] added to the score of a key that lies `distance` tokens back (ALiBi, T5's relative
            positions, any bias of head and distance), or None.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @property
    def monotone(self) -> bool:
        """Whether a larger product is a larger score, so that products can stand for scores until they are weighed."""
        return self.soft_cap is None and self.sinks is None and self.bias is None

    def visible(self, segments: Segments) -> Tensor:
        """[token] how many keys a query sees."""
        counts = segments.positions() + 1
        return counts if self.window is None else counts.clamp_(max=self.window)


def check_rule(
    q: Tensor,
    segments: Segments,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> AttentionRule:
    """The rule, after a check of everything a caller can get wrong; tensors in the dtype that is computed in."""
    heads, d = q.shape[1:]
    factor = float(d**-0.5 if scale is None else scale)
    if not 0 < factor < math.inf:  # the order of the scores is read before the scale is applied
        raise InputError(f"expected a positive, finite scale, got {factor}")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise InputError(f"expected a window of at least 1 key (the query's own), got {window!r}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise InputError(f"expected a positive, finite soft cap, got {soft_cap}; None for no cap")
    if sinks is not None and sinks.shape != (heads,):
        raise InputError(f"expected one learned sink logit a head, [{heads}], got {list(sinks.shape)}")
    longest = max((end - start for start, end in segments.spans), default=0)
    reach = longest if window is None else min(longest, window)
    if bias is not None and (bias.ndim != 2 or bias.shape[0] != heads or bias.shape[1] < reach):
        raise InputError(
            f"expected a bias [head, distance] of {heads} heads and at least {reach} distances (0 is the query's own "
            f"key), got {list(bias.shape)}"
        )
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    tensors = (None if t is None else t.detach().to(q.device, dtype) for t in (sinks, bias))
    return AttentionRule(factor, window, None if soft_cap is None else float(soft_cap), *tensors)


def check_token_sets(token_sets: Tensor | Sequence[Tensor] | None, q: Tensor) -> Tensor | None:
    """[set, token] bool on q's device."""
    if token_sets is None:
        return None
    sets = token_sets if isinstance(token_sets, Tensor) else torch.stack(list(token_sets))
    if sets.ndim != 2 or sets.shape[1] != len(q) or sets.dtype != torch.bool or not len(sets):
        raise InputError(
            f"expected token sets as bool [set, token] over {len(q)} tokens, got {sets.dtype} {list(sets.shape)}"
        )
    return sets.to(q.device)
