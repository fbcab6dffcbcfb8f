"""Health, readiness, metrics, and what the page asks first."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from reader_rag import __version__
from reader_rag.config import ServerConfig
from reader_rag.config.setting import settings_of
from reader_rag.errors import ReaderError
from reader_rag.server.access import CallerDep, ServiceDep
from reader_rag.server.errors import ApiError
from reader_rag.server.metrics import CONTENT_TYPE

router = APIRouter()


class Health(BaseModel):
    """The state of the service."""

    status: Literal["ok"] = "ok"


def _limit(name: str) -> Any:
    """A field with the documentation of a setting of the service."""
    return Field(description=settings_of(ServerConfig)[name][2].doc)


class SessionLimits(BaseModel):
    """What a client may send."""

    body_bytes: int = _limit("body_bytes")
    upload_bytes: int = _limit("upload_bytes")
    file_bytes: int = _limit("file_bytes")
    files_per_request: int = _limit("files_per_request")
    undo_seconds: float = _limit("undo_seconds")


class Session(BaseModel):
    """What a client has to know of the service before it asks."""

    auth: Literal["none", "key"] = Field(description="Whether requests need a key.")
    tenant_name: str = Field(description="The caller's tenant.")
    models: list[str] = Field(description="Names of the models.")
    docs_model: str | None = Field(description="Name of the model that answers from the documents.")
    limits: SessionLimits
    version: str = Field(description="Version of the service.")


@router.get("/healthz", tags=["health"])
async def healthz() -> Health:
    """Whether the process answers."""
    return Health()


@router.get("/readyz", tags=["health"])
async def readyz(service: ServiceDep, request: Request) -> Health:
    """Whether requests are taken: 503 while the service shuts down, or when its store cannot be read."""
    if request.app.state.closing:
        raise ApiError(503, "the service is shutting down", code="shutting_down")
    if service.store is not None:
        store = service.store
        try:
            await run_in_threadpool(lambda: store.num_nodes)
        except ReaderError as error:
            raise ApiError(503, "the document store cannot be read", code="no_store") from error
    return Health()


@router.get("/metrics", tags=["health"], response_class=PlainTextResponse)
async def metrics(request: Request) -> PlainTextResponse:
    """Prometheus metrics; with API keys only for those of operators. No label names a tenant, a key or a document."""
    return PlainTextResponse(request.app.state.metrics.exposition(), media_type=CONTENT_TYPE)


@router.get("/api/session", tags=["session"])
async def session(service: ServiceDep, caller: CallerDep) -> Session:
    """What a client has to know before it asks."""
    return Session(
        auth="none" if service.keys is None else "key",
        tenant_name=caller.tenant,
        models=service.models,
        docs_model=service.docs_model,
        limits=SessionLimits.model_validate(service.config, from_attributes=True),
        version=__version__,
    )
