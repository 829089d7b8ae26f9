"""Vectors of 8 float32 for numba's compiler: loads, stores, fused multiply-adds, comparisons, 2 ** x and tanh.

A type of its own, because numba leaves loops over arrays scalar: it can't know that two arrays don't overlap. Nothing
is compiled with fast-math: multiply-adds are fused where `fma` says so and nowhere else, and no sum is reordered.

numba's cache of a function elsewhere doesn't see a change here: touch its file, or delete `__pycache__`.
"""

from __future__ import annotations

import operator
import platform
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, overload, register_model

LANES = 8


class Lanes(types.Type):
    """Eight float32 in a vector register."""


lanes = Lanes(name="Lanes")
_VECTOR, _INT = ir.VectorType(ir.FloatType(), LANES), ir.IntType(32)
_intrinsic: Any = intrinsic  # which drops the typing context from the parameters: more than a type checker knows
_FUSED = get_host_cpu_features().get("fma", False) or platform.machine() in ("arm64", "aarch64")


@register_model(Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager, front_end_type) -> None:
        super().__init__(manager, front_end_type, _VECTOR)


def _address(context, builder, signature, arguments):
    return builder.gep(context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]])


def _repeated(element: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, LANES), [value] * LANES)


def _repeat_one(builder, x):
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), x, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), _repeated(_INT, 0))


@_intrinsic
def load(typing_context, array, index):
    """Lanes from `array.ravel()[index:]`. The array is contiguous; the index isn't checked."""

    def generate(context, builder, signature, arguments):
        address = builder.bitcast(_address(context, builder, signature, arguments), _VECTOR.as_pointer())
        return builder.load(address, align=4)

    return lanes(array, types.intp), generate


@_intrinsic
def store(typing_context, array, index, value):
    def generate(context, builder, signature, arguments):
        address = builder.bitcast(_address(context, builder, signature, arguments), _VECTOR.as_pointer())
        builder.store(arguments[2], address, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), generate


@_intrinsic
def load_one(typing_context, array, index):
    """Lanes that all hold `array.ravel()[index]`."""

    def generate(context, builder, signature, arguments):
        return _repeat_one(builder, builder.load(_address(context, builder, signature, arguments)))

    return lanes(array, types.intp), generate


@_intrinsic
def spread(typing_context, x):
    """Lanes that all hold x."""
    return lanes(types.float32), lambda context, builder, signature, arguments: _repeat_one(builder, arguments[0])


@_intrinsic
def power_of_two(typing_context, rounded):
    """2 ** n of the integers n in the low bits of `n + _ROUNDER`."""

    def generate(context, builder, signature, arguments):
        bits = builder.shl(builder.bitcast(arguments[0], ir.VectorType(_INT, LANES)), _repeated(_INT, 23))
        return builder.bitcast(builder.add(bits, _repeated(_INT, 127 << 23)), _VECTOR)

    return lanes(lanes), generate


@_intrinsic
def fma(typing_context, a, b, c):
    """a * b + c, rounded once where the processor can."""

    def generate(context, builder, signature, arguments):
        if not _FUSED:
            return builder.fadd(builder.fmul(arguments[0], arguments[1]), arguments[2])
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        return builder.call(get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), arguments)

    return lanes(lanes, lanes, lanes), generate


def _choice(comparison: str):
    """x where a and b compare so, else y; no comparison with NaN holds."""

    @_intrinsic
    def choose(typing_context, a, b, x, y):
        def generate(context, builder, signature, arguments):
            a, b, x, y = arguments
            return builder.select(builder.fcmp_ordered(comparison, a, b), x, y)

        return lanes(lanes, lanes, lanes, lanes), generate

    return choose


if_greater, if_less, if_equal, if_at_least = _choice(">"), _choice("<"), _choice("=="), _choice(">=")


def _arithmetic(operation, instruction: str) -> None:
    @_intrinsic
    def apply(typing_context, a, b):
        def generate(context, builder, signature, arguments):
            return getattr(builder, instruction)(*arguments)

        return lanes(lanes, lanes), generate

    @overload(operation)
    def of_lanes(a, b):
        return (lambda a, b: apply(a, b)) if a is b is lanes else None


_arithmetic(operator.add, "fadd")
_arithmetic(operator.sub, "fsub")
_arithmetic(operator.mul, "fmul")
_arithmetic(operator.truediv, "fdiv")

INFINITY, ZERO, ONE = np.float32(np.inf), np.float32(0), np.float32(1)
SMALLEST = np.float32(-126)  # 2 ** -126 is the last normal float32; smaller weights are rounded up to it
_ROUNDER = np.float32(1.5 * 2**23)  # adding it rounds to an integer, which then fills the low bits
# Minimax polynomial of 2 ** x over [-1/2, 1/2], relative error 7.5e-8.
_C0, _C1, _C2 = np.float32(1.0000000716553021), np.float32(0.6931469670628841), np.float32(0.24022119720751478)
_C3, _C4, _C5 = np.float32(0.055507132750653304), np.float32(0.00967554150262763), np.float32(0.0013276471959732528)
_MINUS_2_LOG2_E = np.float32(-2 / np.log(2))
_NEAR, _T3, _T5, _T7 = np.float32(0.2), np.float32(-1 / 3), np.float32(2 / 15), np.float32(-17 / 315)


@njit(cache=True, nogil=True)
def exp2(x):
    """2 ** x for -126 <= x <= 0, to 3e-7 relative. NaN stays NaN."""
    rounded = x + spread(_ROUNDER)
    f = x - (rounded - spread(_ROUNDER))
    p = fma(fma(spread(_C5), f, spread(_C4)), f, spread(_C3))
    p = fma(fma(fma(p, f, spread(_C2)), f, spread(_C1)), f, spread(_C0))
    return p * power_of_two(rounded)


@njit(cache=True, nogil=True)
def larger(a, b):
    return if_greater(a, b, a, b)


@njit(cache=True, nogil=True)
def sort_two(a, b):
    return if_greater(a, b, a, b), if_greater(a, b, b, a)


@njit(cache=True, nogil=True)
def tanh(x):
    """To 2e-7 relative; NaN stays NaN."""
    size = larger(x, spread(ZERO) - x)
    exponent = size * spread(_MINUS_2_LOG2_E)
    e = exp2(if_less(exponent, spread(SMALLEST), spread(SMALLEST), exponent))
    far = (spread(ONE) - e) / (spread(ONE) + e)
    square = size * size  # Taylor: 1 - e would lose the digits of a small one
    near = fma(fma(fma(square, spread(_T7), spread(_T5)), square, spread(_T3)), square, spread(ONE)) * size
    size = if_less(size, spread(_NEAR), near, far)
    return if_less(x, spread(ZERO), spread(ZERO) - size, size)
