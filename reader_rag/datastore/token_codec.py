"""How tokens are stored: in 16, 24 or 32 bits, by the vocabulary, so that no token is ever cut."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore import kernels
from reader_rag.errors import MissingDependencyError

_RANKED = 4
"""Texts of so many times the vocabulary's tokens are sorted by the ranks of the tokens that are in them."""


@dataclass(frozen=True)
class Width:
    """The stored form of tokens.

    Attributes:
        bytes: Of a token: 2, 3 or 4. The largest value separates documents and is no token.
    """

    bytes: int

    @classmethod
    def of(cls, vocabulary: int) -> Width:
        """The narrowest one for a vocabulary.

        Raises:
            ValueError: There is none.
        """
        if not 1 <= vocabulary <= np.iinfo(np.int32).max:
            raise ValueError(f"a vocabulary has 1 to 2147483647 tokens, not {vocabulary}")
        return cls(2 if vocabulary < 1 << 16 else (3 if vocabulary < 1 << 24 else 4))

    @property
    def separator(self) -> int:
        """What encloses documents."""
        return (1 << (8 * self.bytes)) - 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of stored arrays, which have `each` elements a token."""
        return np.dtype({2: "<u2", 3: "u1", 4: "<u4"}[self.bytes])

    @property
    def each(self) -> int:
        """Elements of a stored array by token."""
        return 3 if self.bytes == 3 else 1

    def pack(self, tokens: NDArray[np.integer]) -> NDArray[Any]:
        """The stored form of tokens, or of separators: [n] to [n * each]."""
        if self.bytes != 3:
            return tokens.astype(self.dtype)
        return tokens.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1)

    def unpack(self, stored: NDArray[Any]) -> NDArray[np.int64]:
        """int64 [n], the tokens of a stored array."""
        if self.bytes != 3:
            return stored.astype(np.int64)
        parts = stored.reshape(-1, 3).astype(np.int64)
        result: NDArray[np.int64] = parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16
        return result

    def sort(self, stored: NDArray[Any]) -> NDArray[np.int32]:
        """The places of a stored text in the order that `kernels` searches.

        Args:
            stored: A text that begins and ends with a separator, of fewer than 2**31 tokens.

        Returns:
            int32 [places].

        Raises:
            MissingDependencyError: pydivsufsort is not installed.
        """
        try:
            from pydivsufsort import divsufsort
        except ImportError as cause:
            raise MissingDependencyError("the datastore needs pydivsufsort: pip install pydivsufsort") from cause
        count = len(stored) // self.each
        codes, width = np.zeros(0, np.int64), self.bytes
        if count >= _RANKED * (1 << 16) and width < 4:
            present = np.zeros(self.separator + 1, np.bool_)
            kernels.mark_tokens(stored, count, present)
            codes = np.cumsum(present, dtype=np.int64) - 1
            width = (int(codes[-1]).bit_length() + 7) // 8 or 1
        text = np.empty(count * width, np.uint8)
        kernels.encode_backwards(stored, count, codes, width, text)
        order = divsufsort(text)
        # Sorting a long text takes most of a machine's memory: the places are written over what they are made of.
        places = order if order.dtype == np.int32 else np.empty(count, np.int32)
        number = kernels.pick_places(order, width, stored, count, self.separator, places)
        return np.array(places[:number])


def digest(tokens: NDArray[np.int64]) -> int:
    """64 bits that tell whether two documents have the same tokens, whatever their width."""
    return int.from_bytes(hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=8).digest(), "little")


def token_array(tokens: Sequence[int] | NDArray[np.integer], vocabulary: int) -> NDArray[np.int64]:
    """int64 [n].

    Raises:
        ValueError: Not a flat list of token ids of the vocabulary.
    """
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"token ids must be a flat list, not of shape {array.shape}")
    if not len(array):
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, not {array.dtype}")
    least, most = int(array.min()), int(array.max())
    if least < 0 or most >= vocabulary:
        raise ValueError(f"token ids must lie from 0 to {vocabulary - 1}: {least if least < 0 else most}")
    return array.astype(np.int64, copy=False)


def checksum(data: Any) -> int:
    """CRC-32 of bytes or of an array."""
    return zlib.crc32(memoryview(data).cast("B"))
