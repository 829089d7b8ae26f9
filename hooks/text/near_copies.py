"""Near copies among documents: the same text with a changed header or a typo isn't a second, independent document. No torch.

Two documents are near copies if they share most of their runs of eight tokens (Jaccard's index, estimated from each one's
smallest hashes: Broder 1997, "On the resemblance and containment of documents"). They count as one where documents are counted
as independent, as identical ones do: a copy carries the hash of the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

SHARE = 0.8
"""Of the runs of tokens of both, how many are in both, from where on two documents are near copies."""
_RUN = 8
_SKETCH = 128
"""Hashes kept of a document: the share is known to within 0.035, one standard error at 0.8."""
_LOOKED_UP = 8
_MOST = 16
_FACTORS = np.random.default_rng(8).integers(1, 2**63, _RUN, dtype=np.uint64) | np.uint64(1)


def without_near_copies(documents: Iterable[np.ndarray], hashes: np.ndarray) -> np.ndarray:
    """`hashes [document]` with that of the first in place of each near copy's.

    Args:
        documents: token ids of each.
        hashes: of the whole documents; those of documents shorter than 16 tokens stay as they are.

    What a document is a copy of depends on earlier documents alone, so a text that goes on keeps its hashes.

    Examples:
        >>> text = np.arange(200)
        >>> changed = np.concatenate([[7, 7], text])
        >>> without_near_copies([text, changed, text[::-1]], np.array([11, 12, 13], dtype=np.uint64))
        array([11, 11, 13], dtype=uint64)
    """
    found = hashes.copy()
    seen: dict[int, list[tuple[int, np.ndarray]]] = {}
    for number, document in enumerate(documents):
        sketch = _sketch(document)
        if len(sketch) < _RUN:
            continue
        keys = [int(key) for key in sketch[:_LOOKED_UP]]
        candidates = {first: other for key in keys for first, other in seen.get(key, ())}
        first = next((first for first, other in sorted(candidates.items()) if _alike(sketch, other)), None)
        if first is not None:
            found[number] = found[first]
            continue
        for key in keys:
            if len(known := seen.setdefault(key, [])) < _MOST:
                known.append((number, sketch))
    return found


def _sketch(document: np.ndarray) -> np.ndarray:
    """The smallest hashes of its runs of tokens, each once and rising."""
    if len(document) < 2 * _RUN:
        return np.empty(0, np.uint64)
    runs = np.lib.stride_tricks.sliding_window_view(document.astype(np.uint64), _RUN)
    mixed = (runs * _FACTORS).sum(1, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # Steele, Lea and Flood's SplitMix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.unique(mixed ^ (mixed >> np.uint64(31)))[:_SKETCH]


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Of the smallest hashes of both together, how many are in both."""
    union = np.union1d(one, other)[: min(_SKETCH, max(len(one), len(other)))]
    return bool(np.isin(union, np.intersect1d(one, other)).mean() >= SHARE)
