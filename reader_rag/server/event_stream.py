"""Server-sent events: how routes declare them, and a stream of chunks as OpenAI's API sends it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import anyio
from pydantic import BaseModel
from sse_starlette import EventSourceResponse

from reader_rag.server.errors import error_of, log_bug

EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}
"""The argument `responses` of routes that answer with server-sent events."""

_PING_S = 15
"""Seconds between two comments that keep a silent connection open."""


def event_stream(chunks: AsyncGenerator[Any, None], grace_s: float) -> EventSourceResponse:
    """A stream of chunks as server-sent events, up to `[DONE]`; an error midway is an event too.

    Args:
        chunks: The chunks, models or JSON; closed when the client disconnects.
        grace_s: Seconds that it may go on when the service is shut down.
    """

    async def events() -> AsyncIterator[dict[str, Any]]:
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield {"data": _json(chunk)}
        except Exception as error:
            status, body = error_of(error)
            if status >= 500:
                log_bug(error)
            yield {"data": body.model_dump_json()}
        yield {"data": "[DONE]"}

    return EventSourceResponse(
        events(), sep="\n", ping=_PING_S, shutdown_event=anyio.Event(), shutdown_grace_period=grace_s
    )


def _json(chunk: BaseModel | dict[str, Any]) -> str:
    if isinstance(chunk, BaseModel):
        return chunk.model_dump_json(exclude_unset=True, by_alias=True)
    return json.dumps(chunk, ensure_ascii=False)
