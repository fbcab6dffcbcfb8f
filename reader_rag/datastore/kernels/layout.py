"""What the search kernels read and write: the table of segments, the buffers of matches, and stored tokens.

A segment is a text of documents, enclosed by separators, and its suffix array: the positions of all tokens that have a
predecessor in their document, sorted by the tokens before them, read backwards. So the positions behind the same last
tokens are neighbours, and one binary search finds the longest match and, around it, all shorter ones. No state is kept
between searches: a step that breaks a match costs what a step that extends it costs.

The separator is the largest value of the stored width and equals no token. Tokens are stored in 16, 24 (three bytes,
the lowest first) or 32 bits. Segments are passed as addresses, because their number varies. Files may be damaged:
kernels clamp every number from a file before they use it as a position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

MAX_MATCH = 64
"""Most tokens of a context that are compared; a match of that length may be longer."""

# Columns of the table of segments: addresses and lengths of arrays.
TOKENS, SIZE, POSITIONS, POSITION_COUNT, BUCKET_STARTS, VOCABULARY, TOMBSTONES, TOMBSTONE_COUNT = range(8)
COLUMNS = 8


class SegmentTable(NamedTuple):
    """The segments that one search reads.

    Attributes:
        rows: int64 [segments, COLUMNS], addresses and lengths of each segment's arrays. `BUCKET_STARTS` is 0 where a
            segment has none. Tombstones are int64 [n, 2], the first position of each removed document and the one
            behind its last, ascending.
        token_type: An empty array of the stored type, from which the kernels take it.
        separator: The stored separator.
        vocabulary: Number of token ids; what is stored between them and the separator is damage.
    """

    rows: Any
    token_type: Any
    separator: int
    vocabulary: int


class MatchBuffers(NamedTuple):
    """What a search writes.

    Attributes:
        continuations: int32 [max_matches * (max_tokens + 1)], the tokens behind each match, ended by -1.
        matches: int32 [2, max_matches], where each match's tokens begin in `continuations`, and its match length.
        origins: int64 [2, max_matches], the segment and the position of each match.
    """

    continuations: Any
    matches: Any
    origins: Any


@njit(cache=True, nogil=True, error_model="numpy")
def token_at(tokens: Any, i: Any) -> Any:
    """One token of a stored text.

    Args:
        tokens: uint16 or uint32 [n], or uint8 [3 * n].
        i: Index of the token.
    """
    if tokens.itemsize == 1:
        return np.int64(tokens[3 * i]) | np.int64(tokens[3 * i + 1]) << 8 | np.int64(tokens[3 * i + 2]) << 16
    return np.int64(tokens[i])
