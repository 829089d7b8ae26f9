"""Shared choices and shared weight against Python sets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visitlens.errors import InputError
from visitlens.kernels.set_overlap import shared_count, shared_weight


@given(st.integers(1, 9), st.integers(0, 6), st.integers(0, 3), st.data())
def test_counts_and_weights_of_any_choices(k: int, more: int, tokens: int, data: st.DataObject) -> None:
    n = k + more
    other_k = data.draw(st.integers(1, n))
    chosen = [[data.draw(st.permutations(range(n)))[:size] for _ in range(tokens)] for size in (k, other_k)]
    first, second = (
        torch.tensor(c, dtype=torch.long).view(tokens, size) for c, size in zip(chosen, (k, other_k), strict=True)
    )
    generator = torch.Generator().manual_seed(n)
    weights = [torch.rand(c.shape, generator=generator, dtype=torch.float64) for c in (first, second)]
    count = shared_count(first, second, n)
    weight = shared_weight(first, weights[0], second, weights[1], n)
    for t in range(tokens):
        one, two = (dict(zip(c[t], w[t].tolist(), strict=True)) for c, w in zip(chosen, weights, strict=True))
        assert count[t] == len(one.keys() & two.keys())
        assert weight[t] == pytest.approx(sum(min(one[e], two[e]) for e in one.keys() & two.keys()), abs=1e-12)


def test_half_precision_is_summed_in_float32_and_nan_shows() -> None:
    experts, gates = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0.5, 0.5], [math.nan, 0.5]], dtype=torch.bfloat16)
    weight = shared_weight(experts, gates, torch.tensor([[1, 2], [2, 0]]), torch.ones(2, 2, dtype=torch.bfloat16), 3)
    assert weight.dtype == torch.float32 and weight[0] == 0.5 and weight[1].isnan()


def test_choices_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match=r"in 0\.\.2, got 0\.\.3"):
        shared_count(torch.tensor([[0, 3]]), torch.tensor([[0, 1]]), 3)
    with pytest.raises(InputError, match="one text"):
        shared_count(torch.zeros(2, 1, dtype=torch.long), torch.zeros(3, 1, dtype=torch.long), 3)
