"""Norms, inner products and cosines against float64, over dtypes, widths and block borders."""

from __future__ import annotations

import math

import pytest
import torch

from visitlens.errors import InputError
from visitlens.kernels import vector_geometry
from visitlens.kernels.vector_geometry import cosines, inner, norms, pairwise_products

DTYPES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 12), (1500, 70), (0, 8)], ids=str)
def test_norms_and_inner_products(shape, dtype, tolerance) -> None:
    a, b = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    for value, expected in ((norms(a), a.double().norm(dim=-1)), (inner(a, b), (a.double() * b.double()).sum(-1))):
        assert value.dtype == accumulated
        torch.testing.assert_close(value.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
@pytest.mark.parametrize("buffer", [1, 200, 2**20])
def test_products_and_cosines_of_sums(monkeypatch, buffer, dtype, tolerance) -> None:
    monkeypatch.setattr(vector_geometry, "_BUFFER", buffer)  # blocks of 1 token, of some, of all
    terms = [[draw(9, 24, dtype=dtype, seed=3 * i + j) for j in range(1 + i % 3)] for i in range(4)]
    products = pairwise_products(terms)
    vectors = torch.stack([sum(t.double() for t in parts) for parts in terms], dim=1)
    expected = vectors @ vectors.mT
    torch.testing.assert_close(products.double(), expected, atol=50 * tolerance, rtol=tolerance)
    units = vectors / vectors.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(cosines(products).double(), units @ units.mT, atol=tolerance, rtol=0)
    assert products.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_inputs_stay_as_they_were() -> None:
    a, b = draw(6, 8, dtype=torch.float32), draw(6, 8, dtype=torch.float32, seed=1)
    before = a.clone()
    pairwise_products([(a, b), (b, a)])
    assert torch.equal(a, before)


def test_vectors_without_a_direction_have_no_cosine() -> None:
    x = torch.tensor([[[3.0, 4.0], [0.0, 0.0], [math.inf, 1.0]]])
    values = cosines(pairwise_products([(x[:, i],) for i in range(3)]))[0]
    assert values[0, 0] == 1 and values.isnan().sum() == 8
    assert inner(torch.full((1, 100), math.nan), torch.ones(1, 100)).isnan().all()


def test_tensors_of_different_shapes_are_refused() -> None:
    with pytest.raises(InputError, match=r"of one shape, got \[\[\[2, 3\]\], \[\[2, 4\]\]\]"):
        pairwise_products([(torch.ones(2, 3),), (torch.ones(2, 4),)])
    with pytest.raises(InputError, match="expected vectors"):
        pairwise_products([])
