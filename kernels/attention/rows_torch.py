"""The statistics of `attention_rows` in tiled torch: any device, any float dtype, every feature.

A panel of query rows is computed at once for all heads of all visits; panels see their keys only, so that other
segments and keys beyond the window cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from visitlens.kernels.attention.results import TOP, VisitOverlaps, Wanted, overlap_results, row_results
from visitlens.kernels.attention.rule import AttentionRule
from visitlens.kernels.segments import Segments

_PANEL_ROWS = 64
_ALIGNED = 16  # keys of a tile are rounded up to this, for the vector units
_SHORT = 32  # segments of up to this many tokens are computed many at a time
_TILE = 2**21  # elements of one buffer, unless 16 rows need more: larger ones leave the outer cache
_FOLDED = 768  # keys from which on a row's 8th largest score is first guessed from a quarter of them
_LOG2_E = math.log2(math.e)
_HIDDEN = -1e30  # joins the score of a key that a query doesn't see, where all scores are known to be small against it


def torch_visit_overlaps(
    visits: Sequence[tuple[Tensor, Tensor]], segments: Segments, rule: AttentionRule, wanted: Wanted
) -> VisitOverlaps:
    """`visit_overlaps`; the row statistics only, where overlaps aren't wanted."""
    (q, k), num_visits = visits[0], len(visits)
    tokens, heads, d = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Zero tokens at the end pad tiles, and take what the padding of short segments yields.
    queries = q.new_zeros(num_visits, heads, tokens + 1, d, dtype=dtype)
    keys = q.new_zeros(num_visits, k.shape[1], d, tokens + _ALIGNED, dtype=dtype)
    for v, (q, k) in enumerate(visits):
        queries[v, :, :tokens] = q.transpose(0, 1)
        keys[v, :, :, :tokens] = k.permute(1, 2, 0)
    sets = None
    if wanted.token_sets is not None:
        sets = torch.nn.functional.pad(wanted.token_sets.to(dtype), (0, _ALIGNED)).T.contiguous()  # [token, set]
    scoring = _Scoring(rule, sets, _all_small(queries, keys, rule))
    pairs = list(combinations(range(num_visits), 2)) if wanted.overlaps else []
    controls = num_visits if wanted.overlaps and heads > 1 else 0
    rows = queries.new_empty(4 + (0 if sets is None else sets.shape[1]), num_visits, heads, tokens + 1)
    compared = queries.new_empty(3, len(pairs) + controls, heads, tokens + 1)
    top_keys = rows.new_empty(TOP, num_visits, heads, tokens + 1, dtype=torch.int64) if wanted.top_keys else None
    control, half, every = compared[:, len(pairs) :], heads // 2, (slice(None), slice(None))
    # Heads 0, 1, ... against half, half + 1, ...; an odd number of heads then goes round to the first ones.
    ring = [(slice(0, heads - half), slice(half, heads)), (slice(heads - half, heads), slice(0, half))]

    panels = list(_panels(segments, rule.window, num_visits * heads, q.device))
    buffers = queries.new_empty(3, num_visits * heads * max((math.prod(p.shape) for p in panels), default=0))
    for panel in panels:
        tile = _Tile(panel, queries, keys, buffers, scoring)
        panel.store(rows, tile.row_values())
        if top_keys is not None:
            panel.store(top_keys, tile.top_keys())
        if wanted.overlaps:
            tile.find_tops()
        for n, (a, b) in enumerate(pairs):
            panel.store(compared[:, n], tile.overlap_values((a,), (b,)))
        for one, other in ring[: 1 + heads % 2] if controls else ():
            panel.store(control[:, :, one], tile.overlap_values((*every, one), (*every, other)))
    if heads % 2 == 0:  # a control is the same from both of its heads
        control[:, :, half:] = control[:, :, :half]

    results = overlap_results(compared[..., :tokens], rule.visible(segments).to(q.device))
    top_keys = None if top_keys is None else top_keys[..., :tokens].permute(1, 2, 3, 0)
    return VisitOverlaps(
        rows=row_results(rows[..., :tokens], rule, wanted, top_keys),
        across=dict(zip(pairs, results, strict=False)),
        control=results[len(pairs) :] or None,
    )


def _all_small(queries: Tensor, keys: Tensor, rule: AttentionRule) -> bool:
    """Whether every score is small against `_HIDDEN`; False with a NaN."""
    largest = [t.abs().max() for t in (rule.bias, rule.sinks) if t is not None and t.numel()]
    if queries.numel():
        largest.append(queries.abs().max() * keys.abs().max() * queries.shape[-1])
    return 1e-20 < rule.scale < 1e6 and all(bool(x < 1e20) for x in largest)


@dataclass(frozen=True)
class _Scoring:
    """What tiles need beyond Q and K: the rule, token sets [token, set], whether all scores are small."""

    rule: AttentionRule
    sets: Tensor | None
    all_small: bool

    def hide(self, scores: Tensor, mask: Tensor) -> None:
        """Adds to the scores under the mask where that will do, which is several times faster than filling them."""
        if self.all_small:
            scores.add_(mask * torch.tensor(_HIDDEN, dtype=scores.dtype, device=scores.device))
        else:
            scores.masked_fill_(mask, -math.inf)


@dataclass(frozen=True)
class _Panel:
    """Query rows that are computed together, and the keys they see; `shape` is (document, row, key).

    Of one document, rows and keys are slices of the token axis; of several, token indices [document, row].
    Row r lies `distance + r - c` tokens after the key of column c. The keys of the segment start are the first
    `skipped` columns to the left.
    """

    rows: slice | Tensor
    keys: slice | Tensor
    shape: tuple[int, int, int]
    distance: int
    skipped: int

    def take(self, x: Tensor, dim: int, index: slice | Tensor) -> Tensor:
        """`x` with its token axis `dim` replaced by axes (document, row or key)."""
        taken = x[(slice(None),) * dim + (index,)]
        return taken.unsqueeze(dim) if isinstance(index, slice) else taken

    def store(self, out: Tensor, values: Tensor) -> None:
        """Writes values [..., document, head, row] to out [..., head, token]."""
        values = values.transpose(-3, -2)
        out[..., self.rows] = values[..., 0, :] if isinstance(self.rows, slice) else values


def _panels(segments: Segments, window: int | None, maps: int, device: torch.device) -> Iterator[_Panel]:
    short: dict[int, list[tuple[int, int]]] = {}
    for start, end in segments.spans:
        length = end - start
        if length <= _SHORT:
            short.setdefault(-(-length // 8), []).append((start, end))
            continue
        reach = length if window is None else min(length, window + _PANEL_ROWS)
        height = min(_PANEL_ROWS, max(16, _TILE // (maps * reach)))
        height = -(-length // -(-length // height))  # panels of equal heights: no sliver at the end
        for first in range(start, end, height):
            last = min(first + height, end)
            begin = start if window is None else max(start, first - window + 1)
            columns = -(-(last - begin) // _ALIGNED) * _ALIGNED
            shape = (1, last - first, columns)
            yield _Panel(slice(first, last), slice(begin, begin + columns), shape, first - begin, begin - start)
    short.pop(0, None)
    for spans in short.values():
        length = max(end - start for start, end in spans)
        count = max(1, _TILE // (maps * length * length))
        for n in range(0, len(spans), count):
            starts, ends = torch.tensor(spans[n : n + count], device=device).T.unsqueeze(-1)
            index = starts + torch.arange(length, device=device)
            index = index.where(index < ends, segments.num_tokens)
            yield _Panel(index, index, (len(index), length, length), 0, 0)


class _Tile:
    """Scores and weights of one panel, [visit, document, head, row, key], in three buffers that are used again."""

    def __init__(self, panel: _Panel, queries: Tensor, keys: Tensor, buffers: Tensor, scoring: _Scoring) -> None:
        (num_visits, heads, _, d), kv_heads = queries.shape, keys.shape[1]
        documents, rows, columns = panel.shape
        self.panel, self.scoring, rule = panel, scoring, scoring.rule
        q = panel.take(queries, 2, panel.rows).transpose(1, 2)  # [visit, document, head, row, d]
        k = panel.take(keys, 3, panel.keys).permute(0, 3, 1, 2, 4)  # [visit, document, kv head, d, key]
        shape = (num_visits, documents, heads, rows, columns)
        self.scores, self.spare, self.weights = (x[: math.prod(shape)].view(shape) for x in buffers)
        batch = num_visits * documents * kv_heads
        # The query heads of one key head are stacked as rows of one product.
        torch.bmm(q.reshape(batch, -1, d), k.reshape(batch, d, columns), out=self.scores.view(batch, -1, columns))
        self.factor = rule.scale
        if not rule.monotone:
            self._transform(rule)
        self._hide(rule.window)

    def _transform(self, rule: AttentionRule) -> None:
        """Turns products into scores."""
        self.factor = 1.0
        if rule.soft_cap is None:
            self.scores.mul_(rule.scale)
        else:
            self.scores.mul_(rule.scale / rule.soft_cap).tanh_().mul_(rule.soft_cap)
        if rule.bias is not None:
            _, rows, columns = self.panel.shape
            reach = self.panel.distance + rows
            known = rule.bias[:, :reach].flip(1)
            # Far to near, the biases of a row's keys lie side by side; those of the row above begin one further on.
            line = torch.nn.functional.pad(known, (reach - known.shape[1], columns - 1 - self.panel.distance))
            self.scores.add_(line.unfold(1, columns, 1).flip(1))

    def _hide(self, window: int | None) -> None:
        """Hides keys after a row, and those that a window leaves out."""
        _, rows, columns = self.panel.shape
        device, distance = self.scores.device, self.panel.distance
        future = torch.ones(rows, columns - distance, dtype=torch.bool, device=device).triu_(1)
        self.scoring.hide(self.scores[..., distance:], future)
        if window is not None and distance + rows > window:
            shift = distance + 1 - window  # the row at 0 misses the keys before this column
            past = torch.ones(rows, min(columns, rows + shift), dtype=torch.bool, device=device).tril_(shift - 1)
            self.scoring.hide(self.scores[..., : past.shape[1]], past)

    def row_values(self) -> Tensor:
        """Log-sum-exp, sink mass, first-4 mass, entropy, masses of the sets: [4 + sets, visit, document, head, row].

        Finds the top key and fills the weights. The row's largest score is taken off before anything is summed, and
        exponents are base 2: exp2 takes half the time of exp.
        """
        self.top = _row_argmax(self.scores)
        peak, sinks = self.scores.gather(-1, self.top.unsqueeze(-1)), self.scoring.rule.sinks
        if sinks is not None:
            sinks = sinks.view(-1, 1, 1)
            peak = peak.maximum(sinks)
        exponents = torch.add(peak * (-self.factor * _LOG2_E), self.scores, alpha=self.factor * _LOG2_E, out=self.spare)
        torch.exp2(exponents, out=self.weights)
        total = self.weights.sum(-1, keepdim=True)
        if not self.scoring.all_small:  # 0 times -inf would be NaN; real NaNs pass through the clamp
            exponents.clamp_(min=-1e5)
        weighted = _row_dot(self.weights, exponents)
        learned = 0.0
        if sinks is not None:
            learned = ((sinks - peak) * _LOG2_E).exp2()
            total += learned
            learned = (learned / total).squeeze(-1)
        self.weights.mul_(1 / total)
        log_total = total.log().squeeze(-1)
        log_sum_exp = peak.squeeze(-1) * self.factor + log_total
        entropy = log_total * (1 - learned) - weighted / total.squeeze(-1) / _LOG2_E
        sink, first4 = self.weights[..., 0], self.weights[..., :4].sum(-1)
        if self.panel.skipped:  # a window left the segment's first keys out; NaN stays NaN
            sink = total.squeeze(-1) * 0
            first4 = sink + self.weights[..., : max(0, 4 - self.panel.skipped)].sum(-1)
        values = torch.stack([log_sum_exp, sink, first4, entropy])
        if self.scoring.sets is None:
            return values
        sets = self.panel.take(self.scoring.sets, 0, self.panel.keys).unsqueeze(1)  # [document, 1, key, set]
        return torch.cat([values, (self.weights @ sets).movedim(-1, 0)])

    def top_keys(self) -> Tensor:
        """Token indices of the 8 top keys, highest first, -1 where there are fewer: [8, visit, document, head, row]."""
        left, keys, found = self.spare.copy_(self.scores), self.panel.keys, []
        hidden = _HIDDEN / 2 if self.scoring.all_small else -math.inf
        for _ in range(min(TOP, left.shape[-1])):
            place = _row_argmax(left).unsqueeze(-1)
            found.append(place.where(left.gather(-1, place) > hidden, -1))
            left.scatter_(-1, place, -math.inf)
        places = torch.nn.functional.pad(torch.cat(found, dim=-1), (0, TOP - len(found)), value=-1)
        if isinstance(keys, slice):
            tokens = places + keys.start
        else:
            tokens = keys[:, None, None].expand(*places.shape[:-1], -1).gather(-1, places.clamp(min=0))
        return tokens.where(places >= 0, -1).movedim(-1, 0)

    def find_tops(self) -> None:
        """Turns the scores into 1 where a key is among the row's top 8, 0 elsewhere.

        Rows that see up to 8 keys get anything: their answer is known.
        """
        if min(self.scores.shape[-1], self.scoring.rule.window or TOP + 1) <= TOP:
            self.scores.zero_()
            return
        scores, chosen = self.scores, self.spare
        torch.ge(scores, _almost_eighth(scores), out=chosen)
        unclear = chosen.sum(-1) != TOP
        unclear[..., : max(0, TOP - self.panel.distance)] = False  # rows that see up to 8 keys
        if unclear.any():
            chosen[unclear] = _first_eight(scores[unclear])
        self.scores, self.spare = chosen, scores

    def overlap_values(self, first: tuple, second: tuple) -> Tensor:
        """Top-1 match, top-8 shared and mass overlap of two equally shaped parts: [3, ..., document, head, row]."""
        match = self.top[first] == self.top[second]
        shared = _row_dot(self.scores[first], self.scores[second])
        weights = self.weights[first]
        spare = self.spare.view(-1)[: weights.numel()].view(weights.shape)
        mass = torch.minimum(weights, self.weights[second], out=spare).sum(-1)
        return torch.stack([match.to(mass.dtype), shared, mass])


def _first_eight(scores: Tensor) -> Tensor:
    """1 at the top 8 of each row, 0 elsewhere: of keys that tie for the last places, the first ones get them."""
    eighth = _eighth(scores.clone())
    chosen = scores >= eighth
    tied = chosen.sum(-1) > TOP
    if tied.any():
        above, level = scores[tied] > eighth[tied], scores[tied] == eighth[tied]
        room = TOP - above.sum(-1, keepdim=True)
        chosen[tied] = above | (level & (level.cumsum(-1) <= room))
    return chosen.to(scores.dtype)


def _almost_eighth(scores: Tensor) -> Tensor:
    """The 8th largest of each row [..., 1], or a little less: then more keys reach it.

    In a long row, of every 4 keys, far apart from each other, only the largest is looked at.
    """
    if scores.shape[-1] < _FOLDED:
        return _eighth(scores.clone())
    return _eighth(scores.unflatten(-1, (4, -1)).amax(-2))


# NumPy's reductions of a row are several times faster than torch's on the CPU, and its partition than topk.


def _row_argmax(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy().argmax(-1)) if x.device.type == "cpu" else x.argmax(-1)  # the first of equals


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type != "cpu":
        return (a * b).sum(-1)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.vecdot(a.numpy(), b.numpy()))


def _eighth(scores: Tensor) -> Tensor:
    """8th largest of each row [..., 1]. Reorders the scores."""
    if scores.device.type != "cpu":
        return scores.topk(TOP, dim=-1).values[..., -1:]
    at = scores.shape[-1] - TOP
    scores.numpy().partition(at, axis=-1)
    return scores[..., at : at + 1].clone()
