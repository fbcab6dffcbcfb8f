"""The page at `/`: its files, which are part of this package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

from reader_rag.server.errors import ApiError

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_CACHE = "no-cache"  # kept by browsers, and asked for again: a file of an older version is never shown

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class _File:
    """A file of the page.

    Attributes:
        content: Its bytes.
        media_type: Its Content-Type.
        etag: Its ETag, a hash of the content.
    """

    content: bytes
    media_type: str
    etag: str


def _read_files() -> dict[str, _File]:
    """The files of the page by their path below its folder. No other path is ever looked up on disk."""
    found = {}
    for path in sorted(_FOLDER.rglob("*")):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(_FOLDER).as_posix()] = _File(content, _TYPES[path.suffix], etag)
    return found


_FILES = _read_files()


@router.api_route("/", methods=["GET", "HEAD"])
def page(request: Request) -> Response:
    """The page."""
    return _answer(request, "index.html")


@router.api_route("/page/{path:path}", methods=["GET", "HEAD"])
def page_file(request: Request, path: str) -> Response:
    """A file of the page.

    Args:
        request: The request.
        path: The file's path below the page's folder.
    """
    return _answer(request, path)


def _answer(request: Request, path: str) -> Response:
    file = _FILES.get(path)
    if file is None:
        raise ApiError(404, "the page has no such file")
    headers = {"ETag": file.etag, "Cache-Control": _CACHE, "X-Content-Type-Options": "nosniff"}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
