"""`GET /v1/models`, and the answer of `/v1/responses`, which is not offered."""

from __future__ import annotations

import time
from typing import NoReturn

from fastapi import APIRouter

from reader_rag.server.access import CallerDep, ServiceDep
from reader_rag.server.errors import ApiError
from reader_rag.server.openai.prepared import known_model
from reader_rag.server.openai.responses import Model, ModelList
from reader_rag.server.service import Service

router = APIRouter(prefix="/v1", tags=["models"])

_METHODS = ["GET", "POST", "DELETE"]
_STARTED = int(time.time())


@router.get("/models")
async def list_models(service: ServiceDep, caller: CallerDep) -> ModelList:
    """The models: the model itself, and, where there is a store, the one that answers from it."""
    return ModelList(data=[_model(service, name) for name in service.models])


@router.get("/models/{name:path}")
async def get_model(name: str, service: ServiceDep, caller: CallerDep) -> Model:
    """A model."""
    known_model(service, name)
    return _model(service, name)


@router.api_route("/responses", methods=_METHODS, include_in_schema=False, response_model=None)
@router.api_route("/responses/{path:path}", methods=_METHODS, include_in_schema=False, response_model=None)
async def responses() -> NoReturn:
    """Refuse the API of responses."""
    raise ApiError(404, "this service has no Responses API: use POST /v1/chat/completions", code="not_offered")


def _model(service: Service, name: str) -> Model:
    return Model(id=name, created=_STARTED, max_model_len=service.llm.metadata.context_window)
