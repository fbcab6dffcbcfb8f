"""Soft caps of attention scores and logits, and the last scale of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from reader_rag.model.cpu.rounding import rounded
from reader_rag.util.vector_math import exp


@njit(cache=True, error_model="numpy", nogil=True)
def tanh(x: Any) -> Any:
    """The hyperbolic tangent in float32, within three units in the last place; a loop over it becomes vector code."""
    square = x * x
    p = np.float32(-5.70498872745e-3)
    p = p * square + np.float32(2.06390887954e-2)
    p = p * square + np.float32(-5.37397155531e-2)
    p = p * square + np.float32(1.33314422036e-1)
    p = p * square + np.float32(-3.33332819422e-1)
    small = p * square * x + x
    magnitude = np.abs(x)
    large = np.float32(1) - np.float32(2) / (exp(magnitude + magnitude) + np.float32(1))
    return small if magnitude < np.float32(0.625) else np.copysign(large, x)


@njit(cache=True, error_model="numpy", nogil=True)
def cap_scores(scores: Any, cap: Any) -> None:
    """`scores = cap * tanh(scores / cap)`, in place.

    Args:
        scores: float32 [any].
        cap: float32, above 0.
    """
    for k in range(scores.shape[0]):
        scores[k] = cap * tanh(scores[k] / cap)


@njit(cache=True, parallel=True, error_model="numpy", nogil=True)
def scale_logits(logits: Any, rows: Any, divisor: Any, cap: Any, like: Any) -> None:
    """Divide logits and cap them, in place; in 16 bits every result is rounded.

    Args:
        logits: float32 [at least rows, vocabulary].
        rows: Rows to compute.
        divisor: float32.
        cap: float32, of the quotients; 0: none.
        like: An array of the type to round to.
    """
    for row in prange(rows):
        for k in range(logits.shape[1]):
            value = rounded(logits[row, k] / divisor, like)
            if cap > 0:
                value = rounded(value / cap, like)
                value = rounded(rounded(tanh(value), like) * cap, like)
            logits[row, k] = value
