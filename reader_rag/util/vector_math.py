"""Functions of float32 numbers for numba loops, which become vector code there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

FUSED = {"contract", "nsz"}
"""Options for `fastmath` with which sums are taken in the written order."""


@njit(cache=True, fastmath=FUSED, error_model="numpy", nogil=True)
def exp(x: Any) -> Any:
    """e**x in float32, within two units in the last place; a loop over it becomes vector code."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
