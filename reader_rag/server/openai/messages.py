"""Messages of OpenAI's API as LlamaIndex's."""

from __future__ import annotations

import json
from collections.abc import Sequence

from llama_index.core.base.llms.types import ChatMessage, TextBlock, ToolCallBlock

from reader_rag.server.errors import ApiError
from reader_rag.server.openai.schemas import ContentPart, Message


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Convert the messages of a chat.

    Args:
        messages: As the client sent them.

    Raises:
        ApiError: A message has content that is not text, or a tool call that no text can be made of.
    """
    return [_converted(message, f"messages.{number}") for number, message in enumerate(messages)]


def text_of(content: str | Sequence[ContentPart] | None, param: str) -> str:
    """The text of a content.

    Args:
        content: A string, or parts, which are put one behind the other.
        param: What the content is called in messages.

    Raises:
        ApiError: A part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            raise ApiError(
                400, f"this model takes text only: leave the part {part.type!r:.40} out", param=f"{param}.{number}"
            )
        texts.append(text)
    return "".join(texts)


def _converted(message: Message, param: str) -> ChatMessage:
    text = text_of(message.content, f"{param}.content") or message.refusal or ""
    blocks: list[TextBlock | ToolCallBlock] = [TextBlock(text=text)] if text else []
    if message.tool_calls and message.role != "assistant":
        raise ApiError(400, "only messages of the assistant have tool_calls", param=f"{param}.tool_calls")
    for call in message.tool_calls or ():
        arguments = _arguments(call.function.arguments, f"{param}.tool_calls")
        blocks.append(ToolCallBlock(tool_call_id=call.id, tool_name=call.function.name, tool_kwargs=arguments))
    if message.role == "tool":
        if message.tool_call_id is None:
            raise ApiError(400, "a tool's message names its call: add tool_call_id", param=f"{param}.tool_call_id")
        return ChatMessage(role="tool", blocks=blocks, additional_kwargs={"tool_call_id": message.tool_call_id})
    return ChatMessage(role=message.role, blocks=blocks)


def _arguments(text: str, param: str) -> dict[str, object]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, "the arguments of a tool call must be an object in JSON", param=param)
    return arguments
