"""Attention of a decoder layer along the paths of draft trees, and the rotation of its queries and keys.

A row attends to the committed positions of its sequence and to its own path, in the order of the text, or to the last
of them where the layer has a window. So its numbers do not depend on the rows beside it, and a drafted token's are bit
for bit those of plain decoding. Scores and their weights stay in float32, as in PyTorch's fused attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, prange  # type: ignore[attr-defined]

from reader_rag.model.cpu import simd
from reader_rag.model.cpu.products import FUSED, normalize
from reader_rag.model.cpu.rounding import narrowed, rounded
from reader_rag.model.cpu.softcap import cap_scores
from reader_rag.util.addresses import pointer

lanes: Any = simd  # in kernels its operations take no compiler's context


class Rotation(NamedTuple):
    """Rotary position embeddings (arXiv 2104.09864) of the rows of a pass, as the model's own module makes them.

    Attributes:
        cos: float32 [kinds, rows, rotated], of the first numbers of a head; the others are not rotated.
        sin: float32 [kinds, rows, rotated].
        rounds_once: In 16 bits, whether a rotated number is rounded once, not each of its two products too.
    """

    cos: Any
    sin: Any
    rounds_once: Any


class Attention(NamedTuple):
    """How a layer attends.

    Attributes:
        q_norm: `Norm` of each query head, or of all of them together, by the width of its weight.
        k_norm: `Norm` of each key head, or of all of them together.
        rotation: The kind of `Rotation`; -1: none.
        window: Positions that a row sees, its own included; 0: all.
        scale: Of the scores, float32.
        cap: Of the scores, float32: they become `cap * tanh(score / cap)`; 0: none.
    """

    q_norm: Any
    k_norm: Any
    rotation: Any
    window: Any
    scale: Any
    cap: Any


class Paths(NamedTuple):
    """Where the rows of a pass are in their draft trees.

    Attributes:
        depths: int64 [rows], positions relative to the sequence's committed ones; those of a path are 0, 1, 2, ...
        rows: int32 [rows, longest], the rows from the first of its path to each row, itself included, counted from
            the sequence's first row.
    """

    depths: Any
    rows: Any


class Caches(NamedTuple):
    """The sequences of a pass, and the arrays [key heads, capacity, width] of their keys and values in one layer.

    Attributes:
        starts: int64 [sequences + 1], the first row of each; rows of a sequence are adjacent.
        committed: int64 [sequences], positions before the root, which all rows of the sequence see.
        capacities: int64 [sequences], positions that the arrays have room for.
        keys: int64 [sequences], addresses of the keys.
        values: int64 [sequences], addresses of the values.
        like: [any, width], an array of their type.
    """

    starts: Any
    committed: Any
    capacities: Any
    keys: Any
    values: Any
    like: Any


class KeyHead(NamedTuple):
    """One key head of one sequence.

    Attributes:
        index: Which head.
        group: Query heads that share it.
        committed: Committed positions.
        keys: [capacity, width].
        values: [capacity, width].
        window: As in `Attention`.
        scale: As in `Attention`.
        cap: As in `Attention`.
    """

    index: Any
    group: Any
    committed: Any
    keys: Any
    values: Any
    window: Any
    scale: Any
    cap: Any


@njit(cache=True, fastmath=FUSED, error_model="numpy", nogil=True)
def _rotate(head: Any, cos: Any, sin: Any, products: Any, like: Any) -> None:
    """Rotate a head to its position, in place; in 16 bits, products are rounded to the type of `products`."""
    half = cos.shape[0] // 2
    for d in range(half):
        a, b = head[d], head[d + half]
        head[d] = rounded(rounded(a * cos[d], products) - rounded(b * sin[d], products), like)
        head[d + half] = rounded(rounded(b * cos[d + half], products) + rounded(a * sin[d + half], products), like)


@njit(cache=True, error_model="numpy", nogil=True)
def _norm_and_rotate(heads: Any, norm: Any, layer: Any, rotation: Any, row: Any, like: Any) -> None:
    """Normalise the heads of a row (where `norm` is not empty) and rotate them to its position, in place.

    Args:
        heads: float32 [heads * width], overwritten.
        norm: `Norm`.
        layer: `Attention`.
        rotation: `Rotation`.
        row: The row of the pass.
        like: [any, width], an array of the type of keys and values.
    """
    if norm.weight.shape[0]:
        for start in range(0, heads.shape[0], norm.weight.shape[0]):
            part = heads[start : start + norm.weight.shape[0]]
            normalize(part, norm, part)
    if layer.rotation < 0:
        return
    cos, sin = rotation.cos[layer.rotation, row], rotation.sin[layer.rotation, row]
    for start in range(0, heads.shape[0], like.shape[1]):
        head = heads[start : start + like.shape[1]]
        if rotation.rounds_once:
            _rotate(head, cos, sin, cos, like)
        else:
            _rotate(head, cos, sin, like, like)


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
    """`exp` of Lanes."""
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
def _first_seen(position: Any, window: Any) -> Any:
    """The first position that a row at `position` sees."""
    return max(position + 1 - window, np.int64(0)) if window else np.int64(0)


@njit(cache=True, error_model="numpy", nogil=True)
def _hide(eight: Any, position: Any, since: Any, value: Any) -> None:
    """Overwrite what four queries have of positions `position` and `position + 1` before the first that each sees.

    Args:
        eight: float32 [8], of the two positions for each of the queries.
        position: The first of the two.
        since: int64 [4], the first position that each query sees.
        value: float32.
    """
    for lane in range(8):
        if position + lane // 4 < since[lane % 4]:
            eight[lane] = value


@njit(cache=True, error_model="numpy", nogil=True)
def _attend_four(q: Any, first: Any, queries: Any, head: Any, paths: Any, out: Any) -> None:
    """Attention of four queries of a key head; query n is head `n % group` of the group in row `n // group`.

    The committed positions are taken two at a time, lane `4 * (position % 2) + query`; what is left, the end of each
    query's own path, follows query by query. Each position adds the same numbers to the same lane either way. Of the
    positions before the windows of all four none is read; those before the windows of some add zeros to these.

    Args:
        q: float32 [rows of the sequence, heads * width].
        first: The first of the four queries.
        queries: Number of queries in all.
        head: `KeyHead`.
        paths: `Paths` of the rows.
        out: Like `q`.
    """
    h, group, committed, scale, cap = head.index, head.group, head.committed, head.scale, head.cap
    depths, rows = paths.depths, paths.rows
    width, even = head.keys.shape[1], committed - committed % 2
    count = min(4, queries - first)
    four, mixed = np.zeros((4, width), np.float32), np.empty((4, width), np.float32)
    since = np.zeros(4, np.int64)
    start = partly = even  # the first position that one of the four sees, the first that all of them see; even
    for j in range(count):
        row, column = (first + j) // group, (h * group + (first + j) % group) * width
        for d in range(width):
            four[j, d] = q[row, column + d]
        since[j] = _first_seen(committed + depths[row], head.window)
        start = min(start, since[j] - since[j] % 2)
    partly = start
    for j in range(count):
        partly = max(partly, min(since[j] + since[j] % 2, even))
    keys, values = head.keys[start:], head.values[start:]
    pairs, hidden = (even - start) // 2, (partly - start) // 2
    weights, eight = np.empty((pairs, 8), np.float32), np.zeros((1, 8), np.float32)
    greatest = lanes.spread(np.float32(-np.inf))
    for p in range(hidden):
        lanes.store(weights, p, 0, _two_scores(keys, 2 * p, 2 * p + 1, four, scale))
        _hide(weights[p], start + 2 * p, since, np.float32(-np.inf))
        greatest = lanes.maximum(greatest, lanes.load(weights, p, 0))
    for p in range(hidden, pairs):
        scores = _two_scores(keys, 2 * p, 2 * p + 1, four, scale)
        lanes.store(weights, p, 0, scores)
        greatest = lanes.maximum(greatest, scores)
    lanes.store(eight, 0, 0, greatest)

    longest = rows.shape[1] + 1
    slots = np.empty(longest, np.int64)
    near, ends = np.empty((longest // 2 + 1, 8), np.float32), np.zeros((4, longest + 8), np.float32)
    for j in range(count):
        row = (first + j) // group
        length = committed - even + depths[row] + 1
        if j == 0 or (first + j) % group == 0:  # the queries of a row see the same
            _slots_of(committed, rows[row], length, slots)
            for t in range(0, length, 2):
                scores = _two_scores(head.keys, slots[t], slots[min(t + 1, length - 1)], four, scale)
                lanes.store(near, t // 2, 0, scores)
        top = max(eight[0, j], eight[0, 4 + j])
        for t in range(max(since[j] - even, 0), length):
            ends[j, t] = near[t // 2, 4 * (t % 2) + j]
            top = max(top, ends[j, t])
        eight[0, j] = eight[0, 4 + j] = top
    if cap > 0:
        for p in range(pairs):
            cap_scores(weights[p], cap)
        for j in range(count):
            cap_scores(ends[j], cap)
        cap_scores(eight[0], cap)

    greatest, total = lanes.load(eight, 0, 0), lanes.spread(np.float32(0))
    for p in range(hidden):
        lanes.store(weights, p, 0, _exponential(lanes.subtract(lanes.load(weights, p, 0), greatest)))
        _hide(weights[p], start + 2 * p, since, np.float32(0))
        total = lanes.add(total, lanes.load(weights, p, 0))
    for p in range(hidden, pairs):
        exponential = _exponential(lanes.subtract(lanes.load(weights, p, 0), greatest))
        lanes.store(weights, p, 0, exponential)
        total = lanes.add(total, exponential)
    tops = eight.copy()
    lanes.store(eight, 0, 0, total)
    _mix(weights, values, mixed)
    for j in range(count):
        row, column = (first + j) // group, (h * group + (first + j) % group) * width
        length = committed - even + depths[row] + 1
        _slots_of(committed, rows[row], length, slots)
        for t in range(0, length, 8):
            ahead = lanes.subtract(lanes.load(ends, j, t), lanes.spread(tops[0, j]))
            lanes.store(ends, j, t, _exponential(ahead))
        for t in range(max(since[j] - even, 0), length):
            eight[0, j + 4 * (t % 2)] += ends[j, t]
            weight = lanes.spread(ends[j, t])
            for d in range(0, width, 8):
                sum_so_far = lanes.load(mixed, j, d)
                value = lanes.load(head.values, slots[t], d)
                lanes.store(mixed, j, d, lanes.multiply_add(weight, value, sum_so_far))
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

    Numba takes no list of arrays that differ in shape as cheaply as an array of their addresses.
    """
    return carray(pointer(address), (heads, capacity, like.shape[1]), like.dtype)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def attend(heads: Any, layer: Any, rotation: Any, paths: Any, caches: Any, out: Any) -> None:
    """Write the rows' keys and values behind the committed ones of their sequence, and attend along each row's path.

    Args:
        heads: `Heads`; queries and keys are overwritten.
        layer: `Attention`.
        rotation: `Rotation`.
        paths: `Paths`.
        caches: `Caches`.
        out: float32 [rows up to a multiple of 4, heads * width].
    """
    q, k, v = heads.q, heads.k, heads.v
    depths, rows, committed, capacities, like = (
        paths.depths,
        paths.rows,
        caches.committed,
        caches.capacities,
        caches.like,
    )
    starts, keys, values = caches.starts, caches.keys, caches.values
    window, scale, cap = layer.window, layer.scale, layer.cap
    sequences, width = committed.shape[0], like.shape[1]
    key_heads = k.shape[1] // width
    group = q.shape[1] // width // key_heads
    before = np.zeros(sequences + 1, np.int64)  # tasks of the sequences before: four queries of one key head each
    for t in range(sequences):
        own_keys = _heads_at(keys[t], key_heads, capacities[t], like)
        own_values = _heads_at(values[t], key_heads, capacities[t], like)
        for r in range(starts[t], starts[t + 1]):
            slot = committed[t] + r - starts[t]
            _norm_and_rotate(k[r], layer.k_norm, layer, rotation, r, like)
            _norm_and_rotate(q[r], layer.q_norm, layer, rotation, r, like)
            for h in range(key_heads):
                for d in range(width):
                    own_keys[h, slot, d] = narrowed(k[r, h * width + d], like)
                    own_values[h, slot, d] = narrowed(v[r, h * width + d], like)
        before[t + 1] = before[t] + key_heads * (((starts[t + 1] - starts[t]) * group + 3) // 4)
    for task in prange(before[sequences]):
        n = np.searchsorted(before, np.int64(task), side="right") - 1
        start, stop = starts[n], starts[n + 1]
        queries = (stop - start) * group
        fours = (queries + 3) // 4
        h, four = (np.int64(task) - before[n]) // fours, (np.int64(task) - before[n]) % fours
        own_keys = _heads_at(keys[n], key_heads, capacities[n], like)[h]
        own_values = _heads_at(values[n], key_heads, capacities[n], like)[h]
        head = KeyHead(h, group, committed[n], own_keys, own_values, window, scale, cap)
        own_paths = Paths(depths[start:stop], rows[start:stop])
        _attend_four(q[start:stop], 4 * four, queries, head, own_paths, out[start:stop])
