"""Statistics of attention rows (the softmax over keys of each query), from Q and K in tiles: no T x T map.

Queries and keys are flat over tokens, `q [token, n_h, d]` and `k [token, n_kv, d]`; query head h reads key head
`h // (n_h / n_kv)`. Attention is causal within a segment, so the keys of query i are the contiguous tokens
`[segment start, i]` and no mask tensor is needed. P is the softmax of `scale * q k^T` over those keys.

"Top" is by score, ties going to the smaller position. A row with a NaN score has NaN in every float result, and no
top-1 match and no shared top-8 key in the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from visitlens.kernels.dispatch import choose_attention_rows
from visitlens.kernels.errors import InputError
from visitlens.kernels.segments import Segments


@dataclass(frozen=True)
class RowStatistics:
    """What the attention rows of one visit look like, each `[token, head]` (float64 for float64 inputs).

    Attributes:
        log_sum_exp: of the scaled scores, nats.
        sink_mass: P[i, segment start]; 1 at the segment start itself, which callers leave out.
        first4_mass: P on the segment's first 4 tokens, those of them that query i sees.
        entropy: of P, nats.
    """

    log_sum_exp: Tensor
    sink_mass: Tensor
    first4_mass: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class OverlapStatistics:
    """How far two attention maps attend to the same tokens, each `[token, head]`.

    Attributes:
        top1_match: bool, the highest-scored key is the same.
        top8_shared: int64, keys that are among the 8 highest-scored in both (all visible keys where there are <= 8).
        mass_overlap: sum over keys of min(P1, P2), that is 1 - total variation.
    """

    top1_match: Tensor
    top8_shared: Tensor
    mass_overlap: Tensor


@dataclass(frozen=True)
class VisitOverlaps:
    """Row statistics of each visit and the overlaps between them.

    Attributes:
        rows: one per visit.
        across: (a, b), 0-based with a < b: visit a's heads against the same heads at visit b.
        control: one per visit: head h against head `(h + n_h // 2) % n_h` of the same visit, entry h for head h.
            None where there's a single head, which has no other head to be compared with.
    """

    rows: list[RowStatistics]
    across: dict[tuple[int, int], OverlapStatistics]
    control: list[OverlapStatistics] | None


@torch.no_grad()
def row_statistics(
    q: Tensor, k: Tensor, segments: Segments, scale: float | None = None, implementation: str = "auto"
) -> RowStatistics:
    """Statistics of the attention rows of one visit.

    Args:
        q: queries [token, n_h, d], any float dtype; half precision is computed in float32.
        k: keys [token, n_kv, d].
        segments: documents of the token axis.
        scale: of the scores, d ** -0.5 by default.
        implementation: "auto", "torch" or "numba".

    Raises:
        InputError: shapes, dtypes or segments that don't fit together.
        UnavailableError: a forced implementation that isn't installed.
    """
    scale = _check([(q, k)], segments, scale)
    return _implementation(q, implementation)([(q, k)], segments, scale, overlaps=False).rows[0]


@torch.no_grad()
def visit_overlaps(
    visits: Sequence[tuple[Tensor, Tensor]],
    segments: Segments,
    scale: float | None = None,
    implementation: str = "auto",
) -> VisitOverlaps:
    """Row statistics of each visit, overlaps between every two visits, and the control between heads of one visit.

    Args:
        visits: (q, k) of each visit, as in `row_statistics`, all of the same shapes and dtype.
        segments: documents of the token axis.
        scale: of the scores, d ** -0.5 by default.
        implementation: "auto", "torch" or "numba".

    Raises:
        InputError: shapes, dtypes or segments that don't fit together.
        UnavailableError: a forced implementation that isn't installed.
    """
    scale = _check(visits, segments, scale)
    return _implementation(visits[0][0], implementation)(visits, segments, scale, overlaps=True)


def _implementation(q: Tensor, requested: str):
    if choose_attention_rows(q.device.type, q.dtype, requested) == "numba":
        from visitlens.kernels.attention_rows_numba import numba_visit_overlaps

        return numba_visit_overlaps
    return torch_visit_overlaps


def _check(visits: Sequence[tuple[Tensor, Tensor]], segments: Segments, scale: float | None) -> float:
    """Scale to use, after a check of everything a caller can get wrong."""
    if not visits:
        raise InputError("expected the (q, k) of at least one visit, got none")
    q, k = visits[0]
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] != k.shape[2] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(
            "expected q [token, n_h, d] and k [token, n_kv, d] with n_h a multiple of n_kv; "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    bounds = segments.bounds
    if bounds[0] != 0 or any(a > b for a, b in segments.spans) or not len(q) == len(k) == bounds[-1]:
        raise InputError(
            f"expected segments of all {len(q)} tokens of q and {len(k)} of k, got bounds {bounds[:8]} ..."
        )
    if not q.is_floating_point() or any(t.dtype != q.dtype or t.device != q.device for pair in visits for t in pair):
        raise InputError(
            f"expected float tensors of one dtype and device, got {[(p[0].dtype, p[1].dtype) for p in visits]}"
        )
    if any(a.shape != q.shape or b.shape != k.shape for a, b in visits):
        raise InputError(f"expected the same shapes at every visit, got {[(*a.shape, *b.shape) for a, b in visits]}")
    factor = float(q.shape[2] ** -0.5 if scale is None else scale)
    if not 0 < factor < math.inf:  # the order of the scores is read before the scale is applied
        raise InputError(f"expected a positive, finite scale, got {factor}")
    return factor


_PANEL_ROWS = 64
_ALIGNED = 16  # keys of a tile are rounded up to this, for the vector units
_SHORT = 32  # segments of up to this many tokens are computed many at a time
_TILE = 2**21  # elements of one buffer, unless 16 rows need more: larger ones leave the outer cache
_TOP = 8
_LOG2_E = math.log2(math.e)
_HIDDEN = -1e30  # joins the score of a future key, where all scores are known to be small against it


def torch_visit_overlaps(
    visits: Sequence[tuple[Tensor, Tensor]], segments: Segments, scale: float, overlaps: bool
) -> VisitOverlaps:
    """`visit_overlaps` in tiled torch, on any device; without `overlaps`, the row statistics only."""
    (q, k), num_visits = visits[0], len(visits)
    tokens, heads, d = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Zero tokens at the end pad tiles, and take what the padding of short segments yields.
    queries = q.new_zeros(num_visits, heads, tokens + 1, d, dtype=dtype)
    keys = q.new_zeros(num_visits, k.shape[1], d, tokens + _ALIGNED, dtype=dtype)
    for v, (q, k) in enumerate(visits):
        queries[v, :, :tokens] = q.transpose(0, 1)
        keys[v, :, :, :tokens] = k.permute(1, 2, 0)
    hidden = torch.ones(_PANEL_ROWS, _PANEL_ROWS + _ALIGNED, dtype=torch.bool, device=q.device).triu_(1)
    if tokens and 1e-20 < scale < 1e6 and bool(queries.abs().max() * keys.abs().max() * d < 1e20):  # False with a NaN
        hidden = hidden * torch.tensor(_HIDDEN, dtype=dtype, device=q.device)
    pairs = list(combinations(range(num_visits), 2)) if overlaps else []
    controls = num_visits if overlaps and heads > 1 else 0
    rows = queries.new_empty(4, num_visits, heads, tokens + 1)
    compared = queries.new_empty(3, len(pairs) + controls, heads, tokens + 1)
    control, half, every = compared[:, len(pairs) :], heads // 2, (slice(None), slice(None))
    # Heads 0, 1, ... against half, half + 1, ...; an odd number of heads then goes round to the first ones.
    ring = [(slice(0, heads - half), slice(half, heads)), (slice(heads - half, heads), slice(0, half))]

    panels = list(_panels(segments, num_visits * heads, q.device))
    buffers = queries.new_empty(3, num_visits * heads * max((math.prod(p.shape) for p in panels), default=0))
    for panel in panels:
        tile = _Tile(panel, queries, keys, buffers, hidden)
        panel.store(rows, tile.row_values(scale))
        if overlaps:
            tile.find_tops()
        for n, (a, b) in enumerate(pairs):
            panel.store(compared[:, n], tile.overlap_values((a,), (b,)))
        for one, other in ring[: 1 + heads % 2] if controls else ():
            panel.store(control[:, :, one], tile.overlap_values((*every, one), (*every, other)))
    if heads % 2 == 0:  # a control is the same from both of its heads
        control[:, :, half:] = control[:, :, :half]

    rows = rows[..., :tokens].transpose(2, 3).contiguous()
    results = overlap_statistics(compared[..., :tokens], segments.positions().to(q.device))
    return VisitOverlaps(
        rows=[RowStatistics(*x) for x in zip(*rows, strict=True)],
        across=dict(zip(pairs, results, strict=False)),
        control=results[len(pairs) :] or None,
    )


def overlap_statistics(compared: Tensor, positions: Tensor) -> list[OverlapStatistics]:
    """One for each comparison, from top-1 match, top-8 shared and mass overlap, [3, comparison, head, token].

    Fills in what tiles leave open: rows that see up to 8 keys share all of them, rows with a NaN score none.
    """
    match, shared, mass = compared.transpose(2, 3).contiguous()
    undefined = mass.isnan()
    visible = (positions + 1).unsqueeze(1)
    shared = shared.masked_fill(undefined, 0).long().where(visible > _TOP, visible).masked_fill_(undefined, 0)
    match = (match == 1).logical_and_(~undefined)
    return [OverlapStatistics(*x) for x in zip(match, shared, mass, strict=True)]


@dataclass(frozen=True)
class _Panel:
    """Query rows that are computed together, and the keys they see; `shape` is (document, row, key).

    Of one document, rows and keys are slices of the token axis; of several, token indices [document, row].
    The keys from column `future_from` on may lie after a row; row r sees r + 1 of them.
    """

    rows: slice | Tensor
    keys: slice | Tensor
    shape: tuple[int, int, int]
    future_from: int

    def take(self, x: Tensor, dim: int, index: slice | Tensor) -> Tensor:
        """`x` with its token axis `dim` replaced by axes (document, row or key)."""
        taken = x[(slice(None),) * dim + (index,)]
        return taken.unsqueeze(dim) if isinstance(index, slice) else taken

    def store(self, out: Tensor, values: Tensor) -> None:
        """Writes values [..., document, head, row] to out [..., head, token]."""
        values = values.transpose(-3, -2)
        out[..., self.rows] = values[..., 0, :] if isinstance(self.rows, slice) else values


def _panels(segments: Segments, maps: int, device: torch.device) -> Iterator[_Panel]:
    short: dict[int, list[tuple[int, int]]] = {}
    for start, end in segments.spans:
        length = end - start
        if length <= _SHORT:
            short.setdefault(-(-length // 8), []).append((start, end))
            continue
        height = min(_PANEL_ROWS, max(16, _TILE // (maps * length)))
        height = -(-length // -(-length // height))  # panels of equal heights: no sliver at the end
        for first in range(start, end, height):
            last = min(first + height, end)
            columns = -(-(last - start) // _ALIGNED) * _ALIGNED
            shape = (1, last - first, columns)
            yield _Panel(slice(first, last), slice(start, start + columns), shape, first - start)
    short.pop(0, None)
    for spans in short.values():
        length = max(end - start for start, end in spans)
        count = max(1, _TILE // (maps * length * length))
        for n in range(0, len(spans), count):
            starts, ends = torch.tensor(spans[n : n + count], device=device).T.unsqueeze(-1)
            index = starts + torch.arange(length, device=device)
            index = index.where(index < ends, segments.num_tokens)
            yield _Panel(index, index, (len(index), length, length), 0)


class _Tile:
    """Scores and weights of one panel, [visit, document, head, row, key], in three buffers that are used again.

    `hidden` [row, key] is true for future keys; or, several times faster, what to add to their scores.
    """

    def __init__(self, panel: _Panel, queries: Tensor, keys: Tensor, buffers: Tensor, hidden: Tensor) -> None:
        (num_visits, heads, _, d), kv_heads = queries.shape, keys.shape[1]
        documents, rows, columns = panel.shape
        q = panel.take(queries, 2, panel.rows).transpose(1, 2)  # [visit, document, head, row, d]
        k = panel.take(keys, 3, panel.keys).permute(0, 3, 1, 2, 4)  # [visit, document, kv head, d, key]
        shape = (num_visits, documents, heads, rows, columns)
        self.scores, self.spare, self.weights = (x[: math.prod(shape)].view(shape) for x in buffers)
        batch = num_visits * documents * kv_heads
        # The query heads of one key head are stacked as rows of one product.
        torch.bmm(q.reshape(batch, -1, d), k.reshape(batch, d, columns), out=self.scores.view(batch, -1, columns))
        self.last_keys = slice(panel.future_from, columns)
        self.hidden = hidden[:rows, : columns - panel.future_from]
        if self.hidden.dtype == torch.bool:
            self.scores[..., self.last_keys].masked_fill_(self.hidden, -math.inf)
        else:
            self.scores[..., self.last_keys].add_(self.hidden)

    def row_values(self, scale: float) -> Tensor:
        """Log-sum-exp, sink mass, first-4 mass and entropy: [4, visit, document, head, row]. Fills the weights.

        The row's largest score is taken off before anything is summed, and exponents are base 2: exp2 takes half
        the time of exp.
        """
        peak = self.scores.amax(-1, keepdim=True)
        exponents = torch.add(peak * (-scale * _LOG2_E), self.scores, alpha=scale * _LOG2_E, out=self.spare)
        torch.exp2(exponents, out=self.weights)
        total = self.weights.sum(-1, keepdim=True)
        if self.hidden.dtype == torch.bool:  # 0 times -inf would be NaN; real NaNs pass through the clamp
            exponents.clamp_(min=-1e5)
        mean = _row_dot(self.weights, exponents) / total.squeeze(-1)
        self.weights.mul_(1 / total)
        log_total, first4 = total.log().squeeze(-1), self.weights[..., :4].sum(-1)
        log_sum_exp = peak.squeeze(-1) * scale + log_total
        return torch.stack([log_sum_exp, self.weights[..., 0], first4, log_total - mean / _LOG2_E])

    def find_tops(self) -> None:
        """Finds the top key, and turns the scores into 1 where a key is among the row's top 8, 0 elsewhere.

        Rows that see up to 8 keys get anything: their answer is known.
        """
        self.top = _row_argmax(self.scores)
        if self.scores.shape[-1] <= _TOP:
            self.scores.zero_()
            return
        eighth, tied = _eighth(self.scores, self.spare)
        tied[..., : max(0, _TOP - self.last_keys.start)] = False  # rows that see up to 8 keys
        chosen = _first_eight(self.scores[tied], eighth[tied]) if tied.any() else None
        self.scores.ge_(eighth)
        if chosen is not None:
            self.scores[tied] = chosen

    def overlap_values(self, first: tuple, second: tuple) -> Tensor:
        """Top-1 match, top-8 shared and mass overlap of two equally shaped parts: [3, ..., document, head, row]."""
        match = self.top[first] == self.top[second]
        shared = _row_dot(self.scores[first], self.scores[second])
        weights = self.weights[first]
        spare = self.spare.view(-1)[: weights.numel()].view(weights.shape)
        mass = torch.minimum(weights, self.weights[second], out=spare).sum(-1)
        return torch.stack([match.to(mass.dtype), shared, mass])


def _first_eight(scores: Tensor, eighth: Tensor) -> Tensor:
    """1 at the top 8 of rows in which more keys reach the 8th largest score: the first of those complete the 8."""
    above, level = scores > eighth, scores == eighth
    room = _TOP - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1) <= room))).to(scores.dtype)


# NumPy's reductions of a row are several times faster than torch's on the CPU, and its partition than topk.


def _row_argmax(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy().argmax(-1)) if x.device.type == "cpu" else x.argmax(-1)  # the first of equals


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type != "cpu":
        return (a * b).sum(-1)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.vecdot(a.numpy(), b.numpy()))


def _eighth(scores: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """8th largest of each row [..., 1], and whether the 9th equals it [...]. Overwrites `spare`."""
    if scores.device.type != "cpu":
        largest = scores.topk(_TOP + 1, dim=-1).values
        return largest[..., _TOP - 1 : _TOP], largest[..., _TOP - 1] == largest[..., _TOP]
    at = scores.shape[-1] - _TOP
    spare.copy_(scores).numpy().partition(at, axis=-1)
    eighth = spare[..., at : at + 1].clone()
    return eighth, spare.ge_(eighth).sum(-1) > _TOP
