"""What a query sums up in attention: the weights of positions, and values mixed by them.

Each sum is taken in the order of the positions, whichever numbers share a register; so a query's result has the same
bits whether it is computed with others or alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from reader_rag.model.cpu import simd
from reader_rag.model.cpu.attention_tile import AT_ONCE, TILE, add_products, widen_rows
from reader_rag.model.cpu.simd import LANES

lanes: Any = simd  # in kernels operations take no compiler's context
SUMS = 4
"""Queries whose weights are added side by side: each sum waits for its last addition."""


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
def weigh(scores: Any, queries: Any, positions: Any, totals: Any) -> None:
    """Turn scores into weights: e ** (score - the query's greatest).

    Args:
        scores: float32 [queries up to a multiple of SUMS, >= positions up to a multiple of LANES], overwritten.
        queries: Queries.
        positions: Positions.
        totals: float32 [queries up to a multiple of SUMS], overwritten with the sums of the weights.
    """
    highest = np.empty((1, LANES), np.float32)
    for j in range(queries):
        greatest = lanes.spread(np.float32(-np.inf))
        scores[j, positions : positions - positions % -LANES] = -np.inf
        for n in range(0, positions, LANES):
            greatest = lanes.maximum(greatest, lanes.load(scores, j, n))
        lanes.store(highest, 0, 0, greatest)
        greatest = lanes.spread(highest.max())
        for n in range(0, positions, LANES):
            lanes.store(scores, j, n, exponential(lanes.subtract(lanes.load(scores, j, n), greatest)))
    for j in range(0, queries, SUMS):
        a = b = c = d = np.float32(0)
        for n in range(positions):
            a += scores[j, n]
            b += scores[j + 1, n]
            c += scores[j + 2, n]
            d += scores[j + 3, n]
        totals[j], totals[j + 1], totals[j + 2], totals[j + 3] = a, b, c, d


@njit(cache=True, error_model="numpy", nogil=True)
def mix(weights: Any, at: Any, rows: Any, first: Any, count: Any, values: Any, mixed: Any) -> None:
    """Add positions that all queries see to the sums of the queries, in their order.

    Args:
        weights: float32 [queries, any].
        at: Their column for the first position.
        rows: Values, [capacity, width].
        first: The first position.
        count: Positions.
        values: float32 [AT_ONCE, PITCH], overwritten but for its columns from `width` on.
        mixed: float32 [queries, width up to a multiple of TILE].
    """
    for n in range(0, count, AT_ONCE):
        here = min(np.int64(AT_ONCE), count - n)
        widen_rows(rows, first + n, here, values)
        for d in range(0, mixed.shape[1], TILE):
            add_products(weights, at + n, here, values, d, mixed, d)


@njit(cache=True, error_model="numpy", nogil=True)
def mix_seen(weights: Any, at: Any, rows: Any, first: Any, count: Any, values: Any, mixed: Any) -> None:
    """As `mix`, for positions that some queries do not see: whatever these hold, those queries' sums stay."""
    for n in range(0, count, AT_ONCE):
        here = min(np.int64(AT_ONCE), count - n)
        widen_rows(rows, first + n, here, values)
        for j in range(mixed.shape[0]):
            for k in range(here):
                if weights[j, at + n + k] == 0:
                    continue
                weight = lanes.spread_at(weights, j, at + n + k)
                for d in range(0, mixed.shape[1], LANES):
                    total = lanes.load(mixed, j, d)
                    lanes.store(mixed, j, d, lanes.multiply_add(weight, lanes.load(values, k, d), total))
