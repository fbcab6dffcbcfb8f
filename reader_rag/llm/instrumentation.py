"""LlamaIndex instrumentation of answers: an event with counts and times and, for a stream, a span until its end.

LlamaIndex ends the span of a streaming call when the call returns, before there is any text, and handlers that export
spans (OpenTelemetry) drop events of an ended span. So a stream has a span of its own, a child of the call's span. It
is entered and exited in a copy of the call's context, because a generator runs in the context of its consumer.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from contextvars import copy_context
from functools import wraps
from types import TracebackType
from typing import Any, Self, TypeVar, cast
from uuid import uuid4

from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base.event import BaseEvent
from llama_index_instrumentation.dispatcher import active_instrument_tags
from llama_index_instrumentation.events.span import SpanDropEvent
from llama_index_instrumentation.span import active_span_id

from reader_rag.draft.tree import SOURCES
from reader_rag.engine.outputs import Generation

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_SPAN = "ReaderLLM.answer"
_NO_ARGUMENTS = inspect.signature(lambda: None).bind()

_dispatcher = get_dispatcher(__name__)


class ReaderAnswerEvent(BaseEvent):
    """An answer of `ReaderLLM` is finished. It has the fields of `Stats` and no text, token or tenant.

    Every field is a number or a string, which all exporters support.

    Attributes:
        call_span_id: Id of the call's span, which LlamaIndex's own events have; for a stream, `span_id` is the id of
            the stream's span.
        finish_reason: "stop" or "length".
        accepted_context: Accepted nodes that were copied from the prompt or the answer so far.
        accepted_passage: Accepted nodes that were copied from a passage.
        accepted_datastore: Accepted nodes that were copied from a text in the datastore.
        accepted_successor: Accepted nodes from the table of the model's own next tokens.
        accepted_external: Accepted nodes of external draft sources (`DraftSource`).
        accepted_prediction: Accepted nodes that were copied from the request's prediction.
        prediction_accepted: Tokens of the prediction that were accepted, from whatever source the node was copied.
        prediction_rejected: The other tokens of the prediction.
    """

    call_span_id: str = ""
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    steps: int
    drafted: int
    accepted: int
    accepted_context: int
    accepted_passage: int
    accepted_datastore: int
    accepted_successor: int
    accepted_external: int
    accepted_prediction: int
    tokens_per_step: float
    tokens_per_s: float
    queue_s: float
    ttft_s: float
    decode_s: float
    draft_s: float
    cache_bytes: int
    reused_tokens: int
    prediction_accepted: int
    prediction_rejected: int

    @classmethod
    def class_name(cls) -> str:
        """Name of the event in traces."""
        return "ReaderAnswerEvent"

    @classmethod
    def of(cls, done: Generation, call_span_id: str | None) -> Self:
        """The event of a finished answer.

        Args:
            done: The answer.
            call_span_id: Id of the call's span; None: the call has no span.
        """
        figures = done.stats.to_dict()
        by_source = figures.pop("accepted_by_source")
        del figures["draft_sources"]  # by name, which an exporter of numbers and strings does not take
        accepted = {f"accepted_{source}": by_source.get(source, 0) for source in SOURCES}
        return cls(call_span_id=call_span_id or "", finish_reason=done.finish_reason, **accepted, **figures)


def report_answer(done: Generation) -> Generation:
    """Send the event of an answer in the span of the running call, and return the answer.

    Args:
        done: The answer.
    """
    _report(done, active_span_id.get())
    return done


def _report(done: Generation, call: str | None) -> None:
    _dispatcher.event(ReaderAnswerEvent.of(done, call))


class _Answer:
    """The span of a stream, entered and exited in a copy of the call's context. Create it while the call runs."""

    def __init__(self) -> None:
        self._context = copy_context()
        self._call = active_span_id.get()
        self._id = f"{_SPAN}-{uuid4()}"

    def __enter__(self) -> Self:
        self._context.run(self._begin)
        return self

    def _begin(self) -> None:
        tags = active_instrument_tags.get()
        _dispatcher.span_enter(self._id, _NO_ARGUMENTS, parent_id=self._call, tags=tags)
        active_span_id.set(self._id)

    def done(self, generation: Generation) -> None:
        """Send the event of the finished answer."""
        self._context.run(_report, generation, self._call)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.run(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        # Closing the stream early is not an error.
        if error is None or isinstance(error, (GeneratorExit, asyncio.CancelledError)):
            _dispatcher.span_exit(self._id, _NO_ARGUMENTS)
        else:
            _dispatcher.event(SpanDropEvent(span_id=self._id, err_str=str(error)))
            _dispatcher.span_drop(self._id, _NO_ARGUMENTS, err=error)


def traced(function: FunctionT) -> FunctionT:
    """Decorate a generator function so that a span covers its responses.

    Args:
        function: Makes responses of a stream, by (stream, respond); its last response has `raw`.

    Returns:
        The function; the answer's event is sent before the last response.
    """

    def responses_of(stream: Any, responses: Generator[Any, None, None], span: _Answer) -> Generator[Any, None, None]:
        with span, closing(responses):
            for response in responses:
                if response.raw is not None:
                    span.done(stream.result)
                yield response

    @wraps(function)
    def wrapper(stream: Any, respond: Any) -> Generator[Any, None, None]:
        return responses_of(stream, function(stream, respond), _Answer())

    return cast(FunctionT, wrapper)


def atraced(function: FunctionT) -> FunctionT:
    """Decorate an async generator function so that a span covers its responses.

    Args:
        function: Makes responses of a stream, by (stream, respond); its last response has `raw`.

    Returns:
        The function; the answer's event is sent before the last response.
    """

    async def responses_of(
        stream: Any, responses: AsyncGenerator[Any, None], span: _Answer
    ) -> AsyncGenerator[Any, None]:
        with span:
            async with aclosing(responses):
                async for response in responses:
                    if response.raw is not None:
                        span.done(stream.result)
                    yield response

    @wraps(function)
    def wrapper(stream: Any, respond: Any) -> AsyncGenerator[Any, None]:
        return responses_of(stream, function(stream, respond), _Answer())

    return cast(FunctionT, wrapper)
