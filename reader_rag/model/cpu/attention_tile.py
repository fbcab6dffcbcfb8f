"""The sums of attention in tiles of vector registers, for numba kernels.

A lane belongs to a query. What a query adds up, it adds up in the order that is written, in a lane of its own, so that
its numbers depend neither on the queries beside it nor on the size of a tile.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from reader_rag.model.cpu.simd import FLOATS, LANES, fused, spread_value

KEYS = 16 if LANES == 16 else 8
"""Keys of a tile of scores; their sums fill half of the registers."""
PITCH = 272
"""Numbers from one row of widened keys or values to the next: the greatest width of a head."""

_I64 = ir.IntType(64)


def _data(context: Any, builder: Any, signature: Any, arguments: Any, which: int) -> Any:
    return context.make_array(signature.args[which])(context, builder, arguments[which]).data


def _register(builder: Any, numbers: Any, place: Any) -> Any:
    """The address of a register of numbers."""
    return builder.bitcast(builder.gep(numbers, [place]), FLOATS.as_pointer())


def _times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(_I64, factor))


def _plus(builder: Any, value: Any, more: int) -> Any:
    return builder.add(value, ir.Constant(_I64, more))


@intrinsic
def score(typing_context: Any, keys: Any, first: Any, queries: Any, scale: Any, out: Any, at: Any) -> Any:
    """Write the scores of all queries for `KEYS` keys.

    Args:
        keys: float32 [>= first + KEYS, PITCH], C-contiguous; of each row the first `width` numbers are used.
        first: The first key.
        queries: float32 [width, LANES], C-contiguous.
        scale: float32, of the scores.
        out: float32 [>= at + KEYS, LANES], C-contiguous; a row for each key.
        at: The row of the first key.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, lanes, written = (_data(context, builder, signature, arguments, n) for n in (0, 2, 4))
        queries_array = context.make_array(signature.args[2])(context, builder, arguments[2])
        width = cgutils.unpack_tuple(builder, queries_array.shape)[0]
        row = builder.gep(numbers, [_times(builder, arguments[1], PITCH)])
        totals = [cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [0.0] * LANES)) for _ in range(KEYS)]
        with cgutils.for_range(builder, width) as loop:
            query = builder.load(_register(builder, lanes, _times(builder, loop.index, LANES)), align=4)
            for n, total in enumerate(totals):
                number = builder.load(builder.gep(row, [_plus(builder, loop.index, n * PITCH)]))
                builder.store(fused(builder, query, spread_value(builder, number), builder.load(total)), total)
        factor = spread_value(builder, arguments[3])
        for n, total in enumerate(totals):
            place = _times(builder, _plus(builder, arguments[5], n), LANES)
            builder.store(builder.fmul(builder.load(total), factor), _register(builder, written, place), align=4)
        return context.get_dummy_value()

    return types.void(keys, types.intp, queries, types.float32, out, types.intp), code


def _mixer(numbers: int) -> Any:
    """An operation that adds positions to `numbers` sums of all queries."""

    @intrinsic
    def mix(typing_context: Any, weights: Any, first: Any, count: Any, values: Any, d: Any, mixed: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            lanes, rows, sums = (_data(context, builder, signature, arguments, n) for n in (0, 3, 5))
            places = [
                _register(builder, sums, _times(builder, _plus(builder, arguments[4], n), LANES))
                for n in range(numbers)
            ]
            totals = [cgutils.alloca_once_value(builder, builder.load(place, align=4)) for place in places]
            with cgutils.for_range(builder, arguments[2]) as loop:
                at = _times(builder, builder.add(arguments[1], loop.index), LANES)
                weight = builder.load(_register(builder, lanes, at), align=4)
                row = builder.gep(rows, [builder.add(_times(builder, loop.index, PITCH), arguments[4])])
                for n, total in enumerate(totals):
                    number = builder.load(builder.gep(row, [ir.Constant(_I64, n)]))
                    builder.store(fused(builder, weight, spread_value(builder, number), builder.load(total)), total)
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        i = types.intp
        return types.void(weights, i, i, values, i, mixed), code

    return mix


MIXED = 16 if LANES == 16 else 8
"""Numbers of a tile of mixed values."""
mix_some, mix_eight = _mixer(MIXED), _mixer(8)
"""`mix(weights, first, count, values, d, mixed)` adds `count` positions to the sums of numbers `d`, `d + 1`, ... of a
head, `MIXED` or eight of them.

weights: float32 [>= first + count, LANES], C-contiguous; a row for each position.
first: The first position.
count: Positions.
values: float32 [>= count, PITCH], C-contiguous; row 0 is that of the first position.
d: The first number.
mixed: float32 [width, LANES], C-contiguous; overwritten.
"""
