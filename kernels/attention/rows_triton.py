"""The statistics of `attention_rows` on a GPU, in Triton: float32, bfloat16 or float16, every feature.

One program handles a block of queries of one head. A first kernel passes over their keys once, with the running
log-sum-exp of flash attention and a running top 8; a second one passes over the keys of two maps that are compared,
now that both normalisers are known, and sums their smaller P. Q and K are read where they lie.

Top keys are int64: the score's bits, in the order of integers, above the index counted down. So no two are equal, a
tie goes to the smaller position, and the largest integer is the top key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
import triton
import triton.language as tl
from torch import Tensor

from visitlens.kernels.attention.results import TOP, VisitOverlaps, Wanted, overlap_results, row_results
from visitlens.kernels.attention.rule import AttentionRule
from visitlens.kernels.segments import Segments

_NONE = -(2**63)  # less than any top key
_LAST = 2**31 - 1  # what the index is counted down from


def triton_visit_overlaps(
    visits: Sequence[tuple[Tensor, Tensor]], segments: Segments, rule: AttentionRule, wanted: Wanted
) -> VisitOverlaps:
    """`visit_overlaps`; the row statistics only, where overlaps aren't wanted."""
    visits = [(q if q.stride(2) == 1 else q.contiguous(), k if k.stride(2) == 1 else k.contiguous()) for q, k in visits]
    q, num_visits = visits[0][0], len(visits)
    tokens, heads, _ = q.shape
    num_sets = 0 if wanted.token_sets is None else len(wanted.token_sets)
    rows = torch.empty(4 + num_sets, num_visits, heads, tokens, device=q.device)
    tops = torch.empty(num_visits, heads, tokens, TOP, dtype=torch.int64, device=q.device)
    launch = _Launch(segments, rule, wanted.token_sets, q)
    for v, (q, k) in enumerate(visits):
        launch.rows(q, k, rows[:, v], tops[v])
    tops = tops.sort(dim=-1, descending=True).values
    top_keys = (_LAST - (tops & _LAST)).where(tops > _NONE + TOP, -1)

    pairs = list(combinations(range(num_visits), 2)) if wanted.overlaps else []
    controls = num_visits if wanted.overlaps and heads > 1 else 0
    compared = rows.new_empty(3, len(pairs) + controls, heads, tokens)
    half = heads // 2
    comparisons = [(a, b, 0, heads) for a, b in pairs]
    comparisons += [(v, v, half, heads if heads % 2 else half) for v in range(controls)]
    for n, (a, b, shift, count) in enumerate(comparisons):
        launch.compare(visits[a], visits[b], rows[0, a], rows[0, b], shift, compared[2, n, :count])
        first, second = top_keys[a, :count], top_keys[b].roll(-shift, 0)[:count]
        compared[0, n, :count] = first[..., 0] == second[..., 0]
        compared[1, n, :count] = sum(((first == second[..., i : i + 1]) & (first >= 0)).sum(-1) for i in range(TOP))
        compared[:, n, count:] = compared[:, n, : heads - count]  # a control is the same from both of its heads

    results = overlap_results(compared, rule.visible(segments).to(q.device))
    seen = None
    if wanted.top_keys:  # of a score of -inf, the bits in order
        seen = top_keys.where((tops >> 32) > -2139095041, -1)
    return VisitOverlaps(
        rows=row_results(rows, rule, wanted, seen),
        across=dict(zip(pairs, results, strict=False)),
        control=results[len(pairs) :] or None,
    )


@dataclass
class _Launch:
    """What every launch on one text shares."""

    segments: Segments
    rule: AttentionRule
    token_sets: Tensor | None
    like: Tensor

    def __post_init__(self) -> None:
        device, rule, (tokens, _, d) = self.like.device, self.rule, self.like.shape
        width = max(16, triton.next_power_of_2(d))
        bytes_a_vector = width * self.like.element_size()
        # Blocks that fit the shared memory (99 KB) of the smaller cards.
        self.block, keys = (64, 64) if bytes_a_vector <= 128 else (64, 32) if bytes_a_vector <= 512 else (32, 16)
        self.starts = self.segments.starts().to(device, torch.int32)
        nothing = torch.empty(0, device=device)
        self.sinks = nothing if rule.sinks is None else rule.sinks.contiguous()
        self.bias = nothing if rule.bias is None else rule.bias.contiguous()
        self.sets = nothing if self.token_sets is None else self.token_sets.to(torch.int8).contiguous()
        self.common = {
            "scale": rule.scale,
            "window": min(rule.window or tokens, tokens),
            "cap": rule.soft_cap or 0.0,
            "bias_stride": 0 if rule.bias is None else rule.bias.shape[1],
            "HAS_CAP": rule.soft_cap is not None,
            "HAS_BIAS": rule.bias is not None,
            "D": d,
            "WIDTH": width,
            "ROWS": self.block,
            "KEYS": keys,
            "num_stages": 2,
        }

    def rows(self, q: Tensor, k: Tensor, values: Tensor, tops: Tensor) -> None:
        """Writes values [4 + sets, head, token] and tops [head, token, 8], in no order."""
        tokens, heads, _ = q.shape
        if not tokens:
            return
        sets = 0 if self.token_sets is None else len(self.token_sets)
        _rows[(triton.cdiv(tokens, self.block), heads)](
            q, k, self.starts, self.sinks, self.bias, self.sets, values, tops,
            tokens, heads // k.shape[1], q.stride(0), q.stride(1), k.stride(0), k.stride(1), values.stride(0),
            HAS_SINKS=self.rule.sinks is not None, SETS=sets, SET_SLOTS=triton.next_power_of_2(max(sets, 1)),
            **self.common,
        )  # fmt: skip

    def compare(
        self, one: tuple, other: tuple, log_sums: Tensor, other_log_sums: Tensor, shift: int, out: Tensor
    ) -> None:
        """Writes out [head, token]: the shared mass of head h of one and head (h + shift) % heads of the other."""
        (q, k), (q2, k2), (tokens, heads, _) = one, other, one[0].shape
        if not out.numel():
            return
        _compare[(triton.cdiv(tokens, self.block), len(out))](
            q, k, q2, k2, self.starts, self.bias, log_sums, other_log_sums, out,
            tokens, heads, heads // k.shape[1], shift, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            q2.stride(0), q2.stride(1), k2.stride(0), k2.stride(1),
            **self.common,
        )  # fmt: skip


@triton.jit
def _queries(q, rows, head, stride, head_stride, tokens, D: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    at = rows.to(tl.int64)[:, None] * stride + head * head_stride + columns[None, :]
    return tl.load(q + at, mask=(rows < tokens)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _scores(
    queries, k, bias, rows, keys, begin, head, kv_head, stride, head_stride, tokens, scale, cap, bias_stride,
    HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Scores [row, key], -inf where a row doesn't see the key, and whether it does."""
    columns = tl.arange(0, WIDTH)
    at = keys.to(tl.int64)[None, :] * stride + kv_head * head_stride + columns[:, None]
    values = tl.load(k + at, mask=(keys < tokens)[None, :] & (columns < D)[:, None], other=0.0)
    scores = tl.dot(queries, values, input_precision="ieee") * scale
    if HAS_CAP:
        x = scores / cap
        e = tl.exp(-2 * tl.abs(x))
        far = tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)
        square = x * x  # Taylor: 1 - e would lose the digits of a small one
        near = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
        scores = cap * tl.where(tl.abs(x) < 0.2, near, far)
    visible = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= begin[:, None])
    if HAS_BIAS:
        distance = rows[:, None] - keys[None, :]
        scores += tl.load(bias + head * bias_stride + distance, mask=visible, other=0.0)
    return tl.where(visible, scores, float("-inf")), visible


@triton.jit
def _rows(
    q, k, starts, sinks, bias, sets, values, tops,
    tokens, group, q_stride, q_head_stride, k_stride, k_head_stride, value_stride,
    scale, window, cap, bias_stride,
    HAS_SINKS: tl.constexpr, SETS: tl.constexpr, SET_SLOTS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.load(starts + rows, mask=rows < tokens, other=tokens)
    begin = tl.maximum(start, rows - window + 1)
    queries = _queries(q, rows, head, q_stride, q_head_stride, tokens, D, WIDTH)
    if HAS_SINKS:
        peak = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head)
        total = tl.where(peak > float("-inf"), 1.0, 0.0)
    else:
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)  # sum of weight * (score - peak)
    sink = tl.zeros([ROWS], tl.float32)
    first4 = tl.zeros([ROWS], tl.float32)
    slots = tl.arange(0, SET_SLOTS)
    masses = tl.zeros([ROWS, SET_SLOTS], tl.float32)
    lowest = tl.full([ROWS, 8], -(2**63), tl.int64)
    top = lowest + tl.arange(0, 8)[None, :]  # empty places, all different
    for first in range(tl.min(begin, 0), tl.minimum(tl.program_id(0) * ROWS + ROWS, tokens), KEYS):
        keys = first + tl.arange(0, KEYS)
        scores, visible = _scores(
            queries, k, bias, rows, keys, begin, head, head // group, k_stride, k_head_stride, tokens, scale, cap,
            bias_stride, HAS_CAP, HAS_BIAS, D, WIDTH,
        )  # fmt: skip
        bits = scores.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of the scores
        candidates = (bits.to(tl.int64) << 32) | (keys ^ 0x7FFFFFFF)[None, :].to(tl.int64)
        candidates = tl.where(visible, candidates, -(2**63))
        best, worst = tl.max(candidates, 1), tl.min(top, 1)
        while tl.max((best > worst).to(tl.int32), 0) > 0:
            replaced = (top == worst[:, None]) & (best > worst)[:, None]
            top = tl.where(replaced, best[:, None], top)
            candidates = tl.where(candidates == best[:, None], -(2**63), candidates)
            best, worst = tl.max(candidates, 1), tl.min(top, 1)

        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fall = tl.where(peak == float("-inf"), 0.0, peak - base)
        shrink = tl.where(peak == float("-inf"), 0.0, tl.exp(fall))
        exponents = scores - base[:, None]
        weights = tl.exp(exponents)
        weighted = shrink * (weighted + total * fall) + tl.sum(tl.where(weights > 0, weights * exponents, 0.0), 1)
        total = shrink * total + tl.sum(weights, 1)
        offset = keys[None, :] - start[:, None]
        sink = shrink * sink + tl.sum(tl.where(offset == 0, weights, 0.0), 1)
        first4 = shrink * first4 + tl.sum(tl.where((offset >= 0) & (offset < 4), weights, 0.0), 1)
        masses = masses * shrink[:, None]
        for n in tl.static_range(SETS):
            member = tl.load(sets + n * tokens + keys, mask=keys < tokens, other=0).to(tl.float32)
            masses += tl.where(slots[None, :] == n, tl.sum(weights * member[None, :], 1)[:, None], 0.0)
        peak = higher

    inside = rows < tokens
    nan = total - total  # of a NaN score
    out = values + head.to(tl.int64) * tokens + rows
    tl.store(out, peak + tl.log(total), mask=inside)
    tl.store(out + value_stride, sink / total + nan, mask=inside)
    tl.store(out + 2 * value_stride, first4 / total + nan, mask=inside)
    entropy = tl.log(total) - weighted / total
    if HAS_SINKS:  # of the keys alone
        log_learned = tl.load(sinks + head) - peak - tl.log(total)
        entropy += tl.where(log_learned > float("-inf"), tl.exp(log_learned) * log_learned, 0.0)
    tl.store(out + 3 * value_stride, entropy, mask=inside)
    for n in tl.static_range(SETS):
        mass = tl.sum(tl.where(slots[None, :] == n, masses, 0.0), 1)
        tl.store(out + (4 + n) * value_stride, mass / total + nan, mask=inside)
    at = (head.to(tl.int64) * tokens + rows)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(tops + at, top, mask=inside[:, None])


@triton.jit
def _compare(
    q, k, q2, k2, starts, bias, log_sums, other_log_sums, out,
    tokens, heads, group, shift, q_stride, q_head_stride, k_stride, k_head_stride,
    q2_stride, q2_head_stride, k2_stride, k2_head_stride,
    scale, window, cap, bias_stride,
    HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    other = (head + shift) % heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < tokens
    begin = tl.maximum(tl.load(starts + rows, mask=inside, other=tokens), rows - window + 1)
    queries = _queries(q, rows, head, q_stride, q_head_stride, tokens, D, WIDTH)
    other_queries = _queries(q2, rows, other, q2_stride, q2_head_stride, tokens, D, WIDTH)
    log_sum = tl.load(log_sums + head.to(tl.int64) * tokens + rows, mask=inside, other=0.0)
    other_log_sum = tl.load(other_log_sums + other.to(tl.int64) * tokens + rows, mask=inside, other=0.0)
    mass = (log_sum + other_log_sum) * 0  # NaN where either has a NaN score
    for first in range(tl.min(begin, 0), tl.minimum(tl.program_id(0) * ROWS + ROWS, tokens), KEYS):
        keys = first + tl.arange(0, KEYS)
        scores, visible = _scores(
            queries, k, bias, rows, keys, begin, head, head // group, k_stride, k_head_stride, tokens, scale, cap,
            bias_stride, HAS_CAP, HAS_BIAS, D, WIDTH,
        )  # fmt: skip
        other_scores, visible = _scores(
            other_queries, k2, bias, rows, keys, begin, other, other // group, k2_stride, k2_head_stride, tokens, scale,
            cap, bias_stride, HAS_CAP, HAS_BIAS, D, WIDTH,
        )  # fmt: skip
        smaller = tl.minimum(scores - log_sum[:, None], other_scores - other_log_sum[:, None])
        mass += tl.sum(tl.where(visible, tl.exp(smaller), 0.0), 1)
    tl.store(out + head.to(tl.int64) * tokens + rows, mass, mask=inside)
