"""The statistics of `attention_rows` in one compiled pass: CPU, float32 (half precision is converted).

16 queries are computed at a time, for the maps (a head at a visit) that are compared with each other, on vectors of
8 lanes: one key of 8 queries. So every reduction over keys is a plain loop, the 8 largest scores come out of a
sorting network without a branch, a query costs nothing but its keys, and nothing larger than those 16 rows is held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from torch import Tensor

from visitlens.kernels.attention.comparison_plan import plan_comparisons
from visitlens.kernels.attention.numba_lanes import (
    INFINITY,
    LANES,
    ONE,
    SMALLEST,
    ZERO,
    exp2,
    fma,
    if_at_least,
    if_equal,
    if_less,
    larger,
    load,
    load_one,
    sort_two,
    spread,
    store,
    tanh,
)
from visitlens.kernels.attention.results import VisitOverlaps, Wanted, overlap_results, row_results
from visitlens.kernels.attention.rule import AttentionRule
from visitlens.kernels.segments import Segments

_STEP = 2 * LANES  # queries computed together
_TOP = 8
_BLOCK = 64  # keys whose weights are summed before they join the sum of all
_QUERY_BLOCK = 2**18  # numbers of queries that are converted and handed over at a time


def numba_visit_overlaps(
    visits: Sequence[tuple[Tensor, Tensor]], segments: Segments, rule: AttentionRule, wanted: Wanted
) -> VisitOverlaps:
    """`visit_overlaps` by the compiled pass; the row statistics only, where overlaps aren't wanted."""
    num_visits, (tokens, heads, d) = len(visits), visits[0][0].shape
    plan = plan_comparisons(num_visits, heads, wanted.overlaps)
    sets = torch.empty(0, tokens) if wanted.token_sets is None else wanted.token_sets.float()
    values = torch.empty(5 + len(sets), num_visits, heads, tokens)
    compared = torch.empty(3, plan.comparisons, heads, tokens)
    top_keys = torch.empty((num_visits, heads, tokens if wanted.top_keys else 0, _TOP), dtype=torch.int64)
    keys, starts = torch.stack([k.float() for _, k in visits]), segments.starts()
    longest = max((end - start for start, end in segments.spans), default=0)
    reach = longest if rule.window is None else min(longest, rule.window)
    work = torch.empty(2, plan.members.shape[1], (reach + 2 * _STEP) * _STEP)
    # A product times `factor` is a power of two's exponent; a rule that is more than a scale first makes it a score.
    plain = rule.soft_cap is None and rule.bias is None
    cap = np.float32(0 if rule.soft_cap is None else rule.soft_cap)
    bias = torch.empty(0, 0)
    if rule.bias is not None:  # lanes read beyond what their query sees, on both sides
        known = rule.bias[:, :reach]
        bias = torch.nn.functional.pad(known, (_STEP, reach + 3 * _STEP - known.shape[1]))
    scale = rule.scale if plain else 1.0
    sinks = torch.empty(0) if rule.sinks is None else rule.sinks / scale
    block = max(1, _QUERY_BLOCK // (num_visits * heads * d * _STEP)) * _STEP
    packed = torch.empty(num_visits * min(block, tokens) * heads * d)  # used again: fresh pages cost as much as a copy
    for first in range(0, tokens, block):
        size = min(block, tokens - first)
        queries = packed[: num_visits * size * heads * d].view(num_visits, size, heads, d)
        for v, (q, _) in enumerate(visits):
            queries[v] = q[first : first + size]
        if not plain:
            queries *= rule.scale
        _pass(
            queries.numpy(), keys.numpy(), starts.numpy(), values.numpy(), compared.numpy(), top_keys.numpy(),
            work.numpy(), first, np.float32(scale * math.log2(math.e)), rule.window or tokens, cap, sinks.numpy(),
            bias.numpy(), sets.numpy(), plan.members, plan.pairs,
        )  # fmt: skip
    if heads % 2 == 0:  # a control is the same from both of its heads
        compared[:, len(plan.across) :, heads // 2 :] = compared[:, len(plan.across) :, : heads // 2]

    base, total, weighted = values[:3]
    log_total = total.log()
    log_sum_exp = base * scale + log_total
    on_keys = 1.0 if rule.sinks is None else 1 - (rule.sinks.view(-1, 1) - log_sum_exp).exp()
    entropy = log_total * on_keys - weighted / total * math.log(2)
    rows = torch.cat([log_sum_exp[None], values[3:5] / total, entropy[None], values[5:] / total])
    results = overlap_results(compared, rule.visible(segments))
    return VisitOverlaps(
        rows=row_results(rows, rule, wanted, top_keys if wanted.top_keys else None),
        across=dict(zip(plan.across, results, strict=False)),
        control=results[len(plan.across) :] or None,
    )


# What is known of the queries of a step: offsets in `state`.
_PEAK, _EIGHTH, _TOTAL, _WEIGHTED, _COUNT, _WHERE, _BASE = (n * _STEP for n in range(7))


@njit(cache=True, nogil=True)
def _store_step(s, key, x, y):
    store(s, key * _STEP, x)
    store(s, key * _STEP + LANES, y)


@njit(cache=True, nogil=True)
def _score(packed, d, k, row, at, last, s):
    """Products of `packed` [d, query] with keys 0 to `last`, 6 at a time; key n starts at k.ravel()[at + n * row]."""
    for key in range(0, last + 1, 6):
        k0, k1, k2 = at + key * row, at + min(key + 1, last) * row, at + min(key + 2, last) * row
        k3, k4, k5 = at + min(key + 3, last) * row, at + min(key + 4, last) * row, at + min(key + 5, last) * row
        x0 = x1 = x2 = x3 = x4 = x5 = y0 = y1 = y2 = y3 = y4 = y5 = spread(ZERO)
        for n in range(d):
            x, y = load(packed, n * _STEP), load(packed, n * _STEP + LANES)
            one = load_one(k, k0 + n)
            x0, y0 = fma(x, one, x0), fma(y, one, y0)
            one = load_one(k, k1 + n)
            x1, y1 = fma(x, one, x1), fma(y, one, y1)
            one = load_one(k, k2 + n)
            x2, y2 = fma(x, one, x2), fma(y, one, y2)
            one = load_one(k, k3 + n)
            x3, y3 = fma(x, one, x3), fma(y, one, y3)
            one = load_one(k, k4 + n)
            x4, y4 = fma(x, one, x4), fma(y, one, y4)
            one = load_one(k, k5 + n)
            x5, y5 = fma(x, one, x5), fma(y, one, y5)
        _store_step(s, key, x0, y0)
        _store_step(s, key + 1, x1, y1)
        _store_step(s, key + 2, x2, y2)
        _store_step(s, key + 3, x3, y3)
        _store_step(s, key + 4, x4, y4)
        _store_step(s, key + 5, x5, y5)


@njit(cache=True, nogil=True)
def _cap_and_bias(s, last, cap, bias, at):
    """Scaled products to scores; the bias of query 0 with key 0 is bias.ravel()[at], of query n with key m [at + n - m]."""
    for lane in range(0, _STEP, LANES):
        for key in range(last + 1):
            score = load(s, key * _STEP + lane)
            if cap > 0:
                score = tanh(score * spread(ONE / cap)) * spread(cap)
            if bias.size > 0:
                score = score + load(bias, at + lane - key)
            store(s, key * _STEP + lane, score)


@njit(cache=True, nogil=True)
def _hide(s, keys, begin, own):
    """Sets -inf where a query doesn't see a key, up to a whole number of 8 keys, which it returns."""
    padded = -(-keys // _TOP) * _TOP
    for lane in range(_STEP):
        for key in range(begin[lane]):
            s[key * _STEP + lane] = -INFINITY
        for key in range(own[lane] + 1, padded):
            s[key * _STEP + lane] = -INFINITY
    return padded


@njit(cache=True, nogil=True)
def _find_peak(s, keys, state):
    for lane in range(0, _STEP, LANES):
        peak = spread(-INFINITY)
        for at in range(lane, keys * _STEP, _STEP):
            peak = larger(load(s, at), peak)
        store(state, _PEAK + lane, peak)
        store(state, _EIGHTH + lane, peak)


@njit(cache=True, nogil=True)
def _find_top(s, keys, state):
    """The largest and the 8th largest score: 8 keys at a time are sorted, then merged with the 8 largest so far."""
    for lane in range(0, _STEP, LANES):
        ta = tb = tc = td = te = tf = tg = th = spread(-INFINITY)
        for at in range(lane, keys * _STEP, _TOP * _STEP):
            a, b, c, d = load(s, at), load(s, at + _STEP), load(s, at + 2 * _STEP), load(s, at + 3 * _STEP)
            e, f = load(s, at + 4 * _STEP), load(s, at + 5 * _STEP)
            g, h = load(s, at + 6 * _STEP), load(s, at + 7 * _STEP)
            # The 19 comparisons that sort 8 numbers.
            (a, c), (b, d), (e, g), (f, h) = sort_two(a, c), sort_two(b, d), sort_two(e, g), sort_two(f, h)
            (a, e), (b, f), (c, g), (d, h) = sort_two(a, e), sort_two(b, f), sort_two(c, g), sort_two(d, h)
            (a, b), (c, d), (e, f), (g, h) = sort_two(a, b), sort_two(c, d), sort_two(e, f), sort_two(g, h)
            (c, e), (d, f) = sort_two(c, e), sort_two(d, f)
            (b, e), (d, g) = sort_two(b, e), sort_two(d, g)
            (b, c), (d, e), (f, g) = sort_two(b, c), sort_two(d, e), sort_two(f, g)
            # One list against the other reversed: the larger of each two are the top 8, falling and rising once.
            ta, tb, tc, td = larger(ta, h), larger(tb, g), larger(tc, f), larger(td, e)
            te, tf, tg, th = larger(te, d), larger(tf, c), larger(tg, b), larger(th, a)
            # Which takes 12 comparisons to sort.
            (ta, te), (tb, tf), (tc, tg), (td, th) = (
                sort_two(ta, te),
                sort_two(tb, tf),
                sort_two(tc, tg),
                sort_two(td, th),
            )
            (ta, tc), (tb, td), (te, tg), (tf, th) = (
                sort_two(ta, tc),
                sort_two(tb, td),
                sort_two(te, tg),
                sort_two(tf, th),
            )
            (ta, tb), (tc, td), (te, tf), (tg, th) = (
                sort_two(ta, tb),
                sort_two(tc, td),
                sort_two(te, tf),
                sort_two(tg, th),
            )
        store(state, _PEAK + lane, ta)
        store(state, _EIGHTH + lane, th)


@njit(cache=True, nogil=True)
def _weigh(s, e, keys, factor, sinks, head, state):
    """Weights 2 ** (factor * (score - base)), base the peak or a larger learned sink; their sums, and where the peak is."""
    for lane in range(0, _STEP, LANES):
        peak, eighth = load(state, _PEAK + lane), load(state, _EIGHTH + lane)
        base = peak
        total = weighted = count = spread(ZERO)
        if sinks.size > 0:
            sink = load_one(sinks, head)
            base = larger(sink, peak)  # the peak where that is NaN
            exponent = (sink - base) * spread(factor)
            exponent = if_less(exponent, spread(SMALLEST), spread(SMALLEST), exponent)
            total = exp2(exponent)
        where = spread(INFINITY)
        position = spread(np.float32(keys - 1))
        for end in range(keys, 0, -_BLOCK):  # downwards, so that the first of equal peaks is found last
            block_total = block_weighted = spread(ZERO)  # sums of sums: thousands of terms would lose digits
            for key in range(end - 1, max(end - _BLOCK, 0) - 1, -1):
                score = load(s, key * _STEP + lane)
                exponent = (score - base) * spread(factor)
                exponent = if_less(exponent, spread(SMALLEST), spread(SMALLEST), exponent)
                weight = exp2(exponent)
                store(e, key * _STEP + lane, weight)
                block_total = block_total + weight
                block_weighted = fma(weight, exponent, block_weighted)
                count = count + if_at_least(score, eighth, spread(ONE), spread(ZERO))
                where = if_equal(score, peak, position, where)
                position = position - spread(ONE)
            total = total + block_total
            weighted = weighted + block_weighted
        store(state, _TOTAL + lane, total)
        store(state, _WEIGHTED + lane, weighted)
        store(state, _COUNT + lane, count)
        store(state, _WHERE + lane, where)
        store(state, _BASE + lane, base)


@njit(cache=True, nogil=True)
def _set_weight(e, keys, sets, at, out):
    """Weight of the keys for which sets.ravel()[at + key] is 1, of each query."""
    for lane in range(0, _STEP, LANES):
        total = spread(ZERO)
        for key in range(keys):
            total = fma(load(e, key * _STEP + lane), load_one(sets, at + key), total)
        store(out, lane, total)


@njit(cache=True, nogil=True)
def _list_top(s, first, last, low, lane, eighth, out):
    """The 8 top keys of one query by falling score, as tokens; -1 where there are fewer. NaN reaches no eighth."""
    best = np.full(_TOP, -INFINITY, dtype=np.float32)
    out[:] = -1
    for key in range(first, last + 1):
        score = s[key * _STEP + lane]
        if score >= eighth and score > best[_TOP - 1]:
            at = _TOP - 1
            while at > 0 and score > best[at - 1]:
                best[at], out[at] = best[at - 1], out[at - 1]
                at -= 1
            best[at], out[at] = score, low + key


@njit(cache=True, nogil=True)
def _compare(s_a, s_b, e_a, e_b, keys, a, b, shared, mass):
    """Keys among the top 8 of two members, and the sum of their smaller weight, each times the other's total."""
    for lane in range(0, _STEP, LANES):
        eighth_a, eighth_b = load(a, _EIGHTH + lane), load(b, _EIGHTH + lane)
        total_a, total_b = load(a, _TOTAL + lane), load(b, _TOTAL + lane)
        both = smaller = spread(ZERO)
        for at in range(lane, keys * _STEP, _STEP):
            p, q = load(e_a, at) * total_b, load(e_b, at) * total_a
            smaller = smaller + if_less(p, q, p, q)
            among_b = if_at_least(load(s_b, at), eighth_b, spread(ONE), spread(ZERO))
            both = both + if_at_least(load(s_a, at), eighth_a, among_b, spread(ZERO))
        store(shared, lane, both)
        store(mass, lane, smaller)


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
def _pass(
    queries, keys, starts, values, compared, top_keys, work, first_token, factor, window, cap, sinks, bias, sets,
    members, pairs,
):  # fmt: skip
    """All statistics of a block of queries.

    Args:
        queries: [visit, query, head, d], of the tokens from `first_token` on.
        keys: [visit, token, kv head, d].
        starts: [token] first token of its segment.
        values: [5 + sets, visit, head, token] base, total, weighted exponent, weight of the first key, of the first 4
            and of each set, written.
        compared: [3, comparison, head, token] top-1 match, top-8 shared, mass overlap; written.
        top_keys: [visit, head, token or none, 8], written.
        work: [scores or weights, member, key * query of a step].
        factor: of the exponents, base 2.
        window: keys that a query sees.
        cap: soft cap of the scores, 0 for none.
        sinks: [head] or empty, in units of the scores.
        bias: [head, 16 + distance + padding] or empty.
        sets: [set, token], 1 in the set and 0 out of it.
        members, pairs: as in `ComparisonPlan`.
    """
    block, heads, d = queries.shape[1:]
    tokens, kv_heads = keys.shape[1:3]
    packed = np.empty(d * _STEP, dtype=np.float32)
    state = np.empty((members.shape[1], 7 * _STEP), dtype=np.float32)
    begin, own, origin = np.empty(_STEP, np.int64), np.empty(_STEP, np.int64), np.empty(_STEP, np.int64)
    shared, mass = np.empty(_STEP, dtype=np.float32), np.empty(_STEP, dtype=np.float32)
    for query in range(0, block, _STEP):
        first, count = first_token + query, min(_STEP, block - query)
        low = max(starts[first], first - window + 1)
        for lane in range(_STEP):  # lanes past the last query repeat it
            token = first + min(lane, count - 1)
            origin[lane], own[lane] = starts[token] - low, token - low
            begin[lane] = max(origin[lane], own[lane] - window + 1)
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
                if cap > 0 or bias.size > 0:
                    _cap_and_bias(s, last, cap, bias, head * bias.shape[1] + _STEP + own[0])
                padded = _hide(s, last + 1, begin, own)
                if pairs.shape[1] or top_keys.size:
                    _find_top(s, padded, state[n])
                else:
                    _find_peak(s, padded, state[n])
                _weigh(s, e, last + 1, factor, sinks, head, state[n])
                for lane in range(count):
                    at, start = first + lane, begin[lane]
                    first4 = ZERO
                    for key in range(start, min(origin[lane] + 4, own[lane] + 1)):
                        first4 += e[key * _STEP + lane]
                    values[0, visit, head, at] = state[n, _BASE + lane]
                    values[1, visit, head, at] = state[n, _TOTAL + lane]
                    values[2, visit, head, at] = state[n, _WEIGHTED + lane]
                    values[3, visit, head, at] = e[start * _STEP + lane] if start == origin[lane] else ZERO
                    values[4, visit, head, at] = first4
                    if top_keys.size:
                        eighth = state[n, _EIGHTH + lane]
                        _list_top(s, start, own[lane], low, lane, eighth, top_keys[visit, head, at])
                for n_set in range(sets.shape[0]):
                    _set_weight(e, last + 1, sets, n_set * tokens + low, mass)
                    for lane in range(count):
                        values[5 + n_set, visit, head, first + lane] = mass[lane]
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
