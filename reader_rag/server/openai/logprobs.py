"""Log-probabilities of tokens in OpenAI's forms."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from reader_rag.sampling.logprobs import TokenLogprobs
from reader_rag.server.openai.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob


class TokenSpeller:
    """Spells single tokens as text and bytes: a token may be a part of a character.

    Args:
        tokenizer: The model's tokenizer.
        ends: Tokens that end an answer; they are left out, as they are out of the text.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))

    def chat(self, tokens: Sequence[TokenLogprobs], top: int) -> ChatLogprobs:
        """The log-probabilities of a chat's tokens.

        Args:
            tokens: The tokens.
            top: How many of the most probable ones are shown with each.
        """
        content = [
            TokenLogprob(
                **self._one(of.token_id, of.logprob),
                top_logprobs=[TopLogprob(**self._one(*other)) for other in of.top[:top]],
            )
            for of in tokens
            if of.token_id not in self._ends
        ]
        return ChatLogprobs(content=content)

    def completion(self, tokens: Sequence[TokenLogprobs], top: int, offset: int) -> CompletionLogprobs:
        """The log-probabilities of a completion's tokens.

        Args:
            tokens: The tokens.
            top: How many of the most probable ones are shown with each.
            offset: Characters of the text before them.
        """
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])  # set: they are sent
        for of in tokens:
            if of.token_id in self._ends:
                continue
            text = self.text(of.token_id)
            found.tokens.append(text)
            found.token_logprobs.append(of.logprob)
            found.top_logprobs.append({self.text(token): logprob for token, logprob in of.top[:top]})
            found.text_offset.append(offset)
            offset += len(text)
        return found

    def text(self, token: int) -> str:
        """A token as text, with a replacement character for parts of characters.

        Args:
            token: Its id.
        """
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def bytes_of(self, token: int) -> list[int]:
        """The bytes of a token in UTF-8.

        Args:
            token: Its id.
        """
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if self._byte_level:
            table = _bytes_of_letters()
            if all(letter in table for letter in name):
                return [table[letter] for letter in name]
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):  # SentencePiece's single bytes
            return [int(name[3:5], 16)]
        return list(self.text(token).encode("utf-8", "replace"))

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": logprob, "bytes": self.bytes_of(token)}


@lru_cache(maxsize=1)
def _bytes_of_letters() -> dict[str, int]:
    """The bytes that the letters of byte-level tokenizers stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}
