"""`/api/documents` and `/api/jobs`."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from reader_rag.server.access import Caller, CallerDep, ServiceDep
from reader_rag.server.documents.jobs import Jobs, JobState, Upload
from reader_rag.server.documents.library import Library, safe_name, writing_errors
from reader_rag.server.documents.text import document_id
from reader_rag.server.errors import ApiError, unknown_document
from reader_rag.server.event_stream import EVENT_STREAM
from reader_rag.server.service import Service

router = APIRouter(prefix="/api", tags=["documents"])

_WATCH_S = 0.1
_MOST_FIELDS = 8
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["files"],
                    "properties": {
                        "files": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
                    },
                }
            }
        },
    }
}

DocumentId = Annotated[str, Path(pattern="^[0-9a-f]{24}$", description="Id of the document.")]
JobId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="Id of the job.")]


class DocumentInfo(BaseModel):
    """A document in the list."""

    id: str
    name: str = Field(description="File name.")
    title: str
    type: str = Field(description='Suffix of the file name without the dot, such as "pdf".')
    size: int | None = Field(description="Bytes of the original; null where it is not kept.")
    chunks: int = Field(description="Number of passages.")
    pages: int = Field(description="Number of pages; 1 where the format has none.")
    version: str = Field(description="Hash of its text.")
    added: float | None = Field(description="Unix time of the upload; null where the original is not kept.")
    original: bool = Field(description="Whether the original is kept.")


class DocumentList(BaseModel):
    """A part of the list of documents."""

    documents: list[DocumentInfo]
    next: str | None = Field(description="The value of `after` for the next part; null at the end.")
    total: int = Field(description="Number of all documents.")


class PageInfo(BaseModel):
    """A page of a document's text."""

    number: int = Field(description="Number of the page, from 1.")
    label: str = Field(description="The label that the document gives it.")
    start: int = Field(description="Start in the text, in Unicode code points.")
    end: int = Field(description="End in the text; exclusive.")


class DocumentContent(BaseModel):
    """The text of a document."""

    id: str
    name: str
    version: str = Field(description="Hash of the text.")
    text: str
    pages: list[PageInfo]
    original: bool = Field(description="Whether the original is kept.")


class Accepted(BaseModel):
    """An upload that is ingested."""

    job: str = Field(description="Id of the job.")


class SkippedInfo(BaseModel):
    """A file that could not be ingested."""

    name: str
    reason: str


class AddedInfo(BaseModel):
    """A document that was ingested."""

    id: str
    name: str


class JobInfo(BaseModel):
    """How far an ingestion is."""

    id: str
    state: Literal["queued", "running", "done", "failed"]
    stage: str = Field(description='"read" (files) or "embed" (passages); empty before and after.')
    done: int = Field(description="How much of the stage is done.")
    total: int = Field(description="How much there is to do in the stage.")
    current: str = Field(description="Name of the file that is read.")
    skipped: list[SkippedInfo]
    added: list[AddedInfo]
    error: str | None = Field(description="Why it failed.")


class Deletion(BaseModel):
    """A deleted document."""

    undo: str = Field(description="Token that restores it.")
    until: float = Field(description="Unix time until which it can be restored.")


class Undo(BaseModel):
    """What is to be restored."""

    undo: str = Field(min_length=1, max_length=64, description="Token of the deletion.")


class Restored(BaseModel):
    """A restored document."""

    id: str


def library_of(service: Service) -> Library:
    """The documents.

    Args:
        service: The service.

    Raises:
        ApiError: The service has no store.
    """
    if service.library is None:
        raise ApiError(404, "this service has no document store", code="no_store")
    return service.library


def _jobs(service: Service) -> Jobs:
    library_of(service)
    assert service.jobs is not None
    return service.jobs


@router.post("/documents", status_code=202, openapi_extra=_UPLOAD)
async def upload(request: Request, service: ServiceDep, caller: CallerDep) -> Accepted:
    """Upload files. They are ingested in the background; a file of the same name as a document replaces it."""
    library, jobs = library_of(service), _jobs(service)
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError(415, "send the files as multipart/form-data, in fields named files")
    with writing_errors(FilePath(tempfile.gettempdir())):  # the parser keeps larger files there
        form = await request.form(max_files=service.config.files_per_request, max_fields=_MOST_FIELDS)
    try:
        files = form.getlist("files")
        uploads = [file for file in files if isinstance(file, UploadFile)]
        if not uploads or len(uploads) != len(files):
            raise ApiError(400, "send at least one file in a field named files", param="files")
        return await run_in_threadpool(_submit, library, jobs, service.config.file_bytes, caller, uploads)
    finally:
        await form.close()


def _submit(library: Library, jobs: Jobs, most_bytes: int, caller: Caller, files: list[UploadFile]) -> Accepted:
    folder = library.incoming()
    try:
        with writing_errors(library.folder):
            taken, skipped = _stored(folder, files, most_bytes)
        return Accepted(job=jobs.submit(caller.tenant, taken, folder, skipped))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _stored(folder: FilePath, files: list[UploadFile], most_bytes: int) -> tuple[list[Upload], list[tuple[str, str]]]:
    """Write uploaded files into a folder: those that are taken, and the names and reasons of the others."""
    taken: dict[str, Upload] = {}
    skipped = []
    for number, file in enumerate(files):
        name = safe_name(file.filename or "")
        if (file.size or 0) > most_bytes:
            skipped.append((name, f"larger than {most_bytes} bytes, the most that is taken"))
        elif name in taken:
            skipped.append((name, "another file of this upload has the same name"))
        else:
            taken[name] = Upload(folder / str(number), name)
            with taken[name].path.open("wb") as target:
                shutil.copyfileobj(file.file, target)
    return list(taken.values()), skipped


@router.get("/documents")
def list_documents(
    service: ServiceDep,
    caller: CallerDep,
    limit: Annotated[int, Query(ge=1, le=200, description="Most documents of the answer.")] = 50,
    after: Annotated[str | None, Query(pattern="^[0-9a-f]{24}$", description="Id of the last one before.")] = None,
) -> DocumentList:
    """The caller's documents, by file name."""
    library = library_of(service)
    records = sorted(
        library.records(caller.tenant), key=lambda record: (FilePath(record.path).name.lower(), record.path)
    )
    ids = [document_id(record.path) for record in records]
    if after is not None and after not in ids:
        raise unknown_document("after")
    begin = 0 if after is None else ids.index(after) + 1
    shown = records[begin : begin + limit]
    infos = [DocumentInfo(**asdict(library.summary(caller.tenant, record))) for record in shown]
    more = begin + limit < len(records)
    return DocumentList(documents=infos, next=infos[-1].id if more else None, total=len(records))


@router.post("/documents/undo")
def undo(service: ServiceDep, caller: CallerDep, body: Undo) -> Restored:
    """Restore a deleted document."""
    return Restored(id=library_of(service).undo(caller.tenant, body.undo))


@router.get("/documents/{document}")
def text(
    service: ServiceDep,
    caller: CallerDep,
    document: DocumentId,
    v: Annotated[str | None, Query(max_length=64, description="The version that is expected.")] = None,
) -> DocumentContent:
    """The text of a document; 410 `version_gone` where it is another version than `v`."""
    library = library_of(service)
    record = library.find(caller.tenant, document)
    found = library.text(caller.tenant, record)
    if v is not None and v != found.version:
        raise ApiError(410, "this version of the document is gone", code="version_gone", param="v")
    return DocumentContent(
        id=document,
        name=found.name or FilePath(record.path).name,
        version=found.version,
        text=found.text,
        pages=[PageInfo(**asdict(page)) for page in found.pages],
        original=library.original(caller.tenant, record) is not None,
    )


@router.get("/documents/{document}/original", response_class=FileResponse)
def original(service: ServiceDep, caller: CallerDep, document: DocumentId) -> FileResponse:
    """The uploaded file, to be saved; browsers show nothing of it by themselves."""
    library = library_of(service)
    path = library.original(caller.tenant, library.find(caller.tenant, document))
    if path is None:
        raise ApiError(404, "the original of this document is not kept", code="no_original")
    media_type = "application/pdf" if path.suffix.lower() == ".pdf" else "application/octet-stream"
    headers = {"Content-Security-Policy": "sandbox; default-src 'none'"}
    return FileResponse(path, media_type=media_type, filename=path.name, headers=headers)


@router.delete("/documents/{document}")
def delete(service: ServiceDep, caller: CallerDep, document: DocumentId) -> Deletion:
    """Delete a document; it can be restored for a while."""
    token, until = library_of(service).delete(caller.tenant, document)
    return Deletion(undo=token, until=until)


@router.get("/jobs/{job}")
async def job_state(service: ServiceDep, caller: CallerDep, job: JobId) -> JobInfo:
    """How far an ingestion is."""
    return _info(_job(service, caller, job))


@router.get(
    "/jobs/{job}/events",
    response_class=EventSourceResponse,
    responses=EVENT_STREAM,
)
async def job_events(service: ServiceDep, caller: CallerDep, job: JobId) -> EventSourceResponse:
    """How far an ingestion is, as server-sent events: one whenever it changes, until it ends."""
    _job(service, caller, job)

    async def events() -> AsyncIterator[ServerSentEvent]:
        last: JobState | None = None
        while last is None or not last.ended:
            state = _job(service, caller, job)
            if state != last:
                yield ServerSentEvent(_info(state).model_dump_json())
                last = state
            else:
                await asyncio.sleep(_WATCH_S)

    return EventSourceResponse(events())


def _job(service: Service, caller: Caller, id_: str) -> JobState:
    state = _jobs(service).get(caller.tenant, id_)
    if state is None:
        raise ApiError(404, "there is no such job", code="job_not_found")
    return state


def _info(state: JobState) -> JobInfo:
    fields: dict[str, Any] = asdict(state)
    del fields["tenant"]
    fields["skipped"] = [SkippedInfo(name=name, reason=reason) for name, reason in state.skipped]
    fields["added"] = [AddedInfo(id=id_, name=name) for id_, name in state.added]
    return JobInfo(**fields)
