"""Converts LlamaIndex chat messages to the form that chat templates take."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ToolCallBlock

from reader_rag.config.grammar import Grammar
from reader_rag.engine.text.template import bounded_template
from reader_rag.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATE_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}

_TOOLS = """You can call these tools:
{tools}
To call a tool, answer with one line of JSON and nothing else: {{"name": "TOOL", "arguments": {{...}}}}
To call several, write one such line for each. When you know the answer, write it in plain text."""


def template_message(message: ChatMessage, called: Mapping[str | None, str] | None = None) -> dict[str, Any]:
    """Convert a message.

    Args:
        message: The message.
        called: Names of tools by the ids of their calls, for the results of tools.

    Returns:
        A dict with "role" and "content", and the "tool_calls" of an assistant's message.

    Raises:
        ConfigError: The message has a block that is neither text nor an assistant's tool call.
    """
    calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    for block in message.blocks:
        if not isinstance(block, (TextBlock, ToolCallBlock)):
            raise ConfigError(f"this model takes text only; leave the {type(block).__name__} out of the message")
    converted: dict[str, Any] = {
        "role": _TEMPLATE_ROLES.get(message.role, message.role.value),
        "content": message.content or "",
    }
    if calls:
        converted["tool_calls"] = [
            {
                "type": "function",
                "id": block.tool_call_id,
                "function": {"name": block.tool_name, "arguments": _arguments_of(block)},
            }
            for block in calls
        ]
    if message.role == MessageRole.TOOL:
        id_ = message.additional_kwargs.get("tool_call_id")
        converted |= {"tool_call_id": id_, "name": (called or {}).get(id_, "tool")}
    return converted


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert the messages of a chat; see `template_message`.

    Args:
        messages: The messages.
    """
    called = called_tools(messages)
    return [template_message(message, called) for message in messages]


def called_tools(messages: Sequence[ChatMessage]) -> dict[str | None, str]:
    """The names of the tools that were called, by the ids of the calls.

    Args:
        messages: The messages of a chat.
    """
    blocks = (block for message in messages for block in message.blocks if isinstance(block, ToolCallBlock))
    return {block.tool_call_id: block.tool_name for block in blocks}


def answered_calls(messages: Sequence[ChatMessage]) -> list[list[tuple[str, str, str]]]:
    """What was called since the user's last message.

    Args:
        messages: The messages of a chat.

    Returns:
        For each answer since then that has tool calls with results, the calls: tool, arguments as JSON, and result.
    """
    last = max((i for i, message in enumerate(messages) if message.role == MessageRole.USER), default=-1)
    since = messages[last + 1 :]
    results = {
        message.additional_kwargs.get("tool_call_id"): message.content or ""
        for message in since
        if message.role == MessageRole.TOOL
    }
    answers = (
        [
            (block.tool_name, json.dumps(_arguments_of(block), sort_keys=True), results[block.tool_call_id])
            for block in message.blocks
            if isinstance(block, ToolCallBlock) and block.tool_call_id in results
        ]
        for message in since
    )
    return [calls for calls in answers if calls]


def as_text(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The messages for a chat template that knows no tools: calls and their results become text.

    Args:
        messages: The messages.
        tools: The tools in OpenAI's form; a system message before the others describes them.
    """
    called = called_tools(messages)
    converted: list[ChatMessage] = []
    if tools:
        described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        converted.append(ChatMessage(role=MessageRole.SYSTEM, content=_TOOLS.format(tools=described)))
    for message in messages:
        calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
        if calls:
            lines = [message.content] if message.content else []
            lines += [
                json.dumps({"name": block.tool_name, "arguments": _arguments_of(block)}, ensure_ascii=False)
                for block in calls
            ]
            message = ChatMessage(role=MessageRole.ASSISTANT, content="\n".join(lines))
        elif message.role == MessageRole.TOOL:
            name = called.get(message.additional_kwargs.get("tool_call_id"), "tool")
            text = f"The tool {name} returned:\n{template_message(message)['content']}"
            if converted and converted[-1].additional_kwargs.get("tool_result"):  # many templates want turns
                text = f"{converted.pop().content}\n{text}"
            message = ChatMessage(role=MessageRole.USER, content=text, additional_kwargs={"tool_result": True})
        converted.append(message)
    return converted


def _arguments_of(block: ToolCallBlock) -> dict[str, Any]:
    given = block.tool_kwargs
    return given if isinstance(given, dict) else json.loads(given or "{}")


def join_system(messages: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
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
        text = bounded_template(tokenizer, lambda: str(tokenizer.apply_chat_template(probe, tokenize=False)))
    except TemplateError:
        return False
    return "system-probe" in text


_described: OrderedDict[str, Grammar] = OrderedDict()
_MOST_DESCRIBED = 1024


def describe_grammar(description: str, grammar: Grammar) -> None:
    """Have prompts that end with a description answered under its grammar.

    LlamaIndex's output parsers add a description to a prompt's text, and nothing else of them reaches the LLM.

    Args:
        description: The text at the end of a message or prompt.
        grammar: The grammar.
    """
    _described[description] = grammar
    _described.move_to_end(description)
    while len(_described) > _MOST_DESCRIBED:
        _described.popitem(last=False)


def described_grammar(texts: Iterable[str | None]) -> Grammar | None:
    """The grammar that a prompt describes.

    Args:
        texts: The texts of its messages.

    Returns:
        The grammar; None if none of them ends with a description.
    """
    known = list(_described.items())
    # A text of another type is refused where it is encoded.
    given = [text for text in texts if isinstance(text, str)]
    return next((grammar for text in given for end, grammar in known if text.endswith(end)), None)
