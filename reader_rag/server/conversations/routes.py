"""`/api/conversations`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from reader_rag.server.access import Caller, CallerDep, ServiceDep
from reader_rag.server.conversations.store import Conversation, Conversations, Owner, as_markdown
from reader_rag.server.errors import ApiError
from reader_rag.server.openai.responses import Annotation
from reader_rag.server.service import Service

router = APIRouter(prefix="/api/conversations", tags=["conversations"])

ConversationId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="Id of the conversation.")]


def _storable(value: dict[str, Any] | None) -> dict[str, Any] | None:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # NaN, infinity, lone surrogates
        raise ValueError("it has numbers or characters that JSON cannot have") from error
    return value


class StoredMessage(BaseModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system", "tool"]
    content: str = ""
    annotations: list[Annotation] = []
    reader: Annotated[dict[str, Any] | None, AfterValidator(_storable)] = Field(
        default=None, description="Figures of the answer, as the chat gave them."
    )


class ConversationBody(BaseModel):
    """What a client keeps."""

    model_config = ConfigDict(extra="ignore")

    title: str = Field(max_length=500)
    messages: list[StoredMessage] = Field(default=[], max_length=2000)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _storable(self.model_dump())
        return self


class ConversationTitle(BaseModel):
    """A conversation in the list."""

    id: str
    title: str
    updated: float = Field(description="Unix time of the last change.")


class ConversationInfo(ConversationTitle):
    """A conversation."""

    messages: list[StoredMessage]


class ConversationList(BaseModel):
    """Conversations, the last changed first."""

    conversations: list[ConversationTitle]


class Removed(BaseModel):
    """A conversation that was removed."""

    id: str


def _kept(service: Service) -> Conversations:
    if service.conversations is None:
        raise ApiError(404, "this service keeps no conversations: it has no store", code="no_store")
    return service.conversations


def _owner(caller: Caller) -> Owner:
    return Owner(caller.tenant, caller.key)


def _missing() -> ApiError:
    return ApiError(404, "there is no such conversation", code="conversation_not_found")


def _info(kept: Conversations, found: Conversation | None) -> ConversationInfo:
    """A conversation in the API's form.

    Raises:
        ApiError: There is none.
        StoreCorruptError: It has another form: no service has written it.
    """
    if found is None:
        raise _missing()
    with _decoding(kept):
        messages = [StoredMessage.model_validate(message) for message in found.messages]
        return ConversationInfo(id=found.id, title=found.title, updated=found.updated, messages=messages)


@contextmanager
def _decoding(kept: Conversations) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise kept.damaged() from error


def _messages(body: ConversationBody) -> tuple[dict[str, Any], ...]:
    return tuple(message.model_dump() for message in body.messages)


@router.get("")
def list_conversations(
    service: ServiceDep,
    caller: CallerDep,
    q: Annotated[str, Query(max_length=500, description="Words that title or messages have.")] = "",
    limit: Annotated[int, Query(ge=1, le=500, description="Most of the answer.")] = 100,
    offset: Annotated[int, Query(ge=0, le=1 << 31, description="How many to leave out before.")] = 0,
) -> ConversationList:
    """The caller's conversations, the last changed first."""
    kept = _kept(service)
    found = kept.list(_owner(caller), q, limit, offset)
    with _decoding(kept):
        titles = [ConversationTitle(id=each.id, title=each.title, updated=each.updated) for each in found]
    return ConversationList(conversations=titles)


@router.post("", status_code=201)
def create(service: ServiceDep, caller: CallerDep, body: ConversationBody) -> ConversationInfo:
    """Keep a new conversation."""
    kept = _kept(service)
    return _info(kept, kept.add(_owner(caller), body.title, _messages(body)))


@router.get("/{conversation}")
def read(service: ServiceDep, caller: CallerDep, conversation: ConversationId) -> ConversationInfo:
    """A conversation."""
    kept = _kept(service)
    return _info(kept, kept.get(_owner(caller), conversation))


@router.put("/{conversation}")
def change(
    service: ServiceDep, caller: CallerDep, conversation: ConversationId, body: ConversationBody
) -> ConversationInfo:
    """Replace a conversation."""
    kept = _kept(service)
    return _info(kept, kept.change(_owner(caller), conversation, body.title, _messages(body)))


@router.delete("/{conversation}")
def remove(service: ServiceDep, caller: CallerDep, conversation: ConversationId) -> Removed:
    """Remove a conversation."""
    if not _kept(service).delete(_owner(caller), conversation):
        raise _missing()
    return Removed(id=conversation)


@router.get(
    "/{conversation}/export",
    response_class=Response,
    responses={200: {"content": {"text/markdown": {"schema": {"type": "string"}}}}},
)
def export(service: ServiceDep, caller: CallerDep, conversation: ConversationId) -> Response:
    """A conversation as Markdown."""
    kept = _kept(service)
    found = kept.get(_owner(caller), conversation)
    _info(kept, found)  # raises where there is none, or it is damaged
    assert found is not None
    headers = {"Content-Disposition": f'attachment; filename="conversation-{found.id[:8]}.md"'}
    return Response(as_markdown(found), media_type="text/markdown", headers=headers)
