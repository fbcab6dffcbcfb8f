"""Datastore: the long-term texts that drafts are searched in, in a folder of one's own."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore.compactor import Upkeep
from reader_rag.datastore.manifest import MANIFEST, Root, read_root, write_root
from reader_rag.datastore.namespace import Namespace, folder_of, name_in
from reader_rag.datastore.part import Document
from reader_rag.datastore.segment import Identity
from reader_rag.datastore.settings import DatastoreSettings
from reader_rag.datastore.snapshot import View
from reader_rag.datastore.stats import Damage, NamespaceStats, find_damage, measure
from reader_rag.datastore.token_codec import digest, token_array
from reader_rag.datastore.writer import GONE, Writer, remove_folder
from reader_rag.errors import (
    DatastoreBusyError,
    DatastoreCorruptError,
    DatastoreError,
    DatastoreNotFoundError,
    DatastoreWriteError,
    MissingDependencyError,
    ReaderWarning,
)
from reader_rag.util.files import Files, writing

if TYPE_CHECKING:
    from filelock import BaseFileLock

ROOT = "datastore.json"
LOCK = "writer.lock"

_SEGMENT_TOKENS = 1 << 25


class Datastore:
    """Documents as tokens on the disk, in namespaces, searchable as soon as they are added.

    Open one with `Datastore.open`. One process writes at a time, any number read; all methods may be called from any
    thread. What `add` and `remove` change is seen at once by this process, and is on the disk, for other processes and
    after a crash, when `commit` has returned.

    Example:
        >>> with Datastore.open("drafts", vocabulary=50_000, tokenizer="sha256:...") as store:
        ...     store.add("a", [5, 6, 7, 8, 9])
        ...     store.commit()
        ...     cursor = store.view([""]).cursor()
        ...     cursor.extend([1, 6, 7])
        ...     cursor.collect(), cursor.tokens[:3].tolist(), cursor.longest
        True
        (1, [8, 9, -1], 2)
    """

    def __init__(
        self,
        folder: Path,
        root: Root,
        settings: DatastoreSettings,
        files: Files,
        clock: Callable[[], float],
        lock: BaseFileLock | None,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self._root, self._files, self._clock, self._lock = root, files, clock, lock
        self._seen = self._signature()
        self._identity = Identity(root.tokenizer, root.vocabulary)
        self._spaces: dict[str, Namespace] = {}
        self._number = 0
        self._open = True
        self._guard = threading.RLock()
        self._upkeep = Upkeep(clock) if lock is not None and settings.background else None

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        vocabulary: int,
        tokenizer: str,
        read_only: bool = False,
        settings: DatastoreSettings | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Datastore:
        """Open a datastore, or make one.

        Args:
            folder: Where it lies.
            vocabulary: Number of token ids; decides how wide tokens are stored.
            tokenizer: Fingerprint of the tokenizer: tokens of another one mean other text.
            read_only: Change nothing: other processes may write meanwhile, and nothing is made.
            settings: When segments are written and merged.
            files: What writes; for tests.
            clock: Seconds since 1970; for tests.

        Raises:
            DatastoreNotFoundError: There is none, and nothing may be made.
            DatastoreMismatchError: It is of another version, tokenizer or vocabulary.
            DatastoreCorruptError: Its own file is damaged.
            DatastoreBusyError: Somebody else writes to it.
            DatastoreWriteError: The folder cannot be written to.
            ValueError: No vocabulary has so many tokens.
        """
        if sys.byteorder != "little":
            raise DatastoreError("datastores need a little-endian machine: run without one")
        folder, files = Path(folder), files or Files()
        wanted = Root(tokenizer, vocabulary)
        identity = Identity(tokenizer, vocabulary)
        assert identity.width  # raises if there is none
        path = folder / ROOT
        if not path.exists() and read_only:
            raise DatastoreNotFoundError(f"no datastore at {folder}: add documents to it first")
        lock = None
        if not read_only:
            with writing(folder):
                ours = {LOCK, ROOT, ROOT + ".new"}
                if not path.exists() and folder.is_dir() and any(item.name not in ours for item in folder.iterdir()):
                    raise DatastoreNotFoundError(f"{folder} holds other files: name an empty or a new folder")
                files.make_folder(folder)
                lock = _locked(folder)
        try:
            if not path.exists():
                with writing(folder):
                    write_root(files, path, wanted)
            root = read_root(path)
            identity.check({"tokenizer": root.tokenizer, "vocabulary": root.vocabulary}, folder)
            store = cls(folder, root, settings or DatastoreSettings(), files, clock, lock)
            store._clean()
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return store

    @classmethod
    def inspect(cls, folder: Path | str, *, read_only: bool = True) -> Datastore:
        """Open a datastore that exists, whatever tokenizer it is of; errors as in `open`."""
        path = Path(folder) / ROOT
        if not path.exists():
            raise DatastoreNotFoundError(f"no datastore at {folder}: add documents to it first")
        root = read_root(path)
        return cls.open(folder, vocabulary=root.vocabulary, tokenizer=root.tokenizer, read_only=read_only)

    # Documents

    def add(self, document: str, tokens: Sequence[int] | NDArray[np.integer], *, namespace: str = "") -> bool:
        """Put a document in, in place of any of that name; searchable when this returns, durable after `commit`.

        Args:
            document: Its name.
            tokens: int token ids.
            namespace: Where; made if there is none.

        Returns:
            Whether anything changed: False if the document was there with the same tokens.

        Raises:
            ValueError: A token id is not of the vocabulary.
            DatastoreError: The datastore was opened read-only, or is closed.
        """
        array = token_array(tokens, self._root.vocabulary)
        writer = self._writer(namespace)
        with writer.lock:
            known = digest(array)
            if writer.digest_of(document) == known:
                return False
            writer.put(self._document(document, array, known))
            return True

    def add_many(
        self,
        documents: Iterable[tuple[str, Sequence[int] | NDArray[np.integer]]],
        *,
        namespace: str = "",
        segment_tokens: int = _SEGMENT_TOKENS,
        progress: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Put many documents in, straight into segments, each committed when it is full.

        A run that was broken off is resumed by running it again: documents that are there with the same tokens are
        skipped.

        Args:
            documents: Names and token ids.
            namespace: Where; made if there is none.
            segment_tokens: Tokens sorted at once.
            progress: Told the tokens so far.

        Returns:
            How many documents were new or changed.

        Raises:
            ValueError: A token id is not of the vocabulary.
            DatastoreWriteError: A segment could not be written; those before it are committed.
        """
        writer = self._writer(namespace)
        limit = min(segment_tokens, self.settings.max_segment_tokens)
        held: dict[str, Document] = {}
        size = total = changed = 0

        def put() -> None:
            nonlocal changed, size
            changed += len(held)
            writer.add_segment(list(held.values()))
            held.clear()
            size = 0
            self._see_to(writer)

        for name, tokens in documents:
            array = token_array(tokens, self._root.vocabulary)
            total += len(array)
            known = digest(array)
            if (held[name].digest if name in held else writer.digest_of(name)) == known:
                continue
            if size and size + len(array) > limit:
                put()
                progress(total - len(array))
            held[name] = self._document(name, array, known)
            size += len(array) + 1
        put()
        progress(total)
        return changed

    def remove(self, document: str, *, namespace: str = "") -> bool:
        """Remove a document: unfindable when this returns, durably after `commit`.

        Its text leaves the disk when its segment is rewritten: in the background (`DatastoreSettings`), or when
        `compact` returns.

        Returns:
            False if there is none of that name.
        """
        self._check_writable()
        return self._has(namespace) and self._writer(namespace).remove(document)

    def remove_namespace(self, namespace: str) -> bool:
        """Remove a namespace with all its documents, at once and from the disk.

        Returns:
            False if there is none of that name.
        """
        with self._guard:
            self._check_writable()
            if not self._has(namespace):
                return False
            try:
                self._writer(namespace).end()
            except DatastoreCorruptError:
                with writing(self.folder):
                    remove_folder(self._files, self.folder / folder_of(namespace))
            self._spaces.pop(namespace, None)
            self._number += 1
            if namespace in self._root.shared:
                self.share(namespace, False)
            return True

    def used(self, documents: Iterable[str], *, namespace: str = "") -> None:
        """Note that documents gave something; where a namespace is limited, those longest of no use go first."""
        if self._has(namespace):
            self._writer(namespace).use(documents)

    def has(self, document: str, *, namespace: str = "") -> bool:
        """Whether there is a document of that name."""
        space = self._space(namespace)
        return space is not None and space.digest_of(document) is not None

    def read(self, document: str, *, namespace: str = "") -> NDArray[np.int64] | None:
        """int64 [n], the tokens of a document; None: there is none of that name."""
        space = self._space(namespace)
        return None if space is None else space.read(document)

    def documents(self, *, namespace: str = "") -> list[str]:
        """The names of all documents of a namespace."""
        space = self._space(namespace)
        return [] if space is None else space.names()

    # Namespaces

    def namespaces(self) -> list[str]:
        """The names of all namespaces."""
        with self._guard:
            held = {folder_of(name): name for name in self._spaces}
            folders = sorted(path for path in self.folder.iterdir() if path.name.startswith("ns-"))
            found = [held.get(path.name) if path.name in held else name_in(path) for path in folders]
            return [name for name in found if name is not None]

    def share(self, namespace: str, shared: bool = True) -> None:
        """Mark a namespace as one that every request sees, or no longer; committed at once."""
        with self._guard, writing(self.folder):
            self._check_writable()
            others = tuple(name for name in self._root.shared if name != namespace)
            root = replace(self._root, shared=(*others, namespace) if shared else others)
            write_root(self._files, self.folder / ROOT, root)
            self._root = root
            self._number += 1

    def limit(self, namespace: str, *, max_tokens: int | None = None, max_age_s: float | None = None) -> None:
        """Bound a namespace; from the next commit on, documents go that are too old or were longest of no use.

        Args:
            namespace: Made if there is none.
            max_tokens: Most tokens; None: any number.
            max_age_s: Seconds after which a document goes; None: it stays.
        """
        self._writer(namespace).limit(max_tokens, max_age_s)

    def view(self, namespaces: Sequence[str], *, shared: bool = True) -> View:
        """What one request may see: its own namespaces, and those marked as shared; nothing else.

        Args:
            namespaces: Its own; those that are not there (yet) are empty.
            shared: Also those that `share` marked.

        Returns:
            A view that follows changes of this process at once. Those of others are taken in now, and by `refresh`.
        """
        names = tuple(dict.fromkeys(namespaces))
        self.refresh(names)
        held: tuple[int, tuple[Namespace, ...]] = (-1, ())

        def resolve() -> tuple[int, tuple[Namespace, ...]]:
            nonlocal held
            number = self._number
            if held[0] != number:
                with self._guard:
                    wanted = dict.fromkeys((*names, *(self._root.shared if shared else ())))
                    found = [space for name in wanted if (space := self._space(name, tell=True)) is not None]
                    held = self._number, tuple(found)
            return held

        return View(resolve, self._identity)

    def refresh(self, namespaces: Sequence[str] | None = None) -> None:
        """Take in what another process committed; a writer knows all and has nothing to do.

        Args:
            namespaces: Only these and the shared ones; None: all that were looked at before.
        """
        if self._lock is not None:
            return
        with self._guard:
            chosen = self._spaces if namespaces is None else (*namespaces, *self._root.shared)
            for space in [self._spaces[name] for name in chosen if name in self._spaces]:
                try:
                    space.refresh()
                except DatastoreCorruptError as error:
                    warnings.warn(f"datastore: {error}; what was read before is served", ReaderWarning, stacklevel=3)
            seen = self._signature()
            if seen != self._seen:
                self._root, self._seen = read_root(self.folder / ROOT), seen
                folders = {path.name for path in self.folder.iterdir()}
                self._spaces = {name: space for name, space in self._spaces.items() if folder_of(name) in folders}
                self._number += 1

    # The disk

    def commit(self) -> None:
        """Bring all changes to the disk: of each namespace all or none.

        Raises:
            DatastoreWriteError: Something could not be written; those changes are kept for the next commit.
        """
        self._check_writable()
        self._commit_all()

    def compact(self, *, namespace: str | None = None, full: bool = False, wait: bool = True) -> None:
        """Commit, take removed text off the disk, and merge what is due.

        Args:
            namespace: Only this one; None: all.
            full: Merge into as few segments as `max_segment_tokens` allows: searches are fastest then.
            wait: Return when it is done; otherwise it is done in the background.

        Raises:
            DatastoreWriteError: Something could not be written.
        """
        self._check_writable()
        names = self.namespaces() if namespace is None else [namespace] if self._has(namespace) else []
        for name in names:
            writer = self._writer(name)
            writer.commit()
            if wait or self._upkeep is None:
                writer.tidy(force=True, full=full)
            else:
                self._upkeep.see_to(writer, force=True, full=full)

    def verify(self) -> list[Damage]:
        """Read everything and compare checksums; changes nothing.

        Returns:
            What is damaged; empty: nothing is.
        """
        found: list[Damage] = []
        readable = set()
        for name in self.namespaces():
            readable.add(folder_of(name))
            space = self._space(name)
            found += [] if space is None else find_damage(name, space)
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith("ns-") and path.name not in readable:
                found.append(Damage("", path.name, "its manifest cannot be read"))
        return found

    def stats(self) -> dict[str, NamespaceStats]:
        """What each namespace holds."""
        spaces = {name: self._space(name) for name in self.namespaces()}
        return {name: measure(space, name in self._root.shared) for name, space in spaces.items() if space is not None}

    def close(self, *, commit: bool = True) -> None:
        """Commit, end what runs in the background, and let others write.

        Args:
            commit: False: what was not committed is dropped.
        """
        with self._guard:
            if not self._open:
                return
            self._open = False
        try:
            if self._upkeep is not None:
                self._upkeep.close()
            if commit:
                self._commit_all()
        finally:
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit=kind is None)

    # Parts

    def _document(self, name: str, array: NDArray[np.int64], known: int) -> Document:
        now = int(self._clock())
        return Document(name, self._identity.width.pack(array), known, now, now)

    def _commit_all(self) -> None:
        with self._guard:
            writers = [space for space in self._spaces.values() if isinstance(space, Writer)]
        failed = []
        for writer in writers:
            try:
                writer.commit()
            except DatastoreWriteError as error:
                failed.append(error)
            self._see_to(writer)
        if failed:
            raise failed[0]

    def _has(self, namespace: str) -> bool:
        return namespace in self._spaces or (self.folder / folder_of(namespace)).exists()

    def _signature(self) -> tuple[int, ...]:
        """Changes when namespaces come or go or are shared."""
        own, folder = (self.folder / ROOT).stat(), self.folder.stat()
        return own.st_mtime_ns, own.st_ino, folder.st_mtime_ns, folder.st_nlink

    def _check_writable(self) -> None:
        if not self._open:
            raise DatastoreError(f"the datastore {self.folder} is closed: open it again")
        if self._lock is None:
            raise DatastoreError(f"the datastore {self.folder} was opened read-only: open it without read_only")

    def _see_to(self, writer: Writer) -> None:
        if self._upkeep is not None:
            self._upkeep.see_to(writer)

    def _writer(self, namespace: str) -> Writer:
        """A namespace to be changed; made if there is none."""
        with self._guard:
            self._check_writable()
            space = self._spaces.get(namespace)
            if space is None:
                space = self._load_writer(namespace)
                self._number += 1
            assert isinstance(space, Writer)
            return space

    def _load_writer(self, namespace: str) -> Writer:
        folder = self.folder / folder_of(namespace)
        space = Writer(folder, namespace, self._identity, self.settings, self._files, self._clock)
        self._spaces[namespace] = space
        self._see_to(space)
        return space

    def _space(self, namespace: str, *, tell: bool = False) -> Namespace | None:
        """A namespace to be read; None: there is none.

        Args:
            namespace: Its name.
            tell: One that cannot be read is told and left out, so that the others are served.
        """
        with self._guard:
            if not self._open:
                raise DatastoreError(f"the datastore {self.folder} is closed: open it again")
            if namespace in self._spaces:
                return self._spaces[namespace]
            folder = self.folder / folder_of(namespace)
            if not folder.exists():
                return None
            try:
                if self._lock is not None:
                    return self._load_writer(namespace)
                space = Namespace(folder, self._identity)
                space.load()
            except FileNotFoundError:
                return None
            except DatastoreCorruptError as error:
                if not tell:
                    raise
                warnings.warn(f"datastore: {error}; the rest is served", ReaderWarning, stacklevel=3)
                return None
            self._spaces[namespace] = space
            return space

    def _clean(self) -> None:
        """Take off the disk what is left of namespaces that were removed, or never quite made."""
        if self._lock is None:
            return
        for path in list(self.folder.iterdir()):
            unmade = path.name.startswith("ns-") and not (path / MANIFEST).exists() and not any(path.glob("*.seg"))
            if unmade or path.name.startswith(GONE):
                with writing(self.folder):
                    self._files.remove_folder(path)


def _locked(folder: Path) -> Any:
    try:
        from filelock import FileLock, Timeout
    except ImportError as cause:
        raise MissingDependencyError("writing to a datastore needs filelock: pip install filelock") from cause
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as cause:
        raise DatastoreBusyError(
            f"somebody else writes to the datastore {folder}: wait until they close it, or open it with read_only=True"
        ) from cause
    return lock
