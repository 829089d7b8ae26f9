"""Grouped-query attention over packed documents, through SDPA; P is computed beside it only when someone looks.

A hook that merely observes the scores or the pattern leaves the output bit-identical: the pattern is computed from Q and
K for it and thrown away. Only a hook that changes one (returns a tensor, or writes in place) or asks for its
gradient sends the output through the explicit path.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.kernels.segments import Segments

if TYPE_CHECKING:
    from transformer_lens.hook_points import HookPoint

    from visitlens.hooks.models.looped_moe import AttentionHooks


class KVSlot:
    """Keys and values [context, position, kv head, d] of one step."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k = k if self.k is None else torch.cat([self.k, k], dim=1)
        self.v = v if self.v is None else torch.cat([self.v, v], dim=1)
        return self.k, self.v


class KVCache:
    """One slot per step, so that a looped layer's visits never share keys."""

    def __init__(self, steps: int) -> None:
        self.slots = [KVSlot() for _ in range(steps)]
        self.broken = False
        """Whether a forward ended in an error, which leaves some steps with its tokens and others without."""

    @property
    def length(self) -> int:
        k = self.slots[0].k
        return 0 if k is None else k.shape[1]

    def __repr__(self) -> str:
        return f"KVCache({self.length} tokens at {len(self.slots)} steps)"


class SegmentedAttention(nn.Module):
    """Q, K, V, O of one physical layer; `W_Q [H, n_h d]`, `W_K, W_V [H, n_kv d]`, `W_O [n_h d, H]`."""

    def __init__(self, config: LoopedMoEConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = config.num_heads, config.num_kv_heads, config.head_dim
        self.W_Q = nn.Parameter(torch.empty(config.hidden_size, self.heads * self.d))
        self.W_K = nn.Parameter(torch.empty(config.hidden_size, self.kv_heads * self.d))
        self.W_V = nn.Parameter(torch.empty(config.hidden_size, self.kv_heads * self.d))
        self.W_O = nn.Parameter(torch.empty(self.heads * self.d, config.hidden_size))
        self.eps = config.norm_eps
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(self.d))
            self.k_norm = nn.Parameter(torch.ones(self.d))

    def forward(
        self,
        x: Tensor,
        hooks: AttentionHooks,
        segments: Segments,
        rotary: tuple[Tensor, Tensor],
        contexts: int,
        slot: KVSlot | None,
    ) -> Tensor:
        def batched(hook: HookPoint, value: Tensor) -> Tensor:
            return hook(value.unflatten(0, (contexts, -1)))

        q = (x @ self.W_Q).unflatten(-1, (self.heads, self.d))
        k = (x @ self.W_K).unflatten(-1, (self.kv_heads, self.d))
        v = (x @ self.W_V).unflatten(-1, (self.kv_heads, self.d))
        if self.qk_norm:
            q = rms_norm(q, (self.d,), self.q_norm, self.eps)
            k = rms_norm(k, (self.d,), self.k_norm, self.eps)
        q = batched(hooks.hook_q, q).flatten(0, 1)
        k = batched(hooks.hook_k, k).flatten(0, 1)
        q = batched(hooks.hook_rot_q, rotate(q, rotary))
        k = batched(hooks.hook_rot_k, rotate(k, rotary))
        v = batched(hooks.hook_v, v)
        if slot is not None:
            k, v = slot.extend(k, v)
        pattern = self._watched_pattern(q, k, hooks, segments)
        if pattern is not None:
            z = pattern @ self._spread(v).transpose(1, 2)
            z = z.transpose(1, 2)
        elif slot is not None:
            z = self._cached(q, k, v)
        else:
            z = self._packed(q, k, v, segments)
        z = hooks.hook_z(z)
        return z.flatten(0, 1).flatten(1) @ self.W_O

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        """SDPA document by document; documents of one length in one call."""
        lengths = [end - start for start, end in segments.spans]
        gqa = self.heads != self.kv_heads
        if len(set(lengths)) == 1:
            split = (x.flatten(0, 1).unflatten(0, (-1, lengths[0])).transpose(1, 2) for x in (q, k, v))
            documents_q, documents_k, documents_v = split
            z = scaled_dot_product_attention(documents_q, documents_k, documents_v, is_causal=True, enable_gqa=gqa)
            return z.transpose(1, 2).reshape(q.shape)
        rows = [x.flatten(0, 1).transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for x in (q, k, v)]
        outputs = [
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa) for q, k, v in zip(*rows, strict=True)
        ]
        return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1).reshape(q.shape)

    def _cached(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new, total = q.shape[1], k.shape[1]
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        z = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.heads != self.kv_heads)
        return z.transpose(1, 2)

    def _spread(self, x: Tensor) -> Tensor:
        """[..., kv head, d] repeated to [..., head, d]."""
        return x.repeat_interleave(self.heads // self.kv_heads, dim=2)

    def _watched_pattern(self, q: Tensor, k: Tensor, hooks: AttentionHooks, segments: Segments) -> Tensor | None:
        """The pattern [context, head, query, key] if a hook changed it, else None."""
        scores_hook, pattern_hook = hooks.hook_attn_scores, hooks.hook_pattern
        if not (scores_hook.has_hooks() or pattern_hook.has_hooks()):
            return None
        contexts, new, total = q.shape[0], q.shape[1], k.shape[1]
        allowed = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        if new == total:
            starts = segments.starts().to(q.device).view(contexts, new)
            allowed = allowed & (starts.unsqueeze(2) == starts.unsqueeze(1))
            allowed = allowed.unsqueeze(1)
        with versions_counted():
            scores = (q.transpose(1, 2) @ self._spread(k).permute(0, 2, 3, 1)) * self.d**-0.5
            scores = scores.masked_fill(~allowed, float("-inf"))
        changed_scores, scores = pass_through(scores_hook, scores)
        with versions_counted():
            pattern = scores.softmax(-1)
        changed_pattern, pattern = pass_through(pattern_hook, pattern)
        return pattern if changed_scores or changed_pattern else None


def versions_counted() -> AbstractContextManager[object]:
    """Tensors made in inference mode have no version counter, by which a change in place is noticed."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def pass_through(hook: HookPoint, value: Tensor) -> tuple[bool, Tensor]:
    """Whether the hook point changed the tensor (or will want its gradient), and what it returned."""
    version = value._version
    result = hook(value)
    wants_gradient = hook.has_hooks("bwd") and torch.is_grad_enabled()
    return wants_gradient or result is not value or value._version != version, result


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [token, head, d], halves paired (i, i + d/2); cosines and sines [token, 1, d/2]."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
