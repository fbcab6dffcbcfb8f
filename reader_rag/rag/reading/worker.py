"""The process in which files are parsed: `python -m reader_rag.rag.reading.worker`, started by `ReadingProcess`.

It reads requests from standard input and writes answers to standard output. A request is a line of JSON (`suffix`,
`encoding`, `size` and the fields of `ReadLimits`) and the bytes of the file. An answer is a line with the size of the
rest, which is JSON: `sections` (the fields of `Section`), or `error`, the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reader_rag.rag.reading.formats import Format, format_of
from reader_rag.rag.reading.section import Section
from reader_rag.rag.reading.text import UnusableFileError
from reader_rag.util.encodable import encodable
from reader_rag.util.one_line import first_line, one_line

_FREE_BYTES = 10 << 20  # an archive of few bytes may have a high ratio, such as one of an empty sheet
_MOST_PARTS = 20_000  # of an archive
_OLE = bytes.fromhex("d0cf11e0a1b11ae1")  # begins encrypted office files, and those of before 2007
_MOST_REASON = 200  # characters
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
    format_ = format_of(request["suffix"])
    try:
        if format_ is None:
            raise UnusableFileError(f"there is no parser of {request['suffix']} files")
        read = format_.reader()  # imported first: what the import takes is not the file's
        with _bounded_memory(request["memory_bytes"]):
            if format_.is_archive:
                _check_is_archive(data, format_)
                check_archive(data, request["unpacked_bytes"], request["unpack_ratio"])
            sections = read(data, request["suffix"], request["encoding"])
            return {"sections": list(_bounded(sections, request["unpacked_bytes"]))}
    except UnusableFileError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"takes more than {request['memory_bytes'] >> 20} MiB of memory to read"}
    except ImportError as error:
        return {"error": f"the reader of {request['suffix']} files lacks a package: {first_line(error)}"}
    except Exception as error:  # parsers raise errors of many libraries
        return {"error": f"not a readable {request['suffix']} file: {_reason(error)}"}


def _bounded(sections: Iterable[Section], most_bytes: int) -> Iterator[dict[str, Any]]:
    """The sections, JSON-ready, as long as they hold no more than so many characters together."""
    left = most_bytes
    for section in sections:
        left -= len(section.text) + sum(map(len, section.line_labels))
        if left < 0:
            raise UnusableFileError(f"holds more than {most_bytes >> 20} MiB of text; split it")
        fields = dataclasses.asdict(section)
        fields["metadata"] = {name: encodable(text) for name, text in section.metadata.items()}
        yield fields | {"text": encodable(section.text), "line_labels": [encodable(one) for one in section.line_labels]}


def _check_is_archive(data: bytes, format_: Format) -> None:
    if data.startswith(_OLE):
        suffix = format_.suffixes[0]
        raise UnusableFileError(f"encrypted, or of an old version: save it as {suffix} without a password")
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise UnusableFileError(f"not a readable {format_.title} file: damaged, or of another format")


def _reason(error: BaseException) -> str:
    """The error of a parser in words; one of its code, not of its checks, says nothing to a reader."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, (LookupError, AttributeError, TypeError, AssertionError, ArithmeticError)):
        return "damaged, or of another format"
    words = one_line(first_line(error))[:_MOST_REASON]
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)


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
