"""The store's one file: SQLite, so that vectors and documents change together or not at all.

Every document and node is a tenant's, and every statement on them names the tenant: what is asked or changed on behalf
of one never meets the rows of another. A killed process or a full disk leaves the last commit: SQLite's rollback
journal undoes what was half written when the file is opened next. Everything here raises
`reader_rag.errors.StoreError`s, never `sqlite3.Error`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reader_rag.errors import (
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    StoreMismatchError,
    StoreNotFoundError,
    StoreWriteError,
)

FILE_NAME = "store.sqlite3"
APPLICATION_ID = 0x52526167  # "RRag"; tells our file from any other SQLite database
FORMAT_VERSION = 2

_BUSY_TIMEOUT_S = 5.0
_NOT_A_DATABASE = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}

_META = "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
_TABLES = (
    # `version` is another one after each change of the tenant's rows, and never one that was there before.
    "CREATE TABLE tenants (tenant TEXT PRIMARY KEY, version TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE documents (
    tenant TEXT NOT NULL,
    path TEXT NOT NULL,
    root TEXT NOT NULL,
    hash TEXT NOT NULL,
    PRIMARY KEY (tenant, path)
) WITHOUT ROWID""",
    """CREATE TABLE nodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice, also after a delete
    tenant TEXT NOT NULL,
    node_id TEXT NOT NULL,
    ref_doc_id TEXT,
    node_type TEXT NOT NULL,
    node TEXT NOT NULL,
    vector BLOB NOT NULL,                  -- float32, little endian, length 1
    crc INTEGER NOT NULL,                  -- of node and vector
    UNIQUE (tenant, node_id)
)""",
    "CREATE INDEX nodes_by_tenant ON nodes (tenant)",
)
_VERSION = f"PRAGMA user_version = {FORMAT_VERSION}"
_SCHEMA = ";\n".join((_META, *_TABLES, f"PRAGMA application_id = {APPLICATION_ID}", _VERSION)) + ";"

# Format 1 knew no tenants: all it holds becomes that of tenant "".
_FROM_FORMAT_1 = (
    "ALTER TABLE documents RENAME TO documents_1",
    "ALTER TABLE nodes RENAME TO nodes_1",
    *_TABLES,
    "INSERT INTO tenants VALUES ('', lower(hex(randomblob(16))))",
    "INSERT INTO documents SELECT '', path, root, hash FROM documents_1",
    """INSERT INTO nodes
    SELECT id, '', node_id, ref_doc_id, node_type, node, vector, crc FROM nodes_1 ORDER BY id""",
    # Ids go on where they were, also where the last nodes were deleted.
    "DELETE FROM sqlite_sequence WHERE name = 'nodes'",
    "UPDATE sqlite_sequence SET name = 'nodes' WHERE name = 'nodes_1'",
    "DROP TABLE documents_1",
    "DROP TABLE nodes_1",
    _VERSION,
)


@dataclass(frozen=True)
class DocumentRecord:
    """A file that was ingested.

    Attributes:
        path: Absolute path; also the `ref_doc_id` of the file's nodes.
        root: What the user named when the file was ingested: a folder above it, or the file itself.
        hash: Of the content and the settings it was split with; equal hashes give equal nodes.
    """

    path: str
    root: str
    hash: str


@dataclass(frozen=True)
class TenantSize:
    """How much a store holds of one tenant.

    Attributes:
        tenant: Its name.
        documents: Number of ingested files.
        nodes: Number of nodes.
    """

    tenant: str
    documents: int
    nodes: int


@dataclass(frozen=True)
class NodeRow:
    """A node as it is stored; `id` is 0 until it has been written."""

    node_id: str
    ref_doc_id: str | None
    node_type: str
    node: str
    vector: NDArray[np.float32]
    id: int = 0

    @property
    def crc(self) -> int:
        """Checksum over the node's JSON and its vector."""
        return zlib.crc32(self.blob, zlib.crc32(self.node.encode()))

    @property
    def blob(self) -> bytes:
        """The vector as stored: float32, little endian."""
        return self.vector.astype("<f4").tobytes()


class StoreFile:
    """One open store file (or a store in memory). Not thread safe by itself: the vector store holds a lock."""

    def __init__(self, database: sqlite3.Connection, path: Path | None) -> None:
        self._database = database
        self.path = path
        with self._errors_as_ours(writing=False):
            # EXTRA also syncs the folder, so that a commit survives a power cut right after it.
            database.execute("PRAGMA synchronous = EXTRA")

    @classmethod
    def in_memory(cls) -> StoreFile:
        """A store that ends with the process."""
        database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        database.executescript(_SCHEMA)
        return cls(database, None)

    @classmethod
    def open(cls, folder: Path) -> StoreFile:
        """Open the store in `folder` and check that its file is ours and whole; one of format 1 is brought to this one.

        Raises:
            StoreNotFoundError: There is none.
            StoreCorruptError: The file is damaged, truncated, or not a store.
            StoreMismatchError: The file was made by another version of the format.
            StoreBusyError: Another process is writing and does not finish in time.
            StoreWriteError: The file is of format 1 and cannot be written; it stays as it was.
        """
        path = folder / FILE_NAME
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise StoreError(f"{path} cannot be opened ({error.strerror}); check its permissions") from error
        if size is None:
            raise StoreNotFoundError(
                f"there is no store in {folder}; make one with `reader-rag ingest PATH --store DIR`"
            )
        if size == 0:
            raise StoreCorruptError(f"{path} is empty (0 bytes), not a store; {_REMEDY}")
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
        """Open the store in `folder`, or make an empty one there; no one ever sees it half made.

        Raises:
            StoreWriteError: The folder or the file cannot be written.
            StoreError: As `open`.
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
        """All reads inside see one commit, whatever other processes do meanwhile."""
        with self._errors_as_ours(writing=False):
            self._database.execute("BEGIN")
            try:
                yield
            finally:
                self._rollback()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """All changes inside are committed together at the end, or, when anything raises, none is.

        Raises:
            StoreBusyError: Another process is writing and does not finish in time.
            StoreWriteError: Disk full, read-only, or an input/output error; what was stored is intact.
        """
        with self._errors_as_ours(writing=True):
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
        # SQLite has already rolled back after some errors; where even this fails (a dying disk), the journal stays
        # and is played back when the file is opened next, so the error that led here is the one to report.
        if self._database.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")

    def commits_by_others(self) -> int:
        """A number that changes when another connection has committed; ask it inside `reading` or `writing`."""
        return int(self._database.execute("PRAGMA data_version").fetchone()[0])

    def meta(self) -> dict[str, str]:
        """Facts about the store, e.g. which embedding model made it."""
        return dict(self._database.execute("SELECT key, value FROM meta"))

    def set_meta(self, facts: dict[str, str]) -> None:
        """Replace all facts."""
        self._database.execute("DELETE FROM meta")
        self._database.executemany("INSERT INTO meta VALUES (?, ?)", facts.items())

    def is_empty(self) -> bool:
        """Whether there is neither a document nor a node of any tenant."""
        query = "SELECT EXISTS (SELECT 1 FROM documents) OR EXISTS (SELECT 1 FROM nodes)"
        return not self._database.execute(query).fetchone()[0]

    def tenants(self) -> list[TenantSize]:
        """The tenants that have documents or nodes, by name."""
        rows = self._database.execute(
            "SELECT tenant, (SELECT COUNT(*) FROM documents WHERE documents.tenant = tenants.tenant),"
            " (SELECT COUNT(*) FROM nodes WHERE nodes.tenant = tenants.tenant) FROM"
            " (SELECT tenant FROM documents UNION SELECT tenant FROM nodes) AS tenants ORDER BY tenant"
        )
        return [TenantSize(*row) for row in rows]

    def version(self, tenant: str) -> str | None:
        """What is another one after each change of a tenant's rows; None if there never was any."""
        row = self._database.execute("SELECT version FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
        return None if row is None else str(row[0])

    def changed(self, tenant: str) -> str:
        """Note that a tenant's rows are others now, and return their version."""
        version = uuid.uuid4().hex
        self._database.execute("INSERT OR REPLACE INTO tenants VALUES (?, ?)", (tenant, version))
        return version

    def drop_tenant(self, tenant: str) -> None:
        """Remove everything of a tenant, its name included."""
        for table in ("nodes", "documents", "tenants"):
            self._database.execute(f"DELETE FROM {table} WHERE tenant = ?", (tenant,))

    def documents(self, tenant: str) -> list[DocumentRecord]:
        """A tenant's ingested files in path order."""
        query = "SELECT path, root, hash FROM documents WHERE tenant = ? ORDER BY path"
        return [DocumentRecord(*row) for row in self._database.execute(query, (tenant,))]

    def put_documents(self, tenant: str, records: Iterable[DocumentRecord]) -> None:
        """Add a tenant's records, replacing its own of the same path."""
        rows = ((tenant, r.path, r.root, r.hash) for r in records)
        self._database.executemany("INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?)", rows)

    def drop_documents(self, tenant: str, paths: Iterable[str]) -> None:
        """Remove a tenant's records; unknown paths are ignored."""
        rows = ((tenant, path) for path in paths)
        self._database.executemany("DELETE FROM documents WHERE tenant = ? AND path = ?", rows)

    def nodes(self, tenant: str) -> Iterator[NodeRow]:
        """A tenant's nodes in id order, each checked against its checksum.

        Raises:
            StoreCorruptError: A node or its vector was damaged.
        """
        rows = self._database.execute(
            "SELECT id, node_id, ref_doc_id, node_type, node, vector, crc FROM nodes WHERE tenant = ? ORDER BY id",
            (tenant,),
        )
        for id_, node_id, ref_doc_id, node_type, node, blob, crc in rows:
            row = NodeRow(node_id, ref_doc_id, node_type, node, np.frombuffer(blob, dtype="<f4"), id_)
            if row.crc != crc:
                raise StoreCorruptError(f"{self.path}: node {node_id} is damaged; {_REMEDY}")
            yield row

    def node_texts(self, tenant: str, ids: Sequence[int]) -> list[tuple[str, str]]:
        """(node type, node JSON) of each of a tenant's ids, in the order given."""
        query = "SELECT node_type, node FROM nodes WHERE id = ? AND tenant = ?"
        return [self._database.execute(query, (id_, tenant)).fetchone() for id_ in ids]

    def insert_node(self, tenant: str, row: NodeRow) -> int:
        """Write a tenant's node and return its id, larger than any id before."""
        cursor = self._database.execute(
            "INSERT INTO nodes (tenant, node_id, ref_doc_id, node_type, node, vector, crc)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (tenant, row.node_id, row.ref_doc_id, row.node_type, row.node, row.blob, row.crc),
        )
        return int(cursor.lastrowid or 0)

    def delete_nodes(self, tenant: str, ids: Iterable[int]) -> None:
        """Remove nodes of a tenant; their ids are not given out again."""
        rows = ((id_, tenant) for id_ in ids)
        self._database.executemany("DELETE FROM nodes WHERE id = ? AND tenant = ?", rows)

    def copy_to(self, folder: Path) -> None:
        """Write a copy of the store as committed into another folder, replacing a store that is there.

        Raises:
            StoreCorruptError: The file in that folder is not a store of ours.
            StoreWriteError: The copy cannot be written; what was there is intact.
        """
        target = folder / FILE_NAME
        if target.exists():
            StoreFile.open(folder).close()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _temporary(folder) as copy:
                with contextlib.closing(sqlite3.connect(copy)) as database:
                    self._database.backup(database)
                copy.replace(target)
        except (OSError, sqlite3.Error) as error:
            raise StoreWriteError(f"the store cannot be copied to {folder} ({error})") from error

    def _verified_format(self) -> int:
        """The file's format, 1 or this one, after checking that the file is ours and whole."""
        with self.reading():
            # The first read undoes a commit that was interrupted, so it comes before any judgement.
            application_id = self._pragma("application_id")
            version = int(self._pragma("user_version"))
            if application_id != APPLICATION_ID:
                raise StoreCorruptError(f"{self.path} is an SQLite database of another program; {_REMEDY}")
            if not 1 <= version <= FORMAT_VERSION:
                raise StoreMismatchError(
                    f"{self.path} has format version {version}, this program reads 1 to {FORMAT_VERSION}: "
                    "use the version that made it, or ingest into a new folder"
                )
            result = self._pragma("quick_check")
            if result != "ok":
                raise StoreCorruptError(f"{self.path} is damaged ({str(result).splitlines()[-1]}); {_REMEDY}")
            return version

    def _migrate(self) -> None:
        """Bring a file of format 1 to this one, all in one commit."""
        with self.writing():
            if int(self._pragma("user_version")) == 1:  # else another process was quicker
                for statement in _FROM_FORMAT_1:
                    self._database.execute(statement)

    def _pragma(self, name: str) -> int | str:
        value: int | str = self._database.execute(f"PRAGMA {name}").fetchone()[0]
        return value

    @contextlib.contextmanager
    def _errors_as_ours(self, *, writing: bool) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise StoreError(f"the store {self.path or 'in memory'} is closed; open it again") from error
        except sqlite3.Error as error:
            raise self._as_ours(error, writing) from error

    def _as_ours(self, error: sqlite3.Error, writing: bool) -> StoreError:
        # The low byte is the kind of error, the rest its details.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _BUSY:
            return StoreBusyError(f"another process is writing to {self.path}; try again when it has finished")
        if code in _NOT_A_DATABASE:
            return StoreCorruptError(f"{self.path} is truncated, damaged or not a store ({error}); {_REMEDY}")
        if writing:
            return StoreWriteError(
                f"{self.path or 'the store'} could not be written ({error}); "
                "what was stored before is intact: make room or check permissions, then run the command again"
            )
        return StoreError(f"{self.path or 'the store'} could not be read ({error}); check the disk and permissions")


_REMEDY = "restore it from a backup, or delete it and ingest your documents again"


def _publish_empty(folder: Path) -> None:
    """Put an empty store at its place in one step, keeping one that another process was quicker to make."""
    with _temporary(folder) as made:
        with contextlib.closing(sqlite3.connect(made, isolation_level=None)) as database:
            database.executescript(_SCHEMA)
        target = folder / FILE_NAME
        try:
            os.link(made, target)
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            if not target.exists():
                made.replace(target)


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    path = folder / f".store-{uuid.uuid4().hex}.tmp"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
