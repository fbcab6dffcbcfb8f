"""`POST /api/race`: one prompt, decoded with drafts and plainly; when each text came, and whether the tokens agree."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from sse_starlette import EventSourceResponse

from reader_rag.engine.engine import Engine
from reader_rag.errors import BusyError, ReaderError
from reader_rag.llm.calls import PreparedCall
from reader_rag.llm.comparison import RaceStopped, check_idle, race
from reader_rag.server.access import CallerDep, ServiceDep
from reader_rag.server.errors import ApiError, error_of, log_bug
from reader_rag.server.event_stream import EVENT_STREAM
from reader_rag.server.openai.prepared import prepare
from reader_rag.server.openai.schemas import ChatRequest, Message

router = APIRouter(prefix="/api", tags=["race"])

_running = threading.Lock()
"""Held by the one race of this process: another one beside it would falsify the times of both."""


class RaceRequest(BaseModel):
    """The chat that is decoded twice."""

    messages: list[Message] = Field(min_length=1, description="The messages, as of a chat completion.")
    model: str = Field(description="A name of /v1/models; that of the documents retrieves once for both runs.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of the answer; null: the model's default.")


@router.post(
    "/race",
    response_class=EventSourceResponse,
    responses=EVENT_STREAM,
)
async def run_race(request: Request, body: RaceRequest, service: ServiceDep, caller: CallerDep) -> EventSourceResponse:
    """Decode one prompt with drafts, then plainly, greedily and with nothing else running.

    Server-sent events: `{"state": "reader"}` and `{"state": "plain"}` as each run begins, and at the end `{"result":
    {"reader": RUN, "plain": RUN, "agree": true, "first_difference": null}}`, where a RUN is `{"events": [[seconds,
    text], ...], "tokens", "tokens_per_second", "tokens_per_step"}`; or `{"error": {...}}`. Neither run uses state of
    earlier requests, and nothing of them is kept. 409 with the code `busy` where other requests are decoded.
    """
    engine = service.engine
    if engine is None:
        raise ApiError(400, "another server decodes here; a race needs the model in this process", code="no_engine")
    await _refuse_if_busy(engine)
    fields = {"model": body.model, "messages": body.messages, "max_completion_tokens": body.max_tokens}
    try:
        chat = ChatRequest.model_validate({**fields, "temperature": 0.0})
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error
    prepared = await prepare(service, caller, chat, str(request.base_url))
    call = prepared.required_call  # raises before the stream begins
    await _refuse_if_busy(engine)
    return EventSourceResponse(_events(engine, call))


async def _refuse_if_busy(engine: Engine) -> None:
    try:
        await asyncio.to_thread(check_idle, engine)
    except BusyError as error:
        raise _busy() from error
    if _running.locked():
        raise _busy()


def _busy() -> ApiError:
    return ApiError(409, "other requests are running; race when they are done", code="busy")


async def _events(engine: Engine, call: PreparedCall) -> AsyncIterator[dict[str, str]]:
    """The events of a race. When the client disconnects, the race ends with its next chunk."""
    loop, stop = asyncio.get_running_loop(), threading.Event()
    states: asyncio.Queue[str | None] = asyncio.Queue()

    def tell(state: str | None) -> None:
        loop.call_soon_threadsafe(states.put_nowait, state)

    running = asyncio.create_task(asyncio.to_thread(_race, engine, call, tell, stop))
    try:
        while (state := await states.get()) is not None:
            yield _event({"state": state})
        yield _event(await running)
    finally:
        stop.set()


def _event(value: dict[str, Any]) -> dict[str, str]:
    return {"data": json.dumps(value)}


def _race(
    engine: Engine, call: PreparedCall, tell: Callable[[str | None], None], stop: threading.Event
) -> dict[str, Any]:
    """Run a race on a thread of its own.

    Args:
        engine: The engine.
        call: The chat.
        tell: Called with the name of each run, and with None at the end.
        stop: Set when the result is not wanted any more.

    Returns:
        The last event.
    """
    if not _running.acquire(blocking=False):
        tell(None)
        return {"error": error_of(_busy())[1].error.model_dump()}
    try:
        done = race(engine, call.prompt, call.params, call.passages, on_method=tell, stopped=stop.is_set)
        return {"result": done.to_dict()}
    except RaceStopped:
        return {}
    except Exception as error:
        if not isinstance(error, ReaderError):
            log_bug(error)
        return {"error": error_of(error)[1].error.model_dump()}
    finally:
        _running.release()
        tell(None)
