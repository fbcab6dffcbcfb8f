"""Eight float32 numbers at once, or sixteen, for numba kernels.

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

from reader_rag.util.cpu import cpu_features

LANES, WIDE_LANES = 8, 16
HAS_WIDE = "avx512f" in cpu_features()
"""Whether sixteen numbers are one register, so that sums in sixteen lanes are faster than in eight."""

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTEGERS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
_WIDE_FLOATS = ir.VectorType(ir.FloatType(), WIDE_LANES)
_WIDE_INTEGERS = ir.VectorType(ir.IntType(32), WIDE_LANES)
_WIDE_HALVES = ir.VectorType(ir.IntType(16), WIDE_LANES)


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


class _WideLanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="WideLanes")


_lanes, _wide_lanes = _LanesType(), _WideLanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)  # type: ignore[no-untyped-call]


@register_model(_WideLanesType)
class _WideLanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WIDE_FLOATS)  # type: ignore[no-untyped-call]


def _constant(kind: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


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


def _load(context: Any, builder: Any, signature: Any, arguments: Any, floats: Any, integers: Any, halves: Any) -> Any:
    """float32 numbers from elements of an array: float32, bfloat16 bits (uint16) or float16 bits (int16)."""
    dtype = signature.args[0].dtype
    if dtype == types.float32:
        return builder.load(_pointer(context, builder, signature, arguments, floats), align=4)
    half = builder.load(_pointer(context, builder, signature, arguments, halves), align=2)
    bits = builder.zext(half, integers)
    if dtype == types.uint16:
        return builder.bitcast(builder.shl(bits, _constant(integers, 16)), floats)
    return _from_float16(builder, bits, floats)


@intrinsic
def load(typing_context: Any, array: Any, i: Any, j: Any) -> Any:
    """Elements [i, j : j + 8] of a C-contiguous array: float32, bfloat16 bits (uint16) or float16 bits (int16)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(context, builder, signature, arguments, _FLOATS, _INTEGERS, _HALVES)

    return _lanes(array, types.intp, types.intp), code


@intrinsic
def load_wide(typing_context: Any, array: Any, i: Any, j: Any) -> Any:
    """Elements [i, j : j + 16], as `load`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(context, builder, signature, arguments, _WIDE_FLOATS, _WIDE_INTEGERS, _WIDE_HALVES)

    return _wide_lanes(array, types.intp, types.intp), code


def _from_float16(builder: Any, half: Any, floats: ir.VectorType) -> Any:
    """As `rounding._from_float16`: no case is left to arithmetic on denormal numbers."""

    def integers(value: int) -> ir.Constant:
        return _constant(half.type, value)

    magnitude = builder.shl(builder.and_(half, integers(0x7FFF)), integers(13))
    exponent = builder.and_(magnitude, integers(0x0F800000))
    normal = builder.add(magnitude, integers(112 << 23))
    infinite = builder.add(normal, integers(112 << 23))
    shifted = builder.bitcast(builder.add(normal, integers(1 << 23)), floats)
    tiny = builder.bitcast(builder.fsub(shifted, builder.bitcast(integers(113 << 23), floats)), half.type)
    large = builder.select(builder.icmp_unsigned("==", exponent, integers(0x0F800000)), infinite, normal)
    found = builder.select(builder.icmp_unsigned("==", exponent, integers(0)), tiny, large)
    sign = builder.shl(builder.and_(half, integers(0x8000)), integers(16))
    return builder.bitcast(builder.or_(found, sign), floats)


@intrinsic
def store(typing_context: Any, array: Any, i: Any, j: Any, lanes: Any) -> Any:
    """Write elements [i, j : j + 8] of a C-contiguous float32 array."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[3], _pointer(context, builder, signature, arguments, _FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, lanes), code


@intrinsic
def store_wide(typing_context: Any, array: Any, i: Any, j: Any, lanes: Any) -> Any:
    """Write elements [i, j : j + 16] of a C-contiguous float32 array."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[3], _pointer(context, builder, signature, arguments, _WIDE_FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, lanes), code


def _spread(builder: Any, value: Any, floats: ir.VectorType) -> Any:
    undefined = ir.Constant(floats, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, undefined, _constant(ir.VectorType(ir.IntType(32), floats.count), 0))


@intrinsic
def spread(typing_context: Any, value: Any) -> Any:
    """One float32 in all eight lanes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, arguments[0], _FLOATS)

    return _lanes(types.float32), code


@intrinsic
def spread_wide(typing_context: Any, value: Any) -> Any:
    """One float32 in all sixteen lanes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, arguments[0], _WIDE_FLOATS)

    return _wide_lanes(types.float32), code


@intrinsic
def multiply_add_wide(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` in sixteen lanes, rounded once where the CPU can."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_WIDE_FLOATS, [_WIDE_FLOATS] * 3)
        name = f"llvm.fmuladd.v{WIDE_LANES}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

    return _wide_lanes(_wide_lanes, _wide_lanes, _wide_lanes), code


@intrinsic
def fold(typing_context: Any, a: Any) -> Any:
    """Eight lanes of sixteen: lane n is n + (n + 8)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        undefined = ir.Constant(_WIDE_FLOATS, ir.Undefined)
        halves = (ir.Constant(_INTEGERS, list(range(first, first + LANES))) for first in (0, LANES))
        return builder.fadd(*(builder.shuffle_vector(arguments[0], undefined, mask) for mask in halves))

    return _lanes(_wide_lanes), code


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
