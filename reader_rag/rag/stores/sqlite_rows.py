"""The rows of a `FaissStore`'s file: tenants, documents, nodes, and the identity of the embedding model.

Every row of documents and nodes belongs to a tenant, and every statement on them names the tenant, so no call reads or
changes another tenant's rows. Each row has a checksum, and is compared with it when it is read.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reader_rag.errors import StoreCorruptError
from reader_rag.rag.stores import sqlite_schema as schema
from reader_rag.rag.stores.records import DocumentRecord, TenantSize

_META_CRC = "checksum"


@dataclass(frozen=True)
class NodeRow:
    """A row of the table `nodes`.

    Attributes:
        node_id: Id of the node.
        ref_doc_id: Id of the node's document; None if it has none.
        node_type: LlamaIndex's name of the node's class.
        node: The node as JSON.
        vector: float32 [dimension], of length 1.
        id: Primary key; 0 before the row is written.
    """

    node_id: str
    ref_doc_id: str | None
    node_type: str
    node: str
    vector: NDArray[np.float32]
    id: int = 0

    def crc(self, tenant: str) -> int:
        """Checksum of the row, in which the tenant is a column."""
        return schema.checksum(tenant, self.node_id, self.ref_doc_id, self.node_type, self.node, self.blob)

    @property
    def blob(self) -> bytes:
        """The vector as stored: float32, little endian."""
        return self.vector.astype("<f4").tobytes()


class StoreRows:
    """The rows of an open file. Call it inside `StoreFile.reading` or `StoreFile.writing`.

    Args:
        database: The connection.
        damaged: Makes the error for what is damaged, from a few words that name it.
    """

    def __init__(self, database: sqlite3.Connection, damaged: Callable[[str], StoreCorruptError]) -> None:
        self._database, self._damaged = database, damaged

    def meta(self) -> dict[str, str]:
        """The identity of the embedding model that made the store; empty before the first vector is stored.

        Raises:
            StoreCorruptError: It is damaged.
        """
        facts: dict[str, str] = dict(self._database.execute("SELECT key, value FROM meta"))
        crc = facts.pop(_META_CRC, None)
        if (facts or crc is not None) and crc != _crc_of(facts):
            raise self._damaged("its identity")
        return facts

    def set_meta(self, facts: dict[str, str]) -> None:
        """Replace the identity of the embedding model.

        Args:
            facts: Keys and values, from `identity.identity_of`.
        """
        self._database.execute("DELETE FROM meta")
        if facts:
            rows = facts | {_META_CRC: _crc_of(facts)}
            self._database.executemany("INSERT INTO meta VALUES (?, ?)", rows.items())

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
        """The version of a tenant's rows, different after each change; None if the tenant never had rows.

        Raises:
            StoreCorruptError: The tenant's record is damaged, or is missing although there are nodes.
        """
        row = self._tenant_row(tenant)
        if row is not None:
            return str(row[0])
        query = "SELECT EXISTS (SELECT 1 FROM nodes WHERE tenant = ?)"
        if self._database.execute(query, (tenant,)).fetchone()[0]:
            raise self._damaged("a tenant's record")
        return None

    def _tenant_row(self, tenant: str) -> tuple[str, int] | None:
        """Version and number of nodes of a tenant."""
        query = "SELECT version, nodes, crc FROM tenants WHERE tenant = ?"
        row = self._database.execute(query, (tenant,)).fetchone()
        if row is None:
            return None
        version, nodes, crc = row
        if crc != schema.checksum(tenant, version, nodes):
            raise self._damaged("a tenant's record")
        return version, nodes

    def new_version(self, tenant: str) -> str:
        """Give a tenant's rows a new version after a change, and return it."""
        version = uuid.uuid4().hex
        (nodes,) = self._database.execute("SELECT COUNT(*) FROM nodes WHERE tenant = ?", (tenant,)).fetchone()
        row = (tenant, version, nodes, schema.checksum(tenant, version, nodes))
        self._database.execute("INSERT OR REPLACE INTO tenants VALUES (?, ?, ?, ?)", row)
        return version

    def drop_tenant(self, tenant: str) -> None:
        """Remove all rows of a tenant, its name included."""
        for table in ("nodes", "documents", "tenants"):
            self._database.execute(f"DELETE FROM {table} WHERE tenant = ?", (tenant,))

    def documents(self, tenant: str) -> list[DocumentRecord]:
        """A tenant's ingested files in path order.

        Raises:
            StoreCorruptError: A record is damaged.
        """
        records = []
        query = "SELECT path, root, hash, crc FROM documents WHERE tenant = ? ORDER BY path"
        for *fields, crc in self._database.execute(query, (tenant,)):
            if crc != schema.checksum(tenant, *fields):
                raise self._damaged("a document's record")
            records.append(DocumentRecord(*fields))
        return records

    def put_documents(self, tenant: str, records: Iterable[DocumentRecord]) -> None:
        """Add a tenant's records; those of the same path are replaced."""
        rows = ((tenant, r.path, r.root, r.hash, schema.checksum(tenant, r.path, r.root, r.hash)) for r in records)
        self._database.executemany("INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?)", rows)

    def drop_documents(self, tenant: str, paths: Iterable[str]) -> None:
        """Remove a tenant's records; unknown paths are ignored."""
        rows = ((tenant, path) for path in paths)
        self._database.executemany("DELETE FROM documents WHERE tenant = ? AND path = ?", rows)

    def nodes(self, tenant: str) -> Iterator[NodeRow]:
        """A tenant's nodes in id order, each verified by its checksum.

        Raises:
            StoreCorruptError: A node or its vector is damaged.
        """
        rows = self._database.execute(
            "SELECT id, node_id, ref_doc_id, node_type, node, vector, crc FROM nodes WHERE tenant = ? ORDER BY id",
            (tenant,),
        )
        count = 0
        for id_, node_id, ref_doc_id, node_type, node, blob, crc in rows:
            expected = schema.checksum(tenant, node_id, ref_doc_id, node_type, node, blob)
            if crc != expected or not isinstance(blob, bytes):
                raise self._damaged(f"node {node_id}")
            count += 1
            yield NodeRow(node_id, ref_doc_id, node_type, node, np.frombuffer(blob, dtype="<f4"), id_)
        recorded = self._tenant_row(tenant)
        if count != (0 if recorded is None else recorded[1]):
            raise self._damaged("the list of a tenant's nodes")

    def node_texts(self, tenant: str, ids: Sequence[int]) -> list[tuple[str, str]]:
        """(node type, node JSON) of each of a tenant's ids, in the order given."""
        query = "SELECT node_id, ref_doc_id, node_type, node, vector, crc FROM nodes WHERE id = ? AND tenant = ?"
        texts = []
        for id_ in ids:
            row = self._database.execute(query, (id_, tenant)).fetchone()
            if row is None or row[-1] != schema.checksum(tenant, *row[:-1]):
                raise self._damaged("a node")
            texts.append((row[2], row[3]))
        return texts

    def insert_node(self, tenant: str, row: NodeRow) -> int:
        """Insert a tenant's node and return its id, larger than any id before."""
        cursor = self._database.execute(
            "INSERT INTO nodes (tenant, node_id, ref_doc_id, node_type, node, vector, crc)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (tenant, row.node_id, row.ref_doc_id, row.node_type, row.node, row.blob, row.crc(tenant)),
        )
        return int(cursor.lastrowid or 0)

    def delete_nodes(self, tenant: str, ids: Iterable[int]) -> None:
        """Remove nodes of a tenant; their ids are not used again."""
        rows = ((id_, tenant) for id_ in ids)
        self._database.executemany("DELETE FROM nodes WHERE id = ? AND tenant = ?", rows)


def _crc_of(facts: dict[str, str]) -> str:
    """Checksum of the identity of an embedding model."""
    return str(schema.checksum(*(part for fact in sorted(facts.items()) for part in fact)))
