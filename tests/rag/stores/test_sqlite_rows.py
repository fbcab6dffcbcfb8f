"""Rows of a store file that were changed by others are detected."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from llama_index.core.vector_stores.types import VectorStoreQuery

from reader_rag.errors import (
    StoreCorruptError,
    StoreError,
)
from reader_rag.rag import FaissStore
from reader_rag.rag.stores.records import DocumentRecord
from reader_rag.rag.stores.sqlite_file import FILE_NAME

CHANGES = [
    "UPDATE nodes SET tenant = 'other' WHERE node_id = 'n3'",
    "UPDATE nodes SET node_id = 'm3' WHERE node_id = 'n3'",
    "UPDATE nodes SET ref_doc_id = 'other' WHERE node_id = 'n3'",
    "UPDATE nodes SET node_type = 'Other' WHERE node_id = 'n3'",
    "UPDATE nodes SET node = 'null' WHERE node_id = 'n3'",
    "UPDATE nodes SET node = 5 WHERE node_id = 'n3'",
    "UPDATE nodes SET vector = 'text' WHERE node_id = 'n3'",
    "UPDATE nodes SET vector = 5 WHERE node_id = 'n3'",
    "UPDATE nodes SET vector = x'00' WHERE node_id = 'n3'",
    "UPDATE nodes SET crc = 'x' WHERE node_id = 'n3'",
    "DELETE FROM nodes WHERE node_id = 'n3'",
    "UPDATE documents SET hash = 'x'",
    "UPDATE documents SET root = '/'",
    "UPDATE documents SET path = path || 'x'",
    "UPDATE documents SET tenant = 'other'; UPDATE documents SET tenant = ''",
    "UPDATE documents SET hash = x'ff'",
    "UPDATE meta SET value = '3' WHERE key = 'dimension'",
    "UPDATE meta SET value = 'x' WHERE key = 'dimension'",
    "UPDATE meta SET value = x'ff' WHERE key = 'dimension'",
    "UPDATE meta SET key = 'dimensions' WHERE key = 'dimension'",
    "DELETE FROM meta WHERE key = 'dimension'",
    "DELETE FROM meta",
    "UPDATE tenants SET version = 'x'",
    "UPDATE tenants SET nodes = 3",
    "UPDATE tenants SET nodes = 'x'",
    "DELETE FROM tenants",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_row_is_detected(folder: Path, change: str) -> None:
    with FaissStore(folder) as store:
        store._file._database.execute("BEGIN")
        store._file.rows.put_documents("", [DocumentRecord("d", "root", "hash")])
        store._file._database.execute("COMMIT")
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.executescript(change)
    unchanged = change.startswith("UPDATE documents SET tenant")
    try:
        with FaissStore.open(folder) as store:
            store.query(VectorStoreQuery([1.0, 0.0], 10))
            store.get_nodes()
            store.documents()
        found = False
    except StoreError:
        found = True
    assert found != unchanged


@pytest.mark.parametrize("column", ["vector", "node"])
def test_a_flipped_byte_in_a_node_is_detected(folder: Path, column: str) -> None:
    with sqlite3.connect(folder / FILE_NAME) as database:
        old = database.execute(f"SELECT {column} FROM nodes WHERE node_id = 'n7'").fetchone()[0]
        new = old.replace("word", "ward", 1) if isinstance(old, str) else bytes([old[0] ^ 1]) + old[1:]
        database.execute(f"UPDATE nodes SET {column} = ? WHERE node_id = 'n7'", (new,))
    with pytest.raises(StoreCorruptError, match="node n7 is damaged"):
        FaissStore.open(folder)


def test_flipped_bytes_raise_store_errors_only(folder: Path) -> None:
    path = folder / FILE_NAME
    whole = path.read_bytes()
    with FaissStore.open(folder) as store:
        expected = [node.to_dict() for node in store.get_nodes()]
    random = np.random.default_rng(7)
    found = 0
    for at in random.integers(0, len(whole), 150):
        damaged = bytearray(whole)
        damaged[at] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        try:
            with FaissStore.open(folder) as store:
                store.query(VectorStoreQuery([1.0, 0.0], 3))
                nodes = [node.to_dict() for node in store.get_nodes()]
                store.documents()
                store.tenants()
            assert nodes == expected
        except StoreError:
            found += 1
    assert found > 30
