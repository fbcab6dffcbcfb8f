"""The chat engine: LlamaIndex's `ContextChatEngine` with corrected streaming and history."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, StreamingResponse
from llama_index.core.callbacks import trace_method
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.schema import NodeWithScore
from llama_index.core.tools import ToolOutput

from reader_rag.rag.surroundings import Surroundings
from reader_rag.rag.synthesis import GroundedSynthesizer


@dataclass
class ChatStream(StreamingAgentChatResponse):
    """A streamed answer; closing or dropping its `response_gen` ends the generation.

    Attributes:
        metadata: After the stream was read to its end, "citations" of the answer if a `ReaderLLM` answered.
    """

    metadata: dict[str, Any] | None = None

    @property
    def response_gen(self) -> Generator[str, None, None]:
        """The answer's text as it is generated; can be read once."""
        assert self.chat_stream is not None
        with closing(self.chat_stream) as stream:
            for part in stream:
                self.unformatted_response += part.delta or ""
                yield part.delta or ""
        self.response = self.unformatted_response.strip()

    async def async_response_gen(self) -> AsyncGenerator[str, None]:
        """The answer's text as it is generated; can be read once."""
        assert self.achat_stream is not None
        async with aclosing(self.achat_stream) as stream:
            async for part in stream:
                self.unformatted_response += part.delta or ""
                yield part.delta or ""
        self.response = self.unformatted_response.strip()


class GroundedChatEngine(ContextChatEngine):
    """Answers each message from the passages retrieved for it.

    Differences from the base class:
        - Prompts are measured with the LLM's own tokenizer, and without passages the answer is `NOTHING_FOUND`.
        - Text in braces in earlier messages stays text; the base class reads it as a template variable.
        - Streams come directly from the LLM. The base class polls a queue in a busy loop, which takes a core from the
          model, and continues to generate after the consumer has stopped reading. Here closing the stream ends the
          generation, and the text up to then goes to the history. A stream that fails, or is never read, leaves the
          history unchanged.
        - Responses have `metadata`, with the citations of the answer.
        - Drafts also come from the passages around the retrieved ones.

    Args:
        surroundings: Finds the passages around the retrieved ones; None: no others.
        settings: Arguments of `ContextChatEngine`.
    """

    def __init__(self, *, surroundings: Surroundings | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._surroundings = surroundings

    @trace_method("chat")
    def chat(
        self,
        message: str,
        chat_history: list[ChatMessage] | None = None,
        prev_chunks: list[NodeWithScore] | None = None,
    ) -> AgentChatResponse:
        """Answer a message.

        Args:
            message: The user's message.
            chat_history: Replaces the history so far; None keeps it.
            prev_chunks: Passages to use if none is retrieved for this message.

        Returns:
            The answer; `metadata["citations"]` has its citations if a `ReaderLLM` answered.

        Raises:
            PromptError: The message is empty, or too long for the model's context.
        """
        nodes, history = self._prepare(message, chat_history, prev_chunks)
        response = self._get_response_synthesizer(history).synthesize(message, nodes)
        self._memory.put_messages(_exchange(message, str(response)))
        return _answer(message, nodes, response)

    @trace_method("chat")
    async def achat(
        self,
        message: str,
        chat_history: list[ChatMessage] | None = None,
        prev_chunks: list[NodeWithScore] | None = None,
    ) -> AgentChatResponse:
        """`chat` without blocking the event loop; the same arguments, result and errors."""
        nodes, history = await self._aprepare(message, chat_history, prev_chunks)
        response = await self._get_response_synthesizer(history).asynthesize(message, nodes)
        await self._memory.aput_messages(_exchange(message, str(response)))
        return _answer(message, nodes, response)

    def stream_chat(
        self,
        message: str,
        chat_history: list[ChatMessage] | None = None,
        prev_chunks: list[NodeWithScore] | None = None,
    ) -> ChatStream:
        """Answer a message with a stream.

        Args:
            message: The user's message.
            chat_history: Replaces the history so far; None keeps it.
            prev_chunks: Passages to use if none is retrieved for this message.

        Returns:
            The stream; read its `response_gen`.

        Raises:
            PromptError: The message is empty, or too long for the model's context.
        """
        nodes, history = self._prepare(message, chat_history, prev_chunks)
        response = self._get_response_synthesizer(history, streaming=True).synthesize(message, nodes)
        assert isinstance(response, StreamingResponse)

        def stream() -> Generator[ChatResponse, None, None]:
            text = ""
            try:
                for delta in response.response_gen:
                    text += delta
                    yield ChatResponse(message=_message(MessageRole.ASSISTANT, text), delta=delta)
            except (GeneratorExit, KeyboardInterrupt):
                response.response_gen.close()
                self._memory.put_messages(_exchange(message, text))
                raise
            self._memory.put_messages(_exchange(message, text))

        return _streamed(message, nodes, response, chat_stream=stream())

    async def astream_chat(
        self,
        message: str,
        chat_history: list[ChatMessage] | None = None,
        prev_chunks: list[NodeWithScore] | None = None,
    ) -> ChatStream:
        """Answer a message with a stream for event loops.

        Args:
            message: The user's message.
            chat_history: Replaces the history so far; None keeps it.
            prev_chunks: Passages to use if none is retrieved for this message.

        Returns:
            The stream; read its `async_response_gen()`.

        Raises:
            PromptError: The message is empty, or too long for the model's context.
        """
        nodes, history = await self._aprepare(message, chat_history, prev_chunks)
        response = await self._get_response_synthesizer(history, streaming=True).asynthesize(message, nodes)
        assert isinstance(response, AsyncStreamingResponse)

        async def stream() -> AsyncGenerator[ChatResponse, None]:
            text = ""
            deltas = response.async_response_gen()
            try:
                async for delta in deltas:
                    text += delta
                    yield ChatResponse(message=_message(MessageRole.ASSISTANT, text), delta=delta)
            except GeneratorExit:
                await deltas.aclose()
                await self._memory.aput_messages(_exchange(message, text))
                raise
            await self._memory.aput_messages(_exchange(message, text))

        return _streamed(message, nodes, response, achat_stream=stream())

    def _prepare(
        self, message: str, chat_history: list[ChatMessage] | None, prev_chunks: list[NodeWithScore] | None
    ) -> tuple[list[NodeWithScore], list[ChatMessage]]:
        """The passages and the earlier messages of an answer; see `chat` for the arguments."""
        if chat_history is not None:
            self._memory.set(chat_history)
        return self._get_nodes(message) or prev_chunks or [], self._memory.get(input=message)

    async def _aprepare(
        self, message: str, chat_history: list[ChatMessage] | None, prev_chunks: list[NodeWithScore] | None
    ) -> tuple[list[NodeWithScore], list[ChatMessage]]:
        """`_prepare` without blocking the event loop."""
        if chat_history is not None:
            await self._memory.aset(chat_history)
        return await self._aget_nodes(message) or prev_chunks or [], await self._memory.aget(input=message)

    def _get_response_synthesizer(
        self, chat_history: list[ChatMessage], streaming: bool = False
    ) -> GroundedSynthesizer:
        prefix = list(self._prefix_messages)
        system = str(prefix.pop(0).content) if prefix and prefix[0].role == MessageRole.SYSTEM else ""
        earlier = [*prefix, *chat_history]
        # Earlier messages are values of the template, not parts of it, so that braces in them stay text.
        values: dict[str, Any] = {f"message_{i}": message.content or "" for i, message in enumerate(earlier)}
        values["system_text"] = system

        def template(context: str) -> ChatPromptTemplate:
            messages = [
                _message(self._llm.metadata.system_role, context + "{system_text}"),
                *(_message(message.role, f"{{message_{i}}}") for i, message in enumerate(earlier)),
                _message(MessageRole.USER, "{query_str}"),
            ]
            return ChatPromptTemplate(messages, **values)

        return GroundedSynthesizer(
            self._llm,
            template(self._context_template.get_template()),
            template(self._context_refine_template.get_template()),
            streaming=streaming,
            surroundings=self._surroundings,
        )


def _message(role: MessageRole, text: str) -> ChatMessage:
    return ChatMessage(content=text, role=role)


def _answer(message: str, nodes: list[NodeWithScore], response: RESPONSE_TYPE) -> AgentChatResponse:
    return AgentChatResponse(
        response=str(response),
        sources=_sources(message, nodes),
        source_nodes=nodes,
        metadata=response.metadata,
    )


def _streamed(message: str, nodes: list[NodeWithScore], response: RESPONSE_TYPE, **stream: Any) -> ChatStream:
    return ChatStream(
        sources=_sources(message, nodes),
        source_nodes=nodes,
        is_writing_to_memory=False,
        metadata=response.metadata,
        **stream,
    )


def _exchange(question: str, answer: str) -> list[ChatMessage]:
    return [_message(MessageRole.USER, question), _message(MessageRole.ASSISTANT, answer.strip())]


def _sources(message: str, nodes: list[NodeWithScore]) -> list[ToolOutput]:
    return [ToolOutput(tool_name="retriever", content=str(nodes), raw_input={"message": message}, raw_output=nodes)]
