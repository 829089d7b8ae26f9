"""Statistics of attention rows (the softmax over keys of each query), from Q and K in tiles: no T x T map.

Queries and keys are flat over tokens, `q [token, n_h, d]` and `k [token, n_kv, d]`; query head h reads key head
`h // (n_h / n_kv)`. Attention is causal within a segment, so the keys of query i are the contiguous tokens
`[segment start, i]`, or the last `window` of them, and no mask tensor is needed. P is the softmax of the scores of
those keys, which are `scale * q k^T` and what `AttentionRule` adds.

"Top" is by score, ties going to the smaller position. A row with a NaN score has NaN in every float result, and no
top keys, no top-1 match and no shared top-8 key in the others.

Three implementations, chosen when called (`dispatch`): tiled torch anywhere, a compiled pass on the CPU (numba),
a Triton kernel on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from visitlens.errors import InputError
from visitlens.kernels.attention.dispatch import choose_attention_rows
from visitlens.kernels.attention.results import RowStatistics, VisitOverlaps, Wanted
from visitlens.kernels.attention.rule import AttentionRule, check_rule, check_token_sets
from visitlens.kernels.segments import Segments


@torch.no_grad()
def row_statistics(
    q: Tensor,
    k: Tensor,
    segments: Segments,
    scale: float | None = None,
    implementation: str = "auto",
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    token_sets: Tensor | Sequence[Tensor] | None = None,
    top_keys: bool = False,
) -> RowStatistics:
    """Statistics of the attention rows of one visit.

    Args:
        q: queries [token, n_h, d], any float dtype; half precision is computed in float32.
        k: keys [token, n_kv, d].
        segments: documents of the token axis.
        scale: of the products, d ** -0.5 by default.
        implementation: "auto", "torch", "numba" or "triton".
        window: keys that a query sees, its own included; all of its segment up to it by default.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: [n_h] learned logits that join the sum of each row and attend to nothing.
        bias: [n_h, distance] added to the score of the key `distance` tokens back.
        token_sets: bool [set, token]: sets of keys whose mass is wanted.
        top_keys: whether the indices of the 8 top keys are wanted.

    Raises:
        InputError: shapes, dtypes or segments that don't fit together, or a forced implementation that can't do this.
        UnavailableError: a forced implementation that isn't installed.
    """
    _check([(q, k)], segments)
    rule = check_rule(q, segments, scale, window, soft_cap, sinks, bias)
    wanted = Wanted(False, check_token_sets(token_sets, q), top_keys)
    return _implementation(q, implementation)([(q, k)], segments, rule, wanted).rows[0]


@torch.no_grad()
def visit_overlaps(
    visits: Sequence[tuple[Tensor, Tensor]],
    segments: Segments,
    scale: float | None = None,
    implementation: str = "auto",
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    token_sets: Tensor | Sequence[Tensor] | None = None,
    top_keys: bool = False,
) -> VisitOverlaps:
    """Row statistics of each visit, overlaps between every two visits, and the control between heads of one visit.

    Options that aren't listed are those of `row_statistics`, the same for every visit.

    Args:
        visits: (q, k) of each visit, as in `row_statistics`, all of the same tokens, heads, width and dtype; the
            number of key heads may differ.
        segments: documents of the token axis.

    Raises:
        InputError: shapes, dtypes or segments that don't fit together, or a forced implementation that can't do this.
        UnavailableError: a forced implementation that isn't installed.
    """
    _check(visits, segments)
    q = visits[0][0]
    rule = check_rule(q, segments, scale, window, soft_cap, sinks, bias)
    wanted = Wanted(True, check_token_sets(token_sets, q), top_keys)
    if len({k.shape[1] for _, k in visits}) > 1:
        common = math.lcm(*(k.shape[1] for _, k in visits))
        visits = [(q, k.repeat_interleave(common // k.shape[1], dim=1)) for q, k in visits]
    return _implementation(q, implementation)(visits, segments, rule, wanted)


Implementation = Callable[[Sequence[tuple[Tensor, Tensor]], Segments, AttentionRule, Wanted], VisitOverlaps]


def _implementation(q: Tensor, requested: str) -> Implementation:
    name = choose_attention_rows(q.device.type, q.dtype, requested, width=q.shape[2])
    if name == "numba":
        from visitlens.kernels.attention.rows_numba import numba_visit_overlaps

        return numba_visit_overlaps
    if name == "triton":
        from visitlens.kernels.attention.rows_triton import triton_visit_overlaps

        return triton_visit_overlaps
    from visitlens.kernels.attention.rows_torch import torch_visit_overlaps

    return torch_visit_overlaps


def _check(visits: Sequence[tuple[Tensor, Tensor]], segments: Segments) -> None:
    if not visits:
        raise InputError("expected the (q, k) of at least one visit, got none")
    q = visits[0][0]
    for a, b in visits:
        if a.dim() != 3 or b.dim() != 3 or a.shape[2] != b.shape[2] or b.shape[1] == 0 or a.shape[1] % b.shape[1]:
            raise InputError(
                "expected q [token, n_h, d] and k [token, n_kv, d] with n_h a multiple of n_kv; "
                f"got {tuple(a.shape)} and {tuple(b.shape)}"
            )
    if any(a.shape != q.shape or len(b) != len(visits[0][1]) for a, b in visits):
        raise InputError(f"expected the same shapes at every visit, got {[(*a.shape, *b.shape) for a, b in visits]}")
    bounds, keys = segments.bounds, visits[0][1]
    if bounds[0] != 0 or any(a > b for a, b in segments.spans) or not len(q) == len(keys) == bounds[-1]:
        raise InputError(
            f"expected segments of all {len(q)} tokens of q and {len(keys)} of k, got bounds {bounds[:8]} ..."
        )
    if not q.is_floating_point() or any(t.dtype != q.dtype or t.device != q.device for pair in visits for t in pair):
        raise InputError(
            f"expected float tensors of one dtype and device, got {[(p[0].dtype, p[1].dtype) for p in visits]}"
        )


def per_document(values: Tensor, segments: Segments, keep: Tensor | None = None) -> Tensor:
    """Mean of a statistic `[token, ...]` over each document's queries, `[document, ...]` float64; NaN where it has none.

    `keep [token]`: the queries that count, such as those beyond the segment start, which sees itself alone, or those
    with more than 8 visible keys.
    """
    kept = torch.ones(len(values), dtype=torch.bool, device=values.device) if keep is None else keep.to(values.device)
    document = torch.repeat_interleave(torch.tensor(segments.bounds).diff()).to(values.device)[kept]
    documents = len(segments.spans)
    totals = values.new_zeros((documents, *values.shape[1:]), dtype=torch.float64)
    totals.index_add_(0, document, values[kept].double())
    counts = torch.bincount(document, minlength=documents).double()
    return totals / counts.view(-1, *[1] * (values.ndim - 1))
