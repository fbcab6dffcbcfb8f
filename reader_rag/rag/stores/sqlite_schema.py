"""The tables of a store file, its checksums, and the migration from earlier formats."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import zlib
from functools import cache
from typing import Any

APPLICATION_ID = 0x52526167  # "RRag"; distinguishes a store from other SQLite databases
FORMAT_VERSION = 3

_META = "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
# Since format 2. `vector` is float32, little endian, of length 1; `crc` is of all other columns but `id`, and in
# format 2 of `node` and `vector` only.
_NODES = (
    """CREATE TABLE nodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice, also after a delete
    tenant TEXT NOT NULL,
    node_id TEXT NOT NULL,
    ref_doc_id TEXT,
    node_type TEXT NOT NULL,
    node TEXT NOT NULL,
    vector BLOB NOT NULL,
    crc INTEGER NOT NULL,
    UNIQUE (tenant, node_id)
)""",
    "CREATE INDEX nodes_by_tenant ON nodes (tenant)",
)
# `version` is a new random value after each change of the tenant's rows, `nodes` their number in the table `nodes`.
_TENANTS_AND_DOCUMENTS = (
    """CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY,
    version TEXT NOT NULL,
    nodes INTEGER NOT NULL,
    crc INTEGER NOT NULL
) WITHOUT ROWID""",
    """CREATE TABLE documents (
    tenant TEXT NOT NULL,
    path TEXT NOT NULL,
    root TEXT NOT NULL,
    hash TEXT NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (tenant, path)
) WITHOUT ROWID""",
)
_TABLES = (*_TENANTS_AND_DOCUMENTS, *_NODES)
# Format 2 had no checksums of tenants and documents.
_TABLES_2 = (
    "CREATE TABLE tenants (tenant TEXT PRIMARY KEY, version TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE documents (
    tenant TEXT NOT NULL,
    path TEXT NOT NULL,
    root TEXT NOT NULL,
    hash TEXT NOT NULL,
    PRIMARY KEY (tenant, path)
) WITHOUT ROWID""",
    *_NODES,
)
_TABLES_1 = (
    "CREATE TABLE documents (path TEXT PRIMARY KEY, root TEXT NOT NULL, hash TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE nodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    node_id TEXT NOT NULL UNIQUE,
    ref_doc_id TEXT,
    node_type TEXT NOT NULL,
    node TEXT NOT NULL,
    vector BLOB NOT NULL,
    crc INTEGER NOT NULL
)""",
    "CREATE INDEX nodes_by_document ON nodes (ref_doc_id)",
)
SCHEMA = ";\n".join((_META, *_TABLES, f"PRAGMA application_id = {APPLICATION_ID}", "PRAGMA user_version = 3")) + ";"

# Format 1 had no tenants: its rows become those of tenant "".
_FROM_FORMAT_1 = (
    "ALTER TABLE documents RENAME TO documents_1",
    "ALTER TABLE nodes RENAME TO nodes_1",
    *_TABLES_2,
    "INSERT INTO tenants VALUES ('', lower(hex(randomblob(16))))",
    "INSERT INTO documents SELECT '', path, root, hash FROM documents_1",
    """INSERT INTO nodes
    SELECT id, '', node_id, ref_doc_id, node_type, node, vector, crc FROM nodes_1 ORDER BY id""",
    # Ids continue after the highest one ever used, also where the last nodes were deleted.
    "DELETE FROM sqlite_sequence WHERE name = 'nodes'",
    "UPDATE sqlite_sequence SET name = 'nodes' WHERE name = 'nodes_1'",
    "DROP TABLE documents_1",
    "DROP TABLE nodes_1",
)
_FROM_FORMAT_2 = (
    *(f"ALTER TABLE {table} RENAME TO {table}_2" for table in ("tenants", "documents")),
    *_TENANTS_AND_DOCUMENTS,
    """INSERT INTO tenants SELECT tenant, version, nodes, checksum(tenant, version, nodes) FROM
    (SELECT tenant, version, (SELECT COUNT(*) FROM nodes WHERE nodes.tenant = tenants_2.tenant) AS nodes
    FROM tenants_2)""",
    "INSERT INTO documents SELECT tenant, path, root, hash, checksum(tenant, path, root, hash) FROM documents_2",
    "UPDATE nodes SET crc = checksum(tenant, node_id, ref_doc_id, node_type, node, vector)",
    *(f"DROP TABLE {table}_2" for table in ("tenants", "documents")),
    "PRAGMA user_version = 3",
)
_SPACE = re.compile(r"--[^\n]*\n|\s+|[\"`]")


def checksum(*values: Any) -> int:
    """Checksum of the values of a row.

    Args:
        values: What SQLite stores: None, numbers, text or bytes.
    """
    crc = 0
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        crc = zlib.crc32(b"%s %d " % (type(value).__name__.encode(), len(data)) + data, crc)
    return crc


def old_checksum(node: str, vector: bytes) -> int:
    """Checksum of a node in format 1 and 2."""
    return zlib.crc32(vector, zlib.crc32(node.encode()))


def difference(database: sqlite3.Connection, version: int) -> str:
    """How the tables, indexes, views and triggers of a file differ from those of its format; empty if they do not.

    Args:
        database: The open file.
        version: Its format.
    """
    found, expected = schema_entries(database), _expected(version)
    wrong = sorted({name for name, _ in found ^ expected}, key=str)
    return f"{str(wrong[0])[:40]!r}" if wrong else ""


def migrate(database: sqlite3.Connection, version: int) -> bool:
    """Bring a file to the current format, inside a transaction of the caller's.

    Args:
        database: The open file.
        version: Its format.

    Returns:
        False if a node is damaged.
    """
    rows = database.execute("SELECT node, vector, crc FROM nodes")
    for node, vector, crc in rows:
        if not isinstance(node, str) or not isinstance(vector, bytes) or crc != old_checksum(node, vector):
            return False
    database.create_function("checksum", -1, checksum, deterministic=True)
    for statement in (_FROM_FORMAT_1 if version == 1 else ()) + _FROM_FORMAT_2:
        database.execute(statement)
    return True


def schema_entries(database: sqlite3.Connection) -> set[tuple[Any, Any]]:
    """What the schema of a file has, by name; the automatic indexes and tables of SQLite are left out.

    Args:
        database: The open file.
    """
    query = "SELECT name, type, tbl_name, sql FROM sqlite_master"
    rows = database.execute(query).fetchall()
    return {
        (name, (kind, table, _SPACE.sub("", sql or "")))
        for name, kind, table, sql in rows
        if not str(name).startswith("sqlite_") or kind not in ("index", "table")
    }


@cache
def _expected(version: int) -> frozenset[tuple[Any, Any]]:
    tables = {1: _TABLES_1, 2: _TABLES_2, 3: _TABLES}[version]
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(";\n".join((_META, *tables)) + ";")
        return frozenset(schema_entries(database))
