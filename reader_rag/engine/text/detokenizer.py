"""Incremental detokenization: whole characters only, and never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns the tokens of one answer into text incrementally.

    Text is held back while its last character is incomplete and while its end might be the start of a stop string, so
    text that `take` returned is final. Tokens are decoded one at a time, so that the text does not depend on how many
    of them a step emitted.

    Args:
        tokenizer: A `transformers` tokenizer.
        stop: Stop strings; the text ends before the one that begins first.
        before: The last tokens of the prompt; some tokenizers decode a token differently depending on the one before.
        include: End the text after the stop string instead; if several begin at one character, after the shortest.

    Attributes:
        stopped: Whether the text has ended.
        ends: For each token, the length of the text after it in characters, without an incomplete character.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), before: Sequence[int] = (), include: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include = include
        self._tokens = list(before)
        self._read = len(self._tokens)  # tokens before this are in the text
        self._prefix = 0  # decoding starts here, so that the tokenizer sees what precedes a new token
        self._text = ""
        self._taken = 0
        self.stopped = False
        self.ends: list[int] = []

    @property
    def text(self) -> str:
        """The whole text so far, with what is held back."""
        return self._text

    def push(self, token: int) -> bool:
        """Append a token.

        Args:
            token: Its id.

        Returns:
            Whether the text has ended at a stop string.
        """
        self._tokens.append(token)
        new = self._new_text()
        if new and not new.endswith(_REPLACEMENT):
            self._add(new)
            self._prefix, self._read = self._read, len(self._tokens)
        self.ends.append(len(self._text))
        return self.stopped

    def finish(self) -> None:
        """End the text; an incomplete character at the end is decoded as the tokenizer decodes it."""
        if not self.stopped:
            if new := self._new_text():
                self._add(new)
                if self.ends:
                    self.ends[-1] = len(self._text)
            self.stopped = True

    def take(self) -> str:
        """The text that has become final since the last call."""
        end = len(self._text) if self.stopped else len(self._text) - self._held_back()
        piece = self._text[self._taken : end]
        self._taken = max(end, self._taken)
        return piece

    def _new_text(self) -> str:
        """The text of the tokens that are not in the text yet."""
        known = self._decode(self._prefix, self._read)
        return self._decode(self._prefix, len(self._tokens))[len(known) :]

    def _decode(self, start: int, stop: int) -> str:
        text: str = self._tokenizer.decode(self._tokens[start:stop], skip_special_tokens=True)
        return text

    def _add(self, piece: str) -> None:
        searched = max(0, len(self._text) - max((len(s) for s in self._stop), default=0) + 1)
        self._text += piece
        found = [(at, len(s)) for s in self._stop if (at := self._text.find(s, searched)) >= 0]
        if found:
            at, length = min(found)
            self._text = self._text[: at + length if self._include else at]
            self.stopped = True

    def _held_back(self) -> int:
        """Characters at the end that may turn out to be the start of a stop string."""
        return max(
            (n for s in self._stop for n in range(1, min(len(s), len(self._text) + 1)) if self._text.endswith(s[:n])),
            default=0,
        )
