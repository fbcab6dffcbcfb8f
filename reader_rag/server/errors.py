"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import Scope

from reader_rag.errors import (
    BusyError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    GrammarError,
    IngestError,
    MissingDependencyError,
    ModelNotFoundError,
    PromptError,
    ReaderError,
    ScoresError,
    ServerError,
    StoreBusyError,
    StoreConnectionError,
    StoreNotFoundError,
    StoreWriteError,
    ToolCallError,
)

_log = logging.getLogger("reader_rag.server")

RETRY_S = 2
"""Seconds after which a client should repeat a request that was refused because the server is busy."""


class ErrorDetail(BaseModel):
    """What is wrong with a request."""

    message: str = Field(description="One line: what is wrong and what to do.")
    type: str = Field(description="Kind of error, as OpenAI names them.")
    param: str | None = Field(default=None, description="The field that is wrong.")
    code: str | None = Field(default=None, description="A name for programs.")


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An error with its HTTP status.

    Args:
        status: HTTP status.
        message: One line: what is wrong and what to do.
        code: A name for programs.
        param: The field that is wrong.
        headers: Headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code = code
        self.param = param


def unknown_document(param: str | None = None) -> ApiError:
    """The error of an id that no document of the tenant has.

    Args:
        param: The field with the id; None: it is in the path.
    """
    return ApiError(404, "there is no such document", code="document_not_found", param=param)


# The first class that an error is an instance of decides.
_STATUS: tuple[tuple[type[ReaderError], int, str | None], ...] = (
    (BusyError, 429, "queue_full"),
    (StoreBusyError, 429, "store_busy"),
    (ContextLengthError, 400, "context_length_exceeded"),
    (PromptError, 400, None),
    (ConfigError, 400, None),
    (GrammarError, 400, "grammar"),
    (ToolCallError, 400, "tool_call"),
    (ScoresError, 400, "no_token"),
    (IngestError, 400, "nothing_to_ingest"),
    (ModelNotFoundError, 404, "model_not_found"),
    (EngineClosedError, 503, "shutting_down"),
    (StoreNotFoundError, 503, "no_store"),
    (StoreConnectionError, 503, "store_unreachable"),
    (StoreWriteError, 507, "not_written"),
    (MissingDependencyError, 501, "not_installed"),
    (ServerError, 502, "engine_unreachable"),
)


def type_of(status: int) -> str:
    """OpenAI's kind of error for an HTTP status."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "invalid_request_error",
        429: "rate_limit_error",
    }
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_of(error: BaseException) -> tuple[int, ErrorBody]:
    """An exception as HTTP status and body.

    Args:
        error: The exception. One that is neither a `ReaderError` nor an HTTP error is a bug: its message stays here.
    """
    if isinstance(error, HTTPException):
        code, param = getattr(error, "code", None), getattr(error, "param", None)
        return error.status_code, _body(error.status_code, str(error.detail), code, param)
    if isinstance(error, ReaderError):
        for kind, status, code in _STATUS:
            if isinstance(error, kind):
                return status, _body(status, str(error), code)
        return 500, _body(500, str(error))
    return 500, _body(500, "the server failed; its log says where")


def response_of(error: BaseException) -> JSONResponse:
    """An exception as an answer.

    Args:
        error: The exception.
    """
    status, body = error_of(error)
    headers = dict(getattr(error, "headers", None) or {})
    if status in (429, 503):
        headers.setdefault("Retry-After", str(RETRY_S))
    return JSONResponse(body.model_dump(), status, headers)


def client_address(scope: Scope) -> str:
    """The address that a request came from.

    Args:
        scope: The request.
    """
    client: tuple[str, int] | None = scope.get("client")
    return "unknown" if client is None else client[0]


def log_refusal(scope: Scope, error: ApiError) -> None:
    """Log that a request is refused before it reaches a route.

    Args:
        scope: The request.
        error: The answer.
    """
    reason = ReaderError(error.detail)  # one printable line
    _log.warning("refused %s from %s: %d %s", scope["method"], client_address(scope), error.status_code, reason)


def log_bug(error: BaseException) -> None:
    """Log where an unexpected exception came from. Its message is left out, because it may quote a question.

    Args:
        error: The exception.
    """
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    places = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    _log.error("unexpected %s at %s", type(error).__name__, places)


def add_handlers(app: FastAPI) -> None:
    """Have an app answer every known error in the one form; `CountRequests` does so with all others.

    Args:
        app: The app.
    """

    async def known(request: Request, error: Exception) -> JSONResponse:
        if error_of(error)[0] >= 500 and not isinstance(error, HTTPException):
            log_bug(error)
        return response_of(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return JSONResponse(_validation(error.errors()[0]).model_dump(), 400)

    app.add_exception_handler(HTTPException, known)
    app.add_exception_handler(ReaderError, known)
    app.add_exception_handler(RequestValidationError, invalid)


def _validation(first: Mapping[str, Any]) -> ErrorBody:
    """The first thing that pydantic found wrong; what was sent is not repeated."""
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":  # OpenAI's words
        return _body(400, f"Unknown parameter: '{name}'.", "unknown_parameter", name)
    message = str(first["msg"]).removeprefix("Value error, ")
    return _body(400, f"{name}: {message}" if name else message, None, name or None)


def _body(status: int, message: str, code: str | None = None, param: str | None = None) -> ErrorBody:
    line = str(ReaderError(message))  # one printable line
    return ErrorBody(error=ErrorDetail(message=line, type=type_of(status), param=param, code=code))
