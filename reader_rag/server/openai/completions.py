"""`POST /v1/completions`: the continuation of a text, without chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from reader_rag.engine.outputs import Generation, Stats
from reader_rag.llm import ReaderLLM
from reader_rag.llm.calls import PreparedCall
from reader_rag.sampling.logprobs import TokenLogprobs
from reader_rag.server.access import Caller, CallerDep, ServiceDep
from reader_rag.server.errors import ApiError
from reader_rag.server.event_stream import EVENT_STREAM, event_stream
from reader_rag.server.openai.answers import Part, merged, submitted, until_disconnected
from reader_rag.server.openai.logprobs import TokenSpeller
from reader_rag.server.openai.prepared import Prepared, choices, known_model
from reader_rag.server.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ReaderFigures,
    Usage,
    first_fields,
)
from reader_rag.server.openai.sampling import completion_arguments
from reader_rag.server.openai.schemas import MOST_CHOICES, CompletionRequest
from reader_rag.server.service import Service

router = APIRouter(prefix="/v1", tags=["completions"])


@router.post("/completions", response_model=Completion, responses=EVENT_STREAM)
async def completions(
    request: Request, body: CompletionRequest, service: ServiceDep, caller: CallerDep
) -> Completion | Response:
    """Continue one text or several, whole or as a stream of server-sent events."""
    if service.engine is None:
        return await _remote(request, body, service)
    answer = await until_disconnected(request, asyncio.to_thread(_Answer, service, caller, body))
    parts = await until_disconnected(request, submitted(Prepared(answer.llm, None), answer.calls))
    if body.stream:
        return event_stream(answer.chunks(parts), service.config.grace)
    return await until_disconnected(request, answer.whole(parts))


async def _remote(request: Request, body: CompletionRequest, service: Service) -> Response:
    from reader_rag.server.openai.remote import RemoteAnswer  # it needs the extra `openai`

    _check_model(service, body)
    answer = RemoteAnswer(service, body, "/completions")
    return await answer.response(request)


def _check_model(service: Service, body: CompletionRequest) -> None:
    known_model(service, body.model)
    if body.model == service.docs_model:
        raise ApiError(
            400, f"{body.model} answers chats: use POST /v1/chat/completions, or {service.model}", param="model"
        )


class _Answer:
    """The answer to one request.

    Args:
        service: The service.
        caller: Who asks.
        body: The request.

    Attributes:
        llm: The LLM of the caller's tenant.
        calls: The calls: for each prompt, as many as it has choices.

    Raises:
        ApiError: There is no such model, or it continues no text.
        ReaderError: A prompt cannot be continued.
    """

    def __init__(self, service: Service, caller: Caller, body: CompletionRequest) -> None:
        _check_model(service, body)
        assert isinstance(service.llm, ReaderLLM)
        prompts = _prompts(body)
        if len(prompts) * (body.n or 1) > MOST_CHOICES:
            raise ApiError(400, f"a request has at most {MOST_CHOICES} answers, of all its prompts", param="n")
        self.llm = service.llm.for_tenant(caller.tenant)
        arguments = completion_arguments(body)
        made = [self.llm.prepare_completion(prompt, **arguments) for prompt in prompts]
        self.calls: list[PreparedCall] = [call for each in made for call in choices(each, body.n)]
        self._body = body
        engine = self.llm.engine
        self._speller = TokenSpeller(engine.tokenizer, engine.eos_ids)

    async def whole(self, parts: Sequence[AsyncGenerator[Part, None]]) -> Completion:
        """The whole answer.

        Args:
            parts: The parts of each choice.
        """
        done: dict[int, Generation] = {}
        async with aclosing(merged(parts)) as all_parts:
            async for number, part in all_parts:
                if part.done is not None:
                    done[number] = part.done
        found = [
            CompletionChoice(
                index=number,
                text=done[number].text,
                logprobs=self._logprobs(done[number].logprobs, 0),
                finish_reason=done[number].finish_reason,
            )
            for number in sorted(done)
        ]
        figures = ReaderFigures.of(done[0].stats)
        return Completion(model=self._body.model, choices=found, usage=self._usage(done), reader=figures)

    async def chunks(self, parts: Sequence[AsyncGenerator[Part, None]]) -> AsyncGenerator[Completion, None]:
        """The answer as chunks.

        Args:
            parts: The parts of each choice.
        """
        head = first_fields("text_completion", self._body.model)
        if self._body.wants_usage:
            head["usage"] = None
        done: dict[int, Generation] = {}
        lengths = [0] * len(parts)
        async with aclosing(merged(parts)) as all_parts:
            async for number, part in all_parts:
                choice = CompletionChoice(
                    index=number,
                    text=part.text,
                    logprobs=self._logprobs(part.logprobs, lengths[number]),
                    finish_reason=None if part.done is None else part.done.finish_reason,
                )
                lengths[number] += len(part.text)
                if part.done is not None:
                    done[number] = part.done
                    yield Completion(**head, choices=[choice], reader=ReaderFigures.of(part.done.stats))
                elif part.text or part.logprobs:
                    yield Completion(**head, choices=[choice])
        if self._body.wants_usage:
            yield Completion(**{**head, "usage": self._usage(done)}, choices=[])

    def _logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        return self._speller.completion(tokens, self._body.logprobs, offset)

    def _usage(self, done: dict[int, Generation]) -> Usage:
        """The usage of all prompts; the prompt of several choices counts once."""
        count = self._body.n or 1
        total = Usage()
        for first in range(0, len(self.calls), count):
            stats: list[Stats] = [done[k].stats for k in range(first, first + count) if k in done]
            total = total.plus(Usage.of(stats))
        return total


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts: each a text or token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    several: list[str | list[int]] = [each for each in prompt if not isinstance(each, int)]
    return several or [[each for each in prompt if isinstance(each, int)]]
