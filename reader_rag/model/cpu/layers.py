"""All decoder layers of a pass, in one compiled call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from reader_rag.model.cpu.attention import Caches, attend
from reader_rag.model.cpu.products import (
    Linear,
    Norm,
    norm_and_gate,
    norm_and_project_heads,
    project_and_add,
)
from reader_rag.util.addresses import pointer

NORMS = ("input", "q", "k", "gated")
"""Normalisations of a layer, in the order of `Weights.norms`."""
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
"""Linear layers of a decoder layer, in the order of `Weights.linears`."""
_INPUT_NORM, _Q_NORM, _K_NORM, _GATED_NORM = range(4)
_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(7)


class Weights(NamedTuple):
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


class Buffers(NamedTuple):
    """What layers overwrite.

    Attributes:
        normed: float32 [rows up to a multiple of 4, hidden size].
        heads: `Heads`.
        attended: float32 [rows up to a multiple of 4, heads * width].
        gated: float32 [rows up to a multiple of 4, intermediate size].
    """

    normed: Any
    heads: Any
    attended: Any
    gated: Any


@njit(cache=True, error_model="numpy", nogil=True)
def _norm(weights: Any, layer: Any, which: Any) -> Any:
    array = carray(pointer(weights.norms[layer, which]), weights.widths[which], weights.like.dtype)
    return Norm(array, weights.epsilon)


@njit(cache=True, error_model="numpy", nogil=True)
def _linear(weights: Any, layer: Any, which: Any) -> Any:
    features, inputs = weights.shapes[which, 0], weights.shapes[which, 1]
    weight = carray(pointer(weights.linears[layer, which, 0]), (features, inputs), weights.like.dtype)
    return Linear(weight, carray(pointer(weights.linears[layer, which, 1]), features, np.float32))


@njit(cache=True, error_model="numpy", nogil=True)
def compute_layers(x: Any, rows: Any, weights: Any, rotation: Any, paths: Any, caches: Any, buffers: Any) -> None:
    """All decoder layers, in place.

    Args:
        x: float32 [rows up to a multiple of 4, hidden size]; embeddings of the rows, overwritten by the last layer's
            states.
        rows: Rows to compute.
        weights: `Weights`.
        rotation: `Rotation`.
        paths: `Paths`.
        caches: `Caches` of the first layer; the arrays of the others follow in memory.
        buffers: `Buffers`.
    """
    normed, heads = buffers.normed, buffers.heads
    layer_bytes = heads.k.shape[1] * caches.capacities * caches.like.itemsize
    for n in range(weights.norms.shape[0]):
        q, k, v = _linear(weights, n, _Q), _linear(weights, n, _K), _linear(weights, n, _V)
        norm_and_project_heads(x, rows, _norm(weights, n, _INPUT_NORM), normed, q, k, v, heads)
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
        project_and_add(buffers.attended, rows, _linear(weights, n, _O), x)
        gate, up = _linear(weights, n, _GATE), _linear(weights, n, _UP)
        norm_and_gate(x, rows, _norm(weights, n, _GATED_NORM), normed, gate, up, buffers.gated)
        project_and_add(buffers.gated, rows, _linear(weights, n, _DOWN), x)
