"""The same statistics as `attention_rows`, in one compiled pass: CPU, float32 (half precision is converted).

16 queries are computed at a time, for the maps (a head at a visit) that are compared with each other, on vectors of
8 lanes: one key of 8 queries. So every reduction over keys is a plain loop, the 8 largest scores come out of a
sorting network without a branch, a query costs nothing but its keys, and nothing larger than those 16 rows is held.

The vectors are a type of their own (`Lanes`), because numba leaves such loops scalar: it can't know that two arrays
don't overlap. Nothing is compiled with fast-math: multiply-adds are fused where `_fma` says so and nowhere else,
and no sum is reordered.
"""

from __future__ import annotations

import math
import operator
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, overload, register_model
from torch import Tensor

from visitlens.kernels.attention_rows import RowStatistics, VisitOverlaps, overlap_statistics
from visitlens.kernels.segments import Segments

_LANES = 8  # of a vector
_STEP = 2 * _LANES  # queries computed together
_TOP = 8
_BLOCK = 64  # keys whose weights are summed before they join the sum of all
_QUERY_BLOCK = 2**18  # numbers of queries that are converted and handed over at a time


def numba_visit_overlaps(
    visits: Sequence[tuple[Tensor, Tensor]], segments: Segments, scale: float, overlaps: bool
) -> VisitOverlaps:
    """`visit_overlaps` by the compiled pass; without `overlaps`, the row statistics only."""
    num_visits, (tokens, heads, d) = len(visits), visits[0][0].shape
    plan = _plan(num_visits, heads, overlaps)
    values = torch.empty(5, num_visits, heads, tokens)
    compared = torch.empty(3, plan.comparisons, heads, tokens)
    keys, starts = torch.stack([k.float() for _, k in visits]), segments.starts()
    longest = max((end - start for start, end in segments.spans), default=0)
    work = torch.empty(2, plan.members.shape[1], (longest + 2 * _STEP) * _STEP)
    block = max(1, _QUERY_BLOCK // (num_visits * heads * d * _STEP)) * _STEP
    packed = torch.empty(num_visits * min(block, tokens) * heads * d)  # used again: fresh pages cost as much as a copy
    for first in range(0, tokens, block):
        size = min(block, tokens - first)
        queries = packed[: num_visits * size * heads * d].view(num_visits, size, heads, d)
        for v, (q, _) in enumerate(visits):
            queries[v] = q[first : first + size]
        _pass(
            queries.numpy(), keys.numpy(), starts.numpy(), values.numpy(), compared.numpy(), work.numpy(), first,
            np.float32(scale * math.log2(math.e)), plan.members, plan.pairs,
        )  # fmt: skip
    if heads % 2 == 0:  # a control is the same from both of its heads
        compared[:, len(plan.across) :, heads // 2 :] = compared[:, len(plan.across) :, : heads // 2]

    peak, total, weighted, first, first4 = values.transpose(2, 3).contiguous()
    log_total = total.log()
    entropy = log_total - weighted / total * math.log(2)
    rows = zip(peak * scale + log_total, first / total, first4 / total, entropy, strict=True)
    results = overlap_statistics(compared, segments.positions())
    return VisitOverlaps(
        rows=[RowStatistics(*x) for x in rows],
        across=dict(zip(plan.across, results, strict=False)),
        control=results[len(plan.across) :] or None,
    )


@dataclass(frozen=True)
class _Plan:
    """Which maps, numbered visit * heads + head, are in hand together and which of them are compared.

    Attributes:
        across: pairs of visits.
        comparisons: one for each pair of visits, then one for the control of each visit.
        members: [group, member] maps.
        pairs: [group, pair, 3] two members of the group, and comparison * heads + head.
    """

    across: tuple[tuple[int, int], ...]
    comparisons: int
    members: np.ndarray
    pairs: np.ndarray


@cache
def _plan(num_visits: int, heads: int, overlaps: bool) -> _Plan:
    visits, half = range(num_visits), heads // 2
    across = tuple(combinations(visits, 2)) if overlaps else ()
    pairs = {(a * heads + h, b * heads + h): n * heads + h for n, (a, b) in enumerate(across) for h in range(heads)}
    controls = num_visits if overlaps and heads > 1 else 0
    for v in range(controls):
        for h in range(heads if heads % 2 else half):
            pairs[v * heads + h, v * heads + (h + half) % heads] = (len(across) + v) * heads + h
    if not overlaps:
        groups = [[m] for m in range(num_visits * heads)]
    elif heads % 2:  # the controls chain all heads into a ring
        groups = [list(range(num_visits * heads))]
    else:
        groups = [[v * heads + h for v in visits for h in (g, g + half)] for g in range(half)]
    inside = [[(g.index(a), g.index(b), at) for (a, b), at in pairs.items() if a in g] for g in groups]
    shaped = np.array(inside, dtype=np.int64).reshape(len(groups), -1, 3)
    return _Plan(across, len(across) + controls, np.array(groups), shaped)


class Lanes(types.Type):
    """Eight float32 in a vector register."""


lanes = Lanes(name="Lanes")
_VECTOR, _INT = ir.VectorType(ir.FloatType(), _LANES), ir.IntType(32)
_intrinsic: Any = intrinsic  # which drops the typing context from the parameters: more than a type checker knows
_FUSED = get_host_cpu_features().get("fma", False) or platform.machine() in ("arm64", "aarch64")


@register_model(Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager, front_end_type) -> None:
        super().__init__(manager, front_end_type, _VECTOR)


def _address(context, builder, signature, arguments):
    return builder.gep(context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]])


def _repeated(element: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, _LANES), [value] * _LANES)


def _spread(builder, x):
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), x, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), _repeated(_INT, 0))


@_intrinsic
def _load(typing_context, array, index):
    """Lanes from `array.ravel()[index:]`. The array is contiguous; the index isn't checked."""

    def generate(context, builder, signature, arguments):
        address = builder.bitcast(_address(context, builder, signature, arguments), _VECTOR.as_pointer())
        return builder.load(address, align=4)

    return lanes(array, types.intp), generate


@_intrinsic
def _store(typing_context, array, index, value):
    def generate(context, builder, signature, arguments):
        address = builder.bitcast(_address(context, builder, signature, arguments), _VECTOR.as_pointer())
        builder.store(arguments[2], address, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), generate


@_intrinsic
def _load_one(typing_context, array, index):
    """Lanes that all hold `array.ravel()[index]`."""

    def generate(context, builder, signature, arguments):
        return _spread(builder, builder.load(_address(context, builder, signature, arguments)))

    return lanes(array, types.intp), generate


@_intrinsic
def _all(typing_context, x):
    """Lanes that all hold x."""
    return lanes(types.float32), lambda context, builder, signature, arguments: _spread(builder, arguments[0])


@_intrinsic
def _power_of_two(typing_context, rounded):
    """2 ** n of the integers n in the low bits of `n + _ROUNDER`."""

    def generate(context, builder, signature, arguments):
        bits = builder.shl(builder.bitcast(arguments[0], ir.VectorType(_INT, _LANES)), _repeated(_INT, 23))
        return builder.bitcast(builder.add(bits, _repeated(_INT, 127 << 23)), _VECTOR)

    return lanes(lanes), generate


@_intrinsic
def _fma(typing_context, a, b, c):
    """a * b + c, rounded once where the processor can."""

    def generate(context, builder, signature, arguments):
        if not _FUSED:
            return builder.fadd(builder.fmul(arguments[0], arguments[1]), arguments[2])
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        return builder.call(get_or_insert_function(builder.module, kind, f"llvm.fma.v{_LANES}f32"), arguments)

    return lanes(lanes, lanes, lanes), generate


def _choice(comparison: str):
    """x where a and b compare so, else y; no comparison with NaN holds."""

    @_intrinsic
    def choose(typing_context, a, b, x, y):
        def generate(context, builder, signature, arguments):
            a, b, x, y = arguments
            return builder.select(builder.fcmp_ordered(comparison, a, b), x, y)

        return lanes(lanes, lanes, lanes, lanes), generate

    return choose


_if_greater, _if_less, _if_equal, _if_at_least = _choice(">"), _choice("<"), _choice("=="), _choice(">=")


def _arithmetic(operation, instruction: str) -> None:
    @_intrinsic
    def apply(typing_context, a, b):
        def generate(context, builder, signature, arguments):
            return getattr(builder, instruction)(*arguments)

        return lanes(lanes, lanes), generate

    @overload(operation)
    def of_lanes(a, b):
        return (lambda a, b: apply(a, b)) if a is b is lanes else None


_arithmetic(operator.add, "fadd")
_arithmetic(operator.sub, "fsub")
_arithmetic(operator.mul, "fmul")

_INFINITY, _ZERO, _ONE = np.float32(np.inf), np.float32(0), np.float32(1)
_SMALLEST = np.float32(-126)  # 2 ** -126 is the last normal float32; smaller weights are rounded up to it
_ROUNDER = np.float32(1.5 * 2**23)  # adding it rounds to an integer, which then fills the low bits
# Minimax polynomial of 2 ** x over [-1/2, 1/2], relative error 7.5e-8.
_C0, _C1, _C2 = np.float32(1.0000000716553021), np.float32(0.6931469670628841), np.float32(0.24022119720751478)
_C3, _C4, _C5 = np.float32(0.055507132750653304), np.float32(0.00967554150262763), np.float32(0.0013276471959732528)
# What is known of the queries of a step: offsets in `state`.
_PEAK, _EIGHTH, _TOTAL, _WEIGHTED, _COUNT, _WHERE = (n * _STEP for n in range(6))


@njit(cache=True, nogil=True)
def _exp2(x):
    """2 ** x for -126 <= x <= 0, to 3e-7 relative. NaN stays NaN."""
    rounded = x + _all(_ROUNDER)
    f = x - (rounded - _all(_ROUNDER))
    p = _fma(_fma(_all(_C5), f, _all(_C4)), f, _all(_C3))
    p = _fma(_fma(_fma(p, f, _all(_C2)), f, _all(_C1)), f, _all(_C0))
    return p * _power_of_two(rounded)


@njit(cache=True, nogil=True)
def _larger(a, b):
    return _if_greater(a, b, a, b)


@njit(cache=True, nogil=True)
def _sort(a, b):
    return _if_greater(a, b, a, b), _if_greater(a, b, b, a)


@njit(cache=True, nogil=True)
def _store_step(s, key, x, y):
    _store(s, key * _STEP, x)
    _store(s, key * _STEP + _LANES, y)


@njit(cache=True, nogil=True)
def _score(packed, d, k, row, at, last, s):
    """Products of `packed` [d, query] with keys 0 to `last`, 6 at a time; key n starts at k.ravel()[at + n * row]."""
    for key in range(0, last + 1, 6):
        k0, k1, k2 = at + key * row, at + min(key + 1, last) * row, at + min(key + 2, last) * row
        k3, k4, k5 = at + min(key + 3, last) * row, at + min(key + 4, last) * row, at + min(key + 5, last) * row
        x0 = x1 = x2 = x3 = x4 = x5 = y0 = y1 = y2 = y3 = y4 = y5 = _all(_ZERO)
        for n in range(d):
            x, y = _load(packed, n * _STEP), _load(packed, n * _STEP + _LANES)
            one = _load_one(k, k0 + n)
            x0, y0 = _fma(x, one, x0), _fma(y, one, y0)
            one = _load_one(k, k1 + n)
            x1, y1 = _fma(x, one, x1), _fma(y, one, y1)
            one = _load_one(k, k2 + n)
            x2, y2 = _fma(x, one, x2), _fma(y, one, y2)
            one = _load_one(k, k3 + n)
            x3, y3 = _fma(x, one, x3), _fma(y, one, y3)
            one = _load_one(k, k4 + n)
            x4, y4 = _fma(x, one, x4), _fma(y, one, y4)
            one = _load_one(k, k5 + n)
            x5, y5 = _fma(x, one, x5), _fma(y, one, y5)
        _store_step(s, key, x0, y0)
        _store_step(s, key + 1, x1, y1)
        _store_step(s, key + 2, x2, y2)
        _store_step(s, key + 3, x3, y3)
        _store_step(s, key + 4, x4, y4)
        _store_step(s, key + 5, x5, y5)


@njit(cache=True, nogil=True)
def _hide(s, keys, begin, own):
    """Sets -inf where a query doesn't see a key, up to a whole number of 8 keys, which it returns."""
    padded = -(-keys // _TOP) * _TOP
    for lane in range(_STEP):
        for key in range(begin[lane]):
            s[key * _STEP + lane] = -_INFINITY
        for key in range(own[lane] + 1, padded):
            s[key * _STEP + lane] = -_INFINITY
    return padded


@njit(cache=True, nogil=True)
def _find_peak(s, keys, state):
    for lane in range(0, _STEP, _LANES):
        peak = _all(-_INFINITY)
        for at in range(lane, keys * _STEP, _STEP):
            peak = _larger(_load(s, at), peak)
        _store(state, _PEAK + lane, peak)
        _store(state, _EIGHTH + lane, peak)


@njit(cache=True, nogil=True)
def _find_top(s, keys, state):
    """The largest and the 8th largest score: 8 keys at a time are sorted, then merged with the 8 largest so far."""
    for lane in range(0, _STEP, _LANES):
        ta = tb = tc = td = te = tf = tg = th = _all(-_INFINITY)
        for at in range(lane, keys * _STEP, _TOP * _STEP):
            a, b, c, d = _load(s, at), _load(s, at + _STEP), _load(s, at + 2 * _STEP), _load(s, at + 3 * _STEP)
            e, f = _load(s, at + 4 * _STEP), _load(s, at + 5 * _STEP)
            g, h = _load(s, at + 6 * _STEP), _load(s, at + 7 * _STEP)
            # The 19 comparisons that sort 8 numbers.
            (a, c), (b, d), (e, g), (f, h) = _sort(a, c), _sort(b, d), _sort(e, g), _sort(f, h)
            (a, e), (b, f), (c, g), (d, h) = _sort(a, e), _sort(b, f), _sort(c, g), _sort(d, h)
            (a, b), (c, d), (e, f), (g, h) = _sort(a, b), _sort(c, d), _sort(e, f), _sort(g, h)
            (c, e), (d, f) = _sort(c, e), _sort(d, f)
            (b, e), (d, g) = _sort(b, e), _sort(d, g)
            (b, c), (d, e), (f, g) = _sort(b, c), _sort(d, e), _sort(f, g)
            # One list against the other reversed: the larger of each two are the top 8, falling and rising once.
            ta, tb, tc, td = _larger(ta, h), _larger(tb, g), _larger(tc, f), _larger(td, e)
            te, tf, tg, th = _larger(te, d), _larger(tf, c), _larger(tg, b), _larger(th, a)
            # Which takes 12 comparisons to sort.
            (ta, te), (tb, tf), (tc, tg), (td, th) = _sort(ta, te), _sort(tb, tf), _sort(tc, tg), _sort(td, th)
            (ta, tc), (tb, td), (te, tg), (tf, th) = _sort(ta, tc), _sort(tb, td), _sort(te, tg), _sort(tf, th)
            (ta, tb), (tc, td), (te, tf), (tg, th) = _sort(ta, tb), _sort(tc, td), _sort(te, tf), _sort(tg, th)
        _store(state, _PEAK + lane, ta)
        _store(state, _EIGHTH + lane, th)


@njit(cache=True, nogil=True)
def _weigh(s, e, keys, factor, state):
    """Weights 2 ** (factor * (score - peak)); their sum, that of weight * exponent, and where the peak first is."""
    for lane in range(0, _STEP, _LANES):
        peak, eighth = _load(state, _PEAK + lane), _load(state, _EIGHTH + lane)
        total = weighted = count = _all(_ZERO)
        where = _all(_INFINITY)
        position = _all(np.float32(keys - 1))
        for end in range(keys, 0, -_BLOCK):  # downwards, so that the first of equal peaks is found last
            block_total = block_weighted = _all(_ZERO)  # sums of sums: thousands of terms would lose digits
            for key in range(end - 1, max(end - _BLOCK, 0) - 1, -1):
                score = _load(s, key * _STEP + lane)
                exponent = (score - peak) * _all(factor)
                exponent = _if_less(exponent, _all(_SMALLEST), _all(_SMALLEST), exponent)
                weight = _exp2(exponent)
                _store(e, key * _STEP + lane, weight)
                block_total = block_total + weight
                block_weighted = _fma(weight, exponent, block_weighted)
                count = count + _if_at_least(score, eighth, _all(_ONE), _all(_ZERO))
                where = _if_equal(score, peak, position, where)
                position = position - _all(_ONE)
            total = total + block_total
            weighted = weighted + block_weighted
        _store(state, _TOTAL + lane, total)
        _store(state, _WEIGHTED + lane, weighted)
        _store(state, _COUNT + lane, count)
        _store(state, _WHERE + lane, where)


@njit(cache=True, nogil=True)
def _compare(s_a, s_b, e_a, e_b, keys, a, b, shared, mass):
    """Keys among the top 8 of two members, and the sum of their smaller weight, each times the other's total."""
    for lane in range(0, _STEP, _LANES):
        eighth_a, eighth_b = _load(a, _EIGHTH + lane), _load(b, _EIGHTH + lane)
        total_a, total_b = _load(a, _TOTAL + lane), _load(b, _TOTAL + lane)
        both = smaller = _all(_ZERO)
        for at in range(lane, keys * _STEP, _STEP):
            p, q = _load(e_a, at) * total_b, _load(e_b, at) * total_a
            smaller = smaller + _if_less(p, q, p, q)
            among_b = _if_at_least(_load(s_b, at), eighth_b, _all(_ONE), _all(_ZERO))
            both = both + _if_at_least(_load(s_a, at), eighth_a, among_b, _all(_ZERO))
        _store(shared, lane, both)
        _store(mass, lane, smaller)


@njit(cache=True, nogil=True)
def _shared_with_ties(a, b, eighth_a, eighth_b, lane, keys):
    """Keys among the top 8 of both where keys tie with the 8th: the first of those complete the 8."""
    room_a = room_b = _TOP
    for key in range(keys):
        room_a -= a[key * _STEP + lane] > eighth_a
        room_b -= b[key * _STEP + lane] > eighth_b
    shared = 0
    for key in range(keys):
        x, y = a[key * _STEP + lane], b[key * _STEP + lane]
        level_a, level_b = x == eighth_a and room_a > 0, y == eighth_b and room_b > 0
        room_a -= level_a
        room_b -= level_b
        shared += (x > eighth_a or level_a) and (y > eighth_b or level_b)
    return shared


@njit(cache=True, nogil=True)
def _pass(queries, keys, starts, values, compared, work, first_token, factor, members, pairs):
    """All statistics of a block of queries.

    Args:
        queries: [visit, query, head, d], of the tokens from `first_token` on.
        keys: [visit, token, kv head, d].
        starts: [token] first token of its segment.
        values: [5, visit, head, token] peak, total, weighted exponent, weight of the first key and of the first 4,
            written.
        compared: [3, comparison, head, token] top-1 match, top-8 shared, mass overlap; written.
        work: [scores or weights, member, key * query of a step].
        factor: of the exponents, base 2.
        members, pairs: as in `_Plan`.
    """
    block, heads, d = queries.shape[1:]
    tokens, kv_heads = keys.shape[1:3]
    packed = np.empty(d * _STEP, dtype=np.float32)
    state = np.empty((members.shape[1], 6 * _STEP), dtype=np.float32)
    begin, own = np.empty(_STEP, dtype=np.int64), np.empty(_STEP, dtype=np.int64)
    shared, mass = np.empty(_STEP, dtype=np.float32), np.empty(_STEP, dtype=np.float32)
    for query in range(0, block, _STEP):
        first, count = first_token + query, min(_STEP, block - query)
        low = starts[first]
        for lane in range(_STEP):  # lanes past the last query repeat it
            token = first + min(lane, count - 1)
            begin[lane], own[lane] = starts[token] - low, token - low
        last = own[_STEP - 1]
        for group in range(members.shape[0]):
            for n in range(members.shape[1]):
                visit, head = divmod(members[group, n], heads)
                s, e = work[0, n], work[1, n]
                for lane in range(_STEP):
                    for i in range(d):
                        packed[i * _STEP + lane] = queries[visit, query + min(lane, count - 1), head, i]
                at = ((visit * tokens + low) * kv_heads + head // (heads // kv_heads)) * d
                _score(packed, d, keys, kv_heads * d, at, last, s)
                padded = _hide(s, last + 1, begin, own)
                if pairs.shape[1]:
                    _find_top(s, padded, state[n])
                else:
                    _find_peak(s, padded, state[n])
                _weigh(s, e, last + 1, factor, state[n])
                for lane in range(count):
                    first4 = _ZERO
                    for key in range(begin[lane], min(begin[lane] + 4, own[lane] + 1)):
                        first4 += e[key * _STEP + lane]
                    values[0, visit, head, first + lane] = state[n, _PEAK + lane]
                    values[1, visit, head, first + lane] = state[n, _TOTAL + lane]
                    values[2, visit, head, first + lane] = state[n, _WEIGHTED + lane]
                    values[3, visit, head, first + lane] = e[begin[lane] * _STEP + lane]
                    values[4, visit, head, first + lane] = first4
            for n in range(pairs.shape[1]):
                a, b, place = pairs[group, n]
                comparison, head = divmod(place, heads)
                x, y = state[a], state[b]
                _compare(work[0, a], work[0, b], work[1, a], work[1, b], last + 1, x, y, shared, mass)
                for lane in range(count):
                    many = x[_COUNT + lane] > _TOP or y[_COUNT + lane] > _TOP
                    if many and own[lane] - begin[lane] >= _TOP:
                        shared[lane] = _shared_with_ties(
                            work[0, a], work[0, b], x[_EIGHTH + lane], y[_EIGHTH + lane], lane, last + 1
                        )
                    at = first + lane
                    compared[0, comparison, head, at] = x[_WHERE + lane] == y[_WHERE + lane]
                    compared[1, comparison, head, at] = shared[lane]
                    compared[2, comparison, head, at] = mass[lane] / (x[_TOTAL + lane] * y[_TOTAL + lane])
