"""The SQLite file of a `FaissStore`: vectors and documents change in one transaction.

A killed process or a full disk leaves the last commit: SQLite's rollback journal undoes a partial write when the file
is opened next. All functions raise `reader_rag.errors.StoreError`, never `sqlite3.Error`. `sqlite_rows` has the
statements on the rows.
"""

from __future__ import annotations

import contextlib
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from reader_rag.errors import (
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    StoreMismatchError,
    StoreNotFoundError,
    StoreWriteError,
)
from reader_rag.rag.stores import sqlite_schema as schema
from reader_rag.rag.stores.sqlite_rows import StoreRows
from reader_rag.util.files import atomic_path

FILE_NAME = "store.sqlite3"
APPLICATION_ID, FORMAT_VERSION = schema.APPLICATION_ID, schema.FORMAT_VERSION
_BUSY_TIMEOUT_S = 5.0
_REMEDY = "restore it from a backup, or delete it and ingest your documents again"
_NOT_A_DATABASE = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class StoreFile:
    """One open store file (or a store in memory). Not thread safe by itself: `TenantIndexes` holds a lock.

    Args:
        database: An open connection in autocommit mode.
        path: The file; None in memory.

    Attributes:
        path: The file; None in memory.
        rows: What the file holds. Use it inside `reading` or `writing`.
    """

    def __init__(self, database: sqlite3.Connection, path: Path | None) -> None:
        self._database = database
        self.path = path
        self.rows = StoreRows(database, self._damaged)
        with self._store_errors(writing=False):
            # What a schema contains is not trusted: no function that it calls may have effects.
            database.execute("PRAGMA trusted_schema = OFF")
            database.execute("PRAGMA cell_size_check = ON")
            # EXTRA also syncs the folder, so that a commit survives a power cut right after it.
            database.execute("PRAGMA synchronous = EXTRA")

    @classmethod
    def in_memory(cls) -> StoreFile:
        """Make a store in memory; it ends with the process."""
        database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        database.executescript(schema.SCHEMA)
        return cls(database, None)

    @classmethod
    def open(cls, folder: Path) -> StoreFile:
        """Open the store in a folder, check its file, and migrate a file of format 1 to the current format.

        Args:
            folder: Folder of the store.

        Raises:
            StoreNotFoundError: There is no store in the folder.
            StoreCorruptError: The file is damaged, truncated, or not a store.
            StoreMismatchError: The file has an unknown format version.
            StoreBusyError: Another process is writing and does not finish within the timeout.
            StoreWriteError: The file has format 1 and cannot be migrated; it is unchanged.
        """
        path = folder / FILE_NAME
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise StoreError(f"{path} cannot be opened ({error.strerror}); check its permissions") from error
        if size is None:
            raise StoreNotFoundError.at(folder)
        if size == 0:
            raise StoreCorruptError(f"{path} is empty (0 bytes), not a store; {_REMEDY}")
        check_side_files(path)
        try:
            database = sqlite3.connect(
                f"{path.resolve().as_uri()}?mode=rw",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                timeout=_BUSY_TIMEOUT_S,
            )
        except sqlite3.Error as error:
            raise StoreError(f"{path} cannot be opened ({error}); check its permissions") from error
        try:
            file = cls(database, path)
            if file._verified_format() < FORMAT_VERSION:
                file._migrate()
        except BaseException:
            database.close()
            raise
        return file

    @classmethod
    def create(cls, folder: Path) -> StoreFile:
        """Open the store in a folder, or make an empty one there in one atomic step.

        Args:
            folder: Folder of the store; made if it does not exist.

        Raises:
            StoreWriteError: The folder or the file cannot be written.
            StoreError: There is a store, and it cannot be opened (see `open`).
        """
        try:
            if not (folder / FILE_NAME).exists():
                folder.mkdir(parents=True, exist_ok=True)
                _publish_empty(folder)
        except (OSError, sqlite3.Error) as error:
            raise StoreWriteError(
                f"no store can be made in {folder} ({error}); choose a folder you can write to, with room left"
            ) from error
        return cls.open(folder)

    def close(self) -> None:
        """Release the file."""
        self._database.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read transaction: all reads inside see one commit, whatever other processes write meanwhile."""
        with self._store_errors(writing=False):
            self._database.execute("BEGIN")
            try:
                yield
            finally:
                self._rollback()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Write transaction: all changes inside are committed at the end; an exception rolls all of them back.

        Raises:
            StoreBusyError: Another process is writing and does not finish within the timeout.
            StoreWriteError: Disk full, read-only, or an input/output error; what was stored is intact.
        """
        with self._store_errors(writing=True):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._commit()
            except BaseException:
                self._rollback()
                raise

    def _commit(self) -> None:
        self._database.execute("COMMIT")

    def _rollback(self) -> None:
        # SQLite has already rolled back after some errors. Where the rollback itself fails (a failing disk), the
        # journal stays and is applied when the file is opened next, so the first error is the one to report.
        if self._database.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")

    def commits_by_others(self) -> int:
        """A number that changes when another connection has committed; read it inside `reading` or `writing`."""
        return int(self._database.execute("PRAGMA data_version").fetchone()[0])

    def copy_to(self, folder: Path) -> None:
        """Write a copy of the last commit into another folder; a store that is there is replaced.

        Args:
            folder: Folder of the copy; made if it does not exist.

        Raises:
            StoreCorruptError: The file in that folder is not a store.
            StoreWriteError: The copy cannot be written; the folder is unchanged.
        """
        target = folder / FILE_NAME
        if target.exists():
            StoreFile.open(folder).close()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_path(target) as copy, contextlib.closing(sqlite3.connect(copy)) as database:
                self._database.backup(database)
        except (OSError, sqlite3.Error) as error:
            raise StoreWriteError(f"the store cannot be copied to {folder} ({error}); choose another folder") from error

    def _verified_format(self) -> int:
        """The file's format version, after checking that the file is a store and not damaged.

        The tables are compared before anything is read of them: a view in place of one may never end.
        """
        with self.reading():
            # The first read rolls back an interrupted commit, so it precedes every check.
            application_id = self._pragma("application_id")
            version = int(self._pragma("user_version"))
            if application_id != APPLICATION_ID:
                raise StoreCorruptError(f"{self.path} is an SQLite database of another program; {_REMEDY}")
            if not 1 <= version <= FORMAT_VERSION:
                raise StoreMismatchError(
                    f"{self.path} has format version {version}, this program reads 1 to {FORMAT_VERSION}: "
                    "use the version that made it, or ingest into a new folder"
                )
            if difference := schema.difference(self._database, version):
                raise StoreCorruptError(f"{self.path} has other tables than a store ({difference}); {_REMEDY}")
            result = self._pragma("integrity_check(1)")
            if result != "ok":
                raise StoreCorruptError(f"{self.path} is damaged ({str(result).splitlines()[-1]}); {_REMEDY}")
            if version == FORMAT_VERSION and not self.rows.meta() and not self.rows.is_empty():
                raise self._damaged("its identity")
            return version

    def _migrate(self) -> None:
        """Migrate a file of an earlier format to the current one, in one commit."""
        with self.writing():
            version = int(self._pragma("user_version"))
            if version < FORMAT_VERSION:  # else another process has migrated it
                if not schema.migrate(self._database, version):
                    raise self._damaged("a node")
                self.rows.set_meta(dict(self._database.execute("SELECT key, value FROM meta")))

    @contextlib.contextmanager
    def decoding(self, what: str) -> Iterator[None]:
        """Around code that decodes what the file holds: it fails only where that was not written by a store.

        Args:
            what: What is decoded.

        Raises:
            StoreCorruptError: It failed.
        """
        try:
            yield
        except (StoreError, sqlite3.Error):
            raise
        except Exception as error:  # of LlamaIndex, Pydantic, JSON, NumPy and FAISS
            raise self._damaged(what) from error

    def _damaged(self, what: str) -> StoreCorruptError:
        return StoreCorruptError(f"{self.path or 'the store in memory'}: {what} is damaged; {_REMEDY}")

    def _pragma(self, name: str) -> int | str:
        value: int | str = self._database.execute(f"PRAGMA {name}").fetchone()[0]
        return value

    @contextlib.contextmanager
    def _store_errors(self, *, writing: bool) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise StoreError(f"the store {self.path or 'in memory'} is closed; open it again") from error
        except sqlite3.Error as error:
            raise store_error(error, str(self.path or "the store"), _REMEDY, writing=writing) from error
        except UnicodeDecodeError as error:  # a name or message in a damaged file
            raise self._damaged("a text") from error


def check_side_files(path: Path) -> None:
    """Refuse a pipe, a device, a folder or a link where SQLite keeps its journals: it would wait for one for ever.

    Args:
        path: The database.

    Raises:
        StoreCorruptError: There is such a file beside it.
    """
    for suffix in ("-journal", "-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(beside.lstat().st_mode):
                raise StoreCorruptError(f"{beside} is no regular file; remove it")


def store_error(error: sqlite3.Error, file: str, remedy: str, *, writing: bool) -> StoreError:
    """What an error of SQLite means for a file.

    Args:
        error: The error.
        file: The file, in words.
        remedy: What to do with a damaged file.
        writing: Whether the file was being written, not only read.
    """
    # The low byte is SQLite's primary result code.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in _BUSY:
        return StoreBusyError(f"another process is writing to {file}; try again when it has finished")
    if code in _NOT_A_DATABASE:
        return StoreCorruptError(f"{file} is truncated, damaged or not a store ({error}); {remedy}")
    if writing:
        return StoreWriteError(
            f"{file} could not be written ({error}); "
            "what was stored before is intact: make room or check permissions, then try again"
        )
    return StoreError(f"{file} could not be read ({error}); check the disk and permissions")


def _publish_empty(folder: Path) -> None:
    """Make an empty store in one atomic step; a store that another process made first is kept."""
    with (
        atomic_path(folder / FILE_NAME, keep_existing=True) as made,
        contextlib.closing(sqlite3.connect(made, isolation_level=None)) as database,
    ):
        database.executescript(schema.SCHEMA)
