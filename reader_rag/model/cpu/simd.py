"""A vector register of float32 numbers, for numba kernels.

Numba leaves it to the compiler to find vectors in loops, and it finds none across several results. These operations are
the compiler's own vector instructions, for any CPU; each lane is computed as a number alone would be, in the order that
is written, so that results do not depend on how many lanes there are.
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

LANES = 16 if "avx512f" in cpu_features() else 8
"""Numbers of a register."""

_LINE = 64
"""Bytes of a line of the CPU's caches."""

FLOATS: Any = ir.VectorType(ir.FloatType(), LANES)
_INTEGERS, _HALVES = (ir.VectorType(ir.IntType(bits), LANES) for bits in (32, 16))


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


_lanes = _LanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)  # type: ignore[no-untyped-call]


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


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Where element [i, j] of an array lies."""
    array_type = signature.args[0]
    array = context.make_array(array_type)(context, builder, arguments[0])
    return cgutils.get_item_pointer(context, builder, array_type, array, list(arguments[1:3]), wraparound=False)


def spread_value(builder: Any, value: Any) -> Any:
    """A register with one number in all lanes."""
    undefined = ir.Constant(FLOATS, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, undefined, _constant(_INTEGERS, 0))


@intrinsic
def load(typing_context: Any, array: Any, i: Any, j: Any) -> Any:
    """Elements [i, j : j + LANES] of a C-contiguous float32 array."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _pointer(context, builder, signature, arguments)
        return builder.load(builder.bitcast(address, FLOATS.as_pointer()), align=4)

    return _lanes(array, types.intp, types.intp), code


@intrinsic
def load_bfloat16(typing_context: Any, array: Any, i: Any, j: Any) -> Any:
    """Elements [i, j : j + LANES] of a C-contiguous uint16 array with the bits of bfloat16, as float32."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _pointer(context, builder, signature, arguments)
        halves = builder.load(builder.bitcast(address, _HALVES.as_pointer()), align=2)
        return builder.bitcast(builder.shl(builder.zext(halves, _INTEGERS), _constant(_INTEGERS, 16)), FLOATS)

    return _lanes(array, types.intp, types.intp), code


@intrinsic
def store(typing_context: Any, array: Any, i: Any, j: Any, lanes: Any) -> Any:
    """Write elements [i, j : j + LANES] of a C-contiguous float32 array."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _pointer(context, builder, signature, arguments)
        builder.store(arguments[3], builder.bitcast(address, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, lanes), code


def _line(context: Any, builder: Any, signature: Any, arguments: Any, which: int, n: int, vector: Any) -> Any:
    """Where a vector lies at element [i + n, j] of an array; array, i and j are arguments from number `which` on."""
    kind, (i, j) = signature.args[which], arguments[which + 1 : which + 3]
    array = context.make_array(kind)(context, builder, arguments[which])
    place = [builder.add(i, ir.Constant(i.type, n)), j]
    address = cgutils.get_item_pointer(context, builder, kind, array, place, wraparound=False)
    return builder.bitcast(address, vector.as_pointer())


def _transposed(builder: Any, vectors: list[Any]) -> list[Any]:
    """`LANES` vectors of `LANES` elements of 32 bits, transposed."""
    distance, vectors = 1, list(vectors)
    while distance < LANES:  # swap blocks of `distance` elements between lines that are as far apart
        for n in range(LANES):
            if not n & distance:
                a, b = vectors[n], vectors[n + distance]
                low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
                high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
                vectors[n], vectors[n + distance] = (
                    builder.shuffle_vector(a, b, ir.Constant(_INTEGERS, mask)) for mask in (low, high)
                )
        distance *= 2
    return vectors


@intrinsic
def transpose(typing_context: Any, rows: Any, i: Any, j: Any, out: Any, k: Any, m: Any) -> Any:
    """Write elements [i : i + LANES, j : j + LANES] of a C-contiguous float32 array as [k : k + LANES, m : m + LANES]
    of another, transposed."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def line(which: int, n: int) -> Any:
            return _line(context, builder, signature, arguments, which, n, FLOATS)

        vectors = [builder.load(line(0, n), align=4) for n in range(LANES)]
        for n, vector in enumerate(_transposed(builder, vectors)):
            builder.store(vector, line(3, n), align=4)
        return context.get_dummy_value()

    i = types.intp
    return types.void(rows, i, i, out, i, i), code


@intrinsic
def transpose_bfloat16(typing_context: Any, rows: Any, i: Any, j: Any, out: Any, k: Any, m: Any) -> Any:
    """As `transpose`, for twice as many columns of bfloat16: elements [i : i + LANES, j : j + 2 * LANES] of a uint16
    array as float32 [k : k + 2 * LANES, m : m + LANES]."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def line(which: int, n: int, vector: Any) -> Any:
            return _line(context, builder, signature, arguments, which, n, vector)

        pairs = [builder.load(line(0, n, _INTEGERS), align=2) for n in range(LANES)]  # of a row, two columns a lane
        for n, pair in enumerate(_transposed(builder, pairs)):
            even, odd = builder.shl(pair, _constant(_INTEGERS, 16)), builder.and_(pair, _constant(_INTEGERS, -65536))
            builder.store(even, line(3, 2 * n, _INTEGERS), align=4)
            builder.store(odd, line(3, 2 * n + 1, _INTEGERS), align=4)
        return context.get_dummy_value()

    i = types.intp
    return types.void(rows, i, i, out, i, i), code


@intrinsic
def prefetch(typing_context: Any, array: Any, i: Any, count: Any) -> Any:
    """Ask for rows [i : i + count] of a C-contiguous array, which are read soon; they may lie beyond the array."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        stride = cgutils.unpack_tuple(builder, made.strides)[0]
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        first = builder.gep(builder.bitcast(made.data, byte), [builder.mul(arguments[1], stride)])
        declared = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, declared, "llvm.prefetch.p0i8")
        stop, step = builder.mul(arguments[2], stride), ir.Constant(stride.type, _LINE)
        with cgutils.for_range_slice(builder, ir.Constant(stride.type, 0), stop, step) as (at, _):
            builder.call(function, [builder.gep(first, [at]), *(ir.Constant(i32, n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), code


@intrinsic
def spread(typing_context: Any, value: Any) -> Any:
    """One float32 in all lanes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return spread_value(builder, arguments[0])

    return _lanes(types.float32), code


@intrinsic
def spread_at(typing_context: Any, array: Any, i: Any, j: Any) -> Any:
    """Element [i, j] of a float32 array in all lanes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return spread_value(builder, builder.load(_pointer(context, builder, signature, arguments)))

    return _lanes(array, types.intp, types.intp), code


def _builtin(builder: Any, name: str, *arguments: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS] * len(arguments))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), arguments)


def _zeros() -> ir.Constant:
    return _constant(FLOATS, 0.0)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, rounded once where the CPU can."""
    return _builtin(builder, "fmuladd", a, b, c)


def _floor(builder: Any, a: Any) -> Any:
    return _builtin(builder, "floor", a)


def _power_of_two(builder: Any, a: Any) -> Any:
    exponents = builder.add(builder.fptosi(a, _INTEGERS), _constant(_INTEGERS, 127))
    return builder.bitcast(builder.shl(exponents, _constant(_INTEGERS, 23)), FLOATS)


add = _operation(2, lambda builder, a, b: builder.fadd(a, b))
subtract = _operation(2, lambda builder, a, b: builder.fsub(a, b))
multiply = _operation(2, lambda builder, a, b: builder.fmul(a, b))
maximum = _operation(2, lambda builder, a, b: builder.select(builder.fcmp_unordered(">", b, a), b, a))
"""The greater of each lane; a NaN of `b` is kept."""
multiply_add = _operation(3, fused)
"""`a * b + c`, rounded once where the CPU can."""
floor = _operation(1, _floor)
power_of_two = _operation(1, _power_of_two)
"""2**a of whole numbers from -126 to 127."""
zero_below = _operation(3, lambda builder, a, low, b: builder.select(builder.fcmp_ordered("<", a, low), _zeros(), b))
"""0 where `a` is below `low`, else `b`."""
where_zero = _operation(3, lambda builder, a, b, c: builder.select(builder.fcmp_ordered("==", a, _zeros()), b, c))
"""`b` where `a` is 0, else `c`."""
