"""Function calling: LlamaIndex's `FunctionCallingLLM` over grammars, so that every call is valid.

The tools of a call decide its grammar ("auto": text, or calls; "required" and a named tool: calls), and the answer's
text is split into text and calls while it is generated. The formats are in `tool_formats`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.llms.llm import ToolSelection

from reader_rag.errors import ConfigError, IncompleteAnswerError, ToolCallError
from reader_rag.llm.structured import StructuredOutput
from reader_rag.llm.tool_formats import ToolCall, ToolFormat, ToolRequest

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

    from reader_rag.engine.outputs import Generation
    from reader_rag.sampling.logprobs import TokenLogprobs

TOOL_ARGUMENTS = ("tools", "tool_choice", "allow_parallel_tool_calls")
"""Arguments of `chat` beside those of every call."""


def tool_request(form: ToolFormat, given: dict[str, Any]) -> ToolRequest | None:
    """The tools of a call.

    Args:
        form: How the model writes calls.
        given: `TOOL_ARGUMENTS` of the call, those that were given.

    Returns:
        The request; None where the answer is text, without tools or by `tool_choice="none"`.

    Raises:
        ConfigError: A tool has no name, or the choice is none of theirs.
    """
    tools = tuple(_described(tool) for tool in given.get("tools") or ())
    choice = given.get("tool_choice")
    if isinstance(choice, dict):  # OpenAI's form of a named tool
        choice = choice.get("name") or (choice.get("function") or {}).get("name") or choice.get("type")
    choice = {None: "auto", "any": "required"}.get(choice, choice)
    if choice == "none" or (not tools and choice == "auto"):
        return None
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise ConfigError(f"two tools have one name ({', '.join(sorted(names))}); rename one")
    allowed = tools
    if choice not in ("auto", "required"):
        allowed = tuple(tool for tool in tools if tool["function"]["name"] == choice)
    if not allowed:
        raise ConfigError(f"tool_choice is {choice!r}; known: auto, required, none{''.join(f', {n}' for n in names)}")
    parallel = bool(given.get("allow_parallel_tool_calls") or False) and choice in ("auto", "required")
    return ToolRequest(form, allowed, choice != "auto", parallel, shown=tools)


def _described(tool: Any) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    metadata = getattr(tool, "metadata", None)
    if metadata is not None:
        parameters = metadata.get_parameters_dict()
        whole = metadata.fn_schema.model_json_schema() if metadata.fn_schema is not None else {}
        if "$ref" in whole:  # of a class that contains itself; LlamaIndex leaves it out
            parameters = {**whole["$defs"][whole["$ref"].rpartition("/")[2]], "$defs": whole["$defs"]}
        function = {"name": metadata.get_name(), "description": metadata.description, "parameters": parameters}
        return {"type": "function", "function": function}
    if not isinstance(tool, dict) or not (tool.get("function") or {}).get("name"):
        raise ConfigError('a tool is a LlamaIndex tool or {"type": "function", "function": {"name": ..., ...}}')
    return tool


@dataclass
class ToolResponses:
    """Makes the responses of one answer with tools.

    Attributes:
        request: The tools.
        messages: The messages of the call, from which the ids of tool calls are made.
        respond: Makes a response of text; see `responses.Respond`.
    """

    request: ToolRequest
    messages: Sequence[ChatMessage]
    respond: Callable[..., ChatResponse]
    _sent: int = field(default=0, init=False)

    def __call__(
        self, text: str, delta: str | None, logprobs: Sequence[TokenLogprobs], done: Generation | None
    ) -> ChatResponse:
        """The response; see `responses.Respond`."""
        content, calls = self.request.parse(text, whole=done is not None)
        cut = done is not None and done.finish_reason == "length" and self.request.begun(text)
        if cut and not (calls and calls[-1].complete):
            raise IncompleteAnswerError("the answer ended before its tool call was complete; raise max_tokens")
        new, self._sent = content[self._sent :], max(self._sent, len(content))
        response = self.respond(content, None if delta is None else new, logprobs, done)
        if done is not None and self.request.withheld:
            response.additional_kwargs["tools_withheld"] = True
        if calls:
            blocks = [self._block(number, call) for number, call in enumerate(calls)]
            response.message.blocks = [*([TextBlock(text=content)] if content else []), *blocks]
            response.message.additional_kwargs["tool_calls"] = [_openai_call(block) for block in blocks]
        return response

    def _block(self, number: int, call: ToolCall) -> ToolCallBlock:
        # Templates want ids, Mistral's of nine letters; made of the messages, an answer has the same ones every time.
        seed = "".join(message.model_dump_json() for message in self.messages)
        id_ = hashlib.sha256(f"{seed}{number}".encode()).hexdigest()[:9]
        return ToolCallBlock(tool_call_id=id_, tool_name=call.name, tool_kwargs=call.arguments)


def _openai_call(block: ToolCallBlock) -> dict[str, Any]:
    arguments = json.dumps(block.tool_kwargs, ensure_ascii=False)
    return {
        "id": block.tool_call_id,
        "type": "function",
        "function": {"name": block.tool_name, "arguments": arguments},
    }


class FunctionCalling(StructuredOutput):
    """The hooks of `FunctionCallingLLM`, for an LLM whose `chat` takes `TOOL_ARGUMENTS`."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The arguments of `chat` for a call with tools; LlamaIndex calls it.

        Args:
            tools: The tools.
            user_msg: A message after the history.
            chat_history: The messages before it.
            verbose: Has no effect here.
            allow_parallel_tool_calls: Whether an answer may have several calls.
            tool_required: Whether it must be a call; a `tool_choice` among `kwargs` says more.
            kwargs: Further arguments of `chat`.
        """
        messages = list(chat_history or [])
        if user_msg is not None:
            messages.append(ChatMessage(role="user", content=user_msg) if isinstance(user_msg, str) else user_msg)
        choice = kwargs.pop("tool_choice", None) or ("required" if tool_required else "auto")
        return {
            "messages": messages,
            "tools": [_described(tool) for tool in tools],
            "tool_choice": choice,
            "allow_parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def _validate_chat_with_tools_response(
        self, response: ChatResponse, tools: Sequence[BaseTool], *args: Any, **kwargs: Any
    ) -> ChatResponse:
        """The response, whose arguments the tools' Pydantic classes accept; LlamaIndex calls it.

        Raises:
            ToolCallError: They do not: a schema says what the grammar cannot know.
        """
        classes = {tool.metadata.get_name(): tool.metadata.fn_schema for tool in tools}
        for call in self.get_tool_calls_from_response(response, error_on_no_tool_call=False):
            schema = classes.get(call.tool_name)
            try:
                if schema is not None:
                    schema.model_validate(call.tool_kwargs)
            except ValidationError as error:
                first = error.errors()[0]
                raise ToolCallError(
                    f"the arguments of {call.tool_name} are not valid: "
                    f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
                ) from error
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The tool calls of a response; of a streamed one those so far, the last with the arguments so far.

        Args:
            response: The response of a chat.
            error_on_no_tool_call: Whether a response without calls is an error.
            kwargs: Have no effect here.

        Raises:
            ToolCallError: There is no call, and `error_on_no_tool_call` is set.
        """
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            raise ToolCallError("the answer has no tool call; pass tool_required=True to have one in every answer")
        return [
            ToolSelection(
                tool_id=block.tool_call_id or "",
                tool_name=block.tool_name,
                tool_kwargs=block.tool_kwargs if isinstance(block.tool_kwargs, dict) else json.loads(block.tool_kwargs),
            )
            for block in blocks
        ]
