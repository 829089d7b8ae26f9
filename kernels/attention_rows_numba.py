"""The same statistics as `attention_rows`, by matrix products and one compiled pass over their tiles: CPU, float32.

torch computes the scores of a panel of queries, keys down and queries across. The compiled pass takes 16 queries at
a time and works on vectors of 8: one key of 8 queries. So every reduction over keys is a plain loop, the 8 largest
scores come out of a sorting network without a branch, and a query costs nothing but its keys.

The vectors are a type of their own (`Lanes`), because numba leaves such loops scalar: it can't know that two arrays
don't overlap. Nothing is compiled with fast-math: no fused multiply-add and no reordering that differs by machine.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, overload, register_model
from torch import Tensor

from visitlens.kernels.attention_rows import RowStatistics, VisitOverlaps, overlap_statistics
from visitlens.kernels.segments import Segments

_TILE = 2**20  # scores in one tile, unless 16 queries of all maps need more
_PANEL = 64  # queries in one tile at most
_WIDTH = 8  # lanes of a vector
_STEP = 2 * _WIDTH  # queries in one step of the compiled pass: one cache line of scores per key
_TOP = 8


def numba_visit_overlaps(
    visits: Sequence[tuple[Tensor, Tensor]], segments: Segments, scale: float, overlaps: bool
) -> VisitOverlaps:
    """`visit_overlaps` by torch products and the compiled pass; without `overlaps`, the row statistics only."""
    (q, k), num_visits = visits[0], len(visits)
    (tokens, heads, d), kv_heads = q.shape, k.shape[1]
    stack, maps = heads // kv_heads, num_visits * heads  # the query heads of one key head share a product
    plan = _plan(num_visits, heads, overlaps)
    values = torch.empty(5, maps, tokens)
    compared = torch.empty(3, plan.slots, tokens)

    keys = [k.float().transpose(0, 1) for _, k in visits]
    starts = segments.starts().numpy()
    panels = list(_panels(segments, maps))
    tile = torch.empty(maps * max((_padded(last - first) * (last - start) for start, first, last in panels), default=0))
    packed = torch.zeros(heads * d * _PANEL)
    longest = max((last - start for start, _, last in panels), default=0)
    work = np.empty((2, plan.members.shape[1], (longest + _TOP) * _STEP), dtype=np.float32)
    for start, first, last in panels:
        height, width, columns = last - first, last - start, stack * _padded(last - first)
        scores = tile[: num_visits * kv_heads * width * columns].view(num_visits, kv_heads, width, columns)
        queries = packed[: kv_heads * d * columns].view(kv_heads, d, columns)
        for v, (q, _) in enumerate(visits):
            panel = q[first:last].unflatten(1, (kv_heads, stack)).permute(1, 3, 2, 0)
            queries.view(kv_heads, d, stack, -1)[..., :height] = panel
            torch.bmm(keys[v][:, start:last], queries, out=scores[v])
        _panel_pass(
            scores.view(-1, width, columns).numpy(),
            starts[first:last] - start,
            np.float32(scale * math.log2(math.e)),
            plan.members,
            plan.pairs,
            values[:, :, first:last].numpy(),
            compared[:, :, first:last].numpy(),
            work,
        )
    return _results(values.view(5, num_visits, heads, tokens), compared, segments, scale, plan)


def _results(values: Tensor, compared: Tensor, segments: Segments, scale: float, plan: _Plan) -> VisitOverlaps:
    """From values [5, visit, head, token] and compared [3, slot, token] of the compiled pass."""
    peak, total, weighted, first, first4 = values.transpose(2, 3).contiguous()
    log_total = total.log()
    entropy = log_total - weighted / total * math.log(2)
    rows = zip(peak * scale + log_total, first / total, first4 / total, entropy, strict=True)
    positions, heads = segments.positions(), values.shape[2]
    across, control = compared[:, : len(plan.across) * heads], compared[:, len(plan.across) * heads :]
    across = across.unflatten(1, (-1, heads))
    control = control.unflatten(1, (values.shape[1], -1))
    if control.shape[2] < heads:
        control = torch.cat([control, control], dim=2)
    return VisitOverlaps(
        rows=[RowStatistics(*x) for x in rows],
        across={pair: overlap_statistics(across[:, n], positions) for n, pair in enumerate(plan.across)},
        control=[overlap_statistics(x, positions) for x in control.unbind(1)] if control.shape[2] else None,
    )


@dataclass(frozen=True)
class _Plan:
    """Which maps, numbered visit * heads + head, are in hand together and which of them are compared.

    Attributes:
        across: pairs of visits.
        slots: comparisons in all: every head across each pair of visits, then every visit's control.
        members: [group, member] maps.
        pairs: [group, comparison, 3] two members of the group and the slot of their comparison.
    """

    across: tuple[tuple[int, int], ...]
    slots: int
    members: np.ndarray
    pairs: np.ndarray


@cache
def _plan(num_visits: int, heads: int, overlaps: bool) -> _Plan:
    visits, half = range(num_visits), heads // 2
    if not overlaps:
        return _Plan(
            (), 0, np.arange(num_visits * heads)[:, None], np.empty((num_visits * heads, 0, 3), dtype=np.int64)
        )
    across = tuple(combinations(visits, 2))
    slots = [(a * heads + h, b * heads + h) for a, b in across for h in range(heads)]
    if heads % 2:  # the controls chain all heads into a ring
        groups = [list(range(num_visits * heads))]
        slots += [(v * heads + h, v * heads + (h + half) % heads) for v in visits for h in range(heads) if heads > 1]
    else:
        groups = [[v * heads + h for v in visits for h in (g, g + half)] for g in range(half)]
        slots += [(v * heads + h, v * heads + h + half) for v in visits for h in range(half)]
    pairs = [[(g.index(a), g.index(b), n) for n, (a, b) in enumerate(slots) if a in g] for g in groups]
    return _Plan(across, len(slots), np.array(groups), np.array(pairs, dtype=np.int64).reshape(len(groups), -1, 3))


def _padded(queries: int) -> int:
    return -(-queries // _STEP) * _STEP


def _panels(segments: Segments, maps: int) -> Iterator[tuple[int, int, int]]:
    """(first key, first query, end of both) of each panel. Short segments share one: a query knows its own keys."""
    spans = [span for span in segments.spans if span[0] < span[1]]
    n = 0
    while n < len(spans):
        start, end = spans[n]
        n += 1
        while n < len(spans) and spans[n][1] - start <= _PANEL:
            end = spans[n][1]
            n += 1
        height = max(_STEP, min(_PANEL, _TILE // (maps * (end - start)) // _STEP * _STEP))
        for first in range(start, end, height):
            yield start, first, min(first + height, end)


class Lanes(types.Type):
    """Eight float32 in one vector register."""


lanes = Lanes(name="Lanes")
_VECTOR = ir.VectorType(ir.FloatType(), _WIDTH)


@register_model(Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager, front_end_type) -> None:
        super().__init__(manager, front_end_type, _VECTOR)


def _address(context, builder, signature, arguments):
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.bitcast(builder.gep(array.data, [arguments[1]]), _VECTOR.as_pointer())


def _constant(element: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, _WIDTH), [value] * _WIDTH)


@intrinsic
def _load(typing_context, array, index):
    """Lanes at `array.ravel()[index:]`; not bounds-checked."""

    def generate(context, builder, signature, arguments):
        loaded = builder.load(_address(context, builder, signature, arguments))
        loaded.align = 4
        return loaded

    return lanes(array, types.intp), generate


@intrinsic
def _store(typing_context, array, index, value):
    def generate(context, builder, signature, arguments):
        builder.store(arguments[2], _address(context, builder, signature, arguments)).align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), generate


@intrinsic
def _all(typing_context, x):
    """Lanes that all hold x."""

    def generate(context, builder, signature, arguments):
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        one = builder.insert_element(undefined, arguments[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(one, undefined, _constant(ir.IntType(32), 0))

    return lanes(types.float32), generate


@intrinsic
def _power_of_two(typing_context, rounded):
    """2 ** n of the integers n in the low bits of `n + _ROUNDER`."""

    def generate(context, builder, signature, arguments):
        integer = ir.IntType(32)
        bits = builder.shl(builder.bitcast(arguments[0], ir.VectorType(integer, _WIDTH)), _constant(integer, 23))
        return builder.bitcast(builder.add(bits, _constant(integer, 127 << 23)), _VECTOR)

    return lanes(lanes), generate


def _arithmetic(instruction: str):
    @intrinsic
    def apply(typing_context, a, b):
        def generate(context, builder, signature, arguments):
            return getattr(builder, instruction)(*arguments)

        return lanes(lanes, lanes), generate

    return apply


def _choice(comparison: str):
    """x where a and b compare so, else y; a comparison with NaN is false."""

    @intrinsic
    def choose(typing_context, a, b, x, y):
        def generate(context, builder, signature, arguments):
            a, b, x, y = arguments
            return builder.select(builder.fcmp_ordered(comparison, a, b), x, y)

        return lanes(lanes, lanes, lanes, lanes), generate

    return choose


_add, _subtract, _multiply = _arithmetic("fadd"), _arithmetic("fsub"), _arithmetic("fmul")
_if_greater, _if_less, _if_equal, _if_at_least = _choice(">"), _choice("<"), _choice("=="), _choice(">=")


@overload(operator.add)
def _overload_add(a, b):
    return (lambda a, b: _add(a, b)) if a is b is lanes else None


@overload(operator.sub)
def _overload_subtract(a, b):
    return (lambda a, b: _subtract(a, b)) if a is b is lanes else None


@overload(operator.mul)
def _overload_multiply(a, b):
    return (lambda a, b: _multiply(a, b)) if a is b is lanes else None


_INFINITY, _ZERO, _ONE = np.float32(np.inf), np.float32(0), np.float32(1)
_SMALLEST = np.float32(-126)  # 2 ** -126 is the last normal float32; smaller weights are rounded up to it
_ROUNDER = np.float32(1.5 * 2**23)  # adding it rounds to an integer, which then fills the low bits
# Minimax polynomial of 2 ** x over [-1/2, 1/2], relative error 7.5e-8.
_C0, _C1, _C2 = np.float32(1.0000000716553021), np.float32(0.6931469670628841), np.float32(0.24022119720751478)
_C3, _C4, _C5 = np.float32(0.055507132750653304), np.float32(0.00967554150262763), np.float32(0.0013276471959732528)
_PEAK, _EIGHTH, _TOTAL, _WEIGHTED, _COUNT, _WHERE = range(6)  # what is known of each query of a step


@njit(cache=True, nogil=True)
def _exp2(x):
    """2 ** x for -126 <= x <= 0, to 3e-7 relative. NaN stays NaN."""
    rounded = x + _all(_ROUNDER)
    f = x - (rounded - _all(_ROUNDER))
    p = _all(_C5) * f + _all(_C4)
    p = p * f + _all(_C3)
    p = p * f + _all(_C2)
    p = p * f + _all(_C1)
    p = p * f + _all(_C0)
    return p * _power_of_two(rounded)


@njit(cache=True, nogil=True)
def _larger(a, b):
    return _if_greater(a, b, a, b)


@njit(cache=True, nogil=True)
def _sorted2(a, b):
    return _if_greater(a, b, a, b), _if_greater(a, b, b, a)


@njit(cache=True, nogil=True)
def _find_peak(s, keys, state):
    for lane in range(0, _STEP, _WIDTH):
        peak = _all(-_INFINITY)
        for at in range(lane, keys * _STEP, _STEP):
            peak = _larger(_load(s, at), peak)
        _store(state, _PEAK * _STEP + lane, peak)
        _store(state, _EIGHTH * _STEP + lane, peak)


@njit(cache=True, nogil=True)
def _find_top(s, keys, state):
    """The largest and the 8th largest score: 8 keys at a time are sorted, then merged with the 8 largest so far."""
    for lane in range(0, _STEP, _WIDTH):
        ta = tb = tc = td = te = tf = tg = th = _all(-_INFINITY)
        for at in range(lane, keys * _STEP, _TOP * _STEP):
            a, b, c, d = _load(s, at), _load(s, at + 16), _load(s, at + 32), _load(s, at + 48)
            e, f, g, h = _load(s, at + 64), _load(s, at + 80), _load(s, at + 96), _load(s, at + 112)
            # The 19 comparisons that sort 8 numbers.
            (a, c), (b, d), (e, g), (f, h) = _sorted2(a, c), _sorted2(b, d), _sorted2(e, g), _sorted2(f, h)
            (a, e), (b, f), (c, g), (d, h) = _sorted2(a, e), _sorted2(b, f), _sorted2(c, g), _sorted2(d, h)
            (a, b), (c, d), (e, f), (g, h) = _sorted2(a, b), _sorted2(c, d), _sorted2(e, f), _sorted2(g, h)
            (c, e), (d, f) = _sorted2(c, e), _sorted2(d, f)
            (b, e), (d, g) = _sorted2(b, e), _sorted2(d, g)
            (b, c), (d, e), (f, g) = _sorted2(b, c), _sorted2(d, e), _sorted2(f, g)
            # One list against the other reversed: the larger ones are the top 8, rising and then falling.
            ta, tb, tc, td = _larger(ta, h), _larger(tb, g), _larger(tc, f), _larger(td, e)
            te, tf, tg, th = _larger(te, d), _larger(tf, c), _larger(tg, b), _larger(th, a)
            # Which takes 12 comparisons to sort.
            (ta, te), (tb, tf), (tc, tg), (td, th) = (
                _sorted2(ta, te),
                _sorted2(tb, tf),
                _sorted2(tc, tg),
                _sorted2(td, th),
            )
            (ta, tc), (tb, td), (te, tg), (tf, th) = (
                _sorted2(ta, tc),
                _sorted2(tb, td),
                _sorted2(te, tg),
                _sorted2(tf, th),
            )
            (ta, tb), (tc, td), (te, tf), (tg, th) = (
                _sorted2(ta, tb),
                _sorted2(tc, td),
                _sorted2(te, tf),
                _sorted2(tg, th),
            )
        _store(state, _PEAK * _STEP + lane, ta)
        _store(state, _EIGHTH * _STEP + lane, th)


@njit(cache=True, nogil=True)
def _weigh(s, e, keys, factor, state):
    """Weights 2 ** (factor * (score - peak)) of all scores, their sum and that of weight * exponent; where the peak is."""
    for lane in range(0, _STEP, _WIDTH):
        peak, eighth = _load(state, _PEAK * _STEP + lane), _load(state, _EIGHTH * _STEP + lane)
        total = weighted = count = _all(_ZERO)
        where = _all(_INFINITY)
        for key in range(keys):
            score = _load(s, key * _STEP + lane)
            exponent = (score - peak) * _all(factor)
            exponent = _if_less(exponent, _all(_SMALLEST), _all(_SMALLEST), exponent)
            weight = _exp2(exponent)
            _store(e, key * _STEP + lane, weight)
            total = total + weight
            weighted = weighted + weight * exponent
            count = count + _if_at_least(score, eighth, _all(_ONE), _all(_ZERO))
            here = _if_equal(score, peak, _all(np.float32(key)), _all(_INFINITY))
            where = _if_less(here, where, here, where)
        _store(state, _TOTAL * _STEP + lane, total)
        _store(state, _WEIGHTED * _STEP + lane, weighted)
        _store(state, _COUNT * _STEP + lane, count)
        _store(state, _WHERE * _STEP + lane, where)


@njit(cache=True, nogil=True)
def _compare(s_a, s_b, e_a, e_b, keys, a, b, shared, mass):
    """Keys among the top 8 of two members, and the sum of their smaller weight, each times the other's total."""
    for lane in range(0, _STEP, _WIDTH):
        eighth_a, eighth_b = _load(a, _EIGHTH * _STEP + lane), _load(b, _EIGHTH * _STEP + lane)
        total_a, total_b = _load(a, _TOTAL * _STEP + lane), _load(b, _TOTAL * _STEP + lane)
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
def _take_step(block, column, low, keys, own, begin, s):
    """Scores of 16 queries from column on and the keys from low on, -inf where a query doesn't see the key."""
    for key in range(keys):
        row = block[low + key]
        _store(s, key * _STEP, _load(row, column))
        _store(s, key * _STEP + _WIDTH, _load(row, column + _WIDTH))
    padded = -(-keys // _TOP) * _TOP
    for lane in range(_STEP):
        for key in range(begin[lane]):
            s[key * _STEP + lane] = -_INFINITY
        for key in range(own[lane] + 1, padded):
            s[key * _STEP + lane] = -_INFINITY
    return padded


@njit(cache=True, nogil=True)
def _panel_pass(blocks, starts, factor, members, pairs, values, compared, work):
    """All statistics of one panel.

    Args:
        blocks: scores [visit * key head, key, query head of the key head * padded query].
        starts: [query] first key of its segment; the last key is the last query's own.
        factor: of the exponents, base 2.
        members: [group, member] maps that are in hand together.
        pairs: [group, comparison, 3] members to compare and where to write.
        values: [5, map, query] peak, total, weighted exponent, weight of the first key and of the first 4; written.
        compared: [3, slot, query] top-1 match, top-8 shared, mass overlap; written.
        work: [scores or weights, member, key * query of a step].
    """
    width, height = blocks.shape[1], starts.size
    padded_height = -(-height // _STEP) * _STEP
    stack = blocks.shape[2] // padded_height
    state = np.empty((members.shape[1], 6 * _STEP), dtype=np.float32)
    begin, own = np.empty(_STEP, dtype=np.int64), np.empty(_STEP, dtype=np.int64)
    shared, mass = np.empty(_STEP, dtype=np.float32), np.empty(_STEP, dtype=np.float32)
    for query in range(0, height, _STEP):
        count = min(_STEP, height - query)
        low = starts[query]
        for lane in range(_STEP):  # lanes past the last query repeat it
            at = query + min(lane, count - 1)
            begin[lane], own[lane] = starts[at] - low, width - height + at - low
        keys = own[count - 1] + 1
        for group in range(members.shape[0]):
            for n in range(members.shape[1]):
                m = members[group, n]
                s, e = work[0, n], work[1, n]
                padded = _take_step(blocks[m // stack], m % stack * padded_height + query, low, keys, own, begin, s)
                if pairs.shape[1]:
                    _find_top(s, padded, state[n])
                else:
                    _find_peak(s, keys, state[n])
                _weigh(s, e, keys, factor, state[n])
                for lane in range(count):
                    first4 = _ZERO
                    for key in range(begin[lane], min(begin[lane] + 4, own[lane] + 1)):
                        first4 += e[key * _STEP + lane]
                    values[0, m, query + lane] = state[n, _PEAK * _STEP + lane]
                    values[1, m, query + lane] = state[n, _TOTAL * _STEP + lane]
                    values[2, m, query + lane] = state[n, _WEIGHTED * _STEP + lane]
                    values[3, m, query + lane] = e[begin[lane] * _STEP + lane]
                    values[4, m, query + lane] = first4
            for n in range(pairs.shape[1]):
                a, b, slot = pairs[group, n]
                x, y = state[a], state[b]
                _compare(work[0, a], work[0, b], work[1, a], work[1, b], keys, x, y, shared, mass)
                for lane in range(count):
                    eighth, total, ties = _EIGHTH * _STEP + lane, _TOTAL * _STEP + lane, _COUNT * _STEP + lane
                    if own[lane] - begin[lane] >= _TOP and (x[ties] > _TOP or y[ties] > _TOP):
                        shared[lane] = _shared_with_ties(work[0, a], work[0, b], x[eighth], y[eighth], lane, keys)
                    compared[0, slot, query + lane] = x[_WHERE * _STEP + lane] == y[_WHERE * _STEP + lane]
                    compared[1, slot, query + lane] = shared[lane]
                    compared[2, slot, query + lane] = mass[lane] / (x[total] * y[total])
