"""Attention of a decoder layer along the paths of draft trees, and the rotation of its queries and keys.

A row attends to the committed positions of its sequence and to its own path, in the order of the text, or to the last
of them where the layer has a window. So its numbers do not depend on the rows beside it, and a drafted token's are bit
for bit those of plain decoding. Scores and their weights stay in float32, as in PyTorch's fused attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, prange  # type: ignore[attr-defined]

from reader_rag.model.cpu import attention_tile, simd
from reader_rag.model.cpu.attention_tile import KEYS, MIXED, PITCH
from reader_rag.model.cpu.products import FUSED, Heads, Norm, normalize
from reader_rag.model.cpu.rounding import narrowed, rounded, widen
from reader_rag.model.cpu.simd import LANES
from reader_rag.model.cpu.softcap import cap_scores
from reader_rag.util.addresses import pointer

lanes: Any = simd  # in kernels operations take no compiler's context
tiles: Any = attention_tile
_SPREAD_FROM = 8
"""Rows from which on threads share the work of rotating them."""
_AT_ONCE = 64
"""Positions whose keys, then values, are widened at once: they stay in the CPU's first cache."""


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
        chain: int64 [rows], how many rows from the first of its path to each row are rows 0, 1, 2, ... of the sequence.
    """

    depths: Any
    rows: Any
    chain: Any


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
def _exponential(x: Any) -> Any:
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
def _widen_rows(rows: Any, first: Any, count: Any, out: Any) -> None:
    """float32 rows `first`, `first + 1`, ... of keys or values."""
    for n in range(count):
        for d in range(rows.shape[1]):
            out[n, d] = widen(rows[first + n, d])


@njit(cache=True, error_model="numpy", nogil=True)
def _mix(weights: Any, first: Any, count: Any, values: Any, mixed: Any) -> None:
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
def _mix_seen(weights: Any, first: Any, count: Any, values: Any, mixed: Any) -> None:
    """As `_mix`, for positions that some queries do not see: whatever they hold, these queries' sums stay."""
    for n in range(count):
        w = lanes.load(weights, first + n, 0)
        for d in range(mixed.shape[0]):
            total = lanes.load(mixed, d, 0)
            more = lanes.multiply_add(w, lanes.spread_at(values, n, d), total)
            lanes.store(mixed, d, 0, lanes.where_zero(w, total, more))


@njit(cache=True, error_model="numpy", nogil=True)
def _weigh(scores: Any, positions: Any) -> Any:
    """Turn the scores of all queries into weights: e ** (score - the greatest).

    Args:
        scores: float32 [>= positions, LANES], overwritten.
        positions: Positions.

    Returns:
        Lanes, the sums of the weights.
    """
    greatest, total = _greatest(scores, positions), lanes.spread(np.float32(0))
    for n in range(positions):
        weight = _exponential(lanes.subtract(lanes.load(scores, n, 0), greatest))
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
def _weigh_few(scores: Any, positions: Any, weights: Any, totals: Any) -> None:
    """As `_weigh` for up to four queries, with positions in the lanes: the same numbers, added in the same order.

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
            lanes.store(weights, j, n, _exponential(lanes.load(weights, j, n)))
    a = b = c = d = np.float32(0)
    for n in range(positions):
        a += weights[0, n]
        b += weights[1, n]
        c += weights[2, n]
        d += weights[3, n]
    totals[0, 0], totals[0, 1], totals[0, 2], totals[0, 3] = a, b, c, d


@njit(cache=True, error_model="numpy", nogil=True)
def _mix_few(weights: Any, first: Any, count: Any, values: Any, width: Any, mixed: Any) -> None:
    """As `_mix` for up to four queries, with the numbers of a head in the lanes.

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
def _mix_few_seen(weights: Any, first: Any, count: Any, values: Any, width: Any, mixed: Any) -> None:
    """As `_mix_few`, for positions that some queries do not see."""
    for j in range(4):
        for n in range(count):
            w = lanes.spread_at(weights, j, first + n)
            for d in range(0, width, LANES):
                total = lanes.load(mixed, j, d)
                more = lanes.multiply_add(w, lanes.load(values, n, d), total)
                lanes.store(mixed, j, d, lanes.where_zero(w, total, more))


@njit(cache=True, error_model="numpy", nogil=True)
def _first_seen(position: Any, window: Any) -> Any:
    """The first position that a row at `position` sees."""
    return max(position + 1 - window, np.int64(0)) if window else np.int64(0)


@njit(cache=True, error_model="numpy", nogil=True)
def _hide(scores: Any, start: Any, since: Any, partly: Any, seen: Any, shared: Any) -> None:
    """Make the scores of positions that a query does not see minus infinity.

    Args:
        scores: float32 [positions from `start` on, LANES].
        start: The first position.
        since: int64 [LANES], the first position that each query sees.
        partly: The first position that is in the windows of all queries, at most `shared`.
        seen: bool [rows of the pass from the first that is not on the paths of all queries, LANES].
        shared: Where the first of them lies.
    """
    for position in range(start, partly):
        for j in range(LANES):
            if position < since[j]:
                scores[position - start, j] = -np.inf
    for t in range(seen.shape[0]):
        for j in range(LANES):
            if not seen[t, j] and shared + t >= start:
                scores[shared + t - start, j] = -np.inf


@njit(cache=True, error_model="numpy", nogil=True)
def _attend_some(q: Any, first: Any, queries: Any, head: Any, paths: Any, out: Any) -> None:
    """Attention of up to `LANES` queries of a key head; query n is head `n % group` of the group in row `n // group`.

    Each query has a lane, in which everything is computed in the order of the positions. The committed positions and
    the rows of the pass lie in a row; a row that is not on a query's path is left out of its lane.

    Args:
        q: float32 [rows of the sequence, heads * width].
        first: The first of the queries.
        queries: Number of queries in all.
        head: `KeyHead`.
        paths: `Paths` of the rows.
        out: Like `q`.
    """
    h, group, committed, width = head.index, head.group, head.committed, head.keys.shape[1]
    count = min(np.int64(LANES), queries - first)
    row_first, row_last = first // group, (first + count - 1) // group
    chain = paths.chain[row_first]
    start, partly = committed + row_last + 1, np.int64(0)
    transposed, since = np.zeros((width, LANES), np.float32), np.zeros(LANES, np.int64)
    for j in range(count):
        row, column = (first + j) // group, (h * group + (first + j) % group) * width
        for d in range(width):
            transposed[d, j] = q[row, column + d]
        chain = min(chain, paths.chain[row])
        since[j] = _first_seen(committed + paths.depths[row], head.window)
        start, partly = min(start, since[j]), max(partly, since[j])
    shared, stop = committed + chain, committed + row_last + 1
    seen = np.zeros((stop - shared, LANES), np.bool_)
    for j in range(count):
        row = (first + j) // group
        for t in range(max(chain, since[j] - committed), paths.depths[row] + 1):
            seen[paths.rows[row, t] - chain, j] = True
    some = np.empty((_AT_ONCE, PITCH), np.float32)
    some[:, width : width - width % -32] = 0  # read beside the numbers of a head, by whole registers
    scores = np.empty((stop - start + KEYS, LANES), np.float32)  # the last tile may reach beyond the positions
    for position in range(start, stop, _AT_ONCE):
        here = min(np.int64(_AT_ONCE), stop - position)
        _widen_rows(head.keys, position, here, some)
        for n in range(0, here, KEYS):
            tiles.score(some, n, transposed, head.scale, scores, position - start + n)
    if head.cap > 0:
        for n in range(stop - start):
            cap_scores(scores[n], head.cap)
    _hide(scores, start, since, min(partly, shared), seen, shared)
    totals = np.empty((1, LANES), np.float32)
    if count <= 4:
        weights, few = np.empty((4, stop - start + LANES), np.float32), np.zeros((4, PITCH), np.float32)
        _weigh_few(scores, stop - start, weights, totals)
        for position in range(start, stop, _AT_ONCE):
            here = min(np.int64(_AT_ONCE), stop - position)
            _widen_rows(head.values, position, here, some)
            if position >= partly and position + here <= shared:
                _mix_few(weights, position - start, here, some, width, few)
            else:
                _mix_few_seen(weights, position - start, here, some, width, few)
        for j in range(count):
            row, column = (first + j) // group, (h * group + (first + j) % group) * width
            for d in range(width):
                out[row, column + d] = rounded(few[j, d] / totals[0, j], head.values)
        return
    mixed = np.zeros((width, LANES), np.float32)
    lanes.store(totals, 0, 0, _weigh(scores, stop - start))
    for position in range(start, stop, _AT_ONCE):
        here = min(np.int64(_AT_ONCE), stop - position)
        _widen_rows(head.values, position, here, some)
        if position >= partly and position + here <= shared:
            _mix(scores, position - start, here, some, mixed)
        else:
            _mix_seen(scores, position - start, here, some, mixed)
    for j in range(count):
        row, column = (first + j) // group, (h * group + (first + j) % group) * width
        for d in range(width):
            out[row, column + d] = rounded(mixed[d, j] / totals[0, j], head.values)


@njit(cache=True, error_model="numpy", nogil=True)
def _heads_at(address: Any, heads: Any, capacity: Any, like: Any) -> Any:
    """The array [heads, capacity, width of `like`] at an address.

    Numba takes no list of arrays that differ in shape as cheaply as an array of their addresses.
    """
    return carray(pointer(address), (heads, capacity, like.shape[1]), like.dtype)


@njit(cache=True, error_model="numpy", nogil=True)
def _place_row(heads: Any, layer: Any, rotation: Any, caches: Any, r: Any) -> None:
    """Rotate the queries and keys of a row, and write its keys and values behind the committed ones."""
    like, k, v = caches.like, heads.k, heads.v
    width = like.shape[1]
    key_heads = k.shape[1] // width
    n = np.searchsorted(caches.starts, np.int64(r), side="right") - 1
    own_keys = _heads_at(caches.keys[n], key_heads, caches.capacities[n], like)
    own_values = _heads_at(caches.values[n], key_heads, caches.capacities[n], like)
    slot = caches.committed[n] + r - caches.starts[n]
    _norm_and_rotate(k[r], layer.k_norm, layer, rotation, r, like)
    _norm_and_rotate(heads.q[r], layer.q_norm, layer, rotation, r, like)
    for h in range(key_heads):
        for d in range(width):
            own_keys[h, slot, d] = narrowed(k[r, h * width + d], like)
            own_values[h, slot, d] = narrowed(v[r, h * width + d], like)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def _place_rows(heads: Any, layer: Any, rotation: Any, caches: Any) -> None:
    # A parallel loop takes arrays and numbers, no tuples of both.
    q, k, v, cos, sin, rotation_rounds_once = (
        heads.q,
        heads.k,
        heads.v,
        rotation.cos,
        rotation.sin,
        rotation.rounds_once,
    )
    q_weight, q_epsilon, q_offset = layer.q_norm.weight, layer.q_norm.epsilon, layer.q_norm.offset
    k_weight, k_epsilon, k_offset = layer.k_norm.weight, layer.k_norm.epsilon, layer.k_norm.offset
    kind, window, scale, cap, rounds_once = (
        layer.rotation,
        layer.window,
        layer.scale,
        layer.cap,
        layer.q_norm.rounds_once,
    )
    starts, committed, capacities = caches.starts, caches.committed, caches.capacities
    keys, values, like = caches.keys, caches.values, caches.like
    for r in prange(starts[committed.shape[0]]):
        q_norm = Norm(q_weight, q_epsilon, q_offset, rounds_once)
        k_norm = Norm(k_weight, k_epsilon, k_offset, rounds_once)
        _place_row(
            Heads(q, k, v),
            Attention(q_norm, k_norm, kind, window, scale, cap),
            Rotation(cos, sin, rotation_rounds_once),
            Caches(starts, committed, capacities, keys, values, like),
            r,
        )


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
    q, k = heads.q, heads.k
    depths, rows, chain, committed, capacities, like = (
        paths.depths,
        paths.rows,
        paths.chain,
        caches.committed,
        caches.capacities,
        caches.like,
    )
    starts, keys, values = caches.starts, caches.keys, caches.values
    window, scale, cap = layer.window, layer.scale, layer.cap
    sequences, width = committed.shape[0], like.shape[1]
    key_heads = k.shape[1] // width
    group = q.shape[1] // width // key_heads
    before = np.zeros(sequences + 1, np.int64)  # tasks of the sequences before: some queries of one key head each
    if starts[sequences] >= _SPREAD_FROM:
        _place_rows(heads, layer, rotation, caches)
    else:
        for r in range(starts[sequences]):
            _place_row(heads, layer, rotation, caches, r)
    for t in range(sequences):
        before[t + 1] = before[t] + key_heads * (((starts[t + 1] - starts[t]) * group + LANES - 1) // LANES)
    for task in prange(before[sequences]):
        n = np.searchsorted(before, np.int64(task), side="right") - 1
        start, stop = starts[n], starts[n + 1]
        queries = (stop - start) * group
        parts = (queries + LANES - 1) // LANES
        h, part = (np.int64(task) - before[n]) // parts, (np.int64(task) - before[n]) % parts
        own_keys = _heads_at(keys[n], key_heads, capacities[n], like)[h]
        own_values = _heads_at(values[n], key_heads, capacities[n], like)[h]
        head = KeyHead(h, group, committed[n], own_keys, own_values, window, scale, cap)
        own_paths = Paths(depths[start:stop], rows[start:stop], chain[start:stop])
        _attend_some(q[start:stop], LANES * part, queries, head, own_paths, out[start:stop])
