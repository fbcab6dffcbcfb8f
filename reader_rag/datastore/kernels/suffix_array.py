"""Construction of a segment's suffix array: prepare its text for a byte sorter, and keep what the search needs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from reader_rag.datastore.kernels.layout import token_at


@njit(cache=True, nogil=True, error_model="numpy")
def encode_backwards(tokens: Any, count: int, codes: Any, width: int, out: Any) -> None:
    """Write a text backwards, each token as a big-endian number of `width` bytes.

    Args:
        tokens: Stored text.
        count: Tokens of it.
        codes: int64 [separator + 1], the number written for each token, in the tokens' order; empty: the token itself.
        width: Bytes of a number.
        out: uint8 [count * width], overwritten.
    """
    coded = codes.shape[0] > 0
    for i in range(count):
        token = token_at(tokens, count - 1 - i)
        code = codes[token] if coded else token
        for b in range(width):
            out[i * width + b] = (code >> (8 * (width - 1 - b))) & 255


@njit(cache=True, nogil=True, error_model="numpy")
def select_positions(order: Any, width: int, tokens: Any, separator: int, out: Any) -> int:
    """Turn the suffix array of the bytes that `encode_backwards` wrote into that of the tokens.

    Args:
        order: Integers [tokens * width], the suffix array of the bytes.
        width: Bytes of a token in them.
        tokens: Stored text.
        separator: Its separator.
        out: int32 [tokens], overwritten; may be `order` itself.

    Returns:
        The number of entries: positions of tokens that have a predecessor in their document.
    """
    count = order.shape[0] // width
    n = 0
    for i in range(order.shape[0]):
        at = np.int64(order[i])
        if at % width:
            continue
        position = count - at // width
        if (
            0 < position < count
            and token_at(tokens, position - 1) != separator
            and token_at(tokens, position) != separator
        ):
            out[n] = position
            n += 1
    return n


@njit(cache=True, nogil=True, error_model="numpy")
def mark_tokens(tokens: Any, count: int, present: Any) -> None:
    """Mark the tokens that occur in a text.

    Args:
        tokens: Stored text.
        count: Tokens of it.
        present: bool [separator + 1]; `present[token]` is set for each of them.
    """
    for i in range(count):
        present[token_at(tokens, i)] = True


@njit(cache=True, nogil=True, error_model="numpy")
def count_buckets(tokens: Any, count: int, separator: int, bucket_starts: Any) -> None:
    """Compute where in the suffix array the entries behind each token begin.

    Args:
        tokens: Stored text.
        count: Tokens of it.
        separator: Its separator.
        bucket_starts: int32 [vocabulary + 1], overwritten; the entries behind token t are those from
            `bucket_starts[t]` to `bucket_starts[t + 1]`.
    """
    bucket_starts[:] = 0
    before = separator
    for i in range(count):
        token = token_at(tokens, i)
        if before != separator and token != separator:
            bucket_starts[before + 1] += 1
        before = token
    for t in range(1, bucket_starts.shape[0]):
        bucket_starts[t] += bucket_starts[t - 1]


@njit(cache=True, nogil=True, error_model="numpy")
def keep_positions(positions: Any, starts: Any, shifts: Any, out: Any) -> int:
    """Drop the entries of some documents from a suffix array; the order of the others stays.

    Args:
        positions: int32 [n], the suffix array.
        starts: int64 [documents], where each document begins, ascending.
        shifts: int64 [documents], by how many tokens each document moves down; negative: it is dropped.
        out: int32 [>= entries kept], overwritten.

    Returns:
        The number of entries kept.
    """
    n = 0
    for i in range(positions.shape[0]):
        position = np.int64(positions[i])
        low, high = 0, starts.shape[0]
        while low < high:
            middle = (low + high) >> 1
            if starts[middle] <= position:
                low = middle + 1
            else:
                high = middle
        if low and shifts[low - 1] >= 0:
            out[n] = position - shifts[low - 1]
            n += 1
    return n
