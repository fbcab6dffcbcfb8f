"""Text and chat messages to prompts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from reader_rag.engine.outputs import Prompt
from reader_rag.engine.text.template import render_chat
from reader_rag.errors import PromptError
from reader_rag.util.encodable import is_encodable


class PromptEncoder:
    """Tokenizes prompts, from any thread: a lock protects the tokenizer, which is not thread safe.

    Args:
        tokenizer: The model's tokenizer.
        name: Name of the model in error messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._lock = threading.Lock()

    def encode(self, text: str, *, special: bool = False) -> Prompt:
        """Tokenize a text.

        Args:
            text: The text.
            special: Whether the tokenizer adds its special tokens.

        Returns:
            The token ids, with the characters of each if the tokenizer is a fast one.

        Raises:
            PromptError: It is no text, or has a lone surrogate.
        """
        _check_text(text)
        offsets = bool(getattr(self._tokenizer, "is_fast", False))
        with self._lock:
            encoded: Any = self._tokenizer(
                text, add_special_tokens=special, return_offsets_mapping=offsets, verbose=False, truncation=False
            )
        return Prompt(tuple(encoded["input_ids"]), text, tuple(encoded["offset_mapping"]) if offsets else None)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """Format messages by the tokenizer's chat template, with its generation prompt, and tokenize them.

        Args:
            messages: Mappings with "role" and "content".
            tools: Tools for a chat template that describes them, in OpenAI's form.

        Raises:
            ConfigError: The tokenizer has no chat template, or the template refuses these messages or does not end.
        """
        return self.encode(render_chat(self._tokenizer, self._name, messages, tools))


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise PromptError(f"a text must be a string, not {type(text).__name__}")
    if not is_encodable(text):
        at = next(at for at, character in enumerate(text) if not is_encodable(character))
        raise PromptError(
            f"the text has a lone surrogate (character {at}), half of a character that no tokenizer takes; replace it, "
            "for example by text.encode('utf-8', 'replace').decode()"
        )
