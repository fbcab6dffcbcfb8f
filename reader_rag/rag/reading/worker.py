"""The process in which files are parsed: `python -m reader_rag.rag.reading.worker`, started by `ReadingProcess`.

It reads requests from standard input and writes answers to standard output. A request is a line of JSON (`suffix`,
`size` and the fields of `ReadLimits`) and the bytes of the file. An answer is a line with the size of the rest, which
is JSON: `pages` (a list of `text` and, where the format has them, `page_label`), or `error`, the reason.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reader_rag.rag.reading.text import UnusableFileError, html_text
from reader_rag.util.encodable import encodable
from reader_rag.util.one_line import first_line

HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})

_FREE_BYTES = 10 << 20  # an archive of few bytes may have a high ratio, such as one of an empty sheet
_MOST_PARTS = 20_000  # of an archive
_SPARE_SECONDS = 10  # the parent process ends this one; the alarm is for when there is no parent any more


def main() -> None:
    """Answer requests until standard input ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # parsers print
    while line := requests.readline():
        request = json.loads(line)
        answer = _answer(request, requests.read(request["size"]))
        encoded = json.dumps(answer, ensure_ascii=False).encode()
        answers.write(b"%d\n" % len(encoded) + encoded)
        answers.flush()


def _answer(request: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    with contextlib.suppress(AttributeError):  # there is no alarm on Windows
        signal.alarm(int(request["read_seconds"]) + _SPARE_SECONDS)
    if request["suffix"] not in HTML_SUFFIXES:
        from llama_index.core.readers.file import base  # noqa: F401 - what it takes is not the file's
    try:
        with _bounded_memory(request["memory_bytes"]):
            return {"pages": list(_pages(request, data))}
    except UnusableFileError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"takes more than {request['memory_bytes'] >> 20} MiB of memory to read"}
    except Exception as error:  # parsers raise errors of many libraries
        return {"error": f"not a readable {request['suffix']} file: {encodable(first_line(_cause(error)))}"}


def _pages(request: Mapping[str, Any], data: bytes) -> Iterator[dict[str, str]]:
    suffix, left = request["suffix"], request["unpacked_bytes"]
    for page in [{"text": html_text(data)}] if suffix in HTML_SUFFIXES else _office_pages(request, data):
        left -= len(page["text"])
        if left < 0:
            raise UnusableFileError(f"holds more than {request['unpacked_bytes'] >> 20} MiB of text; split it")
        yield {name: encodable(text) for name, text in page.items()}


def _office_pages(request: Mapping[str, Any], data: bytes) -> Iterator[dict[str, str]]:
    check_archive(data, request["unpacked_bytes"], request["unpack_ratio"])
    from llama_index.core.readers.file.base import SimpleDirectoryReader

    suffix = request["suffix"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{suffix}"
        path.write_bytes(data)
        try:
            documents = SimpleDirectoryReader.load_file(
                path, file_metadata=lambda _: {}, file_extractor={}, raise_on_error=True
            )
        except ImportError as error:
            raise UnusableFileError(f"the reader of {suffix} files lacks a package: {first_line(error)}") from error
    for document in documents:
        label = document.metadata.get("page_label")
        yield {"text": document.text} | ({} if label is None else {"page_label": str(label)})


def check_archive(data: bytes, most_bytes: int, most_ratio: float) -> None:
    """Check what an archive unpacks to, before it is unpacked.

    Args:
        data: The file; one that is no zip archive passes.
        most_bytes: Most bytes of all parts unpacked.
        most_ratio: Most unpacked bytes a byte of the file.

    Raises:
        UnusableFileError: The archive unpacks to more, or is damaged.
    """
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise UnusableFileError(f"a damaged archive: {first_line(error)}") from error
    unpacked = sum(part.file_size for part in parts)
    if len(parts) > _MOST_PARTS:
        raise UnusableFileError(f"an archive of {len(parts)} parts, more than {_MOST_PARTS}")
    if unpacked > most_bytes:
        raise UnusableFileError(f"unpacks to {unpacked >> 20} MiB, more than {most_bytes >> 20} MiB")
    if unpacked > max(_FREE_BYTES, most_ratio * len(data)):
        raise UnusableFileError(f"unpacks to {unpacked / len(data):.0f} times its size, more than {most_ratio:.0f}")


def _cause(error: BaseException) -> BaseException:
    """The error that a parser raised, without the wrappers of LlamaIndex and of tenacity, which have no reason."""
    while True:
        attempt = getattr(error, "last_attempt", None)  # of a tenacity.RetryError
        inner = attempt.exception() if attempt is not None else None
        if inner is None and type(error) is Exception:
            inner = error.__cause__
        if inner is None:
            return error
        error = inner


@contextlib.contextmanager
def _bounded_memory(more: int) -> Iterator[None]:
    """Bound the memory of this process inside, where the system can: allocations then raise `MemoryError`.

    Args:
        more: Bytes that may be allocated besides those that are now.
    """
    try:
        import resource

        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (ImportError, OSError):  # elsewhere the parent process watches the memory
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    main()
