"""Attention of a decoder layer along the paths of draft trees, and the rotation of its queries and keys.

A row attends to the committed positions of its sequence and to its own path, in the order of the text, or to the last
of them where the layer has a window. So its numbers do not depend on the rows beside it, and a drafted token's are bit
for bit those of plain decoding. Scores and their weights stay in float32, as in PyTorch's fused attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, prange  # type: ignore[attr-defined]

from reader_rag.model.cpu.attention_part import MOST_QUERIES, KeyHead, attend_part, part_of
from reader_rag.model.cpu.products import Heads, Norm, normalize
from reader_rag.model.cpu.rounding import narrowed, rounded
from reader_rag.util.addresses import pointer
from reader_rag.util.vector_math import FUSED

_SPREAD_FROM = 8
"""Rows from which on threads share the work of rotating them."""
_LEAST_QUERIES = 4
"""Fewest queries of a part that is made smaller to keep all threads at work."""


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
        threads: How many share the work of a pass.
    """

    depths: Any
    rows: Any
    chain: Any
    threads: Any


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


@njit(cache=True, error_model="numpy", nogil=True)
def _parts_of(queries: Any, key_heads: Any, threads: Any) -> Any:
    """Into how many parts the queries of each key head are divided, which changes no bit."""
    parts = (queries + MOST_QUERIES - 1) // MOST_QUERIES
    while key_heads * parts % threads and queries // (parts + 1) >= _LEAST_QUERIES:
        parts += 1
    return parts


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
    starts, keys, values, threads = caches.starts, caches.keys, caches.values, paths.threads
    window, scale, cap = layer.window, layer.scale, layer.cap
    sequences, width = committed.shape[0], like.shape[1]
    key_heads = k.shape[1] // width
    group = q.shape[1] // width // key_heads
    before = np.zeros(sequences + 1, np.int64)  # parts of the sequences before
    if starts[sequences] >= _SPREAD_FROM:
        _place_rows(heads, layer, rotation, caches)
    else:
        for r in range(starts[sequences]):
            _place_row(heads, layer, rotation, caches, r)
    for t in range(sequences):
        before[t + 1] = before[t] + key_heads * _parts_of((starts[t + 1] - starts[t]) * group, key_heads, threads)
    for task in prange(before[sequences]):
        n = np.searchsorted(before, np.int64(task), side="right") - 1
        start, stop = starts[n], starts[n + 1]
        queries, parts = (stop - start) * group, (before[n + 1] - before[n]) // key_heads
        h, p = (np.int64(task) - before[n]) // parts, (np.int64(task) - before[n]) % parts
        first, behind = p * queries // parts, (p + 1) * queries // parts
        own_keys = _heads_at(keys[n], key_heads, capacities[n], like)[h]
        own_values = _heads_at(values[n], key_heads, capacities[n], like)[h]
        head = KeyHead(h, group, committed[n], own_keys, own_values, window, scale, cap)
        own_paths = Paths(depths[start:stop], rows[start:stop], chain[start:stop], threads)
        attend_part(q[start:stop], part_of(first, behind - first, head, own_paths), head, out[start:stop])
