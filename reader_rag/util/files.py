"""The file layer: all that the datastore changes on the disk goes through `Files`, so that tests can make it fail."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reader_rag.errors import DatastoreWriteError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class Files:
    """What changes files and folders. Every method does one thing, wholly or not at all or up to a crash."""

    def create(self, path: Path, chunks: Iterable[Any]) -> None:
        """Write a new file (what stands there is overwritten) and bring it to the disk."""
        with path.open("wb", buffering=0) as file:
            for chunk in chunks:
                self.write(file.fileno(), chunk)
            self.sync(file.fileno())

    def append(self, path: Path, at: int, data: bytes) -> None:
        """Write behind the first `at` bytes of a file, dropping what stands there, and bring it to the disk."""
        with path.open("r+b", buffering=0) as file:
            self.truncate(file.fileno(), at)
            os.lseek(file.fileno(), at, os.SEEK_SET)
            self.write(file.fileno(), data)
            self.sync(file.fileno())

    def shorten(self, path: Path, size: int) -> None:
        """Drop a file's end."""
        with path.open("r+b", buffering=0) as file:
            self.truncate(file.fileno(), size)
            self.sync(file.fileno())

    def put(self, path: Path, data: bytes) -> None:
        """Exchange a file's content at once: whoever reads it, also after a crash, has the old one or the new one."""
        new = path.with_name(path.name + ".new")
        self.create(new, [data])
        self.rename(new, path)
        self.sync_folder(path.parent)

    def write(self, file: int, data: Any) -> None:
        """Write all of `data` to a file descriptor."""
        rest = memoryview(data).cast("B")
        while len(rest):
            rest = rest[os.write(file, rest[: 1 << 26]) :]

    def sync(self, file: int) -> None:
        """Bring a file's content to the disk."""
        os.fsync(file)

    def truncate(self, file: int, size: int) -> None:
        """Set a file's length."""
        os.ftruncate(file, size)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder; a file at the target is replaced at once."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        """Make a folder with those above it, unless it is there."""
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            self.sync_folder(path.parent)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and all files in it."""
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                self.remove_folder(entry)
            else:
                self.unlink(entry)
        path.rmdir()

    def sync_folder(self, path: Path) -> None:
        """Bring a folder's list of files to the disk."""
        if os.name == "nt":
            return  # folders cannot be opened there
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn what a file system says into errors of ours.

    Raises:
        DatastoreWriteError: Something could not be written.
    """
    try:
        yield
    except OSError as cause:
        reason = cause.strerror or str(cause)
        if cause.errno in _FULL:
            advice = "free some space and commit again; what was committed is intact"
        elif cause.errno in _FORBIDDEN:
            advice = "open it with read_only=True, or make the folder writable"
        else:
            advice = "what was committed is intact"
        raise DatastoreWriteError(f"cannot write the datastore {place}: {reason}; {advice}") from cause
