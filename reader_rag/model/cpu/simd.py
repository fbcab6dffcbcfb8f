"""Eight float32 numbers at once, for numba kernels.

Numba leaves it to the compiler to find vectors in loops, and it finds none in sums that are taken in a fixed order, or
across several results. These operations are the compiler's own vector instructions, for any CPU; each lane is computed
as a number alone would be, in the order that is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 8

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTEGERS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


_lanes = _LanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)  # type: ignore[no-untyped-call]


def _constant(kind: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _operation(count: int, emit: Callable[..., Any]) -> Any:
    """An operation on `count` Lanes, which `emit(builder, *lanes)` writes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit(builder, *arguments)

    # The number of arguments is part of what numba asks for.
    if count == 1:

        @intrinsic
        def operation(typing_context: Any, a: Any) -> Any:
            return _lanes(a), code

    elif count == 2:

        @intrinsic
        def operation(typing_context: Any, a: Any, b: Any) -> Any:
            return _lanes(a, b), code

    else:

        @intrinsic
        def operation(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
            return _lanes(a, b, c), code

    return operation


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any, kind: ir.VectorType) -> Any:
    """Where element [i, j] of an array lies, as the address of lanes of `kind`."""
    array_type = signature.args[0]
    array = context.make_array(array_type)(context, builder, arguments[0])
    address = cgutils.get_item_pointer(context, builder, array_type, array, list(arguments[1:3]), wraparound=False)
    return builder.bitcast(address, kind.as_pointer())


@intrinsic
def load(typing_context: Any, array: Any, i: Any, j: Any) -> Any:
    """Elements [i, j : j + 8] of a C-contiguous array: float32, bfloat16 bits (uint16) or float16 bits (int16)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if array.dtype == types.float32:
            return builder.load(_pointer(context, builder, signature, arguments, _FLOATS), align=4)
        half = builder.load(_pointer(context, builder, signature, arguments, _HALVES), align=2)
        bits = builder.zext(half, _INTEGERS)
        if array.dtype == types.uint16:
            return builder.bitcast(builder.shl(bits, _constant(_INTEGERS, 16)), _FLOATS)
        return _from_float16(builder, bits)

    return _lanes(array, types.intp, types.intp), code


def _from_float16(builder: Any, half: Any) -> Any:
    """As `rounding._from_float16`: no case is left to arithmetic on denormal numbers."""

    def integers(value: int) -> ir.Constant:
        return _constant(_INTEGERS, value)

    magnitude = builder.shl(builder.and_(half, integers(0x7FFF)), integers(13))
    exponent = builder.and_(magnitude, integers(0x0F800000))
    normal = builder.add(magnitude, integers(112 << 23))
    infinite = builder.add(normal, integers(112 << 23))
    shifted = builder.bitcast(builder.add(normal, integers(1 << 23)), _FLOATS)
    tiny = builder.bitcast(builder.fsub(shifted, builder.bitcast(integers(113 << 23), _FLOATS)), _INTEGERS)
    large = builder.select(builder.icmp_unsigned("==", exponent, integers(0x0F800000)), infinite, normal)
    found = builder.select(builder.icmp_unsigned("==", exponent, integers(0)), tiny, large)
    sign = builder.shl(builder.and_(half, integers(0x8000)), integers(16))
    return builder.bitcast(builder.or_(found, sign), _FLOATS)


@intrinsic
def store(typing_context: Any, array: Any, i: Any, j: Any, lanes: Any) -> Any:
    """Write elements [i, j : j + 8] of a C-contiguous float32 array."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[3], _pointer(context, builder, signature, arguments, _FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, lanes), code


@intrinsic
def spread(typing_context: Any, value: Any) -> Any:
    """One float32 in all lanes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), arguments[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), _constant(_INTEGERS, 0))

    return _lanes(types.float32), code


def _builtin(builder: Any, name: str, *arguments: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(arguments))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), arguments)


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _builtin(builder, "fmuladd", a, b, c)


def _floor(builder: Any, a: Any) -> Any:
    return _builtin(builder, "floor", a)


def _power_of_two(builder: Any, a: Any) -> Any:
    exponents = builder.add(builder.fptosi(a, _INTEGERS), _constant(_INTEGERS, 127))
    return builder.bitcast(builder.shl(exponents, _constant(_INTEGERS, 23)), _FLOATS)


def _clamp(builder: Any, a: Any, low: Any, high: Any) -> Any:
    raised = builder.select(builder.fcmp_ordered("<", a, low), low, a)
    return builder.select(builder.fcmp_ordered(">", raised, high), high, raised)


add = _operation(2, lambda builder, a, b: builder.fadd(a, b))
subtract = _operation(2, lambda builder, a, b: builder.fsub(a, b))
multiply = _operation(2, lambda builder, a, b: builder.fmul(a, b))
maximum = _operation(2, lambda builder, a, b: builder.select(builder.fcmp_unordered(">", b, a), b, a))
"""The greater of each lane; a NaN of `b` is kept."""
multiply_add = _operation(3, _fused)
"""`a * b + c`, rounded once where the CPU can."""
floor = _operation(1, _floor)
power_of_two = _operation(1, _power_of_two)
"""2**a of whole numbers from -126 to 127."""
clamp = _operation(3, _clamp)
"""`a` within `low` and `high`; a NaN stays."""

_STAGES = (
    ((0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15)),
    ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
    ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
)
"""Which lanes of two neighbours are added up: those next to each other, then pairs, then fours."""


@intrinsic
def sums(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """The sums of eight Lanes, that of `a` first; each is ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left = list(arguments)
        for first, second in _STAGES:
            masks = [ir.Constant(_INTEGERS, list(mask)) for mask in (first, second)]
            left = [
                builder.fadd(*(builder.shuffle_vector(left[k], left[k + 1], mask) for mask in masks))
                for k in range(0, len(left), 2)
            ]
        return left[0]

    return _lanes(*[_lanes] * 8), code
