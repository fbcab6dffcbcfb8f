"""`ReadingProcess`: parses files in a process that can be ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

import psutil

from reader_rag.config.reading import ReadLimits
from reader_rag.rag.reading.section import Section
from reader_rag.rag.reading.text import UnusableFileError

_START_SECONDS = 60.0  # besides the limit, for a process that starts and imports a parser
_WATCH_SECONDS = 0.1
_ESCAPES = 2  # an answer is JSON, which escapes line ends and quotes


class ReadingProcess:
    """Parses files, one after the other, in a process that is started with the first one.

    The process is ended when a file takes too long or too much memory, and another is started for the next file. Close
    it, or use it as a context.

    Args:
        limits: Limits of one file.
    """

    def __init__(self, limits: ReadLimits | None = None) -> None:
        self.limits = limits or ReadLimits()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped_for = ""  # why the watching thread ended the process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not written is of no use any more
                    pipe.close()
        process.wait()

    def read(self, data: bytes, suffix: str, encoding: str = "utf-8") -> list[Section]:
        """Parse a file.

        Args:
            data: Content of the file.
            suffix: Suffix of its name, in lower case, which selects the parser.
            encoding: Encoding of text in files that declare none.

        Returns:
            Its pages, slides, sheets, ..., or all of it as one.

        Raises:
            UnusableFileError: The file cannot be parsed within the limits.
        """
        fresh = self._process is None or self._process.poll() is not None
        if fresh:
            self.close()
        process = self._process = _started() if fresh or self._process is None else self._process
        done = threading.Event()
        seconds = self.limits.read_seconds + (_START_SECONDS if fresh else 0.0)
        watch = threading.Thread(target=self._watch, args=(process, done, time.monotonic() + seconds), daemon=True)
        self._stopped_for = ""
        watch.start()
        completed = False
        try:
            request = dataclasses.asdict(self.limits) | {"suffix": suffix, "encoding": encoding, "size": len(data)}
            answer = self._exchanged(process, json.dumps(request).encode() + b"\n", data)
            completed = True
        except (OSError, ValueError) as error:
            if fresh or self._stopped_for:
                raise UnusableFileError(self._stopped_for or f"its reader crashed{_status(process)}") from error
        finally:
            done.set()
            watch.join()
            if not completed:  # an interrupt as well: an answer that comes later belongs to no file
                self.close()
        if not completed:
            # In a new process: this one may have ended because of an earlier file.
            return self.read(data, suffix, encoding)
        if "error" in answer:
            raise UnusableFileError(answer["error"])
        return [Section(**fields | {"line_labels": tuple(fields["line_labels"])}) for fields in answer["sections"]]

    def _exchanged(self, process: subprocess.Popen[bytes], header: bytes, data: bytes) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            OSError: The process has ended.
            ValueError: The process has ended, or sends something else.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(header)
        process.stdin.write(data)
        process.stdin.flush()
        size = int(process.stdout.readline(64))
        if not 0 <= size <= _ESCAPES * 4 * self.limits.unpacked_bytes:
            raise ValueError("an answer of an impossible size")
        answer = json.loads(process.stdout.read(size))
        if not isinstance(answer, dict):
            raise ValueError("an answer of another kind")
        return answer

    def _watch(self, process: subprocess.Popen[bytes], done: threading.Event, deadline: float) -> None:
        """End the process at the deadline, or when it takes too much memory."""
        most = None
        while not done.wait(_WATCH_SECONDS):
            try:
                used = psutil.Process(process.pid).memory_info().rss
            except psutil.Error:
                return  # it has ended
            most = used + self.limits.memory_bytes if most is None else most
            if time.monotonic() > deadline:
                self._stopped_for = f"takes longer than {self.limits.read_seconds:g} s to read"
            elif used > most:
                self._stopped_for = f"takes more than {self.limits.memory_bytes >> 20} MiB of memory to read"
            else:
                continue
            process.kill()
            return


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: modules in the current folder, which may be the folder that is ingested, are not imported.
        [sys.executable, "-P", "-m", "reader_rag.rag.reading.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        # An interrupt in the terminal reaches this process only, which ends that one.
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
    )


def _status(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return ""
    return f" (signal {-code})" if code < 0 else f" (exit status {code})"
