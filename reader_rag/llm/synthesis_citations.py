"""Puts citations into the responses of query and chat engines, LlamaIndex's own included, as `metadata["citations"]`.

A synthesizer reports its start and its end as events, in the context of the call, and the end with the response that
its caller gets. From start to end the calls of `ReaderLLM` are collected; a streamed answer has its calls while it is
read, so its generator is replaced by one that collects them then. LlamaIndex's chat engines make a response of their
own of the synthesizer's and drop its metadata: the span of a chat ends with that response, which then gets them.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.schema import NodeWithScore
from llama_index_instrumentation.base.event import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler
from llama_index_instrumentation.span import BaseSpan
from llama_index_instrumentation.span_handlers import BaseSpanHandler

from reader_rag.engine.outputs import Generation, Passage
from reader_rag.llm.citations import CitedCall, cite_calls

_MOST_CALLS = 256
"""Most calls of one synthesis that are kept: more are left over from one that failed."""


class Synthesis:
    """The calls of `ReaderLLM` that one synthesis makes.

    Args:
        span_id: Id of the synthesis's span; None: it has none.
    """

    def __init__(self, span_id: str | None) -> None:
        self.span_id = span_id
        self._calls: deque[CitedCall] = deque(maxlen=_MOST_CALLS)

    def add(self, done: Generation, passages: tuple[Passage, ...]) -> None:
        """Record a finished call.

        Args:
            done: Its answer.
            passages: Its passages.
        """
        self._calls.append(CitedCall(done.text, done.copied, passages))

    def write(self, metadata: dict[str, Any], answer: str, nodes: Sequence[NodeWithScore]) -> None:
        """Put the citations of an answer into the metadata of its response, if `ReaderLLM` was called for it.

        Args:
            metadata: The metadata; changed.
            answer: The answer's text.
            nodes: The response's nodes.
        """
        if self._calls:
            metadata["citations"] = cite_calls(answer, tuple(self._calls), nodes)


_current: ContextVar[Synthesis | None] = ContextVar("reader_rag_synthesis", default=None)


def current_synthesis() -> Synthesis | None:
    """The synthesis that the running call belongs to; None if it belongs to none."""
    return _current.get()


@contextmanager
def _collecting(synthesis: Synthesis) -> Generator[None, None, None]:
    """Collect calls for a synthesis. No generator may yield inside: its reader would see the variable."""
    before = _current.set(synthesis)
    try:
        yield
    finally:
        _current.reset(before)


@dataclass
class _Chat:
    """A call of a chat engine.

    Attributes:
        span_id: Id of its span.
        outer: The chat that it is a part of; None: of none.
        metadata: That of the last synthesis in it; None before one has ended.
    """

    span_id: str
    outer: _Chat | None
    metadata: dict[str, Any] | None = None


_chat: ContextVar[_Chat | None] = ContextVar("reader_rag_chat", default=None)


class _ChatSpans(BaseSpanHandler[BaseSpan]):
    """Sets `_chat` while a call of a chat engine runs, and gives its response the metadata; it keeps no spans."""

    @classmethod
    def class_name(cls) -> str:
        return "ReaderChatCitations"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(instance, BaseChatEngine):
            _chat.set(_Chat(id_, _chat.get()))

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> None:
        chat = _chat.get()
        if chat is None or chat.span_id != id_:
            return
        _chat.set(chat.outer)
        of_a_chat = isinstance(result, (AgentChatResponse, StreamingAgentChatResponse))
        if of_a_chat and chat.metadata is not None and getattr(result, "metadata", None) is None:
            result.metadata = chat.metadata  # type: ignore[union-attr]  # of a stream: filled when it was read

    def prepare_to_drop_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        err: BaseException | None = None,
        **kwargs: Any,
    ) -> None:
        self.prepare_to_exit_span(id_, bound_args, instance)


class _Handler(BaseEventHandler):
    """Sets `_current` from the start of a synthesis to its end, and gives its response the citations."""

    @classmethod
    def class_name(cls) -> str:
        return "ReaderCitations"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, SynthesizeStartEvent):
            _current.set(Synthesis(event.span_id))
        elif isinstance(event, SynthesizeEndEvent):
            synthesis = _current.get()
            if synthesis is not None and synthesis.span_id == event.span_id:
                _current.set(None)
                _attach(synthesis, event.response)


def _attach(synthesis: Synthesis, response: Any) -> None:
    """Put the citations into the response of a synthesis: at once, or when its stream was read."""
    chat = _chat.get()
    metadata = {} if response.metadata is None else response.metadata
    # The generators get the metadata, not the response: in a cycle of references an unread stream would not end.
    if isinstance(response, StreamingResponse):
        response.response_gen = _read(synthesis, response.response_gen, metadata, response.source_nodes, chat)
    elif isinstance(response, AsyncStreamingResponse):
        response.response_gen = _aread(synthesis, response.response_gen, metadata, response.source_nodes, chat)
    else:
        synthesis.write(metadata, str(response), response.source_nodes)
        if not metadata:
            return
    response.metadata = metadata
    if chat is not None:
        chat.metadata = metadata


def _read(
    synthesis: Synthesis,
    pieces: Generator[str, None, None],
    metadata: dict[str, Any],
    nodes: list[NodeWithScore],
    chat: _Chat | None,
) -> Generator[str, None, None]:
    """The pieces of a streamed answer; behind the last one, its citations are written."""
    answer = ""
    with closing(pieces):
        while True:
            with _collecting(synthesis):
                piece = next(pieces, None)
            if piece is None:
                break
            answer += piece
            yield piece
    synthesis.write(metadata, _as_shown(answer, chat), nodes)


async def _aread(
    synthesis: Synthesis,
    pieces: AsyncGenerator[str, None],
    metadata: dict[str, Any],
    nodes: list[NodeWithScore],
    chat: _Chat | None,
) -> AsyncGenerator[str, None]:
    """`_read` for an asynchronous stream."""
    answer = ""
    async with aclosing(pieces):
        while True:
            with _collecting(synthesis):
                piece = await anext(pieces, None)
            if piece is None:
                break
            answer += piece
            yield piece
    synthesis.write(metadata, _as_shown(answer, chat), nodes)


def _as_shown(answer: str, chat: _Chat | None) -> str:
    """A streamed answer as its response has it: that of a chat has no white space around it."""
    return answer if chat is None else answer.strip()


_lock = threading.Lock()


def register() -> None:
    """Listen to LlamaIndex's events of synthesizers and to spans of chat engines, once in a process."""
    dispatcher = get_dispatcher()
    with _lock:
        if not any(isinstance(handler, _Handler) for handler in dispatcher.event_handlers):
            dispatcher.add_event_handler(_Handler())
        if not any(isinstance(handler, _ChatSpans) for handler in dispatcher.span_handlers):
            dispatcher.add_span_handler(_ChatSpans())
