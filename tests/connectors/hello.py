"""A chat of one message."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage

HELLO = [ChatMessage(role="user", content="Hello?")]
