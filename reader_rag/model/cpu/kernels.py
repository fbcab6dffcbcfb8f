"""The loops of a decoder layer on the CPU, for a few rows at a time.

PyTorch's matrix products are made for many rows: on a CPU without AVX-512 a product of 8 rows in bfloat16 takes it
seven times as long as one of 1 row, though both read the same weights, and what it does between products takes as long
again (docs/benchmarks/README.md). These loops read each weight once for all rows, and nothing lies between them.

Every row is computed by the same instructions in the same order whatever rows stand beside it, and attends to the
positions of its own path in the order of the text. So a drafted token's numbers are bit for bit those of plain
decoding. Sums are taken in float32; in 16 bits they are rounded where PyTorch's modules round.

Arrays of weights, keys and values are float32, uint16 with the bits of bfloat16, or int16 with those of float16.
Activations are float32 (with values that the type of the weights holds). Arrays of rows have room for a multiple of
four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit, prange, types  # type: ignore[attr-defined]
from numba.extending import overload

from reader_rag.model.cpu import simd as lanes_of_numba
from reader_rag.util.addresses import pointer

lanes: Any = lanes_of_numba  # in kernels its operations take no compiler's context

ROWS_AT_ONCE = 4
"""Rows of a block; arrays of activations have a multiple of it."""

_LANES = {"reassoc", "contract", "nsz"}
"""Sums may be taken in vector lanes; infinities and NaNs stay what they are."""
_FUSED = {"contract", "nsz"}
"""Sums are taken in the written order."""


@njit(cache=True)
def _from_float16(bits: Any) -> Any:
    """float32 of float16 bits (int16).

    No case is left to arithmetic on denormal numbers, which some CPUs take a hundred times as long for.
    """
    half = np.uint32(np.uint16(bits))
    magnitude = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
    exponent = magnitude & np.uint32(0x0F800000)
    normal = np.uint32(magnitude + np.uint32(112 << 23))
    infinite = np.uint32(normal + np.uint32(112 << 23))
    tiny = np.uint32(normal + np.uint32(1 << 23)).view(np.float32) - np.uint32(113 << 23).view(np.float32)
    large = infinite if exponent == np.uint32(0x0F800000) else normal
    found = np.float32(tiny).view(np.uint32) if exponent == np.uint32(0) else large
    return np.uint32(found | np.uint32((half & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@njit(cache=True)
def _round_to_float16(value: Any) -> Any:
    """float32 `value` rounded to the nearest float16 (to even), as float32."""
    bits = np.float32(value).view(np.uint32)
    sign = bits & np.uint32(0x80000000)
    magnitude = np.uint32(bits ^ sign)
    # Below 2**-14 there are multiples of 2**-24 only, as among the float32 from 0.5 on.
    small = (magnitude.view(np.float32) + np.float32(0.5)) - np.float32(0.5)
    normal = (magnitude + np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    large = np.uint32(0x7F800000) if normal >= np.uint32(0x47800000) else np.uint32(normal)
    found = np.float32(small).view(np.uint32) if magnitude < np.uint32(113 << 23) else large
    found = np.uint32(0x7FC00000) if value != value else np.uint32(found)
    return np.uint32(found | sign).view(np.float32)


@njit(cache=True)
def _to_float16(value: Any) -> Any:
    """The bits of float16 (int16), to nearest even."""
    bits = np.float32(_round_to_float16(value)).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    small = np.uint32(magnitude.view(np.float32) * np.float32(1 << 24))
    normal = np.uint32(np.uint32(magnitude - np.uint32(112 << 23)) >> np.uint32(13))
    large = np.uint32(0x7C00 | (0x200 if value != value else 0)) if magnitude >= np.uint32(0x7F800000) else normal
    found = small if magnitude < np.uint32(113 << 23) else large
    return np.int16(np.uint16(found | np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))))


def widen(value: Any) -> Any:
    """float32 of a weight: bfloat16 bits (uint16), float16 bits (int16) or float32."""
    if isinstance(value, np.uint16):
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return _from_float16(value) if isinstance(value, np.int16) else value


@overload(widen, strict=False)
def _widen(value: Any) -> Callable[..., Any]:
    if value == types.uint16:
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return (lambda value: _from_float16(value)) if value == types.int16 else (lambda value: value)


@njit(cache=True)
def _to_bfloat16(value: Any) -> Any:
    """The bits of bfloat16, to nearest even, in the upper half of a uint32. A NaN stays one."""
    bits = np.float32(value).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.uint32(rounded if value == value else np.uint32(0x7FC00000))


def rounded(value: Any, like: Any) -> Any:
    """float32 `value` rounded to the type of `like` (see `widen`), as float32."""
    if like.dtype == np.uint16:
        return np.uint32(_to_bfloat16(value)).view(np.float32)
    return _round_to_float16(value) if like.dtype == np.int16 else value


@overload(rounded, strict=False)
def _rounded(value: Any, like: Any) -> Callable[..., Any]:
    if like.dtype == types.uint16:
        return lambda value, like: np.uint32(_to_bfloat16(value)).view(np.float32)
    if like.dtype == types.int16:
        return lambda value, like: _round_to_float16(value)
    return lambda value, like: value


def narrowed(value: Any, like: Any) -> Any:
    """float32 `value` as an element of `like`."""
    if like.dtype == np.uint16:
        return np.uint16(_to_bfloat16(value) >> np.uint32(16))
    return _to_float16(value) if like.dtype == np.int16 else value


@overload(narrowed, strict=False)
def _narrowed(value: Any, like: Any) -> Callable[..., Any]:
    if like.dtype == types.uint16:
        return lambda value, like: np.uint16(_to_bfloat16(value) >> np.uint32(16))
    if like.dtype == types.int16:
        return lambda value, like: _to_float16(value)
    return lambda value, like: value


@njit(cache=True, fastmath=_LANES, error_model="numpy", nogil=True)
def _products(a: Any, b: Any, x0: Any, x1: Any, x2: Any, x3: Any) -> Any:
    """The products of two weight rows with four rows of activations.

    The only place where long sums of products are taken, so that each of them is always the same sum.
    """
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    for k in range(x0.shape[0]):
        wa, wb = widen(a[k]), widen(b[k])
        a0 += wa * x0[k]
        a1 += wa * x1[k]
        a2 += wa * x2[k]
        a3 += wa * x3[k]
        b0 += wb * x0[k]
        b1 += wb * x1[k]
        b2 += wb * x2[k]
        b3 += wb * x3[k]
    return a0, a1, a2, a3, b0, b1, b2, b3


@njit(cache=True, fastmath=_LANES, error_model="numpy", nogil=True)
def _mean_square(row: Any) -> Any:
    total = np.float32(0)
    for value in row:
        total += value * value
    return total / np.float32(row.shape[0])


@njit(cache=True, fastmath=_FUSED, error_model="numpy", nogil=True)
def _normalize(row: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """Root mean square normalisation of one row (arXiv 1910.07467)."""
    scale = np.float32(1) / np.sqrt(_mean_square(row) + epsilon)
    for k in range(row.shape[0]):
        out[k] = rounded(widen(weight[k]) * rounded(row[k] * scale, weight), weight)


@njit(cache=True, fastmath=_FUSED, error_model="numpy", nogil=True)
def _exp(x: Any) -> Any:
    """e**x in float32, within two units in the last place; a loop over it becomes vector code."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(cache=True, error_model="numpy", nogil=True)
def _two_streams(pair: Any, features: Any) -> Any:
    """The two features that are computed together, one of each half of the layer.

    A thread that goes through its pairs in order reads two long runs of memory, which the CPU fetches ahead.
    """
    n = np.int64(pair)
    m = n + (features + 1) // 2
    return n, m if m < features else n


@njit(cache=True, error_model="numpy", nogil=True)
def _pair(weight: Any, pair: Any, bias: Any, x: Any, rows: Any, out: Any) -> None:
    """Two features of a linear layer, for all rows."""
    n, m = _two_streams(pair, weight.shape[0])
    for r in range(0, rows, 4):
        a0, a1, a2, a3, b0, b1, b2, b3 = _products(weight[n], weight[m], x[r], x[r + 1], x[r + 2], x[r + 3])
        out[r, n], out[r, m] = rounded(a0 + bias[n], weight), rounded(b0 + bias[m], weight)
        out[r + 1, n], out[r + 1, m] = rounded(a1 + bias[n], weight), rounded(b1 + bias[m], weight)
        out[r + 2, n], out[r + 2, m] = rounded(a2 + bias[n], weight), rounded(b2 + bias[m], weight)
        out[r + 3, n], out[r + 3, m] = rounded(a3 + bias[n], weight), rounded(b3 + bias[m], weight)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def norm_and_project(x: Any, rows: Any, norm: Any, epsilon: Any, normed: Any, weight: Any, bias: Any, out: Any) -> None:
    """`out = linear(norm(x))`.

    Args:
        x: [rows up to a multiple of 4, width].
        rows: How many of them count.
        norm: [width], weights of the normalisation.
        epsilon: Of the normalisation, float32.
        normed: Like `x`; overwritten.
        weight: [features, width].
        bias: float32 [features].
        out: [rows up to a multiple of 4, features].
    """
    for r in range(rows):
        _normalize(x[r], norm, epsilon, normed[r])
    for pair in prange((weight.shape[0] + 1) // 2):
        _pair(weight, pair, bias, normed, rows, out)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def norm_and_project_three(
    x: Any,
    rows: Any,
    norm: Any,
    epsilon: Any,
    normed: Any,
    weight_q: Any,
    weight_k: Any,
    weight_v: Any,
    bias_q: Any,
    bias_k: Any,
    bias_v: Any,
    q: Any,
    k: Any,
    v: Any,
) -> None:
    """Queries, keys and values of `norm(x)`; see `norm_and_project`."""
    for r in range(rows):
        _normalize(x[r], norm, epsilon, normed[r])
    pairs_q, pairs_k = (weight_q.shape[0] + 1) // 2, (weight_k.shape[0] + 1) // 2
    for pair in prange(pairs_q + pairs_k + (weight_v.shape[0] + 1) // 2):
        if pair < pairs_q:
            _pair(weight_q, pair, bias_q, normed, rows, q)
        elif pair < pairs_q + pairs_k:
            _pair(weight_k, pair - pairs_q, bias_k, normed, rows, k)
        else:
            _pair(weight_v, pair - pairs_q - pairs_k, bias_v, normed, rows, v)


_BLOCK = 32
"""Features of the feed-forward layer that a thread gates at once."""


@njit(cache=True, fastmath=_FUSED, error_model="numpy", nogil=True)
def _gate(gated: Any, out: Any, like: Any) -> None:
    """`out = silu(gated) * out`."""
    for k in range(gated.shape[0]):
        value = rounded(gated[k], like)
        value = rounded(value / (np.float32(1) + _exp(-value)), like)
        out[k] = rounded(value * rounded(out[k], like), like)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def norm_and_gate(
    x: Any,
    rows: Any,
    norm: Any,
    epsilon: Any,
    normed: Any,
    gate: Any,
    up: Any,
    bias_gate: Any,
    bias_up: Any,
    out: Any,
) -> None:
    """`out = silu(gate(norm(x))) * up(norm(x))`; see `norm_and_project`."""
    for r in range(rows):
        _normalize(x[r], norm, epsilon, normed[r])
    blocks = (gate.shape[0] + _BLOCK - 1) // _BLOCK
    for block in prange(blocks):
        first = np.int64(block) * _BLOCK
        count = min(_BLOCK, gate.shape[0] - first)
        gated = np.empty((rows + 3, _BLOCK), np.float32)
        for k in range(count):
            n = first + k
            for r in range(0, rows, 4):
                g0, g1, g2, g3, u0, u1, u2, u3 = _products(
                    gate[n], up[n], normed[r], normed[r + 1], normed[r + 2], normed[r + 3]
                )
                gated[r, k], out[r, n] = g0 + bias_gate[n], u0 + bias_up[n]
                gated[r + 1, k], out[r + 1, n] = g1 + bias_gate[n], u1 + bias_up[n]
                gated[r + 2, k], out[r + 2, n] = g2 + bias_gate[n], u2 + bias_up[n]
                gated[r + 3, k], out[r + 3, n] = g3 + bias_gate[n], u3 + bias_up[n]
        for r in range(rows):
            _gate(gated[r, :count], out[r, first : first + count], gate)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def project_and_add(values: Any, rows: Any, weight: Any, bias: Any, x: Any) -> None:
    """`x += linear(values)`; see `norm_and_project`."""
    for pair in prange((weight.shape[0] + 1) // 2):
        n, m = _two_streams(pair, weight.shape[0])
        p = np.empty(8, np.float32)
        for r in range(0, rows, 4):
            p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7] = _products(
                weight[n], weight[m], values[r], values[r + 1], values[r + 2], values[r + 3]
            )
            for j in range(4):
                x[r + j, n] = rounded(x[r + j, n] + rounded(p[j] + bias[n], weight), weight)
                if m > n:
                    x[r + j, m] = rounded(x[r + j, m] + rounded(p[4 + j] + bias[m], weight), weight)


@njit(cache=True, fastmath=_FUSED, error_model="numpy", nogil=True)
def _rotate(head: Any, norm: Any, epsilon: Any, cos: Any, sin: Any, like: Any) -> None:
    """Normalise a head (where `norm` is not empty) and turn it to its position (arXiv 2104.09864), in place."""
    if norm.shape[0]:
        _normalize(head, norm, epsilon, head)
    half = head.shape[0] // 2
    for d in range(half):
        a, b = head[d], head[d + half]
        head[d] = rounded(rounded(a * cos[d], like) - rounded(b * sin[d], like), like)
        head[d + half] = rounded(rounded(b * cos[d + half], like) + rounded(a * sin[d + half], like), like)


@njit(cache=True, error_model="numpy", nogil=True)
def _two_scores(keys: Any, n: Any, m: Any, queries: Any, scale: Any) -> Any:
    """Lanes: the scores of four queries for key `n`, then for key `m`."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = lanes.spread(np.float32(0))
    for d in range(0, queries.shape[1], 8):
        a, b = lanes.load(keys, n, d), lanes.load(keys, m, d)
        q0, q1 = lanes.load(queries, 0, d), lanes.load(queries, 1, d)
        a0, a1 = lanes.multiply_add(a, q0, a0), lanes.multiply_add(a, q1, a1)
        b0, b1 = lanes.multiply_add(b, q0, b0), lanes.multiply_add(b, q1, b1)
        q2, q3 = lanes.load(queries, 2, d), lanes.load(queries, 3, d)
        a2, a3 = lanes.multiply_add(a, q2, a2), lanes.multiply_add(a, q3, a3)
        b2, b3 = lanes.multiply_add(b, q2, b2), lanes.multiply_add(b, q3, b3)
    return lanes.multiply(lanes.sums(a0, a1, a2, a3, b0, b1, b2, b3), lanes.spread(scale))


@njit(cache=True, error_model="numpy", nogil=True)
def _exponential(x: Any) -> Any:
    """`_exp` of Lanes."""
    x = lanes.clamp(x, lanes.spread(np.float32(-87.0)), lanes.spread(np.float32(88.0)))
    scaled = lanes.multiply_add(x, lanes.spread(np.float32(1.44269504)), lanes.spread(np.float32(0.5)))
    n = lanes.floor(scaled)
    r = lanes.multiply_add(n, lanes.spread(np.float32(-0.693359375)), x)
    r = lanes.multiply_add(n, lanes.spread(np.float32(2.12194440e-4)), r)
    p = lanes.spread(np.float32(1.9875691500e-4))
    p = lanes.multiply_add(p, r, lanes.spread(np.float32(1.3981999507e-3)))
    p = lanes.multiply_add(p, r, lanes.spread(np.float32(8.3334519073e-3)))
    p = lanes.multiply_add(p, r, lanes.spread(np.float32(4.1665795894e-2)))
    p = lanes.multiply_add(p, r, lanes.spread(np.float32(1.6666665459e-1)))
    p = lanes.multiply_add(p, r, lanes.spread(np.float32(5.0000001201e-1)))
    p = lanes.add(lanes.multiply_add(lanes.multiply(p, r), r, r), lanes.spread(np.float32(1)))
    return lanes.multiply(p, lanes.power_of_two(n))


@njit(cache=True, error_model="numpy", nogil=True)
def _mix(weights: Any, values: Any, out: Any) -> None:
    """`out = weights @ values` of four queries, over the positions in their order.

    Args:
        weights: float32 [pairs, 8], of two positions for each of the queries.
        values: [>= 2 * pairs, width], width a multiple of 8.
        out: float32 [4, width].
    """
    zero = lanes.spread(np.float32(0))
    width = values.shape[1]
    for d in range(0, width, 16):
        e = min(d + 8, width - 8)  # the last eight may be computed twice
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
        for p in range(weights.shape[0]):
            for side in range(2):
                v, u = lanes.load(values, 2 * p + side, d), lanes.load(values, 2 * p + side, e)
                w = lanes.spread(weights[p, 4 * side])
                a0, b0 = lanes.multiply_add(w, v, a0), lanes.multiply_add(w, u, b0)
                w = lanes.spread(weights[p, 4 * side + 1])
                a1, b1 = lanes.multiply_add(w, v, a1), lanes.multiply_add(w, u, b1)
                w = lanes.spread(weights[p, 4 * side + 2])
                a2, b2 = lanes.multiply_add(w, v, a2), lanes.multiply_add(w, u, b2)
                w = lanes.spread(weights[p, 4 * side + 3])
                a3, b3 = lanes.multiply_add(w, v, a3), lanes.multiply_add(w, u, b3)
        lanes.store(out, 0, d, a0)
        lanes.store(out, 1, d, a1)
        lanes.store(out, 2, d, a2)
        lanes.store(out, 3, d, a3)
        lanes.store(out, 0, e, b0)
        lanes.store(out, 1, e, b1)
        lanes.store(out, 2, e, b2)
        lanes.store(out, 3, e, b3)


@njit(cache=True, error_model="numpy", nogil=True)
def _attend_four(
    q: Any,
    h: Any,
    first: Any,
    queries: Any,
    group: Any,
    depths: Any,
    paths: Any,
    committed: Any,
    scale: Any,
    keys: Any,
    values: Any,
    out: Any,
) -> None:
    """Attention of four queries of key head `h`; query n is head `n % group` of the group in row `n // group`.

    The positions that all four see are taken two at a time, lane `4 * (position % 2) + query`; what is left, the end of
    each query's own path, follows query by query. Each position adds the same numbers to the same lane either way.
    """
    width, pairs = keys.shape[1], committed // 2
    count = min(4, queries - first)
    four, mixed = np.zeros((4, width), np.float32), np.empty((4, width), np.float32)
    for j in range(count):
        row, column = (first + j) // group, (h * group + (first + j) % group) * width
        for d in range(width):
            four[j, d] = q[row, column + d]
    weights, eight = np.empty((pairs, 8), np.float32), np.zeros((1, 8), np.float32)
    greatest = lanes.spread(np.float32(-np.inf))
    for p in range(pairs):
        scores = _two_scores(keys, 2 * p, 2 * p + 1, four, scale)
        lanes.store(weights, p, 0, scores)
        greatest = lanes.maximum(greatest, scores)
    lanes.store(eight, 0, 0, greatest)

    longest = paths.shape[1] + 1
    slots = np.empty(longest, np.int64)
    near, ends = np.empty((longest // 2 + 1, 8), np.float32), np.zeros((4, longest + 8), np.float32)
    for j in range(count):
        row = (first + j) // group
        length = committed % 2 + depths[row] + 1
        if j == 0 or (first + j) % group == 0:  # the queries of a row see the same
            _slots_of(committed, paths[row], length, slots)
            for t in range(0, length, 2):
                scores = _two_scores(keys, slots[t], slots[min(t + 1, length - 1)], four, scale)
                lanes.store(near, t // 2, 0, scores)
        top = max(eight[0, j], eight[0, 4 + j])
        for t in range(length):
            ends[j, t] = near[t // 2, 4 * (t % 2) + j]
            top = max(top, ends[j, t])
        eight[0, j] = eight[0, 4 + j] = top

    greatest, total = lanes.load(eight, 0, 0), lanes.spread(np.float32(0))
    for p in range(pairs):
        exponential = _exponential(lanes.subtract(lanes.load(weights, p, 0), greatest))
        lanes.store(weights, p, 0, exponential)
        total = lanes.add(total, exponential)
    tops = eight.copy()
    lanes.store(eight, 0, 0, total)
    _mix(weights, values, mixed)
    for j in range(count):
        row, column = (first + j) // group, (h * group + (first + j) % group) * width
        length = committed % 2 + depths[row] + 1
        _slots_of(committed, paths[row], length, slots)
        for t in range(0, length, 8):
            ahead = lanes.subtract(lanes.load(ends, j, t), lanes.spread(tops[0, j]))
            lanes.store(ends, j, t, _exponential(ahead))
        for t in range(length):
            eight[0, j + 4 * (t % 2)] += ends[j, t]
            weight = lanes.spread(ends[j, t])
            for d in range(0, width, 8):
                sum_so_far = lanes.load(mixed, j, d)
                lanes.store(mixed, j, d, lanes.multiply_add(weight, lanes.load(values, slots[t], d), sum_so_far))
        for d in range(width):
            out[row, column + d] = rounded(mixed[j, d] / (eight[0, j] + eight[0, 4 + j]), values)


@njit(cache=True, error_model="numpy", nogil=True)
def _slots_of(committed: Any, path: Any, length: Any, slots: Any) -> None:
    """Where the last `length` positions of a path lie: an odd last one of the committed, then the path's rows."""
    odd = committed % 2
    for t in range(length):
        slots[t] = committed - 1 if t < odd else committed + path[t - odd]


@njit(cache=True, error_model="numpy", nogil=True)
def _heads_at(address: Any, heads: Any, capacity: Any, like: Any) -> Any:
    """The array [heads, capacity, width of `like`] at an address.

    Texts come and go, and no list of arrays that differ in shape is as cheap to hand over as their addresses.
    """
    return carray(pointer(address), (heads, capacity, like.shape[1]), like.dtype)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def attend(
    q: Any,
    k: Any,
    v: Any,
    starts: Any,
    norm_q: Any,
    norm_k: Any,
    epsilon: Any,
    cos: Any,
    sin: Any,
    depths: Any,
    paths: Any,
    committed: Any,
    capacities: Any,
    scale: Any,
    keys: Any,
    values: Any,
    like: Any,
    out: Any,
) -> None:
    """Write the rows' keys and values behind the committed ones of their text, and attend along each row's path.

    Args:
        q: [rows up to a multiple of 4, heads * width]; overwritten.
        k: [rows up to a multiple of 4, key heads * width]; overwritten.
        v: Like `k`.
        starts: int64 [texts + 1], the first row of each text; rows of a text lie together.
        norm_q: [width], or empty where heads are not normalised.
        norm_k: Like `norm_q`.
        epsilon: Of that normalisation, float32.
        cos: float32 [positions, width].
        sin: float32 [positions, width].
        depths: int64 [rows], positions relative to the text's committed ones; those of a path are 0, 1, 2, ...
        paths: int32 [rows, longest], the rows from the first of its path to each row, itself included, counted from
            the text's first row.
        committed: int64 [texts], positions before the root; all rows of the text see them.
        capacities: int64 [texts], of the caches.
        scale: Of the scores, float32.
        keys: int64 [texts], addresses of the texts' arrays [key heads, capacity, width].
        values: Likewise.
        like: [any, width], an array of their type.
        out: [rows up to a multiple of 4, heads * width].
    """
    texts, width = committed.shape[0], like.shape[1]
    heads = k.shape[1] // width
    group = q.shape[1] // width // heads
    before = np.zeros(texts + 1, np.int64)  # tasks of the texts before: four queries of one key head each
    for t in range(texts):
        held, made = _heads_at(keys[t], heads, capacities[t], like), _heads_at(values[t], heads, capacities[t], like)
        for r in range(starts[t], starts[t + 1]):
            c, s = cos[committed[t] + depths[r]], sin[committed[t] + depths[r]]
            slot = committed[t] + r - starts[t]
            for h in range(heads):
                head = k[r, h * width : (h + 1) * width]
                _rotate(head, norm_k, epsilon, c, s, like)
                for d in range(width):
                    held[h, slot, d] = narrowed(head[d], like)
                    made[h, slot, d] = narrowed(v[r, h * width + d], like)
            for h in range(heads * group):
                _rotate(q[r, h * width : (h + 1) * width], norm_q, epsilon, c, s, like)
        before[t + 1] = before[t] + heads * (((starts[t + 1] - starts[t]) * group + 3) // 4)
    for task in prange(before[texts]):
        text = np.searchsorted(before, np.int64(task), side="right") - 1
        start, stop = starts[text], starts[text + 1]
        queries = (stop - start) * group
        fours = (queries + 3) // 4
        h, four = (np.int64(task) - before[text]) // fours, (np.int64(task) - before[text]) % fours
        _attend_four(
            q[start:stop],
            h,
            4 * four,
            queries,
            group,
            depths[start:stop],
            paths[start:stop],
            committed[text],
            scale,
            _heads_at(keys[text], heads, capacities[text], like)[h],
            _heads_at(values[text], heads, capacities[text], like)[h],
            out[start:stop],
        )
