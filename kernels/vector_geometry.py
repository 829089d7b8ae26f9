"""Sizes and angles of activation vectors, token by token: norms, inner products, cosines of every two of a set.

Half precision is accumulated in float32, float64 in float64. Activations are never copied whole: what needs a sum of
two of them, or a cast, goes through a buffer that stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from visitlens.errors import InputError

_BUFFER = 2**20  # numbers
_MOST_TOKENS = 1024
_LONG = 64  # from this width on NumPy's inner products of rows are faster than torch's on the CPU


def norms(x: Tensor) -> Tensor:
    """||x|| over the last axis, [..., H] to [...]."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


def inner(a: Tensor, b: Tensor) -> Tensor:
    """a . b over the last axis, [..., H] to [...]."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    if a.dtype == b.dtype == dtype and a.device.type == "cpu" and a.shape[-1] >= _LONG:
        with np.errstate(invalid="ignore", over="ignore"):
            return torch.from_numpy(np.asarray(np.vecdot(a.detach().numpy(), b.detach().numpy())))
    if a.dtype == b.dtype == dtype:
        return (a * b).sum(-1)
    out = torch.empty(a.shape[:-1], dtype=dtype, device=a.device)
    for block in _blocks(len(a), a[:1].numel()):
        torch.sum(a[block].to(dtype) * b[block].to(dtype), dim=-1, out=out[block])
    return out


def pairwise_products(vectors: Sequence[Sequence[Tensor]]) -> Tensor:
    """[token, n, n] inner products of every two of n vectors of a token: on the diagonal, their squared norms.

    Args:
        vectors: n of them, each the sum of one or more tensors [token, H].

    Raises:
        InputError: no vectors, or tensors of different shapes.
    """
    if not vectors or not all(vectors) or len({term.shape for terms in vectors for term in terms}) != 1:
        shapes = [[list(term.shape) for term in terms] for terms in vectors]
        raise InputError(f"expected vectors as sums of tensors [token, H] of one shape, got {shapes}")
    first, n = vectors[0][0], len(vectors)
    tokens, width = first.shape
    dtype = torch.promote_types(first.dtype, torch.float32)
    out = torch.empty(tokens, n, n, dtype=dtype, device=first.device)
    buffer = torch.empty(min(tokens, _block_size(n * width)), n, width, dtype=dtype, device=first.device)
    for block in _blocks(tokens, n * width):
        sums = buffer[: block.stop - block.start]
        for i, (term, *others) in enumerate(vectors):
            sums[:, i] = term[block]
            for other in others:
                sums[:, i] += other[block]
        torch.bmm(sums, sums.transpose(1, 2), out=out[block])
    return out


def cosines(products: Tensor) -> Tensor:
    """Of every two vectors, from their inner products [..., n, n]; NaN for a vector of norm 0 or of infinite norm."""
    size = products.diagonal(dim1=-2, dim2=-1).sqrt()
    return products / size.unsqueeze(-1) / size.unsqueeze(-2)


def _block_size(numbers_a_token: int) -> int:
    return max(1, min(_MOST_TOKENS, _BUFFER // max(1, numbers_a_token)))


def _blocks(tokens: int, numbers_a_token: int) -> Iterator[slice]:
    size = _block_size(numbers_a_token)
    for first in range(0, tokens, size):
        yield slice(first, min(first + size, tokens))
