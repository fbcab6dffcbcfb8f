"""From text and chat messages to prompts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from reader_rag.engine.outputs import Prompt
from reader_rag.errors import ConfigError


class PromptEncoder:
    """Makes prompts, from any thread: tokenizers are not safe for several at once.

    Args:
        tokenizer: The model's tokenizer.
        name: What messages call the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._lock = threading.Lock()

    def encode(self, text: str, *, special: bool = False) -> Prompt:
        """Text to token ids and the characters of each.

        Args:
            text: Any text.
            special: Whether the tokenizer adds its special tokens.
        """
        offsets = bool(getattr(self._tokenizer, "is_fast", False))
        with self._lock:
            encoded: Any = self._tokenizer(
                text, add_special_tokens=special, return_offsets_mapping=offsets, verbose=False, truncation=False
            )
        return Prompt(tuple(encoded["input_ids"]), text, tuple(encoded["offset_mapping"]) if offsets else None)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """Messages to a prompt through the tokenizer's chat template, up to where the assistant speaks.

        Args:
            messages: Mappings with "role" and "content".

        Raises:
            ConfigError: The tokenizer has no chat template, or the template refuses these messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(f"{self._name} has no chat template; give a formatted prompt to complete() instead")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as cause:
            raise ConfigError(f"the chat template of {self._name} refuses these messages: {cause}") from cause
        return self.encode(str(text))
