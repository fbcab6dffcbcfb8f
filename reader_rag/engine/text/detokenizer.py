"""Emitted tokens to text, piece by piece: whole characters only, and never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns tokens into text as they come.

    Text is held back while its last character is incomplete and while its end might be the start of a stop string, so
    what was handed out is never taken back. Tokens are taken one at a time, which makes the text independent of how
    many of them a step emitted.

    Args:
        tokenizer: A `transformers` tokenizer.
        stop: Strings that end the text; it ends before the one that begins first.
        before: The last tokens before the first one; some tokenizers spell a word's first token by what precedes it.
        include: The text ends behind the stop string instead (of those that begin there, the shortest).
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
        self._given = 0
        self.stopped = False
        self.ends: list[int] = []
        """For each token: where the text ended after it (an incomplete character is not counted)."""

    @property
    def text(self) -> str:
        """The whole text so far, what is held back included."""
        return self._text

    def push(self, token: int) -> bool:
        """Take a token.

        Returns:
            Whether the text has ended with it, at a stop string.
        """
        self._tokens.append(token)
        old = self._decode(self._prefix, self._read)
        new = self._decode(self._prefix, len(self._tokens))
        if len(new) > len(old) and not new.endswith(_REPLACEMENT):
            self._add(new[len(old) :])
            self._prefix, self._read = self._read, len(self._tokens)
        self.ends.append(len(self._text))
        return self.stopped

    def finish(self) -> None:
        """No more tokens: what is incomplete stays as the tokenizer shows it."""
        if not self.stopped:
            old = self._decode(self._prefix, self._read)
            new = self._decode(self._prefix, len(self._tokens))
            if len(new) > len(old):
                self._add(new[len(old) :])
                if self.ends:
                    self.ends[-1] = len(self._text)
            self.stopped = True

    def take(self) -> str:
        """Text that has become certain since the last call."""
        end = len(self._text) if self.stopped else len(self._text) - self._held()
        piece = self._text[self._given : end]
        self._given = max(end, self._given)
        return piece

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

    def _held(self) -> int:
        """Characters at the end that may turn out to be the start of a stop string."""
        return max(
            (n for s in self._stop for n in range(1, min(len(s), len(self._text) + 1)) if self._text.endswith(s[:n])),
            default=0,
        )
