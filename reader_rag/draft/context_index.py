"""ContextIndex: prompt, output and passages of one request, indexed for copying."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.kernels import context as kernels
from reader_rag.draft.kernels.arrays import CorpusArrays

_LOOK_BACK = 32
"""Tokens over which matches are followed up to the end of tokens that are added at once.

Following every token of a long prompt would double the cost of the index; 32 tokens distinguish long matches, which
must be kept, from the many short ones.
"""


class Corpus:
    """Tokens with chains of equal tokens, growing by doubling; the arrays are what `kernels` describes."""

    def __init__(self, capacity: int) -> None:
        self.tokens = np.zeros(max(capacity, 16), np.int32)
        self.previous = np.zeros(max(capacity, 16), np.int32)
        self.table = np.full((2, 64), kernels.EMPTY, np.int32)
        self.size = 0
        self.distinct = 0

    def make_room(self, count: int) -> None:
        """Make room for so many more tokens, each of which may be a distinct one."""
        needed = self.size + count
        if needed > len(self.tokens):
            self.tokens = _grown(self.tokens, needed)
            self.previous = _grown(self.previous, needed)
        # At most half full, so that probing stays short.
        bound = min(self.distinct + count, needed)
        if 2 * bound > self.table.shape[1]:
            slots = 1 << (2 * bound - 1).bit_length()
            table = np.full((2, slots), kernels.EMPTY, np.int32)
            kernels.rehash(self.table, table)
            self.table = table

    def append(self, new: NDArray[np.int32]) -> None:
        """Append token ids."""
        self.make_room(len(new))
        self.distinct += kernels.append(self.tokens, self.previous, self.table, self.size, new)
        self.size += len(new)

    @property
    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], int]:
        """The fields of `kernels.arrays.CorpusArrays`."""
        return self.tokens, self.previous, self.table, self.size

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return self.tokens.nbytes + self.previous.nbytes + self.table.nbytes


class _Matches:
    """The positions of one corpus whose preceding tokens equal the last tokens of the sequence."""

    def __init__(self, limit: int) -> None:
        self.array = np.zeros((2, limit), np.int32)
        self.scratch = np.zeros((2, limit), np.int32)
        self.count = 0

    def reset(self) -> None:
        self.count = 0

    def advance(self, corpus: Corpus, sequence: Corpus, length: int) -> None:
        """Follow the token `sequence[length - 1]`."""
        self.count = kernels.advance(
            CorpusArrays(*corpus.arrays), sequence.tokens, length, self.array, self.count, self.scratch
        )

    @property
    def current(self) -> NDArray[np.int32]:
        """int32 [2, count]: positions, the latest first, and match lengths."""
        return self.array[:, : self.count]


@dataclass(frozen=True)
class Occurrence:
    """Where a token was copied from.

    Attributes:
        passage_id: The passage, or None for text that belongs to none (the rest of the prompt, the output).
        position: Token index in the sequence (prompt and output), or in the passage's own tokens if `apart`.
        apart: Whether the passage was indexed as a text of its own, since the prompt does not contain it.
    """

    passage_id: str | None
    position: int
    apart: bool = False


class ContextIndex:
    """What one request can be drafted from: its prompt, its output, and passages.

    Prompt and output are one sequence. Passages that the prompt contains are marked in it (`mark_passage`); others are
    indexed as texts of their own (`add_passage`). The index keeps, from token to token, all positions whose preceding
    tokens equal the last tokens of the sequence; a token of output costs microseconds however long the prompt is.

    Example:
        >>> index = ContextIndex([7, 8, 9, 5, 7, 8])
        >>> index.sequence_matches.tolist()   # "7 8" precede position 2
        [[2], [2]]
        >>> index.extend([9])
        >>> index.sequence_matches.tolist()
        [[3], [3]]

    Args:
        prompt: int token ids, not negative.
        max_occurrences: Most matches followed at once, in the sequence and in the passages each.
        max_passage_tokens: Bound on the added passages' tokens, separators included; the oldest is dropped first.
        reserve: Tokens of output to reserve memory for.

    Raises:
        ValueError: A token id is negative.
    """

    def __init__(
        self,
        prompt: Sequence[int] | NDArray[np.integer],
        *,
        max_occurrences: int = 256,
        max_passage_tokens: int = 65_536,
        reserve: int = 0,
    ) -> None:
        self._sequence = Corpus(len(prompt) + reserve)
        self._passages = Corpus(0)
        self._sequence_matches = _Matches(max_occurrences)
        self._passage_matches = _Matches(max_occurrences)
        self._max_passage_tokens = max_passage_tokens
        self._prompt_length = len(prompt)
        self._added: list[tuple[str, NDArray[np.int32]]] = []
        self._added_starts: list[int] = []
        self._marks: list[tuple[int, int, str]] = []
        self.extend(prompt)

    def __len__(self) -> int:
        """Tokens of prompt and output."""
        return self._sequence.size

    @property
    def nbytes(self) -> int:
        """Bytes that the index holds."""
        return self._sequence.nbytes + self._passages.nbytes

    @property
    def sequence(self) -> NDArray[np.int32]:
        """int32 [length], prompt and output; a view."""
        return self._sequence.tokens[: self._sequence.size]

    @property
    def passages(self) -> NDArray[np.int32]:
        """int32 [size], the added passages, each followed by a separator (-1); a view."""
        return self._passages.tokens[: self._passages.size]

    @property
    def sequence_matches(self) -> NDArray[np.int32]:
        """int32 [2, n], the position of the next token and the match length of each occurrence in the sequence."""
        return self._sequence_matches.current

    @property
    def passage_matches(self) -> NDArray[np.int32]:
        """int32 [2, m], the position of the next token and the match length of each occurrence in added passages."""
        return self._passage_matches.current

    @property
    def match_count(self) -> int:
        """Matches followed, in the sequence and in the passages."""
        return self._sequence_matches.count + self._passage_matches.count

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Sequence and passages as `kernels.tree.build` takes them, and how many tokens are the prompt's."""
        sequence, passages = self._sequence, self._passages
        own, others = self._sequence_matches, self._passage_matches
        return (
            (sequence.tokens, sequence.size, own.array, own.count),
            (passages.tokens, passages.size, others.array, others.count),
            self._prompt_length,
        )

    @property
    def corpus(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], int]:
        """Prompt and output as the fields of `kernels.arrays.CorpusArrays`."""
        return self._sequence.arrays

    def extend(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Append tokens to the sequence and follow the matches to its new end.

        Args:
            tokens: int token ids, not negative.

        Raises:
            ValueError: A token id is negative.
        """
        new = _integers(tokens)
        count = len(new)
        if not count:
            return
        sequence, own = self._sequence, self._sequence_matches
        passages, others = self._passages, self._passage_matches
        sequence.make_room(count)
        first = sequence.size + count - _LOOK_BACK
        skips = sequence.size < first
        added, followed, passage_followed = kernels.follow(
            sequence.arrays,
            new,
            first,
            (own.array, 0 if skips else own.count),
            passages.arrays,
            (others.array, 0 if skips else others.count),
            own.scratch,
        )
        if added < 0:
            _token_array(new)  # says what is wrong
        sequence.distinct += added
        sequence.size += count
        own.count, others.count = followed, passage_followed

    def add_passage(self, passage_id: str, tokens: Sequence[int] | NDArray[np.integer]) -> int | None:
        """Add a text that the prompt does not contain; the oldest ones are dropped where the bound is exceeded.

        Args:
            passage_id: The id that `locate` returns.
            tokens: int token ids; of a text longer than the bound, the first part is kept.

        Returns:
            Where it begins in `passages`, until another one is added; None: nothing of it is kept.

        Raises:
            ValueError: A token id is negative.
        """
        new = _token_array(tokens)[: max(self._max_passage_tokens - 1, 0)]
        if not len(new):
            return None
        self._added.append((passage_id, new))
        held = self._passages.size + len(new) + 1
        dropped = 0
        while held > self._max_passage_tokens:
            held -= len(self._added[dropped][1]) + 1
            dropped += 1
        if dropped:
            self._added = self._added[dropped:]
            self._passages = Corpus(held)
            self._added_starts = []
        for _, passage in self._added[len(self._added_starts) :]:
            self._added_starts.append(self._passages.size)
            self._passages.append(np.append(passage, np.int32(-1)))
        self._passage_matches.reset()
        for length in range(max(len(self) - _LOOK_BACK, 0) + 1, len(self) + 1):
            self._passage_matches.advance(self._passages, self._sequence, length)
        return self._added_starts[-1]

    def mark_passage(self, passage_id: str, start: int, stop: int) -> None:
        """Mark tokens of the sequence as (part of) a passage. Where marks overlap, the first one counts.

        Args:
            passage_id: The id that `locate` returns.
            start: First token of the sequence.
            stop: Token behind the last one.

        Raises:
            ValueError: The range is empty or lies outside the sequence.
        """
        if not 0 <= start < stop <= len(self):
            raise ValueError(f"no tokens {start}..{stop} in a sequence of {len(self)}")
        self._marks.append((start, stop, passage_id))

    def find_copy(self, token: int, min_match: int, passages_end: int | None = None) -> tuple[int, int] | None:
        """Find an occurrence of the sequence's end with a token behind it.

        Args:
            token: A token that may follow the sequence.
            min_match: Least match length before it, in tokens.
            passages_end: End of the added passages that are searched, as a position in `passages`; None: all are.

        Returns:
            Source (0 sequence, 1 passages) and position of the token behind the longest match; None: there is none.
        """
        found = None
        for source, corpus, matches in (
            (0, self.sequence, self.sequence_matches),
            (1, self.passages[:passages_end], self.passage_matches),
        ):
            positions, lengths = matches[:, (matches[0] < len(corpus)) & (matches[1] >= min_match)]
            same = np.flatnonzero(corpus[positions] == token)
            if len(same):
                best = same[int(np.argmax(lengths[same]))]
                min_match = int(lengths[best]) + 1
                found = source, int(positions[best])
        return found

    def locate(self, source: int, position: int) -> Occurrence:
        """The occurrence that a copied draft node refers to.

        Args:
            source: The node's value of `DraftTree.sources`, `context` or `passage`.
            position: The node's value of `DraftTree.positions`.
        """
        if source == 1:
            k = bisect_right(self._added_starts, position) - 1
            return Occurrence(self._added[k][0], position - self._added_starts[k], apart=True)
        for start, stop, passage_id in self._marks:
            if start <= position < stop:
                return Occurrence(passage_id, position)
        return Occurrence(None, position)


def _integers(tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 [n].

    Raises:
        ValueError: Not a flat list of integers.
    """
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"token ids must be a flat list, not of shape {array.shape}")
    if len(array) and array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)


def _token_array(tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    array = _integers(tokens)
    if len(array):
        if int(array.min()) < 0:
            raise ValueError(f"token ids must not be negative: {int(array.min())}")
        if int(array.max()) > kernels.LARGEST:
            raise ValueError(f"token ids must fit 32 bits: {int(array.max())}")
    return array.astype(np.int32)


def _grown(array: NDArray[np.int32], needed: int) -> NDArray[np.int32]:
    larger = np.zeros(max(2 * len(array), needed), np.int32)
    larger[: len(array)] = array
    return larger
