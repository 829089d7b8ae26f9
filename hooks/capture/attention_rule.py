"""How a step's attention rows follow from its queries and keys, where that is more than a causal softmax.

The native model's rows are the softmax of `q k^T / sqrt(d)` over `[segment start, i]`. Other models have another scale, a
sliding window, a soft cap or a learned sink: kernels compute the statistics of these too, without a map. Where attention
goes both ways, or a bias depends on the token, the rows of one document at a time are formed here and reduced at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from visitlens.kernels.attention.results import OverlapStatistics, RowStatistics, VisitOverlaps
from visitlens.kernels.segments import Segments

_TOP = 8


@dataclass(frozen=True)
class AttentionRule:
    """`scale` of the scores; `window`: keys a query sees, itself included; `sinks [head]`: logits of a slot that takes
    mass and gives nothing, so that a row sums to 1 with it; `soft_cap` of the scores; `from_map`: rows can't be had from Q and K, P is kept;
    `among_visited`: keys are only the tokens that are at the visit; `masked`: a mask that the model was given leaves out
    keys, or adds to scores, otherwise than by a window: P alone says how (`from_map` then, too)."""

    scale: float
    window: int | None = None
    causal: bool = True
    sinks: Tensor | None = None
    soft_cap: float | None = None
    from_map: bool = False
    among_visited: bool = False
    masked: bool = False

    @property
    def in_kernels(self) -> bool:
        """Whether the kernels form these rows from Q and K."""
        return self.causal and not self.from_map and not self.among_visited

    def pattern(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        """P [..., head, query, key] of whole documents: q [..., token, head, d], k [..., token, kv head, d]. Of fewer queries
        than keys, these are the last ones: tokens generated behind a cache. `mask [..., head or 1, query, key]`, True where a
        query sees a key or what is added to its score, takes the place of what is visible by the rule; a query without
        keys has a row of zeros."""
        spread = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
        q, spread = (x if x.dtype == torch.float64 else x.float() for x in (q, spread))
        scores = q.transpose(-3, -2) @ spread.movedim(-3, -1) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        if mask is None:
            mask = self.visible(k.shape[-3], q.device, q.shape[-3])
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if self.sinks is None:
            return scores.softmax(-1).nan_to_num() if self.masked else scores.softmax(-1)
        slot = self.sinks.to(scores).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, slot], dim=-1).softmax(-1)[..., :-1]

    def visible(self, length: int, device: torch.device | None = None, queries: int | None = None) -> Tensor:
        """[query, key] whether a query of a document sees a key; of the last `queries` alone, where given."""
        keys = torch.arange(length, device=device)
        own = keys[length - (queries or length) :].unsqueeze(1)
        allowed = keys <= own if self.causal else torch.ones_like(keys + own, dtype=torch.bool)
        return allowed if self.window is None else allowed & (keys > own - self.window)


def map_overlaps(
    rules: Sequence[AttentionRule],
    pattern_of: Callable[[int, int, int], Tensor],
    segments: Segments,
    overlaps: bool,
) -> VisitOverlaps:
    """What `kernels.attention.rows.visit_overlaps` finds, from maps: `pattern_of(visit, start, end)` is P [head, query, key] of one
    document. Holds one document's maps of all visits at a time. `log_sum_exp` isn't known from P and is NaN.

    Ties in P go to the smaller position; a row with a NaN has NaN in every float result, no match and no shared key.
    """
    visits = len(rules)
    pairs = list(combinations(range(visits), 2)) if overlaps else []
    rows: list[list[Tensor]] = [[] for _ in range(visits)]
    across: dict[tuple[int, int], list[OverlapStatistics]] = {pair: [] for pair in pairs}
    control: list[list[OverlapStatistics]] = [[] for _ in range(visits)]
    for start, end in segments.spans:
        if start == end:
            continue
        maps = [pattern_of(v, start, end) for v in range(visits)]
        heads = maps[0].shape[0]
        seen = [
            (p > 0).sum(-1) if rule.masked else rule.visible(end - start, p.device).sum(-1)
            for rule, p in zip(rules, maps, strict=True)
        ]
        tops = [_top(p) for p in maps] if overlaps else []
        for v, p in enumerate(maps):
            entropy = torch.special.entr(p).sum(-1)  # over keys; what a learned sink takes is no outcome
            unknown, learned = torch.full_like(entropy, torch.nan), 1 - p.sum(-1)
            rows[v].append(torch.stack([unknown, p[..., 0], p[..., :4].sum(-1), entropy, learned]))
        for a, b in pairs:
            across[a, b].append(_overlap(maps[a], maps[b], tops[a], tops[b], seen[a]))
        if overlaps and heads > 1:
            for v, p in enumerate(maps):
                other, top = p.roll(-(heads // 2), 0), tops[v].roll(-(heads // 2), 0)
                control[v].append(_overlap(p, other, tops[v], top, seen[v]))
    joined = [torch.cat(parts, dim=-1).transpose(1, 2) for parts in rows]
    return VisitOverlaps(
        rows=[RowStatistics(*values) for values in joined],
        across={pair: _join(parts) for pair, parts in across.items()},
        control=[_join(parts) for parts in control] if overlaps and control[0] else None,
    )


def _top(p: Tensor) -> Tensor:
    """[head, query, <= 8] keys of the largest P, smallest position first among equals."""
    return p.sort(dim=-1, descending=True, stable=True).indices[..., :_TOP]


def _overlap(p: Tensor, other: Tensor, top: Tensor, other_top: Tensor, seen: Tensor) -> OverlapStatistics:
    mass = torch.minimum(p, other).sum(-1).masked_fill(p.isnan().any(-1) | other.isnan().any(-1), torch.nan)
    undefined = mass.isnan()
    shared = (top.unsqueeze(-1) == other_top.unsqueeze(-2)).any(-1).sum(-1)
    shared = shared.where(seen > _TOP, seen).masked_fill(undefined, 0)
    return OverlapStatistics((top[..., 0] == other_top[..., 0]) & ~undefined, shared, mass)


def _join(parts: Sequence[OverlapStatistics]) -> OverlapStatistics:
    names = ("top1_match", "top8_shared", "mass_overlap")
    return OverlapStatistics(*(torch.cat([getattr(part, n) for part in parts], dim=1).T for n in names))
