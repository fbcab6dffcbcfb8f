"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from reader_rag.engine.outputs import Generation
from reader_rag.server.access import Caller, CallerDep, ServiceDep
from reader_rag.server.event_stream import EVENT_STREAM, event_stream
from reader_rag.server.openai.answers import (
    CallDelta,
    Part,
    ending,
    merged,
    submitted,
    until_disconnected,
)
from reader_rag.server.openai.logprobs import TokenSpeller
from reader_rag.server.openai.prepared import Prepared, check_model, choices, prepare
from reader_rag.server.openai.responses import (
    AnswerMessage,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    Usage,
    finish_reason,
    first_fields,
)
from reader_rag.server.openai.schemas import ChatRequest
from reader_rag.server.service import Service

router = APIRouter(prefix="/v1", tags=["chat"])


@router.post("/chat/completions", response_model=ChatCompletion, responses=EVENT_STREAM)
async def chat_completions(
    request: Request, body: ChatRequest, service: ServiceDep, caller: CallerDep
) -> ChatCompletion | Response:
    """Answer a chat, whole or as a stream of server-sent events."""
    base_url = str(request.base_url)
    if service.engine is None:
        return await _remote(request, body, service, caller, base_url)
    prepared = await until_disconnected(request, prepare(service, caller, body, base_url))
    calls = [] if prepared.call is None else choices(prepared.call, body.n)
    parts = await until_disconnected(request, submitted(prepared, calls))
    answer = _Answer(body, prepared)
    if body.stream:
        return event_stream(answer.chunks(parts), service.config.grace)
    return await until_disconnected(request, answer.whole(parts))


async def _remote(request: Request, body: ChatRequest, service: Service, caller: Caller, base_url: str) -> Response:
    from reader_rag.server.openai.remote import RemoteAnswer  # it needs the extra `openai`

    check_model(service, body)
    answer = RemoteAnswer(service, body, "/chat/completions")
    if body.model == service.docs_model:
        await until_disconnected(request, answer.ground(caller, base_url))
    return await answer.response(request)


class _Answer:
    """The answer to one request.

    Args:
        body: The request.
        prepared: The same, prepared.
    """

    def __init__(self, body: ChatRequest, prepared: Prepared) -> None:
        self._body = body
        self._prepared = prepared
        engine = prepared.llm.engine
        self._speller = TokenSpeller(engine.tokenizer, engine.eos_ids)

    async def whole(self, parts: Sequence[AsyncGenerator[Part, None]]) -> ChatCompletion:
        """The whole answer.

        Args:
            parts: The parts of each choice.
        """
        made = [_PartialChoice() for _ in parts]
        async with aclosing(merged(parts)) as all_parts:
            async for number, part in all_parts:
                made[number].add(part)
        found = [await self._choice(number, choice) for number, choice in enumerate(made)]
        completion = ChatCompletion(
            model=self._body.model,
            choices=found,
            usage=Usage.of([choice.done.stats for choice in made if choice.done is not None]),
            reader=found[0].reader,
        )
        if len(found) == 1:
            found[0].reader = None
        return completion

    async def chunks(self, parts: Sequence[AsyncGenerator[Part, None]]) -> AsyncGenerator[ChatChunk, None]:
        """The answer as chunks.

        Args:
            parts: The parts of each choice.
        """
        head = first_fields("chat.completion.chunk", self._body.model)
        if self._body.wants_usage:
            head["usage"] = None
        made = [_PartialChoice() for _ in parts]
        async with aclosing(merged(parts)) as all_parts:
            for number in range(len(parts)):
                yield ChatChunk(**head, choices=[_chunk(number, Delta(role="assistant", content=""))])
            async for number, part in all_parts:
                made[number].add(part)
                if part.text or part.calls or part.logprobs:
                    yield ChatChunk(**head, choices=[self._delta(number, part)])
                if part.done is not None:
                    async for chunk in self._end(number, made[number], head):
                        yield chunk
        if self._body.wants_usage:
            counted = Usage.of([choice.done.stats for choice in made if choice.done is not None])
            yield ChatChunk(**{**head, "usage": counted}, choices=[])

    async def _end(self, number: int, made: _PartialChoice, head: dict[str, Any]) -> AsyncGenerator[ChatChunk, None]:
        """The last chunks of a choice: its footer, then citations and figures."""
        assert made.done is not None
        end = await ending(self._prepared, made.text, made.done)
        if end.footer:
            yield ChatChunk(**head, choices=[_chunk(number, Delta(content=end.footer))])
        delta = Delta(annotations=end.annotations) if end.annotations else Delta()
        last = ChunkChoice(
            index=number, delta=delta, logprobs=None, finish_reason=finish_reason(made.done, bool(made.calls))
        )
        yield ChatChunk(**head, choices=[last], reader=end.figures)

    async def _choice(self, number: int, made: _PartialChoice) -> ChatChoice:
        assert made.done is not None
        end = await ending(self._prepared, made.text, made.done)
        text = made.text + end.footer
        message = AnswerMessage(
            content=text if text or not made.calls else None,
            annotations=end.annotations,
            tool_calls=[call.made for call in made.calls] or None,
        )
        return ChatChoice(
            index=number,
            message=message,
            logprobs=self._logprobs(made.logprobs) if self._body.logprobs else None,
            finish_reason=finish_reason(made.done, bool(made.calls)),
            reader=end.figures,
        )

    def _delta(self, number: int, part: Part) -> ChunkChoice:
        delta = Delta()
        if part.text or not part.calls:
            delta.content = part.text
        if part.calls:
            delta.tool_calls = [_call_delta(call) for call in part.calls]
        return _chunk(number, delta, self._logprobs(part.logprobs) if part.logprobs else None)

    def _logprobs(self, tokens: Sequence[Any]) -> ChatLogprobs:
        return self._speller.chat(tokens, self._body.top_logprobs or 0)


class _PartialCall:
    """A tool call that is being streamed: its arguments so far."""

    def __init__(self, delta: CallDelta) -> None:
        self._id, self._name, self._arguments = delta.id, delta.name, delta.arguments

    def add(self, delta: CallDelta) -> None:
        """Add new arguments."""
        self._arguments += delta.arguments

    @property
    def made(self) -> CalledTool:
        """The call in OpenAI's form."""
        return CalledTool(id=self._id, function=CalledFunction(name=self._name, arguments=self._arguments))


class _PartialChoice:
    """A choice that is being streamed: its text, calls and log-probabilities so far."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[_PartialCall] = []
        self.logprobs: list[Any] = []
        self.done: Generation | None = None

    def add(self, part: Part) -> None:
        """Add a part."""
        self.text += part.text
        for delta in part.calls:
            if delta.number == len(self.calls):
                self.calls.append(_PartialCall(delta))
            else:
                self.calls[delta.number].add(delta)
        self.logprobs += part.logprobs
        self.done = part.done


def _chunk(number: int, delta: Delta, logprobs: ChatLogprobs | None = None) -> ChunkChoice:
    return ChunkChoice(index=number, delta=delta, logprobs=logprobs, finish_reason=None)


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.number, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.number, "id": call.id, "type": "function", "function": function}
