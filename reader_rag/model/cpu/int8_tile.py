"""Exact products of 8-bit integers in blocks of 16 features, for numba kernels.

Weights are packed so that a vector register holds four inputs of 16 features: `packed[block, k // 4, 4 * feature +
k % 4]`, each weight plus 128 (unsigned). The CPU's dot-product instruction multiplies them with four inputs of a row
and adds the four products to 16 sums of 32 bits. Where there is no such instruction, the same sums are made of 16-bit
products. Nothing saturates and nothing is rounded, so every CPU and every blocking gives the same integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from reader_rag.util.cpu import cpu_features, has_avx512_vnni, has_avx_vnni

FEATURES = 16
"""Features of a packed block."""
INPUTS = 4
"""Inputs that one instruction multiplies."""
OFFSET = 128
"""What packed weights are greater than the weights; the product of a row is too great by this times its sum."""

WIDE = has_avx512_vnni()
"""Whether registers are wide and many enough for large tiles."""
TILE_ROWS, TILE_BLOCKS = (6, 4) if WIDE else (3, 2)
"""Rows and blocks of the largest tile: its sums fill the CPU's vector registers, 32 of 512 bits or 16 of 256."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), FEATURES)
_SUMS = ir.VectorType(_I32, FEATURES)
_BYTES = ir.VectorType(ir.IntType(8), FEATURES * INPUTS)
_WORDS = ir.VectorType(ir.IntType(16), FEATURES * INPUTS // 2)

Dot = Callable[[Any, Any, Any, Any], Any]
"""Emits `sums + (unsigned bytes of weights) * (signed bytes of inputs)`, from a builder and three vectors of 16 times
32 bits."""


def _spread(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _part(builder: Any, vector: Any, first: int, count: int) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, count), list(range(first, first + count)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _joined(builder: Any, low: Any, high: Any) -> Any:
    count = 2 * low.type.count
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, count), list(range(count))))


def _call(builder: Any, name: str, result: ir.VectorType, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _dot_512(builder: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    return _call(builder, "llvm.x86.avx512.vpdpbusd.512", _SUMS, sums, weights, inputs)


def _dot_256(builder: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    half = ir.VectorType(_I32, 8)
    halves = [
        _call(
            builder,
            "llvm.x86.avx512.vpdpbusd.256",
            half,
            *(_part(builder, vector, first, 8) for vector in (sums, weights, inputs)),
        )
        for first in (0, 8)
    ]
    return _joined(builder, *halves)


def _dot_words(builder: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    """Of the even bytes as 16-bit integers, then of the odd ones; `pmaddwd` adds two products in 32 bits."""
    weights, inputs = builder.bitcast(weights, _WORDS), builder.bitcast(inputs, _WORDS)
    eight = _spread(_WORDS, 8)
    even = builder.and_(weights, _spread(_WORDS, 255)), builder.ashr(builder.shl(inputs, eight), eight)
    odd = builder.lshr(weights, eight), builder.ashr(inputs, eight)
    for pair in (even, odd):
        halves = [
            _call(
                builder,
                "llvm.x86.avx2.pmadd.wd",
                ir.VectorType(_I32, 8),
                *(_part(builder, vector, first, 16) for vector in pair),
            )
            for first in (0, 16)
        ]
        sums = builder.add(sums, _joined(builder, *halves))
    return sums


def _dot_anywhere(builder: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    for byte in range(INPUTS):
        up, down = _spread(_SUMS, 24 - 8 * byte), _spread(_SUMS, 24)
        weight = builder.lshr(builder.shl(weights, up), down)
        sums = builder.add(sums, builder.mul(weight, builder.ashr(builder.shl(inputs, up), down)))
    return sums


def _dot_of_this_cpu() -> Dot:
    if WIDE:
        return _dot_512
    if has_avx_vnni() and "avx512vl" in cpu_features():
        return _dot_256
    return _dot_words if "avx2" in cpu_features() else _dot_anywhere


def _tile(rows: int, blocks: int, dot: Dot) -> Any:
    """An operation that multiplies `rows` rows with `blocks` packed blocks, half of them from each of two places."""

    @intrinsic
    def tile(typing_context: Any, packed: Any, first: Any, second: Any, inputs: Any, row: Any, sums: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            arrays = [context.make_array(signature.args[n])(context, builder, arguments[n]) for n in (0, 3, 5)]
            depth = cgutils.unpack_tuple(builder, arrays[0].shape)[1]
            weights, values, out = (
                builder.bitcast(array.data, kind.as_pointer())
                for array, kind in zip(arrays, (_SUMS, _I32, _SUMS), strict=True)
            )

            def place(at: Any, more: int) -> Any:
                return builder.mul(builder.add(at, ir.Constant(at.type, more)), depth)

            half = blocks // 2
            places = [place(arguments[1], n) for n in range(blocks - half)]
            places += [place(arguments[2], n) for n in range(half)]
            columns = [builder.gep(weights, [at]) for at in places]
            lines = [builder.gep(values, [place(arguments[4], r)]) for r in range(rows)]
            totals = [
                [cgutils.alloca_once_value(builder, _spread(_SUMS, 0)) for _ in range(blocks)] for _ in range(rows)
            ]
            with cgutils.for_range(builder, depth) as loop:
                vectors = [builder.load(builder.gep(column, [loop.index]), align=4) for column in columns]
                for line, row_totals in zip(lines, totals, strict=True):
                    four = builder.load(builder.gep(line, [loop.index]), align=4)
                    undefined = ir.Constant(_SUMS, ir.Undefined)
                    one = builder.insert_element(undefined, four, ir.Constant(_I32, 0))
                    spread = builder.shuffle_vector(one, undefined, _spread(_SUMS, 0))
                    for vector, total in zip(vectors, row_totals, strict=True):
                        builder.store(dot(builder, builder.load(total), vector, spread), total)
            for r, row_totals in enumerate(totals):
                for n, total in enumerate(row_totals):
                    target = builder.gep(out, [ir.Constant(_I64, r * blocks + n)])
                    builder.store(builder.load(total), target, align=4)
            return context.get_dummy_value()

        return types.void(packed, types.intp, types.intp, inputs, types.intp, sums), code

    return tile


_MOST_ROWS = 6
TILES: tuple[Any, ...] = tuple(_tile(rows, TILE_BLOCKS, _dot_of_this_cpu()) for rows in range(1, _MOST_ROWS + 1))
"""By rows - 1, operations `tile(packed, first, second, inputs, row, sums)` that write the sums of products of rows
`row`, `row + 1`, ... with half of `TILE_BLOCKS` blocks from `first` on, and the others from `second` on.

packed: uint8 [blocks, depth, 64], C-contiguous.
first, second: Blocks.
inputs: int8 [rows, 4 * depth], C-contiguous.
row: The first row.
sums: int32 [>= rows * TILE_BLOCKS * 16], overwritten: those of the first row's first block, its second block, ...
"""
COLUMNS: tuple[Any, ...] = tuple(_tile(rows, 1, _dot_of_this_cpu()) for rows in range(1, _MOST_ROWS + 1))
"""By rows - 1, the same operations for block `first` alone."""


def _writer(limbs: int, *, adds: bool) -> Any:
    """An operation that makes 16 outputs of a row from the integer sums of its limbs."""

    @intrinsic
    def write(
        typing_context: Any, sums: Any, at: Any, step: Any, inputs: Any, row: Any, linear: Any, block: Any, out: Any,
        line: Any, column: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def data(kind: Any, value: Any) -> Any:
                return context.make_array(kind)(context, builder, value).data

            def field(argument: int, which: int) -> Any:
                kind = signature.args[argument].types[which]
                return data(kind, builder.extract_value(arguments[argument], which))

            def element(pointer: Any, place: Any) -> Any:
                return builder.load(builder.gep(pointer, [place]))

            def vector(pointer: Any, place: Any, kind: ir.VectorType) -> Any:
                return builder.load(builder.bitcast(builder.gep(pointer, [place]), kind.as_pointer()), align=4)

            def everywhere(value: Any, kind: ir.VectorType) -> Any:
                undefined = ir.Constant(kind, ir.Undefined)
                one = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
                return builder.shuffle_vector(one, undefined, _spread(_SUMS, 0))

            _, row_scales, offsets = (field(3, n) for n in range(3))
            first_limb = builder.mul(arguments[4], ir.Constant(_I64, limbs))
            place, total = arguments[1], None
            for limb in range(limbs):
                offset = element(offsets, builder.add(first_limb, ir.Constant(_I64, limb)))
                exact = vector(data(signature.args[0], arguments[0]), place, _SUMS)
                part = builder.sitofp(builder.sub(exact, everywhere(offset, _SUMS)), _FLOATS)
                if total is not None:
                    part = builder.fadd(builder.fmul(total, ir.Constant(_FLOATS, [256.0] * FEATURES)), part)
                total, place = part, builder.add(place, arguments[2])
            feature = builder.mul(arguments[6], ir.Constant(_I64, FEATURES))
            scaled = builder.fmul(total, everywhere(element(row_scales, arguments[4]), _FLOATS))
            scaled = builder.fmul(scaled, vector(field(5, 1), feature, _FLOATS))
            value = builder.fadd(scaled, vector(field(5, 2), feature, _FLOATS))
            array = context.make_array(signature.args[7])(context, builder, arguments[7])
            place = [arguments[8], arguments[9]]
            address = cgutils.get_item_pointer(context, builder, signature.args[7], array, place, wraparound=False)
            address = builder.bitcast(address, _FLOATS.as_pointer())
            if adds:
                value = builder.fadd(builder.load(address, align=4), value)
            builder.store(value, address, align=4)
            return context.get_dummy_value()

        i = types.intp
        return types.void(sums, i, i, inputs, i, linear, i, out, i, i), code

    return write


WRITERS: tuple[Any, ...] = tuple(_writer(limbs, adds=adds) for limbs in (1, 2) for adds in (False, True))
"""For one limb and for two, operations that write and that add `out[line, column : column + 16]`:
`write(sums, at, step, inputs, row, linear, block, out, line, column)`.

sums: int32, the integer sums of a block at `at`, those of the second limb at `at + step`.
inputs: `QuantisedRows`.
row: The row of `inputs`.
linear: `PackedLinear`.
block: The block of `linear`.
out: float32 [lines, columns], C-contiguous.

The sums of two limbs are greater than 32 bits together; they are rounded to float32 here, in one place.
"""
