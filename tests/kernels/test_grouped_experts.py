"""The three implementations of the MoE feed-forward against a token-by-token float64 loop: values and gradients."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from tests.support import rounding
from torch import Tensor

from visitlens.errors import InputError
from visitlens.kernels.grouped_experts import _choose, expert_outputs, expert_rows, grouped_experts

TOLERANCE = {torch.float64: 1e-12, torch.float32: rounding.bound(torch.float32, 64), torch.bfloat16: 2e-2}
"""Largest error against the float64 loop, relative to the largest value of the output or gradient. In float32 the sums have up
to some hundred terms, two of them one after another: 64 units in the last place of the largest value, for any order of them."""


def by_token(x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """sum_j g_j W_out(silu(x W_gate) * x W_up), one token and expert at a time."""
    width = w_out.shape[1]
    rows = []
    for t in range(len(x)):
        row = x.new_zeros(w_out.shape[2])
        for j in range(experts.shape[1]):
            e = int(experts[t, j])
            gate, up = x[t] @ w_in[e][:, :width], x[t] @ w_in[e][:, width:]
            row = row + gates[t, j] * ((gate / (1 + torch.exp(-gate)) * up) @ w_out[e])
        rows.append(row)
    return torch.stack(rows) if rows else x.new_zeros(0, w_out.shape[2])


def problem(
    tokens: int, hidden: int, width: int, num_experts: int, k: int, dtype: torch.dtype, routing: str = "random"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, experts, gates, w_in, w_out; `routing` is random, one (all tokens on experts 0..k-1) or some (few experts)."""
    torch.manual_seed(tokens + hidden + k)
    pool = {"random": num_experts, "one": k, "some": max(k, num_experts // 2)}[routing]
    experts = torch.rand(tokens, pool).argsort(1)[:, :k]
    gates = torch.rand(tokens, k).softmax(-1)
    x = torch.randn(tokens, hidden)
    w_in = torch.randn(num_experts, hidden, 2 * width) / math.sqrt(hidden)
    w_out = torch.randn(num_experts, width, hidden) / math.sqrt(width)
    return (x.to(dtype), experts, gates.to(dtype), w_in.to(dtype), w_out.to(dtype))


def check_against_loop(case: tuple[Tensor, ...], implementation: str) -> None:
    """Output and the gradients of x, gates, w_in and w_out."""
    x, experts, gates, w_in, w_out = case
    tolerance = TOLERANCE[x.dtype]
    leaves = [t.clone().requires_grad_() for t in (x, gates, w_in, w_out)]
    exact = [t.double().requires_grad_() for t in (x, gates, w_in, w_out)]
    out = grouped_experts(leaves[0], experts, *leaves[1:], implementation)
    expected = by_token(exact[0], experts, *exact[1:])
    assert out.dtype == x.dtype and out.shape == expected.shape
    weight = torch.randn(expected.shape, dtype=torch.float64)
    got = [out, *torch.autograd.grad((out.double() * weight).sum(), leaves)]
    want = [expected, *torch.autograd.grad((expected * weight).sum(), exact)]
    for name, a, b in zip(("out", "x", "gates", "w_in", "w_out"), got, want, strict=True):
        error = float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max())
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("routing", ["random", "one", "some"])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("grouped", torch.float32),
        ("grouped", torch.bfloat16),
        ("loop", torch.float64),
        ("loop", torch.float32),
        ("loop", torch.bfloat16),
        ("dense", torch.float64),
        ("dense", torch.float32),
        ("dense", torch.bfloat16),
    ],
)
def test_every_implementation_agrees_with_the_loop_over_tokens(
    implementation: str, dtype: torch.dtype, routing: str
) -> None:
    check_against_loop(problem(13, 16, 8, 7, 3, dtype, routing), implementation)


@pytest.mark.parametrize("implementation", ["grouped", "loop", "dense", "auto"])
@pytest.mark.parametrize(("tokens", "num_experts", "k"), [(1, 5, 1), (1, 5, 5), (2, 40, 8), (9, 8, 8), (30, 1, 1)])
def test_odd_counts_of_tokens_experts_and_choices(implementation: str, tokens: int, num_experts: int, k: int) -> None:
    check_against_loop(problem(tokens, 16, 8, num_experts, k, torch.float32), implementation)


def test_experts_without_a_token_get_a_zero_gradient() -> None:
    for implementation in ("grouped", "loop", "dense"):
        x, experts, gates, w_in, w_out = problem(6, 16, 8, 5, 2, torch.float32, "one")
        w_in.requires_grad_()
        grouped_experts(x, experts, gates, w_in, w_out, implementation).sum().backward()
        assert not w_in.grad[2:].any() and w_in.grad[:2].any(), implementation


@pytest.mark.parametrize("implementation", ["loop", "dense", "auto"])
def test_no_token_at_all_gives_an_empty_output(implementation: str) -> None:
    out = grouped_experts(*problem(0, 16, 8, 4, 2, torch.float32), implementation)
    assert out.shape == (0, 16)


@pytest.mark.parametrize(
    ("hidden", "width", "dtype"), [(18, 8, torch.float32), (16, 6, torch.float32), (12, 8, torch.bfloat16)]
)
def test_rows_that_are_not_a_multiple_of_16_bytes_fall_back_to_the_loop(
    hidden: int, width: int, dtype: torch.dtype
) -> None:
    case = problem(11, hidden, width, 6, 2, dtype)
    x, experts, _, w_in, w_out = case
    assert _choose(x, experts, w_in, w_out) == "loop"
    check_against_loop(case, "auto")
    with pytest.raises(InputError, match=rf"multiple of 16 bytes; got {dtype} with H={hidden}, F={width}.*'loop'"):
        grouped_experts(*case, "grouped")


def test_grouped_can_not_be_forced_on_float64() -> None:
    with pytest.raises(InputError, match="float64"):
        grouped_experts(*problem(4, 16, 8, 6, 2, torch.float64), "grouped")


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(InputError, match="'auto' or one of"):
        grouped_experts(*problem(4, 16, 8, 6, 2, torch.float32), "fast")


@pytest.mark.parametrize(
    ("hidden", "num_experts", "dtype", "expected"),
    [
        (16, 6, torch.float32, "grouped"),
        (16, 6, torch.bfloat16, "grouped"),
        (16, 2, torch.float32, "dense"),
        (16, 6, torch.float64, "loop"),
        (256, 6, torch.float32, "loop"),
    ],
)
def test_auto_chooses_by_shape_and_dtype(hidden: int, num_experts: int, dtype: torch.dtype, expected: str) -> None:
    x, experts, _, w_in, w_out = problem(4, hidden, 8, num_experts, 2, dtype)
    assert _choose(x, experts, w_in, w_out) == expected


@pytest.mark.parametrize("implementation", ["grouped", "loop", "dense"])
def test_a_token_does_not_depend_on_the_others_of_its_batch(implementation: str) -> None:
    dtype = torch.float32 if implementation == "grouped" else torch.float64
    x, experts, gates, w_in, w_out = problem(20, 16, 8, 6, 3, dtype)
    whole = grouped_experts(x, experts, gates, w_in, w_out, implementation)
    alone = grouped_experts(x[4:5], experts[4:5], gates[4:5], w_in, w_out, implementation)
    near = rounding.bound(dtype, 64) * float(whole.abs().max())  # one row may be summed in another order than twenty
    torch.testing.assert_close(whole[4:5], alone, atol=near, rtol=0)


@pytest.mark.parametrize("bounds", [(0, 6), (0, 2, 6), (0, 1, 4, 5, 6)])
def test_slices_of_the_experts_give_each_choice_to_its_own_slice(bounds: tuple[int, ...]) -> None:
    """Rows of experts that a slice doesn't hold are 0, also those of the expert right after it; all together are the output."""
    x, experts, gates, w_in, w_out = problem(20, 16, 8, 6, 3, torch.float64)
    rows = []
    for first, last in pairwise(bounds):
        found = expert_rows(x, experts, gates, w_in[first:last], w_out[first:last], first)
        mine = (experts >= first) & (experts < last)
        assert bool(mine.any()) and torch.equal(found.abs().sum(-1) > 0, mine)
        rows.append(found)
    expected = gates.unsqueeze(-1) * expert_outputs(x, experts, w_in, w_out)
    torch.testing.assert_close(sum(rows[1:], rows[0]), expected, atol=rounding.bound(torch.float64, 64), rtol=0)


@pytest.mark.parametrize("implementation", ["grouped", "loop"])
def test_an_expert_that_there_is_not_is_refused(implementation: str) -> None:
    """grouped_mm would take its rows, compute nothing for them and make up their gradients."""
    x, experts, gates, w_in, w_out = problem(6, 16, 8, 5, 2, torch.float32)
    experts[3, 1] = 5
    with pytest.raises(InputError, match=r"experts in 0\.\.4, got 5"):
        grouped_experts(x, experts, gates, w_in, w_out, implementation)


def test_gradients_do_not_depend_on_what_memory_held() -> None:
    """Twice the same from dirty memory, most experts empty: no row is left to chance."""
    case = problem(40, 16, 8, 60, 2, torch.float32, "some")
    results = []
    for fill in (0.0, math.nan):
        dirt = [torch.full((n,), fill) for n in (640, 1280, 2560, 15360)]
        del dirt
        leaves = [t.clone().requires_grad_() for t in (case[0], *case[2:])]
        out = grouped_experts(leaves[0], case[1], *leaves[1:], "grouped")
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two) and two.isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "num_experts", "k"), [(9, 7, 3), (5, 4, 4), (6, 1, 1), (0, 5, 2)])
def test_each_experts_output_is_its_own_swiglu(dtype: torch.dtype, tokens: int, num_experts: int, k: int) -> None:
    x, experts, gates, w_in, w_out = problem(tokens, 16, 8, num_experts, k, dtype)
    outputs = expert_outputs(x, experts, w_in, w_out)
    assert outputs.shape == (tokens, k, 16) and outputs.dtype == dtype
    wide = [value.double() for value in (x, w_in, w_out)]
    for j in range(k):
        alone = by_token(wide[0], experts[:, j : j + 1], torch.ones(tokens, 1).double(), wide[1], wide[2])
        error = (outputs[:, j].double() - alone).abs()
        assert not tokens or float(error.max()) <= TOLERANCE[dtype] * float(alone.abs().max())
    weighed = (outputs * gates.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(weighed, grouped_experts(x, experts, gates, w_in, w_out), atol=2e-2, rtol=2e-2)
