"""The sums of attention in tiles of vector registers, for numba kernels.

A tile adds products to the sums of a few queries. Each sum is taken in the order that is written, whichever numbers
share a register, so it depends neither on the queries beside it nor on the size of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from reader_rag.model.cpu import simd
from reader_rag.model.cpu.rounding import widen
from reader_rag.model.cpu.simd import FLOATS, LANES, fused, spread_value

lanes: Any = simd  # in kernels operations take no compiler's context

TILE_QUERIES = 4
"""Most queries of a tile."""
TILE = LANES * (4 if LANES == 16 else 2)
"""Numbers of each of them; all sums of a tile fill half of the CPU's vector registers."""
AT_ONCE = 64
"""Positions whose keys, then values, are made ready for tiles at once: they stay in the CPU's first cache."""
MOST_WIDTH = 256
"""The greatest width of a head."""
PITCH = MOST_WIDTH + 16
"""Numbers from one row of keys or values that are made ready to the next."""

_I64 = ir.IntType(64)


def _tile(queries: int) -> Any:
    """An operation that adds products to the sums of so many queries."""

    @intrinsic
    def tile(
        typing_context: Any, factors: Any, j: Any, first: Any, count: Any, lines: Any, d: Any, sums: Any, at: Any
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def row(which: int, n: Any, column: Any) -> Any:
                """The address of element [n, column] of an array."""
                array = context.make_array(signature.args[which])(context, builder, arguments[which])
                width = cgutils.unpack_tuple(builder, array.shape)[1]
                return builder.gep(array.data, [builder.add(builder.mul(n, width), column)])

            def register(address: Any, n: int) -> Any:
                place = builder.gep(address, [ir.Constant(_I64, n * LANES)])
                return builder.bitcast(place, FLOATS.as_pointer())

            _, j, first, count, _, d, _, at = arguments
            places = [builder.add(j, ir.Constant(_I64, n)) for n in range(queries)]
            columns = [row(0, place, first) for place in places]
            targets = [[register(row(6, place, at), n) for n in range(TILE // LANES)] for place in places]
            totals = [
                [cgutils.alloca_once_value(builder, builder.load(target, align=4)) for target in own] for own in targets
            ]
            with cgutils.for_range(builder, count) as loop:
                line = row(4, loop.index, d)
                vectors = [builder.load(register(line, n), align=4) for n in range(TILE // LANES)]
                for column, own in zip(columns, totals, strict=True):
                    factor = spread_value(builder, builder.load(builder.gep(column, [loop.index])))
                    for vector, total in zip(vectors, own, strict=True):
                        builder.store(fused(builder, factor, vector, builder.load(total)), total)
            for own_targets, own in zip(targets, totals, strict=True):
                for target, total in zip(own_targets, own, strict=True):
                    builder.store(builder.load(total), target, align=4)
            return context.get_dummy_value()

        i = types.intp
        return types.void(factors, i, i, i, lines, i, sums, i), code

    return tile


_tile_1, _tile_2, _tile_3, _tile_4 = (_tile(queries) for queries in range(1, TILE_QUERIES + 1))


@njit(cache=True, error_model="numpy", nogil=True)
def add_products(factors: Any, first: Any, count: Any, lines: Any, d: Any, sums: Any, at: Any) -> None:
    """Add `factors[:, first + n] * lines[n, d : d + TILE]` to `sums[:, at : at + TILE]`, for n = 0, 1, ... in order.

    Args:
        factors: float32 [>= queries, >= first + count], C-contiguous; the fewer of its rows and those of `sums` are
            the queries.
        first: The first column of `factors`.
        count: Lines.
        lines: float32 [>= count, >= d + TILE], C-contiguous.
        d: The first column of `lines`.
        sums: float32 [>= queries, >= at + TILE], C-contiguous.
        at: The first column of `sums`.
    """
    queries = min(factors.shape[0], sums.shape[0])
    for j in range(0, queries, TILE_QUERIES):
        together = min(np.int64(TILE_QUERIES), queries - j)
        if together == 4:
            _tile_4(factors, j, first, count, lines, d, sums, at)
        elif together == 3:
            _tile_3(factors, j, first, count, lines, d, sums, at)
        elif together == 2:
            _tile_2(factors, j, first, count, lines, d, sums, at)
        else:
            _tile_1(factors, j, first, count, lines, d, sums, at)


def _widen_row(rows: Any, n: Any, out: Any, k: Any) -> None:
    """Write row n of keys or values as float32 to the first numbers of row k of `out`."""
    for d in range(rows.shape[1]):
        out[k, d] = widen(rows[n, d])


@overload(_widen_row, strict=False)
def _widen_row_in_loops(rows: Any, n: Any, out: Any, k: Any) -> Callable[..., Any]:
    def bfloat16(rows: Any, n: Any, out: Any, k: Any) -> None:
        whole = rows.shape[1] - rows.shape[1] % LANES
        for d in range(0, whole, LANES):
            lanes.store(out, k, d, lanes.load_bfloat16(rows, n, d))
        for d in range(whole, rows.shape[1]):
            out[k, d] = widen(rows[n, d])

    return bfloat16 if rows.dtype == types.uint16 else _widen_row


@njit(cache=True, error_model="numpy", nogil=True)
def widen_rows(rows: Any, first: Any, count: Any, out: Any) -> None:
    """Write rows `first`, `first + 1`, ... of keys or values as float32 to the first rows of `out`."""
    lanes.prefetch(rows, first + count, count)  # those behind them are next
    for n in range(count):
        _widen_row(rows, first + n, out, n)


@njit(cache=True, error_model="numpy", nogil=True)
def _transpose_floats(rows: Any, first: Any, width: Any, turned: Any) -> None:
    for n in range(0, AT_ONCE, LANES):
        for d in range(0, width, LANES):
            lanes.transpose(rows, first + n, d, turned, d, n)


@njit(cache=True, error_model="numpy", nogil=True)
def _transpose_bfloat16(rows: Any, first: Any, width: Any, turned: Any) -> None:
    for n in range(0, AT_ONCE, LANES):
        for d in range(0, width, 2 * LANES):
            lanes.transpose_bfloat16(rows, first + n, d, turned, d, n)


@njit(cache=True, error_model="numpy", nogil=True)
def _widen_and_transpose(keys: Any, first: Any, count: Any, room: Any, turned: Any) -> None:
    widen_rows(keys, first, count, room)
    _transpose_floats(room, 0, keys.shape[1], turned)


def transpose_keys(keys: Any, first: Any, count: Any, room: Any, turned: Any) -> None:
    """Transpose some keys, where they lie if they fill registers and are not the last of the array.

    Args:
        keys: [capacity, width].
        first: The first of them.
        count: How many, at most AT_ONCE.
        room: float32 [AT_ONCE, PITCH]; overwritten.
        turned: float32 [width up to a multiple of 2 * LANES, AT_ONCE]; overwritten. Columns from `count` on and rows
            from `width` on have no meaning.
    """
    for n in range(count):
        for d in range(keys.shape[1]):
            turned[d, n] = widen(keys[first + n, d])


@overload(transpose_keys, strict=False)
def _transpose_keys(keys: Any, first: Any, count: Any, room: Any, turned: Any) -> Callable[..., Any]:
    is_bfloat16, is_float32 = keys.dtype == types.uint16, keys.dtype == types.float32
    transpose, columns = (_transpose_bfloat16, 2 * LANES) if is_bfloat16 else (_transpose_floats, LANES)

    def in_place(keys: Any, first: Any, count: Any, room: Any, turned: Any) -> None:
        if keys.shape[1] % columns == 0 and first + AT_ONCE <= keys.shape[0]:
            lanes.prefetch(keys, first + count, count)
            transpose(keys, first, keys.shape[1], turned)
        else:
            _widen_and_transpose(keys, first, count, room, turned)

    return in_place if is_bfloat16 or is_float32 else _widen_and_transpose.py_func
