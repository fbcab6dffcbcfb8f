"""Conversions between float32 and the 16-bit types, in numba, rounded to nearest even as PyTorch rounds.

Arrays of weights, keys and values are float32, uint16 with the bits of bfloat16, or int16 with those of float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload


@njit(cache=True)
def _from_float16(bits: Any) -> Any:
    """float32 of float16 bits (int16).

    No case is left to arithmetic on denormal numbers, which some CPUs take a hundred times as long for.
    """
    half = np.uint32(np.uint16(bits))
    magnitude = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
    exponent = magnitude & np.uint32(0x0F800000)
    normal = np.uint32(magnitude + np.uint32(112 << 23))
    infinite = np.uint32(normal + np.uint32(112 << 23))
    tiny = np.uint32(normal + np.uint32(1 << 23)).view(np.float32) - np.uint32(113 << 23).view(np.float32)
    large = infinite if exponent == np.uint32(0x0F800000) else normal
    found = np.float32(tiny).view(np.uint32) if exponent == np.uint32(0) else large
    return np.uint32(found | np.uint32((half & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@njit(cache=True)
def _round_to_float16(value: Any) -> Any:
    """float32 `value` rounded to the nearest float16 (to even), as float32."""
    bits = np.float32(value).view(np.uint32)
    sign = bits & np.uint32(0x80000000)
    magnitude = np.uint32(bits ^ sign)
    # Below 2**-14 there are multiples of 2**-24 only, as among the float32 from 0.5 on.
    small = (magnitude.view(np.float32) + np.float32(0.5)) - np.float32(0.5)
    normal = (magnitude + np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    large = np.uint32(0x7F800000) if normal >= np.uint32(0x47800000) else np.uint32(normal)
    found = np.float32(small).view(np.uint32) if magnitude < np.uint32(113 << 23) else large
    found = np.uint32(0x7FC00000) if value != value else np.uint32(found)
    return np.uint32(found | sign).view(np.float32)


@njit(cache=True)
def _to_float16(value: Any) -> Any:
    """The bits of float16 (int16), to nearest even."""
    bits = np.float32(_round_to_float16(value)).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    small = np.uint32(magnitude.view(np.float32) * np.float32(1 << 24))
    normal = np.uint32(np.uint32(magnitude - np.uint32(112 << 23)) >> np.uint32(13))
    large = np.uint32(0x7C00 | (0x200 if value != value else 0)) if magnitude >= np.uint32(0x7F800000) else normal
    found = small if magnitude < np.uint32(113 << 23) else large
    return np.int16(np.uint16(found | np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))))


def widen(value: Any) -> Any:
    """float32 of a weight: bfloat16 bits (uint16), float16 bits (int16) or float32."""
    if isinstance(value, np.uint16):
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return _from_float16(value) if isinstance(value, np.int16) else value


@overload(widen, strict=False)
def _widen(value: Any) -> Callable[..., Any]:
    if value == types.uint16:
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return (lambda value: _from_float16(value)) if value == types.int16 else (lambda value: value)


@njit(cache=True)
def _to_bfloat16(value: Any) -> Any:
    """The bits of bfloat16, to nearest even, in the upper half of a uint32. A NaN stays one."""
    bits = np.float32(value).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.uint32(rounded if value == value else np.uint32(0x7FC00000))


def rounded(value: Any, like: Any) -> Any:
    """float32 `value` rounded to the type of `like` (see `widen`), as float32."""
    if like.dtype == np.uint16:
        return np.uint32(_to_bfloat16(value)).view(np.float32)
    return _round_to_float16(value) if like.dtype == np.int16 else value


@overload(rounded, strict=False)
def _rounded(value: Any, like: Any) -> Callable[..., Any]:
    if like.dtype == types.uint16:
        return lambda value, like: np.uint32(_to_bfloat16(value)).view(np.float32)
    if like.dtype == types.int16:
        return lambda value, like: _round_to_float16(value)
    return lambda value, like: value


def narrowed(value: Any, like: Any) -> Any:
    """float32 `value` as an element of `like`."""
    if like.dtype == np.uint16:
        return np.uint16(_to_bfloat16(value) >> np.uint32(16))
    return _to_float16(value) if like.dtype == np.int16 else value


@overload(narrowed, strict=False)
def _narrowed(value: Any, like: Any) -> Callable[..., Any]:
    if like.dtype == types.uint16:
        return lambda value, like: np.uint16(_to_bfloat16(value) >> np.uint32(16))
    if like.dtype == types.int16:
        return lambda value, like: _to_float16(value)
    return lambda value, like: value
