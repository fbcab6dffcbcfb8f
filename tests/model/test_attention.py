"""Attention of a row has the same bits whatever rows stand beside it, and is what NumPy computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config as numba_config
from numpy.typing import NDArray
from random_trees import random_tree

from reader_rag.model.cpu.attention import Attention, Caches, Paths, Rotation, attend
from reader_rag.model.cpu.products import Heads, Norm

pytestmark = pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="vectors need the compiler")

Array = NDArray[Any]
NONE = np.zeros(0, np.float32)


class Shape(NamedTuple):
    """Key heads, query heads for each of them, numbers of a head, window and soft cap of a layer; its type."""

    key_heads: int
    group: int
    width: int
    window: int
    cap: float
    dtype: Any


shapes = st.builds(
    Shape,
    key_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7]),
    width=st.sampled_from([8, 24, 64, 80, 136]),
    window=st.sampled_from([0, 0, 2, 9, 70]),
    cap=st.sampled_from([0.0, 0.0, 2.0]),
    dtype=st.sampled_from([np.float32, np.uint16, np.int16]),
)


def stored(numbers: Array, dtype: Any) -> Array:
    """float32 numbers in the type of a cache: float32, the bits of bfloat16 or those of float16."""
    if dtype == np.uint16:
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(np.float16).view(np.int16) if dtype == np.int16 else numbers


def widened(numbers: Array) -> Array:
    """float64 of stored numbers."""
    if numbers.dtype == np.uint16:
        return (numbers.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (numbers.view(np.float16) if numbers.dtype == np.int16 else numbers).astype(np.float64)


def numbers(random: np.random.Generator, *size: int, dtype: Any) -> Array:
    """Random float32 numbers that a cache of this type can hold."""
    return widened(stored(random.standard_normal(size).astype(np.float32), dtype)).astype(np.float32)


def attended(shape: Shape, before: tuple[Array, Array], heads: Heads, paths: Array, depths: Array) -> Array:
    """float32 [rows, heads * width] of rows behind committed keys and values [heads, positions, width]."""
    rows, committed = len(depths), before[0].shape[1]
    caches = []
    for array in before:
        cache = stored(np.full((shape.key_heads, committed + rows, shape.width), np.nan, np.float32), shape.dtype)
        cache[:, :committed] = array
        caches.append(cache)
    same = paths == np.arange(paths.shape[1])
    chain = np.minimum(np.where(same.all(1), paths.shape[1], same.argmin(1)), depths + 1)
    places = Caches(
        np.array([0, rows]),
        np.array([committed]),
        np.array([committed + rows]),
        *(np.array([cache.ctypes.data]) for cache in caches),
        caches[0][0],
    )
    norm = Norm(NONE.astype(shape.dtype), np.float32(1e-6), np.float32(0), False)
    layer = Attention(norm, norm, -1, shape.window, np.float32(shape.width**-0.5), np.float32(shape.cap))
    angles = np.zeros((1, rows, shape.width), np.float32)
    out = np.zeros_like(heads.q)
    attend(
        Heads(*(part.copy() for part in heads)),
        layer,
        Rotation(angles, angles, False),
        Paths(depths, paths, chain, 2),
        places,
        out,
    )
    return out


def expected(shape: Shape, keys: Array, values: Array, query: Array) -> Array:
    """float64 [heads * width], the attention of one row to the last positions [heads, positions, width]."""
    first = max(keys.shape[1] - shape.window, 0) if shape.window else 0
    k, v = (widened(array[:, first:]) for array in (keys, values))
    q = query.reshape(shape.key_heads, shape.group, shape.width).astype(np.float64)
    scores = np.einsum("hgd,hnd->hgn", q, k) * shape.width**-0.5
    if shape.cap:
        scores = shape.cap * np.tanh(scores / shape.cap)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed: Array = np.einsum("hgn,hnd->hgd", weights / weights.sum(-1, keepdims=True), v).ravel()
    return mixed


@settings(max_examples=60, deadline=None)
@given(shape=shapes, committed=st.integers(0, 200), nodes=st.integers(0, 40), seed=st.integers(0, 99))
def test_a_row_of_a_tree_has_the_bits_that_it_has_alone(shape: Shape, committed: int, nodes: int, seed: int) -> None:
    random, tree = np.random.default_rng(seed), random_tree(seed, nodes, 97)
    rows, size = nodes + 1, shape.key_heads * shape.width
    depths, paths = np.concatenate([[0], tree.depths]).astype(np.int64), tree.paths.astype(np.int32)
    before = [
        stored(numbers(random, shape.key_heads, committed, shape.width, dtype=shape.dtype), shape.dtype) for _ in "kv"
    ]
    heads = Heads(*(numbers(random, -(-rows // 4) * 4, n, dtype=shape.dtype) for n in (size * shape.group, size, size)))
    together = attended(shape, (before[0], before[1]), heads, paths, depths)
    for row in random.choice(rows, min(rows, 4), replace=False):
        path = paths[row, : depths[row] + 1]
        own = [
            np.concatenate(
                [array, stored(part[path].reshape(len(path), shape.key_heads, -1).swapaxes(0, 1), shape.dtype)], 1
            )
            for array, part in zip(before, (heads.k, heads.v), strict=True)
        ]
        one = Heads(*(np.concatenate([part[[row]], np.zeros((3, part.shape[1]), np.float32)]) for part in heads))
        earlier = (np.ascontiguousarray(own[0][:, :-1]), np.ascontiguousarray(own[1][:, :-1]))
        alone = attended(shape, earlier, one, np.zeros((1, 1), np.int32), np.zeros(1, np.int64))
        assert alone[0].tobytes() == together[row].tobytes()
        tolerance = 2e-5 if shape.dtype == np.float32 else 2e-2 if shape.dtype == np.uint16 else 2e-3
        assert np.abs(together[row] - expected(shape, own[0], own[1], heads.q[row])).max() < tolerance


def test_what_other_branches_hold_changes_nothing() -> None:
    shape, random = Shape(2, 3, 24, 0, 0.0, np.float32), np.random.default_rng(3)
    before = (numbers(random, 2, 70, 24, dtype=np.float32), numbers(random, 2, 70, 24, dtype=np.float32))
    heads = Heads(*(numbers(random, 4, n, dtype=np.float32) for n in (144, 48, 48)))
    depths, paths = np.array([0, 1, 1]), np.array([[0, 0], [0, 1], [0, 2]], np.int32)
    usual = attended(shape, before, heads, paths, depths)
    heads.k[1], heads.v[1] = np.inf, np.nan
    other = attended(shape, before, heads, paths, depths)
    assert other[[0, 2]].tobytes() == usual[[0, 2]].tobytes()
    assert np.isnan(other[1]).all()
