"""All decoder layers of a pass, in one compiled call, with weights in floating point or in int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import overload

from reader_rag.model.cpu import int8_products, products
from reader_rag.model.cpu.attention import Caches, attend
from reader_rag.model.cpu.int8_products import PackedLinear, QuantisedRows
from reader_rag.model.cpu.int8_tile import FEATURES, INPUTS
from reader_rag.model.cpu.products import GateLinears, HeadLinears, Linear, Norm
from reader_rag.util.addresses import pointer

NORMS = ("input", "q", "k", "gated")
"""Normalisations of a layer, in the order of `norms`."""
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
"""Linear layers of a decoder layer, in the order of `FloatWeights.linears`."""
FUSED_LINEARS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Linear layers that share their inputs and are one product, in the order of `Int8Weights.linears`."""
_INPUT_NORM, _Q_NORM, _K_NORM, _GATED_NORM = range(4)
_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(7)


class FloatWeights(NamedTuple):
    """The weights of all decoder layers, by their addresses: numba would unpack some hundred arrays in each call.

    Attributes:
        norms: int64 [layers, 4], addresses of the weights of `NORMS`.
        widths: int64 [4], their sizes, the same in each layer; 0: there is none.
        linears: int64 [layers, 7, 2], addresses of weight and bias of `LINEARS`.
        shapes: int64 [7, 2], features and inputs of each, the same in each layer.
        like: An array of their type.
        epsilon: Of the normalisations, float32.
        scale: Of the attention's scores, float32.
    """

    norms: Any
    widths: Any
    linears: Any
    shapes: Any
    like: Any
    epsilon: Any
    scale: Any


class Int8Weights(NamedTuple):
    """The weights of all decoder layers in int8, by their addresses.

    Attributes:
        norms: As in `FloatWeights`.
        widths: As in `FloatWeights`.
        linears: int64 [layers, 4, 3], addresses of the arrays of a `PackedLinear` for each of `FUSED_LINEARS`.
        shapes: int64 [4, 2], blocks and depth of each, the same in each layer.
        like: A float32 array, the type of the norms' weights.
        epsilon: Of the normalisations, float32.
        scale: Of the attention's scores, float32.
    """

    norms: Any
    widths: Any
    linears: Any
    shapes: Any
    like: Any
    epsilon: Any
    scale: Any


class LayerLinears(NamedTuple):
    """The linear layers of a decoder layer.

    Attributes:
        heads: Of queries, keys and values: `HeadLinears`, or one `PackedLinear`.
        output: `Linear` or `PackedLinear`.
        gated: `GateLinears`, or one `PackedLinear`.
        down: `Linear` or `PackedLinear`.
    """

    heads: Any
    output: Any
    gated: Any
    down: Any


class Buffers(NamedTuple):
    """What layers overwrite.

    Attributes:
        normed: The inputs of the attention and of the feed-forward layer: `FloatRows` or `QuantisedRows`.
        heads: `Heads`.
        attended: float32 [rows up to a multiple of 4, heads * width].
        output: `attended` as the inputs of a product: `FloatRows` of the same array, or `QuantisedRows`.
        gated: float32 [rows up to a multiple of 4, intermediate size].
        down: `gated` as the inputs of a product.
    """

    normed: Any
    heads: Any
    attended: Any
    output: Any
    gated: Any
    down: Any


def _by_type(kind: type, at: int, for_it: Any, otherwise: Any) -> Any:
    """A function of kernels that calls one of two by the type of its argument number `at`.

    Args:
        kind: A NamedTuple.
        at: The argument.
        for_it: Called if the argument is of that kind.
        otherwise: Called if it is not.
    """

    def function(*arguments: Any) -> Any:
        return (for_it if isinstance(arguments[at], kind) else otherwise)(*arguments)

    @overload(function, strict=False)
    def choose(*arguments: Any) -> Callable[..., Any]:
        given = arguments[at]
        chosen = for_it if isinstance(given, types.NamedTuple) and given.instance_class is kind else otherwise
        return lambda *arguments: chosen(*arguments)

    return function


@njit(cache=True, error_model="numpy", nogil=True)
def _norm(weights: Any, layer: Any, which: Any) -> Any:
    array = carray(pointer(weights.norms[layer, which]), weights.widths[which], weights.like.dtype)
    return Norm(array, weights.epsilon)


@njit(cache=True, error_model="numpy", nogil=True)
def _float_linear(weights: Any, layer: Any, which: Any) -> Any:
    features, inputs = weights.shapes[which, 0], weights.shapes[which, 1]
    weight = carray(pointer(weights.linears[layer, which, 0]), (features, inputs), weights.like.dtype)
    return Linear(weight, carray(pointer(weights.linears[layer, which, 1]), features, np.float32), weights.like)


@njit(cache=True, error_model="numpy", nogil=True)
def _float_linears(weights: Any, n: Any) -> Any:
    heads = HeadLinears(_float_linear(weights, n, _Q), _float_linear(weights, n, _K), _float_linear(weights, n, _V))
    gated = GateLinears(_float_linear(weights, n, _GATE), _float_linear(weights, n, _UP))
    return LayerLinears(heads, _float_linear(weights, n, _O), gated, _float_linear(weights, n, _DOWN))


@njit(cache=True, error_model="numpy", nogil=True)
def _packed_linear(weights: Any, layer: Any, which: Any) -> Any:
    blocks, depth = weights.shapes[which, 0], weights.shapes[which, 1]
    weight = carray(pointer(weights.linears[layer, which, 0]), (blocks, depth, FEATURES * INPUTS), np.uint8)
    scales = carray(pointer(weights.linears[layer, which, 1]), blocks * FEATURES, np.float32)
    return PackedLinear(
        weight, scales, carray(pointer(weights.linears[layer, which, 2]), blocks * FEATURES, np.float32)
    )


@njit(cache=True, error_model="numpy", nogil=True)
def _packed_linears(weights: Any, n: Any) -> Any:
    return LayerLinears(
        _packed_linear(weights, n, 0),
        _packed_linear(weights, n, 1),
        _packed_linear(weights, n, 2),
        _packed_linear(weights, n, 3),
    )


@njit(cache=True, error_model="numpy", nogil=True)
def _as_they_are(values: Any, rows: Any, inputs: Any) -> None:
    """`FloatRows` are the values themselves."""


_linears_of = _by_type(Int8Weights, 0, _packed_linears, _float_linears)
_norm_rows = _by_type(QuantisedRows, 3, int8_products.norm_rows, products.norm_rows)
_quantise_rows = _by_type(QuantisedRows, 2, int8_products.quantise_rows, _as_they_are)
_project_heads = _by_type(PackedLinear, 2, int8_products.project_heads, products.project_heads)
_project_gated = _by_type(PackedLinear, 2, int8_products.project_gated, products.project_gated)
_project_and_add = _by_type(PackedLinear, 2, int8_products.project_and_add, products.project_and_add)
_project = _by_type(PackedLinear, 2, int8_products.project, products.project)


@njit(cache=True, error_model="numpy", nogil=True)
def norm_and_project(x: Any, rows: Any, norm: Any, normed: Any, linear: Any, out: Any) -> None:
    """`out = linear(norm(x))`.

    Args:
        x: float32 [rows up to a multiple of 4, inputs].
        rows: Rows to compute.
        norm: `Norm` of the inputs.
        normed: `FloatRows` or `QuantisedRows`; overwritten.
        linear: `Linear`, or `PackedLinear` for `QuantisedRows`.
        out: float32 [rows up to a multiple of 4, features].
    """
    _norm_rows(x, rows, norm, normed)
    _project(normed, rows, linear, out)


@njit(cache=True, error_model="numpy", nogil=True)
def compute_layers(x: Any, rows: Any, weights: Any, rotation: Any, paths: Any, caches: Any, buffers: Any) -> None:
    """All decoder layers, in place.

    Args:
        x: float32 [rows up to a multiple of 4, hidden size]; embeddings of the rows, overwritten by the last layer's
            states.
        rows: Rows to compute.
        weights: `FloatWeights` or `Int8Weights`.
        rotation: `Rotation`.
        paths: `Paths`.
        caches: `Caches` of the first layer; the arrays of the others follow in memory.
        buffers: `Buffers`.
    """
    normed, heads = buffers.normed, buffers.heads
    layer_bytes = heads.k.shape[1] * caches.capacities * caches.like.itemsize
    for n in range(weights.norms.shape[0]):
        linears = _linears_of(weights, n)
        _norm_rows(x, rows, _norm(weights, n, _INPUT_NORM), normed)
        _project_heads(normed, rows, linears.heads, heads)
        here = Caches(
            caches.starts,
            caches.committed,
            caches.capacities,
            caches.keys + n * layer_bytes,
            caches.values + n * layer_bytes,
            caches.like,
        )
        q_norm, k_norm = _norm(weights, n, _Q_NORM), _norm(weights, n, _K_NORM)
        attend(heads, q_norm, k_norm, rotation, paths, here, weights.scale, buffers.attended)
        _quantise_rows(buffers.attended, rows, buffers.output)
        _project_and_add(buffers.output, rows, linears.output, x)
        _norm_rows(x, rows, _norm(weights, n, _GATED_NORM), normed)
        _project_gated(normed, rows, linears.gated, buffers.gated)
        _quantise_rows(buffers.gated, rows, buffers.down)
        _project_and_add(buffers.down, rows, linears.down, x)
