"""HTTP clients of `ServerLLM` that bound what a server can do: redirects, sizes, total time, waits before retries.

A server that exceeds a bound raises `BoundExceededError`, which the SDK neither retries nor wraps.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from email.utils import parsedate_to_datetime
from typing import Any

import httpcore
import httpx
import openai

MOST_BODY_BYTES = 16 << 20  # of an answer in one piece; a list of a million tokens takes 8 MiB
MOST_ERROR_BYTES = 1 << 20
MOST_STREAM_BYTES = 64 << 20
MOST_EVENT_BYTES = 1 << 20
MOST_EVENT_LINES = 1000

_responses: ContextVar[list[httpx.Response] | None] = ContextVar("responses", default=None)


class BoundExceededError(openai.OpenAIError):
    """A server exceeds a bound; the message continues a sentence that begins with the server's name."""


class TimeBudget:
    """Seconds that a call may spend in all, its retries included; the time between two pieces of a stream is not spent.

    Args:
        total_s: The seconds.
    """

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._spent_s = 0.0
        self._entered: float | None = None

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Let the requests that are made inside spend from this budget."""
        token = _budget.set(self)
        self._entered = time.monotonic()
        try:
            yield
        finally:
            self._spent_s += time.monotonic() - self._entered
            self._entered = None
            _budget.reset(token)

    @property
    def left_s(self) -> float:
        """The seconds that are left."""
        running = 0.0 if self._entered is None else time.monotonic() - self._entered
        return self._total_s - self._spent_s - running

    def exceeded(self) -> BoundExceededError:
        """The error of a call that has spent its budget."""
        return BoundExceededError(
            f"did not complete its answer within {self._total_s:g} s: lower max_tokens, or raise total_timeout_s"
        )


_budget: ContextVar[TimeBudget | None] = ContextVar("budget", default=None)


@contextmanager
def recorded_responses(responses: list[httpx.Response]) -> Iterator[None]:
    """Record the responses that the clients open inside, and bound them as streams of events.

    Closing a generator of the SDK does not close its connection, because the SDK's stream is part of a reference cycle.
    The caller that ends a stream early closes the recorded responses.

    Args:
        responses: The list that they are appended to.
    """
    token = _responses.set(responses)
    try:
        yield
    finally:
        _responses.reset(token)


class BoundedClient(httpx.Client):
    """Bounds and records its responses, and reports a read timeout in a form that the SDK does not retry.

    A slow server would repeat the whole work of a retried request.
    """

    def __init__(self, timeout: httpx.Timeout) -> None:
        super().__init__(timeout=timeout, **_SETTINGS, event_hooks={"response": [self._check]})
        for transport in (self._transport, *self._mounts.values()):  # those of proxies from the environment too
            if isinstance(transport, httpx.HTTPTransport):
                transport._pool._network_backend = _Backend()

    def send(self, request: httpx.Request, **settings: Any) -> httpx.Response:
        """Send a request."""
        try:
            return _record(super().send(request, **settings))
        except httpx.ReadTimeout as error:  # the SDK retries httpx's errors, and lets its own pass
            raise openai.APITimeoutError(request) from error

    @staticmethod
    def _check(response: httpx.Response) -> None:
        check = _checked(response)
        stream = response.stream
        assert isinstance(stream, httpx.SyncByteStream)
        response.stream = _BoundedStream(stream, check)


class BoundedAsyncClient(httpx.AsyncClient):
    """`BoundedClient` for event loops."""

    def __init__(self, timeout: httpx.Timeout) -> None:
        super().__init__(timeout=timeout, **_SETTINGS, event_hooks={"response": [self._check]})
        for transport in (self._transport, *self._mounts.values()):
            if isinstance(transport, httpx.AsyncHTTPTransport):
                transport._pool._network_backend = _AsyncBackend()

    async def send(self, request: httpx.Request, **settings: Any) -> httpx.Response:
        """Send a request."""
        try:
            return _record(await super().send(request, **settings))
        except httpx.ReadTimeout as error:
            raise openai.APITimeoutError(request) from error

    @staticmethod
    async def _check(response: httpx.Response) -> None:
        check = _checked(response)
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        response.stream = _BoundedAsyncStream(stream, check)


# Compressed answers are not asked for: a few bytes of them may unpack to gigabytes.
_SETTINGS: dict[str, Any] = {"follow_redirects": True, "max_redirects": 5, "headers": {"accept-encoding": "identity"}}


def _record(response: httpx.Response) -> httpx.Response:
    responses = _responses.get()
    if responses is not None:
        responses.append(response)
    return response


def _checked(response: httpx.Response) -> Callable[[bytes], None]:
    """Check the head of a response.

    Returns:
        The check of the pieces of its body.

    Raises:
        BoundExceededError: The response redirects to another server, is compressed, or too long.
    """
    headers = response.headers
    if response.has_redirect_location:
        _check_redirect(response)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise BoundExceededError(f"compresses its answer ({encoding[:20]}), which is not asked for: turn that off")
    _limit_retries(response)
    if response.is_error:
        check = _BodyCheck(MOST_ERROR_BYTES)
    elif _responses.get() is not None:
        check = _EventCheck(MOST_STREAM_BYTES)
    else:
        check = _BodyCheck(MOST_BODY_BYTES)
    length = headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20:
        check.check_size(int(length))
    return check


def _check_redirect(response: httpx.Response) -> None:
    here = response.request.url
    try:
        there = here.join(response.headers["location"])
    except httpx.InvalidURL as error:
        raise BoundExceededError(f"redirects to an invalid address ({error})") from error
    if _origin(there) != _origin(here):
        raise BoundExceededError(
            f"redirects to another server, {there.scheme}://{there.netloc.decode('ascii', 'replace')}, which gets no "
            "prompt and no key: if you trust it, pass its address"
        )


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _limit_retries(response: httpx.Response) -> None:
    """Let the SDK raise an error at once, where the server asks to wait longer than the call may take."""
    budget = _budget.get()
    if budget is not None and response.is_error and _retry_after_s(response.headers) > budget.left_s:
        response.headers["x-should-retry"] = "false"


def _retry_after_s(headers: httpx.Headers) -> float:
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with suppress(ValueError):
            return float(headers.get(name, "")) * unit
    try:
        return parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return 0.0


class _BodyCheck:
    """Checks the length of a body.

    Args:
        most_bytes: Most bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0

    def check_size(self, size: int) -> None:
        """Refuse a size in bytes that is announced or reached."""
        if size > self._most_bytes:
            raise BoundExceededError(f"sends an answer of more than {self._most_bytes >> 20} MiB")

    def __call__(self, piece: bytes) -> None:
        self._bytes += len(piece)
        self.check_size(self._bytes)


class _EventCheck(_BodyCheck):
    """Checks the length of a stream, and of each of its events: the lines between two blank ones."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes)
        self._event_bytes = 0
        self._event_lines = 0
        self._last = b""

    def __call__(self, piece: bytes) -> None:
        super().__call__(piece)
        joined = self._last + piece
        ends = [joined.rfind(end) + len(end) for end in (b"\n\n", b"\r\r", b"\r\n\r\n") if end in joined]
        if ends:
            piece = joined[max(ends) :]
            self._event_bytes = self._event_lines = 0
        self._last = joined[-3:]
        self._event_bytes += len(piece)
        self._event_lines += piece.count(b"\n") + piece.count(b"\r")
        if self._event_bytes > MOST_EVENT_BYTES or self._event_lines > MOST_EVENT_LINES:
            raise BoundExceededError(
                f"sends an event of more than {MOST_EVENT_BYTES >> 20} MiB or {MOST_EVENT_LINES} lines"
            )


class _BoundedStream(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, check: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._check = check

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._check(piece)
            yield piece

    def close(self) -> None:
        """Close it."""
        self._stream.close()


class _BoundedAsyncStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, check: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._check = check

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._check(piece)
            yield piece

    async def aclose(self) -> None:
        """Close it."""
        await self._stream.aclose()


# The time is bounded below HTTP, so that a head that comes byte by byte is bounded as well.

_TIMEOUTS = (httpcore.ConnectTimeout, httpcore.ReadTimeout, httpcore.WriteTimeout)


@contextmanager
def _bounded(timeout: float | None) -> Iterator[float | None]:
    """Yield the timeout of one operation of the network: what is left of the call's budget, if that is less.

    Raises:
        BoundExceededError: The budget is spent.
    """
    budget = _budget.get()
    if budget is None:
        yield timeout
        return
    left = budget.left_s
    if left <= 0.0:
        raise budget.exceeded()
    try:
        yield left if timeout is None else min(timeout, left)
    except _TIMEOUTS as error:
        if budget.left_s <= 0.0:
            raise budget.exceeded() from error
        raise


class _Stream(httpcore.NetworkStream):
    """A connection whose operations spend from the call's budget."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read up to `max_bytes`."""
        with _bounded(timeout) as seconds:
            return self._stream.read(max_bytes, seconds)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all of a buffer."""
        with _bounded(timeout) as seconds:
            self._stream.write(buffer, seconds)

    def close(self) -> None:
        """Close it."""
        self._stream.close()

    def start_tls(self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None) -> _Stream:
        """The same connection, encrypted; its operations spend from the budget too."""
        with _bounded(timeout) as seconds:
            return _Stream(self._stream.start_tls(ssl_context, server_hostname, seconds))

    def get_extra_info(self, info: str) -> Any:
        """What the connection below knows of itself, such as its socket."""
        return self._stream.get_extra_info(info)


class _AsyncStream(httpcore.AsyncNetworkStream):
    """`_Stream` for event loops."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read up to `max_bytes`."""
        with _bounded(timeout) as seconds:
            return await self._stream.read(max_bytes, seconds)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all of a buffer."""
        with _bounded(timeout) as seconds:
            await self._stream.write(buffer, seconds)

    async def aclose(self) -> None:
        """Close it."""
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> _AsyncStream:
        """The same connection, encrypted; its operations spend from the budget too."""
        with _bounded(timeout) as seconds:
            return _AsyncStream(await self._stream.start_tls(ssl_context, server_hostname, seconds))

    def get_extra_info(self, info: str) -> Any:
        """What the connection below knows of itself, such as its socket."""
        return self._stream.get_extra_info(info)


class _Backend(httpcore.NetworkBackend):
    """Opens connections of `_Stream`."""

    def __init__(self) -> None:
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> _Stream:
        """Open a connection."""
        with _bounded(timeout) as seconds:
            return _Stream(self._backend.connect_tcp(host, port, seconds, local_address, socket_options))

    def sleep(self, seconds: float) -> None:
        """Wait, between attempts to connect."""
        self._backend.sleep(seconds)


class _AsyncBackend(httpcore.AsyncNetworkBackend):
    """`_Backend` for event loops."""

    def __init__(self) -> None:
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> _AsyncStream:
        """Open a connection."""
        with _bounded(timeout) as seconds:
            return _AsyncStream(await self._backend.connect_tcp(host, port, seconds, local_address, socket_options))

    async def sleep(self, seconds: float) -> None:
        """Wait, between attempts to connect."""
        await self._backend.sleep(seconds)
