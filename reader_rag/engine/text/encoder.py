"""Text and chat messages to prompts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from reader_rag.engine.outputs import Prompt
from reader_rag.errors import ConfigError
from reader_rag.util.one_line import first_line


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
        """
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
            ConfigError: The tokenizer has no chat template, or the template refuses these messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(f"{self._name} has no chat template; pass a formatted prompt to complete() instead")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as cause:
            raise ConfigError(
                f"the chat template of {self._name} refuses the messages ({first_line(cause)}); change their roles"
            ) from cause
        return self.encode(str(text))
