"""How far two choices of k out of n agree, token by token: the number they share, and the weight.

Through a table [token, n] of one choice that is read at the other's: k + n steps a token, where comparing each with
each takes k^2. Nothing else of that size is held.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visitlens.errors import InputError


def shared_count(first: Tensor, second: Tensor, n: int) -> Tensor:
    """[token] int64, how many of the choices `first`, `second` [token, k] (each without repeats) are the same.

    Raises:
        InputError: shapes that differ, or a choice that isn't in 0..n-1.
    """
    _check(first, second, n)
    table = torch.zeros(len(first), n, dtype=torch.bool, device=first.device)
    return table.scatter_(1, first, True).gather(1, second).sum(-1)


def shared_weight(first: Tensor, first_weights: Tensor, second: Tensor, second_weights: Tensor, n: int) -> Tensor:
    """[token] sum over choices of min(weight, weight), 0 for what isn't chosen; float32 for half precision.

    A NaN weight makes its token NaN where the other chose the same. Raises InputError as `shared_count`.
    """
    _check(first, second, n)
    dtype = torch.promote_types(first_weights.dtype, torch.float32)
    table = torch.zeros(len(first), n, dtype=dtype, device=first.device)
    weights = table.scatter_(1, first, first_weights.to(dtype)).gather(1, second)
    return torch.minimum(weights, second_weights.to(dtype)).sum(-1)


def _check(first: Tensor, second: Tensor, n: int) -> None:
    if first.ndim != 2 or first.shape[0] != second.shape[0] or second.ndim != 2:
        raise InputError(f"expected choices [token, k] of one text, got {list(first.shape)} and {list(second.shape)}")
    low = min((int(x.min()) for x in (first, second) if x.numel()), default=0)
    high = max((int(x.max()) for x in (first, second) if x.numel()), default=0)
    if low < 0 or high >= n:
        raise InputError(f"expected choices in 0..{n - 1}, got {low}..{high}")
