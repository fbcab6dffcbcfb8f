"""A scripted server that speaks the service's API: it says what a test wants the page to show, at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, UploadFile
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from reader_rag.server.errors import ApiError, add_handlers
from reader_rag.server.limits import SafeHeaders
from reader_rag.server.page_routes import router


@dataclass
class Copy:
    """A stretch of a scripted answer that is copied from a document: of the text `text` in `document`."""

    document: str
    text: str


@dataclass
class Script:
    """What the server says, and what it was asked.

    Attributes:
        texts: Text of each document, by id.
        pages: Page bounds of a document, by id.
        answer: Stretches of the next answers.
        passages: Ids of documents that are retrieved besides.
        skipped: Names of uploads that are skipped, with the reason.
        pause_s: Seconds between the stretches of an answer.
        key: The key that is needed; empty for none.
        fail: An error for the next question: (status, message).
        break_after: Stretches after which the stream of an answer breaks off.
        race: The result of the next race, or an error.
        requests: Bodies of the questions.
        closed: Streams whose client went away.
    """

    texts: dict[str, str] = field(default_factory=dict)
    pages: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    originals: dict[str, bytes] = field(default_factory=dict)
    answer: list[str | Copy] = field(default_factory=lambda: ["Nothing."])
    passages: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    pause_s: float = 0.0
    key: str = ""
    fail: tuple[int, str] | None = None
    break_after: int | None = None
    race: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    conversations: dict[str, dict[str, Any]] = field(default_factory=dict)
    deleted: dict[str, str] = field(default_factory=dict)
    uploads: list[list[str]] = field(default_factory=list)
    closed: int = 0

    def version(self, document: str) -> str:
        """The version of a document: another one for another text."""
        return f"v{sum(map(ord, self.texts[document])):x}"

    def url(self, document: str, start: int, end: int) -> str:
        """The address of characters of a document."""
        return f"http://test/#/documents/{document}?v={self.version(document)}&start={start}&end={end}"

    def citation(self, copied: Copy, at: int) -> dict[str, Any]:
        """The annotation of a copy that begins at this code point of the answer."""
        start = self.texts[copied.document].index(copied.text)
        url = self.url(copied.document, start, start + len(copied.text))
        place = {"start_index": at, "end_index": at + len(copied.text), "title": copied.document, "url": url}
        return {"type": "url_citation", "url_citation": place}

    def reader(self) -> dict[str, Any]:
        """What the server tells besides an answer."""
        sources = dict.fromkeys([*(part.document for part in self.answer if isinstance(part, Copy)), *self.passages])
        passages = [
            {
                "document_id": document,
                "title": document,
                "url": self.url(document, 0, len(self.texts[document])),
                "score": 0.9 - 0.1 * rank,
                "page": 1 if document in self.pages else None,
            }
            for rank, document in enumerate(sources)
        ]
        copied = sum(len(part.text) for part in self.answer if isinstance(part, Copy))
        written = sum(len(part if isinstance(part, str) else part.text) for part in self.answer)
        return {
            "tokens_per_second": 143.2,
            "tokens_per_step": 3.21,
            "copied_tokens": copied,
            "completion_tokens": written,
            "steps": 40,
            "first_token_s": 0.2,
            "notes": [],
            "passages": passages,
        }


def fake_app(script: Script) -> FastAPI:
    """An app that follows a script.

    Args:
        script: What it says; a test may change it at any time.
    """
    app = FastAPI()
    add_handlers(app)
    app.add_middleware(SafeHeaders)
    app.include_router(router)

    @app.middleware("http")
    async def need_key(request: Request, call_next: Any) -> Response:
        private = request.url.path.startswith(("/api", "/v1"))
        if private and script.key and request.headers.get("authorization") != f"Bearer {script.key}":
            return JSONResponse({"error": {"message": "a key is needed", "code": "invalid_api_key"}}, 401)
        answer: Response = await call_next(request)
        return answer

    @app.get("/api/session")
    async def session() -> dict[str, Any]:
        limits = {"upload_bytes": 9000, "file_bytes": 5000, "files_per_request": 2, "undo_seconds": 120}
        auth = "key" if script.key else "none"
        return {"auth": auth, "models": ["m", "m+docs"], "docs_model": "m+docs", "limits": limits, "version": "0.0"}

    _add_chat(app, script)
    _add_documents(app, script)
    _add_conversations(app, script)
    return app


def _event(value: Any) -> str:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\r\n\r\n"


def _add_chat(app: FastAPI, script: Script) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        script.requests.append(await request.json())
        if script.fail is not None:
            (status, message), script.fail = script.fail, None
            raise ApiError(status, message, headers={"Retry-After": "3"} if status == 429 else None)
        return StreamingResponse(stream(), media_type="text/event-stream")

    async def stream() -> AsyncIterator[str]:
        annotations, at = [], 0
        try:
            for number, part in enumerate(script.answer):
                if number == script.break_after:
                    return
                text = part if isinstance(part, str) else part.text
                if isinstance(part, Copy):
                    annotations.append(script.citation(part, at))
                at += len(text)
                yield _event({"choices": [{"delta": {"content": text}}]})
                await asyncio.sleep(script.pause_s)
        except asyncio.CancelledError:
            script.closed += 1
            raise
        last = {
            "choices": [{"delta": {"annotations": annotations}, "finish_reason": "stop"}],
            "reader": script.reader(),
        }
        yield _event(last)
        yield _event("[DONE]")

    @app.post("/api/race")
    async def race() -> StreamingResponse:
        if "status" in script.race:
            raise ApiError(script.race["status"], script.race["message"], code="busy")

        async def states() -> AsyncIterator[str]:
            for state in ("reader", "plain"):
                yield _event({"state": state})
            yield _event({"result": script.race})

        return StreamingResponse(states(), media_type="text/event-stream")


def _add_documents(app: FastAPI, script: Script) -> None:
    jobs: dict[str, dict[str, Any]] = {}

    def pages(document: str) -> list[dict[str, int]]:
        return script.pages.get(document, [{"number": 1, "start": 0, "end": len(script.texts[document])}])

    def record(document: str) -> dict[str, Any]:
        return {
            "id": document,
            "name": document,
            "title": document,
            "type": document.rsplit(".", 1)[-1],
            "size": len(script.texts[document].encode()),
            "chunks": 3,
            "pages": len(pages(document)),
            "original": document in script.originals,
            "version": script.version(document),
        }

    @app.get("/api/documents")
    async def documents() -> dict[str, Any]:
        return {"documents": [record(one) for one in script.texts], "next": None, "total": len(script.texts)}

    @app.post("/api/documents", status_code=202)
    async def upload(files: list[UploadFile]) -> dict[str, str]:
        names = [file.filename or "" for file in files]
        script.uploads.append(names)
        added = []
        for file, name in zip(files, names, strict=True):
            if name not in script.skipped:
                script.texts[name] = (await file.read()).decode()
                added.append({"id": name, "name": name})
        skipped = [{"name": name, "reason": script.skipped[name]} for name in names if name in script.skipped]
        job = f"job-{len(jobs)}"
        jobs[job] = {"state": "done", "done": 1, "total": 1, "current": None, "skipped": skipped, "added": added}
        return {"job": job}

    @app.get("/api/jobs/{job}/events")
    async def events(job: str) -> StreamingResponse:
        async def states() -> AsyncIterator[str]:
            yield _event({**jobs[job], "state": "running", "done": 0, "current": script.uploads[-1][0]})
            await asyncio.sleep(script.pause_s)
            yield _event(jobs[job])

        return StreamingResponse(states(), media_type="text/event-stream")

    @app.post("/api/documents/undo")
    async def undo(request: Request) -> dict[str, str]:
        document = (await request.json())["undo"]
        script.texts[document] = script.deleted.pop(document)
        return {"id": document}

    @app.get("/api/documents/{document}")
    async def text(document: str, v: str | None = None) -> dict[str, Any]:
        if document not in script.texts:
            raise ApiError(404, "there is no such document")
        if v is not None and v != script.version(document):
            raise ApiError(410, "this version is gone", code="version_gone")
        return record(document) | {"text": script.texts[document], "pages": pages(document)}

    @app.get("/api/documents/{document}/original")
    async def original(document: str) -> Response:
        headers = {"Content-Disposition": "attachment"}
        return Response(script.originals[document], media_type="application/octet-stream", headers=headers)

    @app.delete("/api/documents/{document}")
    async def delete(document: str) -> dict[str, str]:
        script.deleted[document] = script.texts.pop(document)
        return {"undo": document}


def _add_conversations(app: FastAPI, script: Script) -> None:
    kept = script.conversations

    @app.get("/api/conversations")
    async def conversations(q: str = "") -> dict[str, Any]:
        found = [one for one in reversed(kept.values()) if q.lower() in json.dumps(one, ensure_ascii=False).lower()]
        return {"conversations": [{"id": one["id"], "title": one["title"]} for one in found]}

    @app.post("/api/conversations")
    async def create(request: Request) -> dict[str, Any]:
        made = await request.json() | {"id": f"c{len(kept) + 1}"}
        kept[made["id"]] = made
        return made

    @app.get("/api/conversations/{conversation}")
    async def load(conversation: str) -> dict[str, Any]:
        if conversation not in kept:
            raise ApiError(404, "there is no such conversation")
        return kept[conversation]

    @app.put("/api/conversations/{conversation}")
    async def save(conversation: str, request: Request) -> dict[str, Any]:
        kept[conversation] = await request.json() | {"id": conversation}
        return kept[conversation]

    @app.delete("/api/conversations/{conversation}", status_code=204)
    async def remove(conversation: str) -> None:
        del kept[conversation]

    @app.get("/api/conversations/{conversation}/export")
    async def export(conversation: str) -> PlainTextResponse:
        return PlainTextResponse(f"# {kept[conversation]['title']}\n", media_type="text/markdown")
