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
    n = lanes.floor(lanes.clamp(scaled, lanes.spread(np.float32(-126)), lanes.spread(np.float32(126))))
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
        for d in range(rows.shape[1]):
            out[n, d] = widen(rows[first + n, d])


@njit(cache=True, error_model="numpy", nogil=True)
def mix(weights: Any, first: Any, count: Any, values: Any, mixed: Any) -> None:
    """Add `count` positions to the sums of all queries, in their order.

    Args:
        weights: float32 [positions, LANES].
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
def weigh(scores: Any, positions: Any) -> Any:
    """Turn the scores of all queries into weights: e ** (score - the greatest).

    Args:
        scores: float32 [>= positions, LANES], overwritten.
        positions: Positions.

    Returns:
        Lanes, the sums of the weights.
    """
    greatest, total = _greatest(scores, positions), lanes.spread(np.float32(0))
    for n in range(positions):
        weight = exponential(lanes.subtract(lanes.load(scores, n, 0), greatest))
        lanes.store(scores, n, 0, weight)
        total = lanes.add(total, weight)
    return total


@njit(cache=True, error_model="numpy", nogil=True)
def _greatest(scores: Any, positions: Any) -> Any:
    """Lanes, the greatest score of each query."""
    greatest = lanes.spread(np.float32(-np.inf))
    for n in range(positions):
        greatest = lanes.maximum(greatest, lanes.load(scores, n, 0))
    return greatest


@njit(cache=True, error_model="numpy", nogil=True)
def weigh_few(scores: Any, positions: Any, weights: Any, totals: Any) -> None:
    """As `weigh` for up to four queries, with positions in the lanes: the same numbers, added in the same order.

    Args:
        scores: float32 [>= positions, LANES].
        positions: Positions.
        weights: float32 [4, >= positions up to a multiple of LANES], a row for each query; overwritten.
        totals: float32 [1, LANES]; overwritten with the sums of the weights.
    """
    lanes.store(totals, 0, 0, _greatest(scores, positions))
    for n in range(positions):
        for j in range(4):
            weights[j, n] = scores[n, j] - totals[0, j]
    for j in range(4):
        for n in range(0, positions, LANES):
            lanes.store(weights, j, n, exponential(lanes.load(weights, j, n)))
    a = b = c = d = np.float32(0)
    for n in range(positions):
        a += weights[0, n]
        b += weights[1, n]
        c += weights[2, n]
        d += weights[3, n]
    totals[0, 0], totals[0, 1], totals[0, 2], totals[0, 3] = a, b, c, d


@njit(cache=True, error_model="numpy", nogil=True)
def mix_few(weights: Any, first: Any, count: Any, values: Any, width: Any, mixed: Any) -> None:
    """As `mix` for up to four queries, with the numbers of a head in the lanes.

    Args:
        weights: float32 [4, >= first + count].
        first: The first position.
        count: Positions.
        values: float32 [>= count, PITCH].
        width: Numbers of a head; the sums of others are overwritten, too.
        mixed: float32 [4, PITCH].
    """
    for d in range(0, width, 2 * LANES):
        e = d + LANES
        a0, a1, a2, a3 = (
            lanes.load(mixed, 0, d),
            lanes.load(mixed, 1, d),
            lanes.load(mixed, 2, d),
            lanes.load(mixed, 3, d),
        )
        b0, b1, b2, b3 = (
            lanes.load(mixed, 0, e),
            lanes.load(mixed, 1, e),
            lanes.load(mixed, 2, e),
            lanes.load(mixed, 3, e),
        )
        for n in range(count):
            v, u, at = lanes.load(values, n, d), lanes.load(values, n, e), first + n
            w0, w1 = lanes.spread_at(weights, 0, at), lanes.spread_at(weights, 1, at)
            w2, w3 = lanes.spread_at(weights, 2, at), lanes.spread_at(weights, 3, at)
            a0, b0 = lanes.multiply_add(w0, v, a0), lanes.multiply_add(w0, u, b0)
            a1, b1 = lanes.multiply_add(w1, v, a1), lanes.multiply_add(w1, u, b1)
            a2, b2 = lanes.multiply_add(w2, v, a2), lanes.multiply_add(w2, u, b2)
            a3, b3 = lanes.multiply_add(w3, v, a3), lanes.multiply_add(w3, u, b3)
        lanes.store(mixed, 0, d, a0)
        lanes.store(mixed, 1, d, a1)
        lanes.store(mixed, 2, d, a2)
        lanes.store(mixed, 3, d, a3)
        lanes.store(mixed, 0, e, b0)
        lanes.store(mixed, 1, e, b1)
        lanes.store(mixed, 2, e, b2)
        lanes.store(mixed, 3, e, b3)


@njit(cache=True, error_model="numpy", nogil=True)
def mix_few_seen(weights: Any, first: Any, count: Any, values: Any, width: Any, mixed: Any) -> None:
    """As `mix_few`, for positions that some queries do not see."""
    for j in range(4):
        for n in range(count):
            w = lanes.spread_at(weights, j, first + n)
            for d in range(0, width, LANES):
                total = lanes.load(mixed, j, d)
                more = lanes.multiply_add(w, lanes.load(values, n, d), total)
                lanes.store(mixed, j, d, lanes.where_zero(w, total, more))
