"""Hostile files: stores, datastores, and folders that are ingested."""

from __future__ import annotations

import io
import os
import random
import shutil
import socket
import warnings
import zipfile
from pathlib import Path

import pytest
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery
from made_files import FILES
from word_embedding import WordEmbedding

from reader_rag.config import ReadLimits
from reader_rag.datastore import Datastore
from reader_rag.errors import DatastoreError, IngestError, StoreError
from reader_rag.rag import FaissStore
from reader_rag.rag.ingest import ingest
from reader_rag.rag.reading.process import ReadingProcess
from reader_rag.rag.reading.text import UnusableFileError

Attack = object


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Data with flipped bytes, zeroed, cut, repeated or filled ranges."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(changed)) if changed else 0
        length = rng.choice((1, 1, 4, 512, 4096))
        match rng.randrange(5):
            case 0 | 1:
                if changed:
                    changed[at] ^= rng.randrange(1, 256)
            case 2:
                changed[at : at + length] = bytes(len(changed[at : at + length]))
            case 3:
                del changed[at:]
            case _:
                changed[at : at + length] = rng.randbytes(len(changed[at : at + length]))
    return bytes(changed)


def test_damaged_stores_raise_store_errors_only(attack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "store"
    with FaissStore(folder) as store:
        for tenant in ("", "ann"):
            nodes = [TextNode(id_=f"n{i}", text=f"{tenant} {i} " * 40, embedding=[1.0, float(i)]) for i in range(30)]
            store.for_tenant(tenant).add(nodes)
    path = folder / "store.sqlite3"
    whole = path.read_bytes()
    with FaissStore.open(folder) as store:
        expected = {tenant: [n.to_dict() for n in store.for_tenant(tenant).get_nodes()] for tenant in ("", "ann")}

    def one(rng: random.Random) -> None:
        path.write_bytes(damaged(whole, rng))
        for tenant in ("", "ann"):
            try:
                with FaissStore.open(folder, tenant=tenant) as store:
                    store.query(VectorStoreQuery([1.0, 0.5], 3))
                    store.documents()
                    store.tenants()
                    found = [node.to_dict() for node in store.get_nodes()]
            except StoreError as error:
                assert str(error).isprintable()
            else:
                assert found == expected[tenant]

    attack(one)


def test_damaged_datastores_bring_nothing_removed_back(attack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = tmp_path / "made"
    with Datastore.open(made, vocabulary=1000, tokenizer="t") as store:
        store.add_many([("a", [1, 2, 3] * 10), ("gone", [900, 901, 902] * 10)])
        store.add_many([("b", [7, 8, 9] * 10)])
        store.add("c", [4, 5, 6] * 3)
        store.add("gone too", [910, 911, 912] * 3)
        store.commit()
        store.remove("gone")
        store.commit()
        store.remove("gone too")
        store.commit()
    files = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file() and path.suffix != ".lock")

    def one(rng: random.Random) -> None:
        folder = tmp_path / "tried"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
        path = folder / rng.choice(files)
        data = bytearray(path.read_bytes())
        if not data:
            return
        if rng.randrange(3):
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        else:  # the end of the file is lost
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for read_only in (True, False):
                try:
                    with Datastore.open(folder, vocabulary=1000, tokenizer="t", read_only=read_only) as store:
                        names = store.documents()
                        assert not {"gone", "gone too"} & set(names)
                        cursor = store.searcher([""]).cursor(max_matches=8, max_tokens=16)
                        for context in ([1, 2], [7, 8], [4, 5], [900, 901], [910, 911]):
                            cursor.extend(context)
                            cursor.search()
                            assert cursor.continuations.max() < 1000
                        store.verify()
                except DatastoreError as error:
                    assert str(error).isprintable()

    attack(one)


NAMES = [
    b"a.txt",
    b"b.md",
    b"caf\xe9.txt",
    b"\xff\xfe.txt",
    b"x\n\x1b[2J.txt",
    b"-rf",
    b"p.html",
    b"d.docx",
    b"q.pdf",
    b"z",
]
PIECES = [
    b"Herons hunt. ",
    b"\0",
    b"\xff",
    b"<script>x</script>",
    b"<p>",
    b"\xed\xa0\x80",
    b"PK\x03\x04",
    b"%PDF-1.4\n",
]


def test_hostile_folders_are_ingested_without_an_end_or_a_wait(attack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    embedding = WordEmbedding(model_name="words", embedded=[])
    secret = tmp_path / "secret.txt"
    secret.write_text("password heron")

    def make(rng: random.Random, folder: bytes, depth: int) -> None:
        os.makedirs(folder, exist_ok=True)
        for _ in range(rng.randrange(1, 6)):
            path = folder + b"/" + rng.choice(NAMES) + str(rng.randrange(4)).encode() * rng.randrange(2)
            if os.path.lexists(path):
                continue
            match rng.randrange(8):
                case 0 if depth:
                    make(rng, path, depth - 1)
                case 1:
                    os.symlink(rng.choice([secret, "/dev/zero", "/etc/passwd", path, "..", "/proc/kmsg", b"."]), path)
                case 2:
                    os.mkfifo(path)
                case 3 if len(path) < 100:
                    with socket.socket(socket.AF_UNIX) as listening:
                        listening.bind(path)
                case _:
                    Path(os.fsdecode(path)).write_bytes(b"".join(rng.choices(PIECES, k=rng.randrange(8))))

    def one(rng: random.Random) -> None:
        root = tmp_path / "t"
        shutil.rmtree(root, ignore_errors=True)
        make(rng, os.fsencode(root), 2)
        try:
            report = ingest(root, tmp_path / "t" / ".store", embed_model=embedding)
        except IngestError as error:
            assert str(error).isprintable()
            return
        assert all(str(skipped).isprintable() for skipped in report.skipped)
        with FaissStore.open(tmp_path / "t" / ".store") as store:
            assert not any("password" in node.get_content() for node in store.get_nodes())

    attack(one)


def test_hostile_pages_and_archives_are_bounded(attack) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("docx", reason="needs the extra 'files'")
    tags = [
        b"<div>",
        b"</a>",
        b"<script>",
        b"</script>",
        b"<!--",
        b"-->",
        b"<![CDATA[",
        b"&#x110000;",
        b"<pre",
        b">",
        b"\n",
        b"text ",
    ]
    with ReadingProcess(ReadLimits(read_seconds=20, memory_bytes=256 << 20)) as reading:

        def one(rng: random.Random) -> None:
            if rng.randrange(4):
                data, suffix = (
                    b"".join(rng.choices(tags, k=rng.choice((3, 30, 3000)))),
                    rng.choice((".html", ".xhtml", ".pdf")),
                )
            else:
                buffer = io.BytesIO()
                with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
                    for number in range(rng.randrange(1, 4)):
                        file.writestr(f"word/document{number}.xml", bytes(rng.choice((10, 1 << 20, 30 << 20))))
                data, suffix = damaged(buffer.getvalue(), rng), rng.choice((".docx", ".xlsx", ".epub", ".pptx"))
            try:
                pages = reading.read(data, suffix)
            except UnusableFileError as error:
                assert len(str(error)) < 2000
            else:
                assert all(page.text.encode() is not None for page in pages)

        attack(one)


def test_damaged_files_of_every_format_are_read_or_refused_with_a_reason(attack) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("docx", reason="needs the extra 'files'")
    whole = [(Path(file.name).suffix, file.make()) for file in FILES if file.name != "birds.txt"]
    with ReadingProcess(ReadLimits(read_seconds=20, memory_bytes=256 << 20)) as reading:

        def one(rng: random.Random) -> None:
            suffix, data = rng.choice(whole)
            try:
                sections = reading.read(damaged(data, rng), suffix)
            except UnusableFileError as error:
                assert str(error).isprintable()
                assert len(str(error)) < 300
            else:
                for section in sections:
                    assert len(section.line_labels) in (0, section.text.count("\n") + 1)
                    section.text.encode()

        attack(one)
