"""Catalog: the namespaces of a datastore folder, opened when they are first used."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from reader_rag.datastore.manifest import (
    DATASTORE_MANIFEST,
    NAMESPACE_MANIFEST,
    DatastoreManifest,
    read_datastore_manifest,
    write_datastore_manifest,
)
from reader_rag.datastore.namespace import FOLDER_PREFIX, Namespace, checked_name, folder_name, namespace_in
from reader_rag.datastore.token_codec import Identity
from reader_rag.datastore.writer import NamespaceWriter
from reader_rag.errors import (
    DatastoreBusyError,
    DatastoreCorruptError,
    DatastoreError,
    DatastoreNotFoundError,
    MissingDependencyError,
    ReaderWarning,
)
from reader_rag.util.files import REMOVED_PREFIX, Files, datastore_errors, partial_paths

if TYPE_CHECKING:
    from filelock import BaseFileLock

LOCK = "writer.lock"

OpenWriter = Callable[[Path, str], NamespaceWriter]
"""Opens a namespace for writing, or makes it, in a folder and of a name."""


class Catalog:
    """The namespaces of a datastore.

    Args:
        folder: Folder of the datastore; if it is opened for writing and has no manifest, one is written.
        identity: Identity of the datastore.
        files: File layer.
        open_writer: Opens namespaces for writing; None: read-only.

    Attributes:
        lock: Held while namespaces are opened, made or removed.
        version: Grows when namespaces are opened, made, removed or shared.
        closed: Whether the datastore was closed.

    Raises:
        DatastoreNotFoundError: There is no datastore in the folder.
        DatastoreMismatchError: It is of another version, tokenizer or vocabulary.
        DatastoreCorruptError: Its manifest is damaged.
        DatastoreWriteError: The folder cannot be written to.
    """

    def __init__(self, folder: Path, identity: Identity, files: Files, open_writer: OpenWriter | None) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.version = 0
        self.closed = False
        self._identity, self._files, self._open_writer = identity, files, open_writer
        if open_writer is not None and not (folder / DATASTORE_MANIFEST).exists():
            with datastore_errors(folder):
                write_datastore_manifest(files, folder, DatastoreManifest(identity.tokenizer, identity.vocabulary))
        self._stamp = self._current_stamp()
        self._manifest = read_manifest(folder)
        identity.check({"tokenizer": self._manifest.tokenizer, "vocabulary": self._manifest.vocabulary}, folder)
        self._opened: dict[str, Namespace] = {}

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of the namespaces that every request searches."""
        return self._manifest.shared

    @property
    def writers(self) -> list[NamespaceWriter]:
        """The namespaces that were opened for writing."""
        with self.lock:
            return [namespace for namespace in self._opened.values() if isinstance(namespace, NamespaceWriter)]

    def check_writable(self) -> None:
        """Check that the datastore is open for writing.

        Raises:
            DatastoreError: It is closed, or was opened read-only.
        """
        self._check_open()
        if self._open_writer is None:
            raise DatastoreError(f"the datastore {self.folder} was opened read-only: open it without read_only")

    def names(self) -> list[str]:
        """The names of all namespaces."""
        with self.lock:
            opened = {folder_name(name): name for name in self._opened}
            names = [path.name for path in self.folders()]
            found = [(opened[name] if name in opened else namespace_in(self.folder / name), name) for name in names]
            # Not a folder that was copied or moved from another one: its documents are another namespace's.
            return [name for name, folder in found if name is not None and folder_name(name) == folder]

    def folders(self) -> list[Path]:
        """The folders of all namespaces, sorted."""
        return sorted(self.folder.glob(f"{FOLDER_PREFIX}*"))

    def exists(self, name: str) -> bool:
        """Whether there is a namespace of that name."""
        folder = self.folder / folder_name(name)
        return name in self._opened or folder.exists()

    def get(self, name: str, *, skip_damaged: bool = False) -> Namespace | None:
        """Open a namespace to read it.

        Args:
            name: Name of the namespace.
            skip_damaged: Warn about a damaged one and return None, so that the others can be served.

        Returns:
            None if there is none of that name.

        Raises:
            DatastoreError: The datastore is closed.
            DatastoreCorruptError: The namespace's manifest is damaged.
            DatastoreMismatchError: A file is of another version, tokenizer or vocabulary.
        """
        folder = self.folder / folder_name(name)
        with self.lock:
            self._check_open()
            if name in self._opened:
                return self._opened[name]
            if not folder.exists():
                return None
            try:
                if self._open_writer is not None:
                    namespace: Namespace = self._open_writer(folder, name)
                else:
                    namespace = Namespace(folder, self._identity)
                    namespace.load()
                _check_owner(namespace, name)
            except FileNotFoundError:
                return None
            except DatastoreCorruptError as error:
                if not skip_damaged:
                    raise
                warnings.warn(f"datastore: {error}; the rest is served", ReaderWarning, stacklevel=3)
                return None
            self._opened[name] = namespace
            return namespace

    def writer(self, name: str) -> NamespaceWriter:
        """Open a namespace to change it, or make it.

        Raises:
            DatastoreError: The datastore is closed, or was opened read-only.
        """
        folder = self.folder / folder_name(name)
        with self.lock:
            self.check_writable()
            namespace = self._opened.get(name)
            if namespace is None:
                assert self._open_writer is not None
                namespace = self._open_writer(folder, name)
                _check_owner(namespace, name)
                self._opened[name] = namespace
                self.version += 1
            assert isinstance(namespace, NamespaceWriter)
            return namespace

    def remove(self, name: str) -> bool:
        """Remove a namespace from memory and from disk, also one that is damaged.

        Returns:
            False if there is none of that name.
        """
        with self.lock:
            self.check_writable()
            if not self.exists(name):
                return False
            try:
                self.writer(name).remove_folder()
            except DatastoreCorruptError:
                with datastore_errors(self.folder):
                    self._files.remove_atomically(self.folder / folder_name(name))
            self._opened.pop(name, None)
            self.version += 1
            if name in self.shared:
                self.share(name, False)
            return True

    def share(self, name: str, shared: bool) -> None:
        """Mark a namespace as one that every request searches, or no longer; committed at once.

        Args:
            name: The namespace.
            shared: Whether every request searches it.
        """
        name = checked_name(name)
        with self.lock, datastore_errors(self.folder):
            self.check_writable()
            others = tuple(other for other in self.shared if other != name)
            manifest = replace(self._manifest, shared=(*others, name) if shared else others)
            write_datastore_manifest(self._files, self.folder, manifest)
            self._manifest = manifest
            self.version += 1

    def refresh(self, names: Iterable[str] | None) -> None:
        """Read what another process committed.

        Args:
            names: Only these namespaces and the shared ones; None: all that were opened.
        """
        if self._open_writer is not None:
            return
        with self.lock:
            chosen = self._opened if names is None else (*names, *self.shared)
            for namespace in [self._opened[name] for name in chosen if name in self._opened]:
                try:
                    namespace.refresh()
                except DatastoreCorruptError as error:
                    message = f"datastore: {error}; what was read before is served"
                    warnings.warn(message, ReaderWarning, stacklevel=4)
            stamp = self._current_stamp()
            if stamp != self._stamp:
                self._manifest, self._stamp = read_manifest(self.folder), stamp
                folders = {path.name for path in self.folders()}
                self._opened = {name: kept for name, kept in self._opened.items() if folder_name(name) in folders}
                self.version += 1

    def clean(self) -> None:
        """Remove from disk what crashes left: removed and incomplete namespaces, and interrupted writes."""
        with datastore_errors(self.folder):
            for path in [*self.folders(), *self.folder.glob(f"{REMOVED_PREFIX}*")]:
                completed = (path / NAMESPACE_MANIFEST).exists() or any(path.glob("*.seg"))
                if path.name.startswith(REMOVED_PREFIX) or not completed:
                    self._files.remove_folder(path)
            for path in partial_paths(self.folder / DATASTORE_MANIFEST):
                self._files.unlink(path)

    def _check_open(self) -> None:
        if self.closed:
            raise DatastoreError(f"the datastore {self.folder} is closed: open it again")

    def _current_stamp(self) -> tuple[int, ...]:
        """A value that changes when namespaces come or go or are shared; empty: there is no datastore."""
        try:
            own, folder = (self.folder / DATASTORE_MANIFEST).stat(), self.folder.stat()
        except OSError:
            return ()
        return own.st_mtime_ns, own.st_ino, folder.st_mtime_ns, folder.st_nlink


def _check_owner(namespace: Namespace, name: str) -> None:
    """Refuse a folder that was copied or moved from another namespace: its documents may be another tenant's."""
    if namespace.manifest.namespace != name:
        raise DatastoreCorruptError(f"{namespace.folder} holds another namespace: move it away, or restore its own")


def read_manifest(folder: Path) -> DatastoreManifest:
    """Read the manifest of a datastore.

    Raises:
        DatastoreNotFoundError: There is no datastore in the folder.
        DatastoreMismatchError: It is of another version.
        DatastoreCorruptError: Its manifest is damaged.
    """
    if not (folder / DATASTORE_MANIFEST).exists():
        raise DatastoreNotFoundError(f"no datastore at {folder}: add documents to it first")
    return read_datastore_manifest(folder)


def lock_folder(folder: Path, files: Files) -> BaseFileLock:
    """Lock the folder of a datastore for writing, and make it if it does not exist.

    Args:
        folder: Folder of the datastore.
        files: File layer.

    Returns:
        The lock, held.

    Raises:
        DatastoreNotFoundError: There is no datastore, and the folder has other files.
        DatastoreBusyError: Another process writes to it.
        DatastoreWriteError: The folder cannot be written to.
        MissingDependencyError: filelock is not installed.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError as cause:
        raise MissingDependencyError("writing to a datastore needs filelock: pip install filelock") from cause
    with datastore_errors(folder):
        exists = (folder / DATASTORE_MANIFEST).exists()
        if not exists and folder.is_dir() and any(map(_is_foreign, folder.iterdir())):
            raise DatastoreNotFoundError(f"{folder} holds other files: name an empty or a new folder")
        files.make_folder(folder)
        lock = FileLock(folder / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as cause:
            raise DatastoreBusyError(
                f"another process writes to the datastore {folder}: wait until it closes it, or open it with "
                "read_only=True"
            ) from cause
    return lock


def _is_foreign(path: Path) -> bool:
    """Whether a file does not belong to a datastore that was never completed."""
    return path.name != LOCK and DATASTORE_MANIFEST not in path.name
