"""What a query sums up in attention: the weights of positions, and values mixed by them.

Each sum is taken in the order of the positions, whichever numbers share a register; so a query's result has the same
bits whether it is computed with others or with none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from reader_rag.model.cpu import attention_tile, simd
from reader_rag.model.cpu.attention_tile import MIXED
from reader_rag.model.cpu.rounding import widen
from reader_rag.model.cpu.simd import LANES

lanes: Any = simd  # in kernels operations take no compiler's context
tiles: Any = attention_tile


@njit(cache=True, error_model="numpy", nogil=True)
def exponential(x: Any) -> Any:
    """`exp` of Lanes that are not above 0; 0 below -87."""
    scaled = lanes.multiply_add(x, lanes.spread(np.float32(1.44269504)), lanes.spread(np.float32(0.5)))
    n = lanes.floor(lanes.maximum(scaled, lanes.spread(np.float32(-126))))
    r = lanes.multiply_add(n, lanes.spread(np.float32(-0.693359375)), x)
    r = lanes.multiply_add(n, lanes.spread(np.float32(2.12194440e-4)), r)
    p = lanes.spread(np.float32(1.9875691500e-4))
    p = lanes.multiply_add(p, r, lanes.spread(np.float32(1.3981999507e-3)))
    p = lanes.multiply_add(p, r, lanes.spread(np.float32(8.3334519073e-3)))
    p = lanes.multiply_add(p, r, lanes.spread(np.float32(4.1665795894e-2)))
    p = lanes.multiply_add(p, r, lanes.spread(np.float32(1.6666665459e-1)))
    p = lanes.multiply_add(p, r, lanes.spread(np.float32(5.0000001201e-1)))
    p = lanes.add(lanes.multiply_add(lanes.multiply(p, r), r, r), lanes.spread(np.float32(1)))
    return lanes.zero_below(x, lanes.spread(np.float32(-87)), lanes.multiply(p, lanes.power_of_two(n)))


@njit(cache=True, error_model="numpy", nogil=True)
def widen_rows(rows: Any, first: Any, count: Any, out: Any) -> None:
    """float32 rows `first`, `first + 1`, ... of keys or values."""
    for n in range(count):
        lanes.prefetch(rows, first + count + n)  # those behind them are next
        for d in range(rows.shape[1]):
            out[n, d] = widen(rows[first + n, d])


@njit(cache=True, error_model="numpy", nogil=True)
def weigh(scores: Any, positions: Any, totals: Any) -> None:
    """Turn the scores of `LANES` queries into weights: e ** (score - the greatest).

    Args:
        scores: float32 [>= positions, LANES], overwritten.
        positions: Positions.
        totals: float32 [LANES], overwritten with the sums of the weights.
    """
    greatest, total = lanes.spread(np.float32(-np.inf)), lanes.spread(np.float32(0))
    for n in range(positions):
        greatest = lanes.maximum(greatest, lanes.load(scores, n, 0))
    for n in range(positions):
        weight = exponential(lanes.subtract(lanes.load(scores, n, 0), greatest))
        lanes.store(scores, n, 0, weight)
        total = lanes.add(total, weight)
    lanes.store(totals.reshape(1, LANES), 0, 0, total)


@njit(cache=True, error_model="numpy", nogil=True)
def weigh_few(scores: Any, queries: Any, positions: Any, totals: Any) -> None:
    """As `weigh`, with positions in the lanes: the same numbers, added in the same order.

    Args:
        scores: float32 [>= queries up to a multiple of 4, >= positions up to a multiple of LANES], overwritten.
        queries: Queries, a row of `scores` for each.
        positions: Positions.
        totals: float32 [LANES], overwritten with the sums of the queries' weights.
    """
    for j in range(queries):
        greatest = lanes.spread(np.float32(-np.inf))
        scores[j, positions : positions - positions % -LANES] = -np.inf
        for n in range(0, positions, LANES):
            greatest = lanes.maximum(greatest, lanes.load(scores, j, n))
        lanes.store(totals.reshape(1, LANES), 0, 0, greatest)
        highest = lanes.spread(totals.max())
        for n in range(0, positions, LANES):
            lanes.store(scores, j, n, exponential(lanes.subtract(lanes.load(scores, j, n), highest)))
    for j in range(0, queries, 4):
        a = b = c = d = np.float32(0)
        for n in range(positions):  # four sums at a time: each waits for its last addition
            a += scores[j, n]
            b += scores[j + 1, n]
            c += scores[j + 2, n]
            d += scores[j + 3, n]
        totals[j], totals[j + 1], totals[j + 2], totals[j + 3] = a, b, c, d


@njit(cache=True, error_model="numpy", nogil=True)
def mix(weights: Any, first: Any, count: Any, values: Any, mixed: Any) -> None:
    """Add `count` positions to the sums of `LANES` queries, in their order.

    Args:
        weights: float32 [>= first + count, LANES].
        first: The first position.
        count: Positions.
        values: float32 [>= count, PITCH].
        mixed: float32 [width, LANES], width a multiple of 8.
    """
    width = mixed.shape[0]
    tiled = width - width % MIXED
    for d in range(0, tiled, MIXED):
        tiles.mix_some(weights, first, count, values, d, mixed)
    for d in range(tiled, width, 8):
        tiles.mix_eight(weights, first, count, values, d, mixed)


@njit(cache=True, error_model="numpy", nogil=True)
def mix_seen(weights: Any, first: Any, count: Any, values: Any, mixed: Any) -> None:
    """As `mix`, for positions that some queries do not see: whatever they hold, these queries' sums stay."""
    for n in range(count):
        w = lanes.load(weights, first + n, 0)
        for d in range(mixed.shape[0]):
            total = lanes.load(mixed, d, 0)
            more = lanes.multiply_add(w, lanes.spread_at(values, n, d), total)
            lanes.store(mixed, d, 0, lanes.where_zero(w, total, more))


@njit(cache=True, error_model="numpy", nogil=True)
def mix_few(weights: Any, first: Any, count: Any, values: Any, mixed: Any, column: Any, width: Any) -> None:
    """As `mix` for up to four queries, with the numbers of a row of values in the lanes.

    Args:
        weights: float32 [4, >= first + count].
        first: The first position.
        count: Positions.
        values: float32 [>= count, any], a row for each position.
        mixed: float32 [4, any].
        column: Of `mixed`, for the first number of `values`.
        width: Numbers of a row; the sums up to a multiple of 2 * LANES are overwritten.
    """
    for d in range(0, width, 2 * LANES):
        e, f, g = d + LANES, column + d, column + d + LANES
        a0, a1, a2, a3 = (
            lanes.load(mixed, 0, f),
            lanes.load(mixed, 1, f),
            lanes.load(mixed, 2, f),
            lanes.load(mixed, 3, f),
        )
        b0, b1, b2, b3 = (
            lanes.load(mixed, 0, g),
            lanes.load(mixed, 1, g),
            lanes.load(mixed, 2, g),
            lanes.load(mixed, 3, g),
        )
        for n in range(count):
            v, u, at = lanes.load(values, n, d), lanes.load(values, n, e), first + n
            w0, w1 = lanes.spread_at(weights, 0, at), lanes.spread_at(weights, 1, at)
            w2, w3 = lanes.spread_at(weights, 2, at), lanes.spread_at(weights, 3, at)
            a0, b0 = lanes.multiply_add(w0, v, a0), lanes.multiply_add(w0, u, b0)
            a1, b1 = lanes.multiply_add(w1, v, a1), lanes.multiply_add(w1, u, b1)
            a2, b2 = lanes.multiply_add(w2, v, a2), lanes.multiply_add(w2, u, b2)
            a3, b3 = lanes.multiply_add(w3, v, a3), lanes.multiply_add(w3, u, b3)
        lanes.store(mixed, 0, f, a0)
        lanes.store(mixed, 1, f, a1)
        lanes.store(mixed, 2, f, a2)
        lanes.store(mixed, 3, f, a3)
        lanes.store(mixed, 0, g, b0)
        lanes.store(mixed, 1, g, b1)
        lanes.store(mixed, 2, g, b2)
        lanes.store(mixed, 3, g, b3)


@njit(cache=True, error_model="numpy", nogil=True)
def mix_few_seen(weights: Any, first: Any, count: Any, values: Any, mixed: Any, column: Any, width: Any) -> None:
    """As `mix_few`, for positions that some queries do not see."""
    for j in range(4):
        for n in range(count):
            w = lanes.spread_at(weights, j, first + n)
            for d in range(0, width, LANES):
                total = lanes.load(mixed, j, column + d)
                more = lanes.multiply_add(w, lanes.load(values, n, d), total)
                lanes.store(mixed, j, column + d, lanes.where_zero(w, total, more))
