"""Noise of one unit in the last place on every float32 product, which shows what hangs on the order of its sums.

Another processor, another number of threads or another batch adds the terms of a product in another order. All of these
orders are right; they differ by a few roundings of the terms that they add. `disturb_products` gives each product of
float32 matrices on the CPU (matmul, linear, einsum, bmm, addmm, attention) such a difference, without another machine.

The noise is a function of the product's values and shape: the same product has the same noise, wherever it is computed,
so that equality to the bit of one computation with itself stays a claim. Another batch has another noise. A product that
float32 holds exactly (a one-hot selection, small integers) has none, as no order of its sums rounds it.

`refuse_near_equality` is the other side: no test may take a difference for an effect that rounding could have made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_EPSILON = torch.finfo(torch.float32).eps
FORWARD = 512
"""Roundings of a forward of the tiny models: some sixty products one after another, each of up to 64 terms, whose sums in another
order differ by a few units in the last place of their terms."""


def bound(dtype: torch.dtype, roundings: int = FORWARD) -> float:
    """What so many roundings may change of a value of size 1."""
    return roundings * torch.finfo(dtype).eps


def disturb_products(units: float) -> torch.library.Library:
    """Puts the noise under every float32 product of this process until the returned library is destroyed.

    units: size of the noise, in units in the last place of the sum of the terms' magnitudes.
    """
    library = torch.library.Library("aten", "IMPL")

    def put(name: str, make: Callable[..., Any]) -> None:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

        def product(keys: Any, *arguments: Any, **options: Any) -> Any:
            if arguments[0].dtype != torch.float32:
                return kernel.call_boxed(keys, *arguments, **options)
            return make(lambda *a, **o: kernel.call_boxed(keys, *a, **o), units, *arguments, **options)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # it's the purpose
            library.impl(name, product, "CPU", with_keyset=True, allow_override=True)

    for name in ("mm", "bmm", "dot"):
        put(name, _product)
    for name in ("mm.out", "bmm.out"):
        put(name, _product_into)
    for name in ("addmm", "baddbmm", "addmv"):
        put(name, _sum)
    for name in ("addmm.out", "baddbmm.out", "addmv.out"):
        put(name, _sum_into)
    for name in ("addmm_", "baddbmm_", "addmv_"):
        put(name, _sum_in_place)
    put("mv", _product)
    put("_scaled_dot_product_flash_attention_for_cpu", _attention)
    return library


def refuse_near_equality(units: float) -> Callable[[], None]:
    """Makes `torch.equal` fail where float32 tensors differ by as little as rounding in another order may make them differ: then
    whether they are equal hangs on rounding, whichever of the two a test asserts. Returns what undoes it.

    units: how little, in units in the last place of the largest value.
    """
    equal = torch.equal

    def decided(a: Tensor, b: Tensor) -> bool:
        if equal(a, b):
            return True
        if a.shape == b.shape and a.dtype == b.dtype == torch.float32:
            size = max(float(x.nan_to_num(posinf=0, neginf=0).abs().max()) for x in (a, b))
            near = torch.allclose(a, b, rtol=0, atol=units * _EPSILON * size)
            assert not near, (
                f"whether these are equal hangs on rounding: they differ by {(a - b).abs().max():.2g} of {size:.2g}"
            )
        return False

    torch.equal = decided

    def undo() -> None:
        torch.equal = equal

    return undo


def noisy(exact: Tensor, magnitude: Tensor, units: float) -> Tensor:
    """float32 values near the float64 values `exact`; `magnitude`: float64, sums of the terms' magnitudes."""
    rounded = exact.float()
    bits = rounded.contiguous().view(torch.int32).long()
    mixed = (bits ^ (bits >> 15)) * 0x2C1B3C6D + sum(n * 0x9E3779B1 << i for i, n in enumerate(rounded.shape))
    mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39
    sign = ((mixed >> 21) & 1) * 2 - 1
    moved = exact + sign * (units * _EPSILON) * magnitude
    return torch.where((rounded.double() == exact) | ~exact.isfinite(), rounded, moved.float())


def _terms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = a.double(), b.double()
    return a @ b, a.abs() @ b.abs()


def _product(_kernel: Any, units: float, a: Tensor, b: Tensor) -> Tensor:
    return noisy(*_terms(a, b), units)


def _product_into(_kernel: Any, units: float, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    result = _product(_kernel, units, a, b)
    return out.resize_(result.shape).copy_(result)


def _sum(_kernel: Any, units: float, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    exact, magnitude = _terms(a, b)
    if beta == 0:  # a bias that isn't read may hold anything
        return noisy(alpha * exact, abs(alpha) * magnitude, units)
    bias = beta * bias.double()
    return noisy(bias + alpha * exact, bias.abs() + abs(alpha) * magnitude, units)


def _sum_into(_kernel: Any, units: float, bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor, **options: Any) -> Tensor:
    result = _sum(_kernel, units, bias, a, b, **options)
    return out.resize_(result.shape).copy_(result)


def _sum_in_place(_kernel: Any, units: float, bias: Tensor, a: Tensor, b: Tensor, **options: Any) -> Tensor:
    return bias.copy_(_sum(_kernel, units, bias, a, b, **options))


def _attention(
    kernel: Any,
    units: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.double()
    q, k, v = q.double(), k.double(), v.double()
    exact, log_sum = kernel(q, k, v, *rest, attn_mask=attn_mask, **options)
    magnitude, _ = kernel(q, k, v.abs(), *rest, attn_mask=attn_mask, **options)
    return noisy(exact, magnitude, units), log_sum.float()
