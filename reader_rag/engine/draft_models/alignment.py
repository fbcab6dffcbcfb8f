"""One text as tokens of two tokenizers: follows the target's tokens in another vocabulary, and brings drafts back.

As in universal assisted decoding (`assistant_model` of `generate` with another tokenizer), what both have in common is
the text. It is followed in segments that begin with a word: new text is tokenized with the word that it may continue,
so a step tokenizes a word or two, whatever the length of the sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.errors import ConfigError

Encode = Callable[[str], Sequence[int]]
"""A text to token ids, without special tokens."""

_CONTEXT = 8
"""Tokens before new ones that are decoded with them: what some tokenizers decode depends on the token before."""
_PENDING = 3
"""Tokens for which the end of a character is awaited: all bytes of one but the last."""
_SEGMENT = 128
"""Characters after which a segment ends also within a word."""
_WORD = re.compile(r"(?<=\S) (?=\S)")
"""The beginning of a segment: the one space before a word, which tokenizers join with the word."""
_REPLACEMENT = "\ufffd"
_TRIED = ("The answer is 42.", "Water (H2O), they say,\nboils at 100 degrees.\n\nWhy?", "def f(x):\n    return x + 1")
"""Texts that a tokenizer has to give back."""
_MARK = "\n"


class TextTokenizer:
    """A tokenizer that continues texts: white space at the beginning stays, and nothing is put before it.

    Args:
        tokenizer: A tokenizer of `transformers`.
        encode: Its way from a text to token ids.
        name: What messages call its model.

    Attributes:
        special: Token ids that are no text.

    Raises:
        ConfigError: It does not give texts back, or cannot continue one.
    """

    def __init__(self, tokenizer: Any, encode: Encode, name: str) -> None:
        self._tokenizer = tokenizer
        self._encode = encode
        self.special = frozenset(int(token) for token in getattr(tokenizer, "all_special_ids", ()))
        self._mark: tuple[int, ...] = ()
        if not self._continues():
            self._mark = tuple(encode(_MARK))  # it puts a space before a text: a mark takes it, and is cut off
        given_back = all(self.decode(list(encode(text))).strip() == text for text in _TRIED)
        if not given_back or not self._continues():
            raise ConfigError(
                f"the tokenizer of {name} does not give texts back as they were, so it cannot draft by text: choose a "
                "draft model of the same family"
            )

    def began(self, text: str) -> list[int]:
        """The tokens of a text that continues none.

        Args:
            text: The text.
        """
        return list(self._encode(text))

    def continued(self, text: str) -> list[int]:
        """The tokens of a text that continues another one.

        Args:
            text: The text.
        """
        if self._mark:
            marked = tuple(self._encode(_MARK + text))
            if marked[: len(self._mark)] == self._mark:
                return list(marked[len(self._mark) :])
        return list(self._encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones.

        Args:
            tokens: Token ids.
        """
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _continues(self) -> bool:
        """Whether a text may be continued by a word, and a word by its rest."""
        word = self.began("The answer") + self.continued(" is 42") == self.began("The answer is 42")
        return word and self.decode(self.began("The ans") + self.continued("wer")).strip() == "The answer"

    def lengths(self, before: Sequence[int], tokens: Sequence[int]) -> tuple[str, list[int]]:
        """The text that tokens add, and its length after each of them.

        Args:
            before: Tokens before them.
            tokens: The tokens.
        """
        context = list(before[-_CONTEXT:])
        known = len(self.decode(context))
        texts = [self.decode([*context, *tokens[: n + 1]])[known:] for n in range(len(tokens))]
        return texts[-1] if texts else "", [len(text) for text in texts]


class Alignment:
    """The tokens of a sequence in another vocabulary.

    Args:
        target: The target's tokenizer.
        own: The other one.
        start: Token ids that the other one puts before every text.

    Attributes:
        tokens: The sequence in the other vocabulary, without what of its text is not complete yet.
    """

    def __init__(self, target: TextTokenizer, own: TextTokenizer, start: Sequence[int] = ()) -> None:
        self.tokens = list(start)
        self._target = target
        self._own = own
        self._read = 0  # tokens of the target that are in the text
        self._segment = ""  # the end of the text, which is tokenized again with what follows
        self._first = self._start = len(start)  # where the text begins in `tokens`, and where the segment does

    def follow(self, sequence: NDArray[np.int32]) -> bool:
        """Follow the target's sequence.

        Args:
            sequence: int32 [length], all tokens of the target; those of the last call come first.

        Returns:
            Whether its text is complete; if not, its last character is not, and `tokens` are those of before.
        """
        first = max(self._read - _CONTEXT, 0)
        window = sequence[first:].tolist()
        known = self._target.decode(window[: self._read - first])
        whole = self._target.decode(window)
        if whole.endswith(_REPLACEMENT):
            ends = [len(window) - n for n in range(1, _PENDING + 1) if n <= len(sequence) - self._read]
            if any(not self._target.decode(window[:end]).endswith(_REPLACEMENT) for end in ends):
                return False
        new = whole[len(known) :]
        self._read = len(sequence)
        if new:
            self._add(new)
        return True

    def translated(
        self, sequence: NDArray[np.int32], drafted: Sequence[int], logprobs: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        """A drafted chain in the target's vocabulary.

        Args:
            sequence: int32 [length], the tokens of the last `follow`.
            drafted: Tokens of the other vocabulary behind `tokens`.
            logprobs: The log-probability of each, given those before.

        Returns:
            Tokens of the target, and the log-probability of each, given those before: that of the drafted tokens which
            begin in it.
        """
        end = next((n for n, token in enumerate(drafted) if token in self._own.special), len(drafted))
        text, ends = self._own.lengths(self.tokens, drafted[:end])
        text = text.rstrip(_REPLACEMENT)
        if not text:
            return [], []
        tail = self._target.continued(self._segment)
        tokens = self._target.continued(self._segment + text)
        if tokens[: len(tail)] == tail == sequence[len(sequence) - len(tail) :].tolist():
            tokens = tokens[len(tail) :]
        else:  # the target would write the last word in other tokens
            tokens = self._target.continued(text)
        _, lengths = self._target.lengths(sequence[-_CONTEXT:].tolist(), tokens)
        chances, taken, starts = list[float](), 0, [0, *ends]
        for length in lengths:
            begun = max(taken, sum(start < length for start in starts[:-1]))
            chances.append(float(sum(logprobs[taken:begun])))
            taken = begun
        return tokens, chances

    def _add(self, text: str) -> None:
        """Append text."""
        self._segment += text
        cuts = [match.start() for match in _WORD.finditer(self._segment)]
        if cuts or len(self._segment) > _SEGMENT:
            cut = cuts[-1] if cuts else len(self._segment)
            self._tokenize(self._segment[:cut])
            self._segment, self._start = self._segment[cut:], len(self.tokens)
        self._tokenize(self._segment)

    def _tokenize(self, text: str) -> None:
        """Replace the tokens of the segment by those of a text."""
        begins = self._start == self._first
        self.tokens[self._start :] = self._own.began(text) if begins else self._own.continued(text)
