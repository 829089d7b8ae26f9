"""The same statistics as `attention_rows`, by matrix products and one compiled pass over their tiles: CPU, float32.

torch computes the scores of a panel of queries, keys down and queries across. The compiled pass takes 16 queries at
a time and works on vectors of 8: one key of 8 queries. So every reduction over keys is a plain loop, the 8 largest
scores come from a sorting network without a branch, and a row costs nothing but its keys.

Vectors are written out (`Lanes` below) because numba leaves such loops scalar: it can't tell that arrays don't
overlap. Nothing is compiled with fast-math, so no fused multiply-add and no reordering differs between machines.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
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

_PANEL_ROWS = 64
_TILE = 2**20  # scores in one tile, unless 16 rows of all maps need more
_GROUP = 16  # queries in one step of the compiled pass: two vectors, one cache line
_TOP = 8


def numba_visit_overlaps(
    visits: Sequence[tuple[Tensor, Tensor]], segments: Segments, scale: float, overlaps: bool
) -> VisitOverlaps:
    """`visit_overlaps` by torch products and the compiled pass; without `overlaps`, the row statistics only."""
    (q, k), num_visits = visits[0], len(visits)
    (tokens, heads, d), kv_heads = q.shape, k.shape[1]
    group, half = heads // kv_heads, heads // 2
    maps = num_visits * heads
    across = list(combinations(range(num_visits), 2)) if overlaps else []
    controls = 0 if not overlaps or heads == 1 else half if heads % 2 == 0 else heads
    members, pairs = _plan(num_visits, heads, across, controls)
    rows = torch.empty(_ROW_VALUES, maps, tokens)
    compared = torch.empty(3, len(across) * heads + num_visits * controls, tokens)

    keys = [k.float().transpose(0, 1) for _, k in visits]
    starts = segments.starts().numpy()
    panels = list(_panels(segments, maps))
    largest = max((_padded(last - first) * (last - start) for start, first, last in panels), default=0)
    longest = max((last - start for start, _, last in panels), default=0)
    tile, panel_q = torch.empty(maps * largest), torch.zeros(kv_heads * d * group * _padded(_PANEL_ROWS))
    work = np.empty((2, members.shape[1], (longest + _TOP) * _GROUP), dtype=np.float32)
    for start, first, last in panels:
        height, width = last - first, last - start
        across_size = group * _padded(height)
        scores = tile[: maps * _padded(height) * width].view(num_visits, kv_heads, width, across_size)
        packed = panel_q[: kv_heads * d * across_size].view(kv_heads, d, group, -1)
        for v, (q, _) in enumerate(visits):
            packed[..., :height] = q[first:last].unflatten(1, (kv_heads, group)).permute(1, 3, 2, 0)
            torch.bmm(keys[v][:, start:last], packed.view(kv_heads, d, across_size), out=scores[v])
        _pass(
            tile.numpy(), group, width, first, height, starts[first:last] - start, np.float32(scale * _LOG2_E),
            overlaps, members, pairs, rows.numpy(), compared.numpy(), work,
        )  # fmt: skip
    return _results(rows, compared, segments, scale, across, num_visits, heads, controls)
