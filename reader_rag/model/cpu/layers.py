"""All decoder layers of a pass, in one compiled call, with weights in floating point or in int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import overload

from reader_rag.model.cpu import int8_products, products
from reader_rag.model.cpu.attention import Attention, Caches, attend
from reader_rag.model.cpu.int8_products import PackedLinear, QuantisedRows
from reader_rag.model.cpu.int8_tile import FEATURES, INPUTS
from reader_rag.model.cpu.products import GateLinears, HeadLinears, Linear, Norm, add_branch
from reader_rag.util.addresses import pointer

NORMS = ("input", "q", "k", "attended", "gated", "fed")
"""Normalisations of a layer, in the order of `norms`."""
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
"""Linear layers of a decoder layer, in the order of `FloatWeights.linears`."""
FUSED_LINEARS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Linear layers that share their inputs and are one product, in the order of `Int8Weights.linears`."""
_INPUT_NORM, _Q_NORM, _K_NORM, _ATTENDED_NORM, _GATED_NORM, _FED_NORM = range(6)
_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(7)


class FloatWeights(NamedTuple):
    """The weights of all decoder layers, by their addresses: numba would unpack some hundred arrays in each call.

    Attributes:
        norms: int64 [layers, 6], addresses of the weights of `NORMS`.
        widths: int64 [6], their sizes, the same in each layer; 0: there is none.
        linears: int64 [layers, 7, 2], addresses of weight and bias of `LINEARS`.
        shapes: int64 [7, 2], features and inputs of each, the same in each layer.
        like: An array of their type.
    """

    norms: Any
    widths: Any
    linears: Any
    shapes: Any
    like: Any


class Int8Weights(NamedTuple):
    """The weights of all decoder layers in int8, by their addresses.

    Attributes:
        norms: As in `FloatWeights`.
        widths: As in `FloatWeights`.
        linears: int64 [layers, 4, 3], addresses of the arrays of a `PackedLinear` for each of `FUSED_LINEARS`.
        shapes: int64 [4, 2], blocks and depth of each, the same in each layer.
        like: A float32 array, the type of the norms' weights.
    """

    norms: Any
    widths: Any
    linears: Any
    shapes: Any
    like: Any


class Form(NamedTuple):
    """What layers compute around their products, as `architecture.Architecture` declares it.

    Attributes:
        rotations: int64 [layers], kinds of `Rotation`; -1: none.
        windows: int64 [layers], positions that a row sees, its own included; 0: all.
        score_scale: Of the attention's scores, float32.
        score_cap: Soft cap of the scores, float32; 0: none.
        epsilon: Of the normalisations, float32.
        norm_offset: Added to the weights of the normalisations, float32.
        norm_rounds_once: In 16 bits, whether a normalised row is rounded after its product with the weights alone.
        residual_scale: Of the outputs of attention and of the feed-forward layers, float32.
        gelu: Whether gates have the tanh form of GELU, else SiLU.
    """

    rotations: Any
    windows: Any
    score_scale: Any
    score_cap: Any
    epsilon: Any
    norm_offset: Any
    norm_rounds_once: Any
    residual_scale: Any
    gelu: Any


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
        attention: The inputs of the attention: `FloatRows` or `QuantisedRows`.
        heads: `Heads`.
        attended: float32 [rows up to a multiple of 4, heads * width].
        output: `attended` as the inputs of a product: `FloatRows` of the same array, or `QuantisedRows`.
        feed: The inputs of the feed-forward layer, as those of the attention.
        gated: float32 [rows up to a multiple of 4, intermediate size].
        down: `gated` as the inputs of a product.
        branch: float32 [rows up to a multiple of 4, hidden size], outputs that are normalised or scaled before they
            are added; empty if none are.
        places: int64 [layers + 1], where in `states` the rows after so many layers are kept; -1: nowhere.
        states: float32 [n, rows up to a multiple of 4, hidden size].
    """

    attention: Any
    heads: Any
    attended: Any
    output: Any
    feed: Any
    gated: Any
    down: Any
    branch: Any
    places: Any
    states: Any


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
def _norm(weights: Any, form: Any, layer: Any, which: Any) -> Any:
    array = carray(pointer(weights.norms[layer, which]), weights.widths[which], weights.like.dtype)
    return Norm(array, form.epsilon, form.norm_offset, form.norm_rounds_once)


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
def _add_product(inputs: Any, rows: Any, linear: Any, norm: Any, scale: Any, x: Any, branch: Any, like: Any) -> None:
    """`x += scale * norm(linear(inputs))`; where `norm` is empty and `scale` 1, `branch` is not needed."""
    if norm.weight.shape[0] or scale != np.float32(1):
        _project(inputs, rows, linear, branch)
        add_branch(branch, rows, norm, scale, x, like)
    else:
        _project_and_add(inputs, rows, linear, x)


@njit(cache=True, error_model="numpy", nogil=True)
def _keep_states(x: Any, rows: Any, layers: Any, buffers: Any) -> None:
    """Copy the rows after so many layers to where they are wanted."""
    place = buffers.places[layers]
    if place >= 0:
        buffers.states[place, :rows] = x[:rows]


@njit(cache=True, error_model="numpy", nogil=True)
def compute_layers(
    x: Any, rows: Any, weights: Any, form: Any, rotation: Any, paths: Any, caches: Any, buffers: Any
) -> None:
    """All decoder layers, in place.

    Args:
        x: float32 [rows up to a multiple of 4, hidden size]; embeddings of the rows, overwritten by the last layer's
            states.
        rows: Rows to compute.
        weights: `FloatWeights` or `Int8Weights`.
        form: `Form`.
        rotation: `Rotation`.
        paths: `Paths`.
        caches: `Caches` of the first layer; the arrays of the others follow in memory.
        buffers: `Buffers`.
    """
    heads, branch, like = buffers.heads, buffers.branch, weights.like
    layer_bytes = heads.k.shape[1] * caches.capacities * caches.like.itemsize
    for n in range(weights.norms.shape[0]):
        _keep_states(x, rows, n, buffers)
        linears = _linears_of(weights, n)
        _norm_rows(x, rows, _norm(weights, form, n, _INPUT_NORM), buffers.attention)
        _project_heads(buffers.attention, rows, linears.heads, heads)
        here = Caches(
            caches.starts,
            caches.committed,
            caches.capacities,
            caches.keys + n * layer_bytes,
            caches.values + n * layer_bytes,
            caches.like,
        )
        attention = Attention(
            _norm(weights, form, n, _Q_NORM),
            _norm(weights, form, n, _K_NORM),
            form.rotations[n],
            form.windows[n],
            form.score_scale,
            form.score_cap,
        )
        attend(heads, attention, rotation, paths, here, buffers.attended)
        _quantise_rows(buffers.attended, rows, buffers.output)
        norm = _norm(weights, form, n, _ATTENDED_NORM)
        _add_product(buffers.output, rows, linears.output, norm, form.residual_scale, x, branch, like)
        _norm_rows(x, rows, _norm(weights, form, n, _GATED_NORM), buffers.feed)
        _project_gated(buffers.feed, rows, linears.gated, form.gelu, buffers.gated)
        _quantise_rows(buffers.gated, rows, buffers.down)
        norm = _norm(weights, form, n, _FED_NORM)
        _add_product(buffers.down, rows, linears.down, norm, form.residual_scale, x, branch, like)
    _keep_states(x, rows, weights.norms.shape[0], buffers)
