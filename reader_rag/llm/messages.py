"""Converts LlamaIndex chat messages to the form that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock

from reader_rag.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATE_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def template_message(message: ChatMessage) -> dict[str, str]:
    """Convert a message.

    Args:
        message: The message.

    Returns:
        A dict with "role" and "content".

    Raises:
        ConfigError: The message has a block that is not text.
    """
    for block in message.blocks:
        if not isinstance(block, TextBlock):
            raise ConfigError(f"this model takes text only; leave the {type(block).__name__} out of the message")
    return {"role": _TEMPLATE_ROLES.get(message.role, message.role.value), "content": message.content or ""}


def join_system(messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Join the leading system messages into one, because LlamaIndex adds `system_prompt` to a prompt's own.

    Args:
        messages: Messages with "role" and "content".
        tokenizer: The tokenizer whose chat template formats them.

    Returns:
        The messages with one system message; if the template has no system role, its text is put before the first
        user message.
    """
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    head, rest = messages[:count], list(messages[count:])
    if not head:
        return rest
    system = "\n\n".join(message["content"] for message in head)
    if _takes_system_role(tokenizer):
        return [{"role": "system", "content": system}, *rest]
    if rest and rest[0]["role"] == "user":
        system, rest = f"{system}\n\n{rest[0]['content']}", rest[1:]
    return [{"role": "user", "content": system}, *rest]


def _takes_system_role(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template puts a system message into the prompt; some templates raise, some drop it silently."""
    from jinja2.exceptions import TemplateError

    probe = [{"role": "system", "content": "system-probe"}, {"role": "user", "content": "user-probe"}]
    try:
        return "system-probe" in str(tokenizer.apply_chat_template(probe, tokenize=False))
    except TemplateError:
        return False
