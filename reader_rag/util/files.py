"""Durable changes of files: `atomic_path` replaces a file or makes a folder, `Files` is the datastore's file layer.

The datastore makes all changes on disk through a `Files` object, so that tests can make each step fail.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from reader_rag.errors import DatastoreWriteError

REMOVED_PREFIX = "removed-"
"""Prefix of a folder's name while it is removed."""

_PAUSES = () if os.name == "posix" else (0.01, 0.05, 0.2, 0.5)
"""Seconds between tries to rename: on Windows it fails while another process reads one of the files."""
# Opening a pipe, a terminal or a file such as /proc/kmsg then does not wait. Windows has no such flags.
READ_AT_ONCE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


def open_regular(path: Path) -> FileIO:
    """Open a regular file to read it. A pipe or a device in its place is refused, without waiting for data.

    Args:
        path: The file, or a link to it.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read, or is a folder, pipe, socket or device.
    """
    file = FileIO(os.open(path, READ_AT_ONCE))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path) -> bytes:
    """The content of a regular file; errors are those of `open_regular`.

    Args:
        path: The file, or a link to it.
    """
    with open_regular(path) as file:
        return file.readall() or b""  # None: reading on would wait, as at /proc/kmsg


@contextlib.contextmanager
def atomic_path(path: Path, *, keep_existing: bool = False) -> Iterator[Path]:
    """Replace a file, or make a folder, atomically: readers see the old content or the new, also after a crash.

    Args:
        path: The file to replace, or the folder to make; its parent must exist.
        keep_existing: Drop the new file if there is one at `path`, also one that another process makes meanwhile.

    Yields:
        A path beside it, to be written as a file or made as a folder. When the block ends it is flushed to disk and
        renamed to `path`; when the block raises it is removed.
    """
    files = Files()
    with files.replacing(path, keep_existing=keep_existing) as partial:
        yield partial
        files.sync_tree(partial)


def partial_paths(path: Path) -> list[Path]:
    """The unfinished files that interrupted writes of `path` left beside it.

    Args:
        path: The file that was to be written.
    """
    prefix = _partial_prefix(path)
    return [other for other in path.parent.iterdir() if other.name.startswith(prefix)]


def _partial_prefix(path: Path) -> str:
    return f".{path.name}.partial-"


class Files:
    """Changes files and folders. Each method completes, fails, or is interrupted by a crash as one step."""

    def create(self, path: Path, chunks: Iterable[Any]) -> None:
        """Write a file and flush it to disk; a file at `path` is overwritten.

        Args:
            path: The file.
            chunks: Its content in order, as bytes or arrays.
        """
        with path.open("wb", buffering=0) as file:
            for chunk in chunks:
                self.write(file.fileno(), chunk)
            self.sync(file.fileno())

    def append(self, path: Path, at: int, data: bytes) -> None:
        """Truncate a file to `at` bytes, append `data` and flush it to disk."""
        with path.open("r+b", buffering=0) as file:
            self.truncate(file.fileno(), at)
            os.lseek(file.fileno(), at, os.SEEK_SET)
            self.write(file.fileno(), data)
            self.sync(file.fileno())

    def overwrite(self, path: Path, at: int, data: bytes) -> None:
        """Write `data` at an offset of a file, without flushing it to disk: the next flush of the file does.

        Args:
            path: The file.
            at: Offset in bytes; `data` must not cross a multiple of 512, so that a power cut leaves all of it or none.
            data: What to write.
        """
        assert at // 512 == (at + len(data) - 1) // 512
        with path.open("r+b", buffering=0) as file:
            file.seek(at)
            self.write(file.fileno(), data)

    def shorten(self, path: Path, size: int) -> None:
        """Truncate a file to `size` bytes and flush it to disk."""
        with path.open("r+b", buffering=0) as file:
            self.truncate(file.fileno(), size)
            self.sync(file.fileno())

    def replace(self, path: Path, data: bytes) -> None:
        """Replace a file's content atomically and durably."""
        with self.replacing(path) as partial:
            self.create(partial, [data])

    @contextlib.contextmanager
    def replacing(self, path: Path, *, keep_existing: bool = False) -> Iterator[Path]:
        """Yield a path beside `path`; what the block writes there, flushed to disk, is renamed to `path`.

        Args:
            path: The file to replace.
            keep_existing: Drop the new file if there is one at `path`.
        """
        partial = path.with_name(_partial_prefix(path) + uuid.uuid4().hex)
        try:
            yield partial
            if keep_existing:
                self.link(partial, path)
            else:
                self.rename(partial, path)
        except BaseException:  # an interrupt as well
            with contextlib.suppress(OSError):
                if partial.is_dir():
                    shutil.rmtree(partial)
                else:
                    self.unlink(partial)
            raise
        self.sync_folder(path.parent)

    def write(self, file: int, data: Any) -> None:
        """Write all of `data` to a file descriptor."""
        rest = memoryview(data).cast("B")
        while len(rest):
            rest = rest[os.write(file, rest[: 1 << 26]) :]

    def sync(self, file: int) -> None:
        """Flush a file descriptor to disk."""
        os.fsync(file)

    def truncate(self, file: int, size: int) -> None:
        """Set the length of a file in bytes."""
        os.ftruncate(file, size)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder; a file at the target is replaced atomically."""
        for pause in _PAUSES:
            try:
                source.replace(target)
            except PermissionError:
                time.sleep(pause)
            else:
                return
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Rename a file, unless there is one at the target; then the source is removed."""
        try:
            with contextlib.suppress(FileExistsError):
                os.link(source, target)
        except OSError:  # a file system without hard links
            if not target.exists():
                self.rename(source, target)
        self.unlink(source)

    def unlink(self, path: Path) -> None:
        """Remove a file if it exists."""
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents if they do not exist."""
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            self.sync_folder(path.parent)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and all files in it; of a link in its place, the link alone."""
        if path.is_symlink() or not path.is_dir():
            self.unlink(path)
            return
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                self.remove_folder(entry)
            else:
                self.unlink(entry)
        path.rmdir()

    def remove_atomically(self, path: Path, on_removed: Callable[[], None] = lambda: None) -> None:
        """Remove a folder with its content. It is renamed first, so that a crash leaves no half of it under its name.

        Args:
            path: The folder; while it is removed its name has the prefix `REMOVED_PREFIX`.
            on_removed: Called after the rename.
        """
        target = path.with_name(REMOVED_PREFIX + path.name)
        if path.exists():
            if target.exists():
                self.remove_folder(target)
            self.rename(path, target)
        on_removed()
        self.sync_folder(target.parent)
        if target.exists():
            self.remove_folder(target)

    def sync_folder(self, path: Path) -> None:
        """Flush a folder's list of files to disk."""
        if os.name != "posix":
            return  # elsewhere a folder cannot be opened, and a rename is durable by itself
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def sync_tree(self, path: Path) -> None:
        """Flush a file to disk, or a folder with all that is in it."""
        if path.is_dir():
            for entry in path.iterdir():
                self.sync_tree(entry)
            self.sync_folder(path)
        else:
            with path.open("rb+") as file:
                self.sync(file.fileno())


@contextlib.contextmanager
def datastore_errors(folder: Path) -> Iterator[None]:
    """Raise a `DatastoreWriteError` in place of an `OSError`.

    Args:
        folder: The datastore's folder, for the message.

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
        raise DatastoreWriteError(f"cannot write the datastore {folder}: {reason}; {advice}") from cause
