"""Prometheus metrics of the service: the engine's observer, and counts of HTTP requests.

Labels name routes and statuses only: no tenant, key, document or text.
"""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reader_rag.engine.engine import Engine
from reader_rag.engine.metrics import PrometheusMetrics
from reader_rag.errors import EngineClosedError
from reader_rag.server.errors import error_of, log_bug, response_of

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_NO_ROUTE = "none"


class ServiceMetrics:
    """The metrics of one service, in a registry of their own.

    Args:
        engine: The engine to observe; None where another server decodes.
    """

    def __init__(self, engine: Engine | None) -> None:
        self._registry = CollectorRegistry()
        self._engine = engine
        self._observer = PrometheusMetrics(self._registry) if engine is not None else None
        self._requests = Counter(
            "reader_rag_http_requests_total",
            "HTTP requests that have ended, by route, method and status.",
            ["route", "method", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "reader_rag_http_request_seconds",
            "Time of an HTTP request until its answer was sent, by route.",
            ["route"],
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._running = Gauge(
            "reader_rag_http_requests_running", "HTTP requests that run now.", registry=self._registry
        )

    def observe(self) -> None:
        """Begin to observe the engine."""
        if self._engine is not None and self._observer is not None and self._observer not in self._engine.observers:
            self._engine.observers.append(self._observer)

    def close(self) -> None:
        """Observe the engine no longer."""
        if self._engine is not None and self._observer is not None and self._observer in self._engine.observers:
            self._engine.observers.remove(self._observer)

    def exposition(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def began(self) -> float:
        """Note that a request began, and return the time."""
        self._running.inc()
        return time.monotonic()

    def ended(self, route: str, method: str, status: int, begin: float) -> None:
        """Note that a request has ended.

        Args:
            route: Template of its path.
            method: Its method.
            status: HTTP status of the answer; 499 where the client disconnected before the answer began.
            begin: What `began` returned.
        """
        self._running.dec()
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(time.monotonic() - begin)


class CountRequests:
    """ASGI middleware: counts requests, and answers those that fail by a bug, whose message may quote a question, and
    those that are cut off because the service is being ended and the time for that is over.

    Args:
        app: The app behind it.
        metrics: Where they are counted.
    """

    _METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
    _DISCONNECTED = 499

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count it when it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, is_events, complete = self._DISCONNECTED, False, False

        async def send_noting(message: Message) -> None:
            nonlocal status, is_events, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                is_events = (
                    Headers(raw=message.get("headers", [])).get("content-type", "").startswith("text/event-stream")
                )
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        begin = self._metrics.began()
        try:
            await self._app(scope, receive, send_noting)
        except asyncio.CancelledError:  # by uvicorn, which then closes the connection
            cut = EngineClosedError("the service was stopped before the answer was complete; ask again later")
            if status == self._DISCONNECTED:
                await response_of(cut)(scope, receive, send_noting)
            elif is_events and not complete:
                events = f"data: {error_of(cut)[1].model_dump_json()}\n\ndata: [DONE]\n\n"
                await send_noting({"type": "http.response.body", "body": events.encode()})
        except Exception as error:
            log_bug(error)
            if status == self._DISCONNECTED:
                await response_of(error)(scope, receive, send_noting)
        finally:
            route = getattr(scope.get("route"), "path", _NO_ROUTE)
            method = scope["method"] if scope["method"] in self._METHODS else "other"
            self._metrics.ended(route, method, status, begin)
