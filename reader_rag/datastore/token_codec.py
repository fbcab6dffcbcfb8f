"""TokenCodec: tokens are stored in 16, 24 or 32 bits, chosen by the vocabulary, so that no token id is truncated."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from reader_rag.datastore.kernels import suffix_array
from reader_rag.errors import ConfigError, DatastoreMismatchError, MissingDependencyError
from reader_rag.util.encodable import is_encodable
from reader_rag.util.fork import note_threads

_RANKED = 4
"""Texts of so many times 65,536 tokens are sorted by the ranks of the tokens that occur in them."""
_SHORT = 1 << 18
"""Texts of fewer bytes are sorted by one thread, within 10 ms. A text of one document takes 0.1 ms, and where other
processes use the cores, waiting for a second thread takes many times that."""


@dataclass(frozen=True)
class TokenCodec:
    """Encodes token ids as stored arrays.

    Attributes:
        bytes: Bytes of a stored token: 2, 3 or 4. The largest value is the separator and no token.
    """

    bytes: int

    @classmethod
    def for_vocabulary(cls, vocabulary: int) -> TokenCodec:
        """The codec with the fewest bytes.

        Args:
            vocabulary: Number of token ids.

        Raises:
            ConfigError: The number is no integer, below 1, or above 2**31 - 1.
        """
        whole = isinstance(vocabulary, Integral) and not isinstance(vocabulary, bool)
        if not whole or not 1 <= vocabulary <= np.iinfo(np.int32).max:
            raise ConfigError(f"a vocabulary has 1 to 2147483647 tokens, not {vocabulary!r:.80}")
        return cls(2 if vocabulary < 1 << 16 else (3 if vocabulary < 1 << 24 else 4))

    @property
    def separator(self) -> int:
        """The value that encloses documents."""
        return (1 << (8 * self.bytes)) - 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of stored arrays."""
        return np.dtype({2: "<u2", 3: "u1", 4: "<u4"}[self.bytes])

    @property
    def elements(self) -> int:
        """Elements of a stored array by token."""
        return 3 if self.bytes == 3 else 1

    def encode(self, tokens: NDArray[np.integer]) -> NDArray[Any]:
        """Encode tokens or separators.

        Args:
            tokens: Integers [n].

        Returns:
            `dtype` [n * elements].
        """
        if self.bytes != 3:
            return tokens.astype(self.dtype)
        return tokens.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1)

    def decode(self, stored: NDArray[Any]) -> NDArray[np.int64]:
        """Decode a stored array.

        Args:
            stored: `dtype` [n * elements].

        Returns:
            int64 [n].
        """
        if self.bytes != 3:
            return stored.astype(np.int64)
        columns = stored.reshape(-1, 3).astype(np.int64)
        result: NDArray[np.int64] = columns[:, 0] | columns[:, 1] << 8 | columns[:, 2] << 16
        return result

    def suffix_array(self, stored: NDArray[Any]) -> NDArray[np.int32]:
        """Sort the positions of a stored text by the tokens before them; see `kernels.layout`.

        `pydivsufsort` sorts bytes: tokens are written backwards, as big-endian numbers. In long texts these are ranks
        among the tokens that occur, in as few bytes as the ranks need.

        Args:
            stored: `dtype` [n * elements], n below 2**31; begins and ends with a separator.

        Returns:
            int32 [entries].

        Raises:
            ForkError: This process was forked after OpenMP's threads had started.
            MissingDependencyError: pydivsufsort is not installed.
        """
        try:
            from pydivsufsort import divsufsort
        except ImportError as cause:
            raise MissingDependencyError("the datastore needs pydivsufsort: pip install pydivsufsort") from cause
        count = len(stored) // self.elements
        codes, width = np.zeros(0, np.int64), self.bytes
        if count >= _RANKED * (1 << 16) and width < 4:
            present = np.zeros(self.separator + 1, np.bool_)
            suffix_array.mark_tokens(stored, count, present)
            codes = np.cumsum(present, dtype=np.int64) - 1
            width = (int(codes[-1]).bit_length() + 7) // 8 or 1
        text = np.empty(count * width, np.uint8)
        suffix_array.encode_backwards(stored, count, codes, width, text)
        note_threads()
        with _one_thread() if len(text) < _SHORT else nullcontext():
            order = divsufsort(text)
        # Sorting a long text takes most of a machine's memory, so the result overwrites its input.
        positions = order if order.dtype == np.int32 else np.empty(count, np.int32)
        number = suffix_array.select_positions(order, width, stored, self.separator, positions)
        return np.array(positions[:number])


def _one_thread() -> AbstractContextManager[object]:
    """Loops of the sorter run on the calling thread alone."""
    limit: AbstractContextManager[object] = _openmp().limit(limits=1)
    return limit


@cache
def _openmp() -> ThreadpoolController:
    """The OpenMP libraries that are loaded; the sorter's is one of them once it is imported."""
    return ThreadpoolController().select(internal_api="openmp")


@dataclass(frozen=True)
class Identity:
    """The model that a datastore's tokens are of; every file carries it.

    Attributes:
        tokenizer: Fingerprint of the tokenizer.
        vocabulary: Number of token ids.

    Raises:
        ConfigError: The fingerprint is no string, or cannot be stored.
    """

    tokenizer: str
    vocabulary: int

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, str) or not is_encodable(self.tokenizer):
            raise ConfigError(f"the fingerprint of a tokenizer must be a string, not {self.tokenizer!r:.80}")

    @property
    def codec(self) -> TokenCodec:
        """The codec of the datastore."""
        return TokenCodec.for_vocabulary(self.vocabulary)

    def check(self, header: dict[str, Any], path: Path) -> None:
        """Compare with the header of a file.

        Args:
            header: The header, with `tokenizer` and `vocabulary`.
            path: The file, for the message.

        Raises:
            DatastoreMismatchError: The file is of another tokenizer or vocabulary.
        """
        for name, expected in (("tokenizer", self.tokenizer), ("vocabulary", self.vocabulary)):
            if header.get(name) != expected:
                raise DatastoreMismatchError(
                    f"{path} was made with {name} {header.get(name)!r}, not {expected!r}: open it with the model that "
                    "made it, or build another datastore in a new folder"
                )


def token_digest(tokens: NDArray[np.int64]) -> int:
    """64 bits that tell whether two documents have the same tokens, whatever their codec."""
    return int.from_bytes(hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=8).digest(), "little")


def token_array(tokens: Sequence[int] | NDArray[np.integer], vocabulary: int) -> NDArray[np.int64]:
    """Convert token ids to an array, and check them.

    Args:
        tokens: Token ids [n].
        vocabulary: Number of token ids.

    Returns:
        int64 [n].

    Raises:
        ConfigError: The input is not flat, not of integers, or has an id outside the vocabulary.
    """
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError("token ids must be a flat list of integers") from error
    if array.ndim != 1:
        raise ConfigError(f"token ids must be a flat list, not of shape {array.shape}")
    if not len(array):
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise ConfigError(f"token ids must be integers, not {array.dtype}")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= vocabulary:
        raise ConfigError(f"token ids must lie from 0 to {vocabulary - 1}: {lowest if lowest < 0 else highest}")
    return array.astype(np.int64, copy=False)


def check_version(path: Path, found: int | str, expected: int) -> None:
    """Compare the format's version in a file with the one that this code reads.

    Args:
        path: The file, for the message.
        found: The version in it.
        expected: The version that this code reads.

    Raises:
        DatastoreMismatchError: They differ.
    """
    if str(found) != str(expected):
        raise DatastoreMismatchError(
            f"{path} has format {found} and this version reads {expected}: use the version that wrote it, or build "
            "another datastore in a new folder"
        )


def checksum(data: Any) -> int:
    """CRC-32 of bytes or of an array."""
    return zlib.crc32(memoryview(data).cast("B"))
