"""The linear layers and normalisations of a decoder layer with int8 weights (see `model.quantization.int8`).

Rows are quantised where they are normalised, gated or attended, each with a scale of its own. Products are exact, and
everything else is computed row by row in float32, so a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from reader_rag.model.cpu.int8_tile import COLUMNS, FEATURES, OFFSET, TILE_BLOCKS, TILE_ROWS, TILES, WRITERS
from reader_rag.model.cpu.products import normalize, steepness
from reader_rag.util.vector_math import exp

_GREATEST, _GREATEST_OF_TWO = np.float32(127), np.float32(127 * 256 + 127)
_SPREAD_FROM = 4
"""Rows from which on threads share the work of quantising them."""
_HALF = TILE_BLOCKS // 2

_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = TILES
_write_one, _add_one, _write_two, _add_two = WRITERS
_column_1, _column_2, _column_3, _column_4, _column_5, _column_6 = COLUMNS


class PackedLinear(NamedTuple):
    """The arrays of a linear layer, or of several that share their inputs, one behind the other.

    Attributes:
        weight: uint8 [blocks, depth, 64], see `int8_tile`; inputs and features beyond the layer's own are zero.
        scales: float32 [16 * blocks].
        bias: float32 [16 * blocks].
    """

    weight: Any
    scales: Any
    bias: Any


class QuantisedRows(NamedTuple):
    """The inputs of products, in one limb of 8 bits or in two: `x = scale * (256 * high + low)`.

    Attributes:
        values: int8 [rows * limbs, 4 * depth], the limbs of a row one behind the other, zero beyond the inputs.
        scales: float32 [rows].
        sums: int32 [rows * limbs], of the values, times `OFFSET`.
        limbs: 1 or 2.
    """

    values: Any
    scales: Any
    sums: Any
    limbs: Any


@njit(cache=True, error_model="numpy", nogil=True)
def _quantise(row: Any, inputs: Any, r: Any) -> None:
    """Row `r` of `inputs` from float32 [width]; a NaN or an infinity makes all products of the row NaN or infinite."""
    bits = np.uint32(0)  # of magnitudes, which are ordered as the numbers are
    for value in row:
        bits = max(bits, np.float32(value).view(np.uint32) & np.uint32(0x7FFFFFFF))
    greatest = np.uint32(bits).view(np.float32)
    most = _GREATEST if inputs.limbs == 1 else _GREATEST_OF_TWO
    inverse = most / greatest if greatest != np.float32(0) else np.float32(0)
    inputs.scales[r] = greatest / most
    if inputs.limbs == 1:
        values, total = inputs.values[r], np.int32(0)
        for k in range(row.shape[0]):
            value = np.int32(np.rint(row[k] * inverse))
            values[k] = np.int8(value)
            total += value
        inputs.sums[r] = np.int32(total * np.int32(OFFSET))
    else:
        highs, lows = inputs.values[2 * r], inputs.values[2 * r + 1]
        high_total = low_total = np.int32(0)
        for k in range(row.shape[0]):
            value = np.int32(np.rint(row[k] * inverse))
            high = np.int32((value + np.int32(128)) >> np.int32(8))
            low = np.int32(value - np.int32(256) * high)
            highs[k], lows[k] = np.int8(high), np.int8(low)
            high_total += high
            low_total += low
        inputs.sums[2 * r] = np.int32(high_total * np.int32(OFFSET))
        inputs.sums[2 * r + 1] = np.int32(low_total * np.int32(OFFSET))


@njit(cache=True, error_model="numpy", nogil=True)
def _norm_row(x: Any, norm: Any, inputs: Any, r: Any) -> None:
    normed = np.empty(x.shape[1], np.float32)
    normalize(x[r], norm, normed)
    _quantise(normed, inputs, r)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def _norm_rows(x: Any, rows: Any, norm: Any, inputs: Any) -> None:
    for r in prange(rows):
        _norm_row(x, norm, inputs, r)


@njit(cache=True, error_model="numpy", nogil=True)
def norm_rows(x: Any, rows: Any, norm: Any, inputs: Any) -> None:
    """`inputs = quantised(norm(x))`.

    Args:
        x: float32 [>= rows, width].
        rows: Rows to compute.
        norm: `Norm` with float32 weights.
        inputs: `QuantisedRows`; overwritten.
    """
    if rows >= _SPREAD_FROM:
        _norm_rows(x, rows, norm, inputs)
    else:
        for r in range(rows):
            _norm_row(x, norm, inputs, r)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def _quantise_rows(values: Any, rows: Any, inputs: Any) -> None:
    for r in prange(rows):
        _quantise(values[r], inputs, r)


@njit(cache=True, error_model="numpy", nogil=True)
def quantise_rows(values: Any, rows: Any, inputs: Any) -> None:
    """`inputs = quantised(values)`.

    Args:
        values: float32 [>= rows, width].
        rows: Rows to compute.
        inputs: `QuantisedRows`; overwritten.
    """
    if rows >= _SPREAD_FROM:
        _quantise_rows(values, rows, inputs)
    else:
        for r in range(rows):
            _quantise(values[r], inputs, r)


@njit(cache=True, error_model="numpy", nogil=True)
def _multiply(weight: Any, first: Any, second: Any, inputs: Any, row: Any, count: Any, sums: Any) -> None:
    """A tile of products of `count` limbs of rows."""
    if count == 6:
        _tile_6(weight, first, second, inputs, row, sums)
    elif count == 5:
        _tile_5(weight, first, second, inputs, row, sums)
    elif count == 4:
        _tile_4(weight, first, second, inputs, row, sums)
    elif count == 3:
        _tile_3(weight, first, second, inputs, row, sums)
    elif count == 2:
        _tile_2(weight, first, second, inputs, row, sums)
    else:
        _tile_1(weight, first, second, inputs, row, sums)


@njit(cache=True, error_model="numpy", nogil=True)
def _multiply_one(weight: Any, block: Any, inputs: Any, row: Any, count: Any, sums: Any) -> None:
    """Products of `count` limbs of rows with one block."""
    if count == 6:
        _column_6(weight, block, block, inputs, row, sums)
    elif count == 5:
        _column_5(weight, block, block, inputs, row, sums)
    elif count == 4:
        _column_4(weight, block, block, inputs, row, sums)
    elif count == 3:
        _column_3(weight, block, block, inputs, row, sums)
    elif count == 2:
        _column_2(weight, block, block, inputs, row, sums)
    else:
        _column_1(weight, block, block, inputs, row, sums)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def _project(inputs: Any, rows: Any, linear: Any, out: Any, add: Any) -> None:
    weight, values, limbs = linear.weight, inputs.values, inputs.limbs
    blocks, at_once = weight.shape[0], TILE_ROWS // inputs.limbs
    tiles = blocks // TILE_BLOCKS
    for task in prange(tiles + blocks - tiles * TILE_BLOCKS):
        sums = np.empty(TILE_ROWS * TILE_BLOCKS * FEATURES, np.int32)
        is_tile = task < tiles
        n = np.int64(task)
        first, second = (n * _HALF, (tiles + n) * _HALF) if is_tile else (n + tiles * (TILE_BLOCKS - 1), np.int64(0))
        wide = np.int64(TILE_BLOCKS if is_tile else 1)
        step = wide * FEATURES
        for row in range(0, rows, at_once):
            count = min(at_once, rows - row)
            if is_tile:
                _multiply(weight, first, second, values, row * limbs, count * limbs, sums)
            else:
                _multiply_one(weight, first, values, row * limbs, count * limbs, sums)
            for j in range(count):
                for b in range(wide):
                    block = first + b if b < _HALF else second + b - _HALF
                    at, r, column = (j * limbs * wide + b) * FEATURES, row + j, block * FEATURES
                    if add and limbs == 1:
                        _add_one(sums, at, step, inputs, r, linear, block, out, r, column)
                    elif add:
                        _add_two(sums, at, step, inputs, r, linear, block, out, r, column)
                    elif limbs == 1:
                        _write_one(sums, at, step, inputs, r, linear, block, out, r, column)
                    else:
                        _write_two(sums, at, step, inputs, r, linear, block, out, r, column)


@njit(cache=True, error_model="numpy", nogil=True)
def project(inputs: Any, rows: Any, linear: Any, out: Any) -> None:
    """`out = linear(inputs)`.

    Args:
        inputs: `QuantisedRows`.
        rows: Rows to compute.
        linear: `PackedLinear`.
        out: float32 [>= rows, 16 * blocks].
    """
    _project(inputs, rows, linear, out, False)


@njit(cache=True, error_model="numpy", nogil=True)
def project_and_add(inputs: Any, rows: Any, linear: Any, x: Any) -> None:
    """`x += linear(inputs)`.

    Args:
        inputs: `QuantisedRows`.
        rows: Rows to compute.
        linear: `PackedLinear`.
        x: float32 [>= rows, 16 * blocks].
    """
    _project(inputs, rows, linear, x, True)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def project_heads(inputs: Any, rows: Any, linear: Any, heads: Any) -> None:
    """Queries, keys and values.

    Args:
        inputs: `QuantisedRows`.
        rows: Rows to compute.
        linear: `PackedLinear` of the queries, the keys and the values.
        heads: `Heads`, each of a multiple of 16 features; overwritten.
    """
    weight, values, limbs = linear.weight, inputs.values, inputs.limbs
    q, k, v = heads.q, heads.k, heads.v
    first_k, blocks, at_once = q.shape[1] // FEATURES, weight.shape[0], TILE_ROWS // inputs.limbs
    first_v = first_k + k.shape[1] // FEATURES
    tiles = blocks // TILE_BLOCKS
    for task in prange(tiles + blocks - tiles * TILE_BLOCKS):
        sums = np.empty(TILE_ROWS * TILE_BLOCKS * FEATURES, np.int32)
        is_tile = task < tiles
        n = np.int64(task)
        first, second = (n * _HALF, (tiles + n) * _HALF) if is_tile else (n + tiles * (TILE_BLOCKS - 1), np.int64(0))
        wide = np.int64(TILE_BLOCKS if is_tile else 1)
        step = wide * FEATURES
        for row in range(0, rows, at_once):
            count = min(at_once, rows - row)
            if is_tile:
                _multiply(weight, first, second, values, row * limbs, count * limbs, sums)
            else:
                _multiply_one(weight, first, values, row * limbs, count * limbs, sums)
            for j in range(count):
                for b in range(wide):
                    block = first + b if b < _HALF else second + b - _HALF
                    at, r = (j * limbs * wide + b) * FEATURES, row + j
                    if block < first_k:
                        out, column = q, block * FEATURES
                    elif block < first_v:
                        out, column = k, (block - first_k) * FEATURES
                    else:
                        out, column = v, (block - first_v) * FEATURES
                    if limbs == 1:
                        _write_one(sums, at, step, inputs, r, linear, block, out, r, column)
                    else:
                        _write_two(sums, at, step, inputs, r, linear, block, out, r, column)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def project_gated(inputs: Any, rows: Any, linear: Any, gelu: Any, out: Any) -> None:
    """`out = activation(gate(inputs)) * up(inputs)`.

    Args:
        inputs: `QuantisedRows`, in one limb.
        rows: Rows to compute.
        linear: `PackedLinear` of `gate` and `up`, with as many blocks each.
        gelu: Whether the activation is the tanh form of GELU, else it is SiLU.
        out: float32 [>= rows, 16 * blocks of each].
    """
    weight, values = linear.weight, inputs.values
    blocks = weight.shape[0] // 2
    tiles = blocks // _HALF
    for task in prange(tiles + blocks - tiles * _HALF):
        sums = np.empty(TILE_ROWS * TILE_BLOCKS * FEATURES, np.int32)
        ups = np.empty(TILE_ROWS * FEATURES, np.int32)
        both = np.empty((2, _HALF * FEATURES), np.float32)
        is_tile = task < tiles
        n = np.int64(task)
        first = n * _HALF if is_tile else n + tiles * (_HALF - 1)
        wide = np.int64(_HALF if is_tile else 1)
        for row in range(0, rows, TILE_ROWS):
            count = min(TILE_ROWS, rows - row)
            if is_tile:
                _multiply(weight, first, blocks + first, values, row, count, sums)
            else:
                _multiply_one(weight, first, values, row, count, sums)
                _multiply_one(weight, blocks + first, values, row, count, ups)
            for j in range(count):
                r = row + j
                for b in range(wide):
                    block, up, column = first + b, blocks + first + b, b * FEATURES
                    if is_tile:
                        at = (j * TILE_BLOCKS + b) * FEATURES
                        _write_one(sums, at, 0, inputs, r, linear, block, both, 0, column)
                        _write_one(sums, at + _HALF * FEATURES, 0, inputs, r, linear, up, both, 1, column)
                    else:
                        _write_one(sums, j * FEATURES, 0, inputs, r, linear, block, both, 0, column)
                        _write_one(ups, j * FEATURES, 0, inputs, r, linear, up, both, 1, column)
                for c in range(wide * FEATURES):
                    gate = both[0, c]
                    out[r, first * FEATURES + c] = gate / (np.float32(1) + exp(-steepness(gate, gelu))) * both[1, c]
