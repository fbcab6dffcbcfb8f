"""The linear layers and normalisations of a decoder layer with int8 weights (see `model.quantization.int8`).

Rows are quantised where they are normalised, gated or attended, each with a scale of its own. Products are exact, and
everything else is computed row by row in float32, so a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from reader_rag.model.cpu.int8_tile import COLUMNS, FEATURES, OFFSET, TILE_BLOCKS, TILE_ROWS, TILES
from reader_rag.model.cpu.products import FUSED, exp, normalize

_GREATEST = np.float32(127)
_SPREAD_FROM = 4
"""Rows from which on threads share the work of quantising them."""
_HALF = TILE_BLOCKS // 2

_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = TILES
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
    """The inputs of products.

    Attributes:
        values: int8 [rows, 4 * depth], zero beyond the inputs.
        scales: float32 [rows].
        sums: int32 [rows], of the values of each row, times `OFFSET`.
    """

    values: Any
    scales: Any
    sums: Any


@njit(cache=True, error_model="numpy", nogil=True)
def _quantise(row: Any, inputs: Any, r: Any) -> None:
    """Row `r` of `inputs` from float32 [width]; a NaN or an infinity makes all products of the row NaN or infinite."""
    bits = np.uint32(0)  # of magnitudes, which are ordered as the numbers are
    for value in row:
        bits = max(bits, np.float32(value).view(np.uint32) & np.uint32(0x7FFFFFFF))
    greatest = np.uint32(bits).view(np.float32)
    inverse = _GREATEST / greatest if greatest != np.float32(0) else np.float32(0)
    values = inputs.values[r]
    total = np.int32(0)
    for k in range(row.shape[0]):
        value = np.int32(np.rint(row[k] * inverse))
        values[k] = np.int8(value)
        total += value
    inputs.scales[r] = greatest / _GREATEST
    inputs.sums[r] = np.int32(total * np.int32(OFFSET))


@njit(cache=True, error_model="numpy", nogil=True)
def _norm_row(x: Any, norm: Any, inputs: Any, r: Any) -> None:
    normed = np.empty(x.shape[1], np.float32)
    normalize(x[r], norm.weight, norm.epsilon, normed)
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
    """A tile of products of `count` rows."""
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
    """Products of `count` rows with one block."""
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


@njit(cache=True, fastmath=FUSED, error_model="numpy", nogil=True)
def _scaled(total: Any, offset: Any, row_scale: Any, scale: Any, bias: Any) -> Any:
    """float32 output of a feature from its integer sum."""
    return np.float32(np.int32(total - offset)) * row_scale * scale + bias


@njit(cache=True, fastmath=FUSED, error_model="numpy", nogil=True)
def _write(sums: Any, at: Any, linear: Any, block: Any, inputs: Any, row: Any, out: Any, first: Any, add: Any) -> None:
    """A block's outputs of one row: `out[row, first : first + 16]`, or added to what is there."""
    scales, bias = linear.scales, linear.bias
    row_scale, offset, feature = inputs.scales[row], inputs.sums[row], block * FEATURES
    for c in range(min(FEATURES, out.shape[1] - first)):
        value = _scaled(sums[at + c], offset, row_scale, scales[feature + c], bias[feature + c])
        out[row, first + c] = out[row, first + c] + value if add else value


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def _project(inputs: Any, rows: Any, linear: Any, out: Any, add: Any) -> None:
    weight, values = linear.weight, inputs.values
    blocks = (out.shape[1] + FEATURES - 1) // FEATURES
    tiles = blocks // TILE_BLOCKS
    for task in prange(tiles + blocks - tiles * TILE_BLOCKS):
        sums = np.empty(TILE_ROWS * TILE_BLOCKS * FEATURES, np.int32)
        t = np.int64(task)
        for row in range(0, rows, TILE_ROWS):
            count = min(TILE_ROWS, rows - row)
            if t < tiles:
                first, second = t * _HALF, (tiles + t) * _HALF
                _multiply(weight, first, second, values, row, count, sums)
                for j in range(count):
                    for n in range(TILE_BLOCKS):
                        block = first + n if n < _HALF else second + n - _HALF
                        at = (j * TILE_BLOCKS + n) * FEATURES
                        _write(sums, at, linear, block, inputs, row + j, out, block * FEATURES, add)
            else:
                block = tiles * TILE_BLOCKS + t - tiles
                _multiply_one(weight, block, values, row, count, sums)
                for j in range(count):
                    _write(sums, j * FEATURES, linear, block, inputs, row + j, out, block * FEATURES, add)


@njit(cache=True, error_model="numpy", nogil=True)
def project(inputs: Any, rows: Any, linear: Any, out: Any) -> None:
    """`out = linear(inputs)`.

    Args:
        inputs: `QuantisedRows`.
        rows: Rows to compute.
        linear: `PackedLinear`.
        out: float32 [>= rows, features].
    """
    _project(inputs, rows, linear, out, False)


@njit(cache=True, error_model="numpy", nogil=True)
def project_and_add(inputs: Any, rows: Any, linear: Any, x: Any) -> None:
    """`x += linear(inputs)`.

    Args:
        inputs: `QuantisedRows`.
        rows: Rows to compute.
        linear: `PackedLinear`.
        x: float32 [>= rows, features].
    """
    _project(inputs, rows, linear, x, True)


@njit(cache=True, error_model="numpy", nogil=True)
def _write_head(sums: Any, at: Any, linear: Any, block: Any, inputs: Any, row: Any, heads: Any) -> None:
    """A block's outputs of one row, among the queries, keys or values."""
    q, k, v = heads.q, heads.k, heads.v
    keys = (q.shape[1] + FEATURES - 1) // FEATURES
    values = keys + (k.shape[1] + FEATURES - 1) // FEATURES
    if block < keys:
        _write(sums, at, linear, block, inputs, row, q, block * FEATURES, False)
    elif block < values:
        _write(sums, at, linear, block, inputs, row, k, (block - keys) * FEATURES, False)
    else:
        _write(sums, at, linear, block, inputs, row, v, (block - values) * FEATURES, False)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def project_heads(inputs: Any, rows: Any, linear: Any, heads: Any) -> None:
    """Queries, keys and values.

    Args:
        inputs: `QuantisedRows`.
        rows: Rows to compute.
        linear: `PackedLinear` of the queries, the keys and the values; each begins a block.
        heads: `Heads`; overwritten.
    """
    weight, values = linear.weight, inputs.values
    blocks = weight.shape[0]
    tiles = blocks // TILE_BLOCKS
    for task in prange(tiles + blocks - tiles * TILE_BLOCKS):
        sums = np.empty(TILE_ROWS * TILE_BLOCKS * FEATURES, np.int32)
        t = np.int64(task)
        for row in range(0, rows, TILE_ROWS):
            count = min(TILE_ROWS, rows - row)
            if t < tiles:
                first, second = t * _HALF, (tiles + t) * _HALF
                _multiply(weight, first, second, values, row, count, sums)
                for j in range(count):
                    for n in range(TILE_BLOCKS):
                        block = first + n if n < _HALF else second + n - _HALF
                        _write_head(sums, (j * TILE_BLOCKS + n) * FEATURES, linear, block, inputs, row + j, heads)
            else:
                block = tiles * TILE_BLOCKS + t - tiles
                _multiply_one(weight, block, values, row, count, sums)
                for j in range(count):
                    _write_head(sums, j * FEATURES, linear, block, inputs, row + j, heads)


@njit(cache=True, fastmath=FUSED, error_model="numpy", nogil=True)
def _write_gated(gates: Any, ups: Any, at: Any, linear: Any, block: Any, inputs: Any, row: Any, out: Any) -> None:
    """A block of `silu(gate) * up` of one row, from the sums of both at `at`."""
    scales, bias = linear.scales, linear.bias
    row_scale, offset, first = inputs.scales[row], inputs.sums[row], block * FEATURES
    other = first + scales.shape[0] // 2
    for c in range(min(FEATURES, out.shape[1] - first)):
        gate = _scaled(gates[at + c], offset, row_scale, scales[first + c], bias[first + c])
        up = _scaled(ups[at + c], offset, row_scale, scales[other + c], bias[other + c])
        out[row, first + c] = gate / (np.float32(1) + exp(-gate)) * up


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def project_gated(inputs: Any, rows: Any, linear: Any, out: Any) -> None:
    """`out = silu(gate(inputs)) * up(inputs)`.

    Args:
        inputs: `QuantisedRows`.
        rows: Rows to compute.
        linear: `PackedLinear` of `gate` and `up`, with as many blocks each.
        out: float32 [>= rows, features of each].
    """
    weight, values = linear.weight, inputs.values
    blocks = weight.shape[0] // 2
    tiles = blocks // _HALF
    for task in prange(tiles + blocks - tiles * _HALF):
        sums = np.empty(TILE_ROWS * TILE_BLOCKS * FEATURES, np.int32)
        more = np.empty(TILE_ROWS * FEATURES, np.int32)
        t = np.int64(task)
        for row in range(0, rows, TILE_ROWS):
            count = min(TILE_ROWS, rows - row)
            if t < tiles:
                first = t * _HALF
                _multiply(weight, first, blocks + first, values, row, count, sums)
                ups = sums[_HALF * FEATURES :]
                for j in range(count):
                    for n in range(_HALF):
                        at = (j * TILE_BLOCKS + n) * FEATURES
                        _write_gated(sums, ups, at, linear, first + n, inputs, row + j, out)
            else:
                block = tiles * _HALF + t - tiles
                _multiply_one(weight, block, values, row, count, sums)
                _multiply_one(weight, blocks + block, values, row, count, more)
                for j in range(count):
                    _write_gated(sums, more, j * FEATURES, linear, block, inputs, row + j, out)
