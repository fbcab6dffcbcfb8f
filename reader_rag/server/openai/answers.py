"""Answers while they are decoded: text, tool calls and sources of each choice, for streams and whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing, closing
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import Request
from starlette.requests import ClientDisconnect

from reader_rag.engine.outputs import Generation, Stats
from reader_rag.engine.stream import GenerationStream
from reader_rag.llm.calls import PreparedCall
from reader_rag.llm.tool_formats import ToolRequest
from reader_rag.rag.prompts import NOTHING_FOUND
from reader_rag.sampling.logprobs import TokenLogprobs
from reader_rag.server.openai.prepared import Prepared
from reader_rag.server.openai.responses import Annotation, ReaderFigures

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class CallDelta:
    """What is new of a tool call.

    Attributes:
        number: The call's place in the answer.
        arguments: New text of the arguments.
        name: The tool's name, where the call is new; else "".
        id: The call's id, where it is new; else "".
    """

    number: int
    arguments: str
    name: str = ""
    id: str = ""


@dataclass(frozen=True)
class Part:
    """What a step adds to an answer.

    Attributes:
        text: New text.
        calls: New tool calls, and what is new of those before.
        logprobs: Log-probabilities of the step's tokens, where they are asked for.
        done: The finished answer; None before the last part.
    """

    text: str
    calls: tuple[CallDelta, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    done: Generation | None = None


@dataclass(frozen=True)
class Ending:
    """What comes with the last part of an answer to a chat.

    Attributes:
        annotations: The citations.
        footer: The sources in Markdown, where that is asked for.
        figures: Figures, notes and passages.
    """

    figures: ReaderFigures
    annotations: list[Annotation] = field(default_factory=list)
    footer: str = ""


async def read(stream: GenerationStream, tools: ToolRequest | None) -> AsyncGenerator[Part, None]:
    """The parts of an answer. Closing the generator ends the request.

    Args:
        stream: The answer.
        tools: The tools that it may call; None: none.
    """
    text, sent = "", 0
    written: list[int] = []  # characters of the arguments of each call that were sent
    with closing(stream):
        async for chunk in stream:
            done = stream.result if chunk.finish_reason is not None else None
            if tools is None:
                yield Part(chunk.text, (), chunk.logprobs, done)
                continue
            text += chunk.text
            content, calls = tools.parse(text, whole=done is not None)
            new, sent = content[sent:], max(sent, len(content))
            deltas = []
            for number, call in enumerate(calls):
                if number == len(written):
                    written.append(len(call.text))
                    deltas.append(CallDelta(number, call.text, call.name, uuid4().hex[:9]))  # Mistral's have nine
                elif len(call.text) > written[number]:
                    deltas.append(CallDelta(number, call.text[written[number] :]))
                    written[number] = len(call.text)
            yield Part(new, tuple(deltas), chunk.logprobs, done)


async def nothing_found() -> AsyncGenerator[Part, None]:
    """The one part of an answer for which no passage was found."""
    yield Part(NOTHING_FOUND, done=Generation(NOTHING_FOUND, (), "stop", Stats()))


async def submitted(prepared: Prepared, calls: Sequence[PreparedCall]) -> list[AsyncGenerator[Part, None]]:
    """Queue the calls of a request; if one is refused, those before it end.

    Args:
        prepared: The request.
        calls: A call for each choice; none: nothing was found, and one choice says so.

    Raises:
        ReaderError: A call is refused.
    """
    if not calls:
        return [nothing_found()]
    streams: list[GenerationStream] = []
    try:
        for call in calls:
            streams.append(await asyncio.to_thread(prepared.llm.submit, call))
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return [read(stream, call.tools) for stream, call in zip(streams, calls, strict=True)]


async def merged(parts: Sequence[AsyncGenerator[Part, None]]) -> AsyncGenerator[tuple[int, Part], None]:
    """The parts of several choices, with the number of their choice, as they come. Closing it closes all.

    Args:
        parts: The choices.
    """
    async with AsyncExitStack() as opened:
        for each in parts:
            await opened.enter_async_context(aclosing(each))
        waiting = {asyncio.ensure_future(anext(each, None)): number for number, each in enumerate(parts)}
        try:
            while waiting:
                ready, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(ready, key=lambda task: waiting[task]):
                    number = waiting.pop(task)
                    part = task.result()
                    if part is not None:
                        waiting[asyncio.ensure_future(anext(parts[number], None))] = number
                        yield number, part
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def ending(prepared: Prepared, content: str, done: Generation) -> Ending:
    """Citations and figures of a finished answer.

    Args:
        prepared: The request.
        content: Its text without tool calls.
        done: The answer.
    """
    figures = ReaderFigures.of(done.stats)
    figures.notes = prepared.notes
    if prepared.sources is None:
        return Ending(figures)
    cited = await asyncio.to_thread(prepared.sources.cite, content, done.copied)
    figures.question = prepared.sources.found.question
    figures.passages = cited.passages
    return Ending(figures, cited.annotations, cited.footer)


async def until_disconnected(request: Request, work: Awaitable[_Result]) -> _Result:
    """The result of a piece of work, which is cancelled when the client disconnects.

    Args:
        request: The client's request, whose body was read.
        work: The work.

    Raises:
        ClientDisconnect: The client has gone.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def started(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of another server, once the first has come: until then an error is an HTTP status.

    Args:
        chunks: The chunks.
    """
    try:
        first = await anext(chunks, None)
    except BaseException:
        await chunks.aclose()
        raise

    async def all_chunks() -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(chunks):
            if first is not None:
                yield first
            async for chunk in chunks:
                yield chunk

    return all_chunks()
