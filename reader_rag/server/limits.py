"""Limits of requests' bodies, and the headers that every answer has."""

from __future__ import annotations

import asyncio
import logging
import time

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from reader_rag.config import ServerConfig
from reader_rag.server.errors import ApiError, log_refusal, response_of

_log = logging.getLogger("reader_rag.server")

UPLOADS = "/api/documents"
"""The path whose bodies have the limit of uploads."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; frame-src 'self' blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
"""Headers of every answer; a route may set others."""


class BodyLimits:
    """ASGI middleware: ends requests whose body is too large or comes too slowly.

    Args:
        app: The app behind it.
        config: Limits.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with its body bounded."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._config, is_upload=scope["path"].rstrip("/") == UPLOADS)
        started = False

        async def send_noting(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            body.check_length(Headers(scope=scope).get("content-length"))
            await self._app(scope, body.receive, send_noting)
        except ApiError as error:
            if error is not body.refusal or started:
                raise
        refused = body.refusal
        if refused is not None:
            log_refusal(scope, refused)
            if not started:
                await response_of(refused)(scope, receive, send)


class _Body:
    """The body of one request.

    Args:
        receive: The server's own function.
        config: Limits.
        is_upload: Whether the limit of uploads holds.
    """

    def __init__(self, receive: Receive, config: ServerConfig, *, is_upload: bool) -> None:
        self.refusal: ApiError | None = None
        self._receive = receive
        self._config = config
        self._most = config.upload_bytes if is_upload else config.body_bytes
        self._received = 0
        self._complete = False
        self._begin = time.monotonic()

    def check_length(self, length: str | None) -> None:
        """Refuse a body by the length that is announced.

        Args:
            length: The header.
        """
        if length is not None and length.isdecimal() and int(length) > self._most:
            raise self._refuse_length()

    async def receive(self) -> Message:
        """The next part of the body, or that the client has gone."""
        if self._complete:
            return await self._receive()
        config, now = self._config, time.monotonic()
        allowed = self._begin + config.body_seconds + self._received / config.body_bytes_per_second - now
        try:
            async with asyncio.timeout(min(config.body_seconds, max(allowed, 0.0))):
                message = await self._receive()
        except TimeoutError:
            raise self._refuse(408, "the body came too slowly") from None
        if message["type"] != "http.request":
            self._complete = True
            return message
        self._received += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._received > self._most:
            raise self._refuse_length()
        return message

    def _refuse_length(self) -> ApiError:
        return self._refuse(413, f"the body has more than {self._most} bytes, the most that is taken")

    def _refuse(self, status: int, message: str) -> ApiError:
        self.refusal = ApiError(status, message, headers={"Connection": "close"})
        return self.refusal


class SafeHeaders:
    """ASGI middleware: adds `HEADERS` to every answer, and forbids caches to keep what needs a key.

    Args:
        app: The app behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and add the headers to its answer."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def slow_header_protocol(seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol, which closes connections whose request has not all its headers in time.

    Args:
        seconds: Most seconds from the connection, or from the first byte after another request.
    """

    class SlowHeaderProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                self._arm()
            else:
                self._disarm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _arm(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(seconds, self._expire)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _expire(self) -> None:
            _log.warning("closed a connection from %s: its headers came too slowly", (self.client or ("unknown",))[0])
            self.transport.close()

    return SlowHeaderProtocol
