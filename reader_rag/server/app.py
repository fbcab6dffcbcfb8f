"""`create_app`: the service as an ASGI app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.concurrency import run_in_threadpool

from reader_rag import __version__
from reader_rag.server import embeddings, health, openai, page_routes, race
from reader_rag.server.access import AccessChecks
from reader_rag.server.conversations import routes as conversations
from reader_rag.server.documents import routes as documents
from reader_rag.server.errors import ErrorBody, add_handlers
from reader_rag.server.limits import BodyLimits, SafeHeaders
from reader_rag.server.metrics import CountRequests, ServiceMetrics
from reader_rag.server.service import Service

_PURGE_S = 5.0
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused."},
    "5XX": {"model": ErrorBody, "description": "The service cannot answer now."},
}


def _routers() -> Iterator[APIRouter]:
    """The routers of all parts of the service."""
    yield health.router
    yield embeddings.router
    yield documents.router
    yield conversations.router
    yield from openai.routers()
    yield page_routes.router
    yield race.router


def create_app(service: Service) -> FastAPI:
    """The service as an ASGI app.

    Args:
        service: What the routes use. Closing it is the caller's.
    """
    metrics = ServiceMetrics(service.engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        metrics.observe()
        purging = asyncio.create_task(_purge(service))
        try:
            yield
        finally:
            app.state.closing = True
            purging.cancel()
            metrics.close()

    app = FastAPI(
        title="reader-rag",
        version=__version__,
        summary="Answers from your documents, with the characters that were copied from them.",
        docs_url=None,  # it loads scripts from another host
        redoc_url=None,
        lifespan=lifespan,
        responses=_ERRORS,
    )
    app.state.service = service
    app.state.metrics = metrics
    app.state.closing = False
    for router in _routers():
        app.include_router(router)
    add_handlers(app)
    _describe(app)
    # The last one added is the first that a request meets.
    app.add_middleware(BodyLimits, config=service.config)
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.cors_origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(AccessChecks, config=service.config, keys=service.keys, tenant=service.tenant)
    app.add_middleware(CountRequests, metrics=metrics)
    app.add_middleware(SafeHeaders)
    return app


async def _purge(service: Service) -> None:
    """Remove for good, now and then, what was deleted and not restored in time."""
    while service.library is not None:
        await asyncio.sleep(_PURGE_S)
        await run_in_threadpool(service.library.purge)


def _describe(app: FastAPI) -> None:
    """Have the OpenAPI description say that invalid requests are answered with 400 in the one form of errors."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = described()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for unused in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(unused, None)
            schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{}, {"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
