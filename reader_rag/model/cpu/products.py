"""The linear layers and normalisations of a decoder layer, for a few rows at a time.

PyTorch's matrix products are made for many rows: on a CPU without AVX-512 a product of 8 rows in bfloat16 takes it
seven times as long as one of 1 row, though both read the same weights, and what it does between products takes as long
again (docs/benchmarks/README.md). These loops read each weight once for all rows, and nothing runs between them.

Every row is computed by the same instructions in the same order whatever rows are beside it. Sums are taken in float32;
in 16 bits they are rounded where PyTorch's modules round. Activations are float32 (with values that the type of the
weights has). Arrays of rows have room for a multiple of four.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from reader_rag.model.cpu.rounding import rounded, widen
from reader_rag.util.vector_math import FUSED, exp

ROWS_AT_ONCE = 4
"""Rows of a block; arrays of activations have a multiple of it."""

_LANES = {"reassoc", "contract", "nsz"}
"""Sums may be taken in vector lanes; infinities and NaNs stay what they are."""


class Linear(NamedTuple):
    """The arrays of a linear layer.

    Attributes:
        weight: [features, inputs].
        bias: float32 [features].
        like: An array of the type that outputs are rounded to.
    """

    weight: Any
    bias: Any
    like: Any


class HeadLinears(NamedTuple):
    """The linear layers of queries, keys and values: `Linear` each."""

    q: Any
    k: Any
    v: Any


class GateLinears(NamedTuple):
    """The linear layers of a gated feed-forward layer: `Linear` each, of as many features."""

    gate: Any
    up: Any


class FloatRows(NamedTuple):
    """The inputs of products.

    Attributes:
        values: float32 [rows up to a multiple of 4, inputs].
    """

    values: Any


class Norm(NamedTuple):
    """A root mean square normalisation (arXiv 1910.07467).

    Attributes:
        weight: [width], or empty for none.
        epsilon: float32, added to the mean square.
        offset: float32, added to the weights.
        rounds_once: In 16 bits, whether a row is rounded after its product with the weights, not before it too.
    """

    weight: Any
    epsilon: Any
    offset: Any
    rounds_once: Any


class Heads(NamedTuple):
    """Queries, keys and values of the rows of a pass.

    Attributes:
        q: float32 [rows up to a multiple of 4, heads * width].
        k: float32 [rows up to a multiple of 4, key heads * width].
        v: float32 [rows up to a multiple of 4, key heads * width].
    """

    q: Any
    k: Any
    v: Any


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


@njit(cache=True, fastmath=FUSED, error_model="numpy", nogil=True)
def normalize(row: Any, norm: Any, out: Any) -> None:
    """`out = norm(row)` of one row, which may be `out` itself; an empty `Norm` copies it."""
    weight, offset = norm.weight, norm.offset
    if not weight.shape[0]:
        for k in range(row.shape[0]):
            out[k] = row[k]
        return
    scale = np.float32(1) / np.sqrt(_mean_square(row) + norm.epsilon)
    if norm.rounds_once:
        for k in range(row.shape[0]):
            out[k] = rounded((offset + widen(weight[k])) * (row[k] * scale), weight)
    else:
        for k in range(row.shape[0]):
            out[k] = rounded((offset + widen(weight[k])) * rounded(row[k] * scale, weight), weight)


@njit(cache=True, error_model="numpy", nogil=True)
def add_branch(branch: Any, rows: Any, norm: Any, scale: Any, x: Any, like: Any) -> None:
    """`x += scale * norm(branch)`.

    Args:
        branch: float32 [>= rows, width], the outputs of attention or of the feed-forward layers; overwritten.
        rows: Rows to compute.
        norm: `Norm`.
        scale: float32.
        x: float32 [>= rows, width].
        like: An array of the type to round to.
    """
    for r in range(rows):
        normalize(branch[r], norm, branch[r])
        for k in range(branch.shape[1]):
            x[r, k] = rounded(x[r, k] + rounded(scale * branch[r, k], like), like)


@njit(cache=True, fastmath=FUSED, error_model="numpy", nogil=True)
def steepness(x: Any, gelu: Any) -> Any:
    """The exponent of a gate's activation, which is `x / (1 + exp(-steepness))`.

    Args:
        x: float32.
        gelu: True for the tanh form of GELU (arXiv 1606.08415), False for SiLU.
    """
    return x * (np.float32(1.5957691216) + np.float32(0.0713548162726) * x * x) if gelu else x


@njit(cache=True, error_model="numpy", nogil=True)
def _two_streams(pair: Any, features: Any) -> Any:
    """The two features that are computed together, one of each half of the layer.

    A thread that goes through its pairs in order reads two long runs of memory, which the CPU fetches ahead.
    """
    n = np.int64(pair)
    m = n + (features + 1) // 2
    return n, m if m < features else n


@njit(cache=True, error_model="numpy", nogil=True)
def _pair(weight: Any, pair: Any, bias: Any, like: Any, x: Any, rows: Any, out: Any) -> None:
    """Two features of a linear layer, for all rows."""
    n, m = _two_streams(pair, weight.shape[0])
    for r in range(0, rows, 4):
        a0, a1, a2, a3, b0, b1, b2, b3 = _products(weight[n], weight[m], x[r], x[r + 1], x[r + 2], x[r + 3])
        out[r, n], out[r, m] = rounded(a0 + bias[n], like), rounded(b0 + bias[m], like)
        out[r + 1, n], out[r + 1, m] = rounded(a1 + bias[n], like), rounded(b1 + bias[m], like)
        out[r + 2, n], out[r + 2, m] = rounded(a2 + bias[n], like), rounded(b2 + bias[m], like)
        out[r + 3, n], out[r + 3, m] = rounded(a3 + bias[n], like), rounded(b3 + bias[m], like)


@njit(cache=True, error_model="numpy", nogil=True)
def norm_rows(x: Any, rows: Any, norm: Any, inputs: Any) -> None:
    """`inputs = norm(x)`.

    Args:
        x: float32 [>= rows, width].
        rows: Rows to compute.
        norm: `Norm`.
        inputs: `FloatRows`; overwritten.
    """
    for r in range(rows):
        normalize(x[r], norm, inputs.values[r])


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def project(inputs: Any, rows: Any, linear: Any, out: Any) -> None:
    """`out = linear(inputs)`.

    Args:
        inputs: `FloatRows`.
        rows: Rows to compute.
        linear: `Linear`.
        out: float32 [rows up to a multiple of 4, features].
    """
    weight, bias, like, values = linear.weight, linear.bias, linear.like, inputs.values
    for pair in prange((weight.shape[0] + 1) // 2):
        _pair(weight, pair, bias, like, values, rows, out)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def project_heads(inputs: Any, rows: Any, linears: Any, heads: Any) -> None:
    """Queries, keys and values.

    Args:
        inputs: `FloatRows`.
        rows: Rows to compute.
        linears: `HeadLinears`.
        heads: `Heads`; overwritten.
    """
    q, k, v = linears.q, linears.k, linears.v
    weight_q, bias_q, weight_k, bias_k, weight_v, bias_v = q.weight, q.bias, k.weight, k.bias, v.weight, v.bias
    queries, keys, values, x = heads.q, heads.k, heads.v, inputs.values
    pairs_q, pairs_k = (weight_q.shape[0] + 1) // 2, (weight_k.shape[0] + 1) // 2
    for pair in prange(pairs_q + pairs_k + (weight_v.shape[0] + 1) // 2):
        if pair < pairs_q:
            _pair(weight_q, pair, bias_q, weight_q, x, rows, queries)
        elif pair < pairs_q + pairs_k:
            _pair(weight_k, pair - pairs_q, bias_k, weight_k, x, rows, keys)
        else:
            _pair(weight_v, pair - pairs_q - pairs_k, bias_v, weight_v, x, rows, values)


_BLOCK = 32
"""Features of the feed-forward layer that a thread gates at once."""


@njit(cache=True, fastmath=FUSED, error_model="numpy", nogil=True)
def _gate(gated: Any, gelu: Any, out: Any, like: Any) -> None:
    """`out = activation(gated) * out`."""
    for k in range(gated.shape[0]):
        value = rounded(gated[k], like)
        value = rounded(value / (np.float32(1) + exp(-steepness(value, gelu))), like)
        out[k] = rounded(value * rounded(out[k], like), like)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def project_gated(inputs: Any, rows: Any, linears: Any, gelu: Any, out: Any) -> None:
    """`out = activation(gate(inputs)) * up(inputs)`.

    Args:
        inputs: `FloatRows`.
        rows: Rows to compute.
        linears: `GateLinears`.
        gelu: Whether the activation is the tanh form of GELU, else it is SiLU.
        out: float32 [rows up to a multiple of 4, features].
    """
    gate, up, values = linears.gate, linears.up, inputs.values
    weight_gate, bias_gate, weight_up, bias_up = gate.weight, gate.bias, up.weight, up.bias
    blocks = (weight_gate.shape[0] + _BLOCK - 1) // _BLOCK
    for block in prange(blocks):
        first = np.int64(block) * _BLOCK
        count = min(_BLOCK, weight_gate.shape[0] - first)
        gated = np.empty((rows + 3, _BLOCK), np.float32)
        for k in range(count):
            n = first + k
            for r in range(0, rows, 4):
                g0, g1, g2, g3, u0, u1, u2, u3 = _products(
                    weight_gate[n], weight_up[n], values[r], values[r + 1], values[r + 2], values[r + 3]
                )
                gated[r, k], out[r, n] = g0 + bias_gate[n], u0 + bias_up[n]
                gated[r + 1, k], out[r + 1, n] = g1 + bias_gate[n], u1 + bias_up[n]
                gated[r + 2, k], out[r + 2, n] = g2 + bias_gate[n], u2 + bias_up[n]
                gated[r + 3, k], out[r + 3, n] = g3 + bias_gate[n], u3 + bias_up[n]
        for r in range(rows):
            _gate(gated[r, :count], gelu, out[r, first : first + count], weight_gate)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def project_and_add(inputs: Any, rows: Any, linear: Any, x: Any) -> None:
    """`x += linear(inputs)`.

    Args:
        inputs: `FloatRows`.
        rows: Rows to compute.
        linear: `Linear`.
        x: float32 [rows up to a multiple of 4, features].
    """
    weight, bias, values = linear.weight, linear.bias, inputs.values
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
