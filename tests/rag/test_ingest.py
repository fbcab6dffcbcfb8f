"""Ingestion: what is added, updated, removed and reported, for each tenant, also after failures."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.schema import MetadataMode, TextNode
from waiting import join
from word_embedding import WordEmbedding

from reader_rag.config import ReadLimits
from reader_rag.errors import (
    ConfigError,
    IngestError,
    ReaderWarning,
    StoreBusyError,
    StoreMismatchError,
    StoreWriteError,
)
from reader_rag.rag import FaissStore, IngestReport, LocalEmbedding, SizedEmbedding, make_retriever
from reader_rag.rag.files import content_hash
from reader_rag.rag.files import find_files as really_find_files
from reader_rag.rag.ingest import ingest
from reader_rag.rag.stores.records import TenantSize

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return tmp_path / "docs"


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def run(store_dir: Path, embedding: SizedEmbedding) -> Callable[..., IngestReport]:
    """Ingests paths into the test's store."""

    def run(*paths: Path, **options: Any) -> IngestReport:
        return ingest(paths, store_dir, **({"embed_model": embedding} | options))

    return run


def contents(store_dir: Path, tenant: str = "") -> dict[str, str]:
    """File name -> text of its chunks, in order."""
    texts: dict[str, list[str]] = {}
    with FaissStore.open(store_dir, tenant=tenant) as store:
        for node in store.get_nodes():
            texts.setdefault(node.metadata["file_name"], []).append(node.get_content())
    return {name: " | ".join(parts) for name, parts in sorted(texts.items())}


def names(paths: tuple[Path, ...]) -> list[str]:
    return [path.name for path in paths]


def test_files_become_searchable_nodes(run: Any, write: Write, docs: Path, store_dir: Path) -> None:
    write("cats.txt", "Cats purr when they are content.")
    path = write("sub/dogs.md", "\n\nDogs bark.\n")
    report = run(docs)
    assert names(report.added) == ["cats.txt", "dogs.md"]
    assert (report.chunks, report.total_chunks, report.ok) == (2, 2, True)
    with FaissStore.open(store_dir) as store:
        (dogs,) = [node for node in store.get_nodes() if node.ref_doc_id == str(path)]
    assert isinstance(dogs, TextNode)
    assert dogs.metadata == {"file_path": str(path), "file_name": "dogs.md"}
    assert (dogs.start_char_idx, dogs.end_char_idx) == (2, 12)
    assert dogs.get_content(metadata_mode=MetadataMode.LLM) == "Dogs bark."


def test_a_changed_file_replaces_its_chunks_and_an_unchanged_one_is_not_embedded_again(
    run: Any, write: Write, docs: Path, store_dir: Path, embedding: Any
) -> None:
    write("a.txt", "first version")
    write("b.txt", "always the same")
    run(docs)
    write("a.txt", "second version")
    embedding.embedded.clear()
    report = run(docs)
    assert (names(report.updated), names(report.unchanged), report.added) == (["a.txt"], ["b.txt"], ())
    assert "second version" in embedding.embedded
    assert "always the same" not in embedding.embedded
    assert contents(store_dir) == {"a.txt": "second version", "b.txt": "always the same"}


def test_a_text_that_files_share_is_embedded_once(run: Any, write: Write, docs: Path, embedding: Any) -> None:
    write("a.txt", "twice the same")
    write("b.txt", "twice the same")
    assert run(docs).total_chunks == 2
    assert embedding.embedded.count("twice the same") == 1


def test_other_chunk_settings_split_and_embed_again(run: Any, write: Write, docs: Path) -> None:
    write("a.txt", "one two three four five. " * 10)
    run(docs)
    report = run(docs, chunk_tokens=20, chunk_overlap=0)
    assert names(report.updated) == ["a.txt"]
    assert report.total_chunks == report.chunks > 2


def test_a_file_gone_from_its_root_is_removed_and_other_roots_stay(
    run: Any, write: Write, docs: Path, store_dir: Path
) -> None:
    write("a/1.txt", "one")
    gone = write("a/2.txt", "two")
    write("b/3.txt", "three")
    run(docs / "a")
    run(docs / "b")
    gone.unlink()
    report = run(docs / "b")
    assert report.removed == ()
    assert contents(store_dir) == {"1.txt": "one", "2.txt": "two", "3.txt": "three"}
    assert run(docs / "a").removed == (gone,)
    assert contents(store_dir) == {"1.txt": "one", "3.txt": "three"}


def test_roots_may_be_nested(run: Any, write: Write, docs: Path, store_dir: Path) -> None:
    write("top.txt", "top")
    deep = write("sub/deep.txt", "deep")
    assert names(run(docs, docs / "sub", deep).added) == ["deep.txt", "top.txt"]
    assert names(run(docs / "sub").unchanged) == ["deep.txt"]
    deep.unlink()
    write("sub/new.txt", "new")
    report = run(docs / "sub")
    assert (names(report.added), names(report.removed)) == (["new.txt"], ["deep.txt"])
    assert contents(store_dir) == {"new.txt": "new", "top.txt": "top"}


def test_a_hidden_root_stays_when_the_folder_around_it_is_ingested(
    run: Any, write: Write, docs: Path, store_dir: Path
) -> None:
    write("seen.txt", "seen")
    hidden = write(".notes/kept.txt", "kept")
    run(docs / ".notes")
    assert run(docs).removed == ()
    hidden.unlink()
    assert run(docs).removed == (hidden,)
    assert contents(store_dir) == {"seen.txt": "seen"}


def test_a_single_file_can_be_a_root(run: Any, write: Write, store_dir: Path) -> None:
    path = write("a.txt", "one")
    write("b.txt", "not asked for")
    run(path)
    write("a.txt", "two")
    assert run(path).updated == (path,)
    assert contents(store_dir) == {"a.txt": "two"}


def test_unusable_files_are_reported_and_the_others_ingested(
    run: Any, write: Write, docs: Path, store_dir: Path
) -> None:
    write("good.txt", "good")
    write("picture.png", b"\x89PNG\r\n\x1a\n\x00\x00")
    write("latin.txt", "déjà vu".encode("latin-1"))
    write("empty.txt", "")
    (docs / "dangling.txt").symlink_to(docs / "nowhere")
    report = run(docs)
    assert not report.ok
    assert names(report.added) == ["good.txt"]
    assert {s.path.name: s.reason for s in report.skipped} == {
        "picture.png": "binary",
        "latin.txt": "not utf-8 text (byte 1); convert it to UTF-8",
        "empty.txt": "empty",
        "dangling.txt": "cannot be read: No such file or directory",
    }
    assert contents(store_dir) == {"good.txt": "good"}


def test_an_unreadable_file_is_reported(
    run: Any, write: Write, docs: Path, monkeypatch: pytest.MonkeyPatch, store_dir: Path
) -> None:
    write("good.txt", "good")
    secret = write("secret.txt", "was readable")
    run(docs)
    really_open = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:  # root may read everything: permissions are no test
        if path == secret:
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    report = run(docs)
    assert [(s.path, s.reason, s.kept_old) for s in report.skipped] == [
        (secret, "cannot be read: Permission denied", True)
    ]
    assert contents(store_dir) == {"good.txt": "good", "secret.txt": "was readable"}


def test_a_file_that_becomes_unusable_keeps_its_last_content(
    run: Any, write: Write, docs: Path, store_dir: Path
) -> None:
    write("good.txt", "good")
    write("log.txt", "fine so far")
    run(docs)
    write("log.txt", b"fine so far\x00\x00\x00")
    (skipped,) = run(docs).skipped
    assert (skipped.path.name, skipped.reason, skipped.kept_old) == ("log.txt", "binary", True)
    assert contents(store_dir)["log.txt"] == "fine so far"


def test_files_in_a_folder_that_cannot_be_listed_stay(
    run: Any, write: Write, docs: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("good.txt", "good")
    locked = write("locked/a.txt", "inside").parent
    run(docs)

    def find(root: Path, exclude: Path, **options: Any) -> Any:
        found = really_find_files(root, exclude, **options)
        found.files = [file for file in found.files if file.parent != locked]
        found.unlisted.append((locked, "folder cannot be listed: Permission denied"))
        return found

    monkeypatch.setattr("reader_rag.rag.ingest.find_files", find)
    report = run(docs)
    assert [(s.path, s.kept_old) for s in report.skipped] == [(locked, True)]
    assert (report.removed, contents(store_dir)["a.txt"]) == ((), "inside")


def test_nothing_to_ingest_is_an_error_and_changes_nothing(run: Any, write: Write, docs: Path, store_dir: Path) -> None:
    (docs / "empty").mkdir(parents=True)
    with pytest.raises(IngestError, match=r"docs/empty: no file in it \(hidden files are skipped\)"):
        run(docs / "empty")
    with pytest.raises(IngestError, match="there is no file or folder .*nowhere"):
        run(docs / "nowhere")
    with pytest.raises(IngestError, match="no path was given"):
        run()
    assert not store_dir.exists()
    write("bad/a.bin", b"\x00")
    with pytest.raises(IngestError, match=r"none of the 1 files can be ingested, e\.g\. .*a\.bin: binary") as caught:
        run(docs / "bad")
    assert [(skipped.path.name, skipped.reason) for skipped in caught.value.skipped] == [("a.bin", "binary")]


@pytest.mark.parametrize("sources", [None, 5, object(), [None], [["a"]], b"a"])
def test_sources_of_another_type_are_refused(store_dir: Path, sources: Any) -> None:
    with pytest.raises(ConfigError, match="ingest takes paths, LlamaIndex Documents and readers, not"):
        ingest(sources, store_dir, embed_model=WordEmbedding(model_name="words", embedded=[]))


def test_a_folder_that_has_been_emptied_keeps_its_documents(
    run: Any, write: Write, docs: Path, store_dir: Path
) -> None:
    write("a.txt", "precious")
    run(docs)
    shutil.rmtree(docs)
    docs.mkdir()
    with pytest.raises(IngestError, match="nothing was changed"):
        run(docs)
    assert contents(store_dir) == {"a.txt": "precious"}


def test_another_embedding_model_is_refused_before_any_work(
    run: Any, write: Write, docs: Path, store_dir: Path, wide_embedding: Any, other_embedding: Any
) -> None:
    write("a.txt", "one")
    run(docs)
    write("b.txt", "two")
    for model in (wide_embedding, other_embedding):
        with pytest.raises(StoreMismatchError):
            run(docs, embed_model=model)
        assert "two" not in model.embedded
    assert contents(store_dir) == {"a.txt": "one"}


def test_a_failure_while_embedding_changes_nothing(
    run: Any, write: Write, docs: Path, store_dir: Path, embedding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.txt", "one")
    run(docs)
    write("a.txt", "two")
    monkeypatch.setattr(
        type(embedding), "get_text_embedding_batch", lambda self, texts: (_ for _ in ()).throw(KeyboardInterrupt())
    )
    with pytest.raises(KeyboardInterrupt):
        run(docs)
    assert contents(store_dir) == {"a.txt": "one"}


def test_a_full_disk_while_committing_changes_nothing(
    run: Any, write: Write, docs: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.txt", "one")
    run(docs)
    write("a.txt", "two " * 20_000)
    start = FaissStore.__init__

    def on_a_full_disk(store: FaissStore, *args: Any, **kwargs: Any) -> None:
        start(store, *args, **kwargs)
        store._file._database.execute("PRAGMA max_page_count = 1")  # SQLite takes the present size for the least

    monkeypatch.setattr(FaissStore, "__init__", on_a_full_disk)
    with pytest.raises(StoreWriteError, match="intact"):
        run(docs)
    assert contents(store_dir) == {"a.txt": "one"}


def test_two_ingestions_at_once_are_refused(run: Any, write: Write, docs: Path, store_dir: Path) -> None:
    write("a.txt", "one")
    store_dir.mkdir()
    with FileLock(store_dir / "ingest.lock"), pytest.raises(StoreBusyError, match="another process is ingesting"):
        run(docs)
    assert run(docs).chunks == 1


def test_a_store_folder_that_cannot_be_made_is_an_error(write: Write, docs: Path, embedding: Any) -> None:
    in_the_way = write("a.txt", "one")
    with pytest.raises(StoreWriteError, match="choose another folder"):
        ingest([docs], in_the_way / "store", embed_model=embedding)


def test_progress_is_reported_from_zero_to_the_total(run: Any, write: Write, docs: Path) -> None:
    for i in range(12):
        write(f"{i:02}.txt", f"text {i}")
    calls: list[tuple[str, int, int]] = []
    run(docs, progress=lambda *call: calls.append(call))
    assert calls == [*(("read", i, 12) for i in range(13)), ("embed", 0, 12), ("embed", 10, 12), ("embed", 12, 12)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 49}, "reads 48 tokens at most: chunk_tokens cannot be 49"),
        ({"chunk_tokens": 15}, "at least 16, not 15"),
        ({"chunk_tokens": 20, "chunk_overlap": 20}, r"0\.\.19 \(less than chunk_tokens\), not 20"),
        ({"chunk_overlap": -1}, "not -1"),
    ],
)
def test_chunk_settings_are_checked(run: Any, write: Write, docs: Path, options: Any, message: str) -> None:
    write("a.txt", "one")
    with pytest.raises(ConfigError, match=message):
        run(docs, **options)


def test_the_store_may_be_inside_an_ingested_folder(write: Write, docs: Path, embedding: Any) -> None:
    write("a.txt", "one")
    for _ in range(2):
        report = ingest([docs], docs / "store", embed_model=embedding)
    assert (names(report.unchanged), report.skipped) == (["a.txt"], ())


def test_the_same_file_gives_the_same_node_ids(run: Any, write: Write, docs: Path, store_dir: Path) -> None:
    def ids() -> list[str]:
        with FaissStore.open(store_dir) as store:
            return [node.node_id for node in store.get_nodes()]

    write("a.txt", "one two three. " * 40)
    run(docs)
    first = ids()
    shutil.rmtree(store_dir)
    run(docs)
    assert ids() == first
    assert len(set(first)) == len(first) > 1


def test_the_last_words_of_a_long_document_can_be_found(
    minilm: LocalEmbedding, write: Write, docs: Path, store_dir: Path
) -> None:
    write("long.txt", "The weather was mild and nothing happened. " * 150 + "The treasure is buried under the oak.")
    ingest([docs], store_dir, embed_model=minilm)
    with FaissStore.open(store_dir, embed_model=minilm) as store:
        (best,) = make_retriever(store, minilm, top_k=1).retrieve("Where is the treasure?")
    assert best.node.get_content().endswith("The treasure is buried under the oak.")
    assert best.node.metadata["file_name"] == "long.txt"


def test_two_tenants_ingest_the_same_files(run: Any, write: Write, docs: Path, store_dir: Path) -> None:
    write("one.txt", "the first")
    write("two.txt", "the second")
    for tenant in ("", "a", "b"):
        report = run(docs, tenant=tenant)
        assert (len(report.added), report.chunks, report.total_chunks) == (2, 2, 2)
    expected = {"one.txt": "the first", "two.txt": "the second"}
    assert [contents(store_dir, tenant) for tenant in ("", "a", "b")] == [expected] * 3
    with FaissStore.open(store_dir) as store:
        ids = [node.node_id for tenant in ("", "a", "b") for node in store.for_tenant(tenant).get_nodes()]
        assert store.tenants() == [TenantSize(tenant, 2, 2) for tenant in ("", "a", "b")]
    assert len(set(ids)) == 6


def test_a_changed_file_is_updated_for_the_ingesting_tenant_only(
    run: Any, write: Write, docs: Path, store_dir: Path
) -> None:
    write("one.txt", "old")
    run(docs, tenant="a")
    run(docs, tenant="b")
    path = write("one.txt", "new")
    assert run(docs, tenant="b").updated == (path,)
    assert (contents(store_dir, "a"), contents(store_dir, "b")) == ({"one.txt": "old"}, {"one.txt": "new"})
    assert run(docs, tenant="a").updated == (path,)
    assert run(docs, tenant="b").unchanged == (path,)
    assert contents(store_dir, "a") == {"one.txt": "new"}


def test_missing_files_are_removed_for_the_ingesting_tenant_only(
    run: Any, write: Write, docs: Path, store_dir: Path
) -> None:
    write("one.txt", "first")
    gone = write("two.txt", "second")
    for tenant in ("", "a", "b"):
        run(docs, tenant=tenant)
    gone.unlink()
    assert run(docs, tenant="a").removed == (gone,)
    assert contents(store_dir, "a") == {"one.txt": "first"}
    assert contents(store_dir, "") == contents(store_dir, "b") == {"one.txt": "first", "two.txt": "second"}
    assert run(docs).removed == (gone,)
    assert contents(store_dir, "b") == {"one.txt": "first", "two.txt": "second"}


def test_a_cleared_tenant_can_ingest_again(run: Any, write: Write, docs: Path, store_dir: Path) -> None:
    write("one.txt", "first")
    run(docs, tenant="a")
    run(docs, tenant="b")
    with FaissStore.open(store_dir) as store:
        store.for_tenant("a").clear()
    report = run(docs, tenant="a")
    assert (len(report.added), report.unchanged) == (1, ())
    assert contents(store_dir, "a") == contents(store_dir, "b") == {"one.txt": "first"}


def test_node_ids_of_the_default_tenant_are_those_of_existing_stores(
    run: Any, write: Write, docs: Path, store_dir: Path
) -> None:
    path = write("one.txt", "first")
    run(docs)
    digest = content_hash(Path("a.txt"), b"first", "chunker 1, 48 tokens, overlap 32")
    with FaissStore.open(store_dir) as store:
        (node,) = store.get_nodes()
    assert node.node_id == str(uuid.uuid5(uuid.NAMESPACE_URL, f"{path}\0{digest}\x000"))


def test_two_tenants_may_ingest_at_once(run: Any, write: Write, docs: Path, store_dir: Path) -> None:
    write("one.txt", "first")
    run(docs, tenant="a")
    (lock,) = (path for path in (store_dir).iterdir() if path.name.startswith("ingest-"))
    with FileLock(lock):
        with pytest.raises(StoreBusyError, match="is ingesting"):
            run(docs, tenant="a")
        assert run(docs, tenant="b").chunks == run(docs).chunks == 1
    with FileLock(store_dir / "ingest.lock"):
        assert run(docs, tenant="a").ok


def test_commits_of_two_tenants_wait_for_one_another(
    run: Any, write: Write, docs: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("one.txt", "first")
    run(docs, tenant="a")
    waiting, reports = threading.Event(), []

    class Lock(FileLock):
        def acquire(self, *args: Any, **kwargs: Any) -> Any:
            if self.lock_file.endswith("commit.lock"):
                waiting.set()
            return super().acquire(*args, **kwargs)

    monkeypatch.setattr("reader_rag.rag.ingest.FileLock", Lock)
    with FileLock(store_dir / "commit.lock"):
        thread = threading.Thread(target=lambda: reports.append(run(docs, tenant="b")))
        thread.start()
        assert waiting.wait(60)
        assert reports == []
    join(thread)
    assert reports[0].chunks == 1


def test_a_name_that_is_not_valid_utf8_is_skipped_and_reported(run: Any, write: Write, docs: Path) -> None:
    write("good.txt", "Cats purr.")
    bad = Path(os.fsdecode(os.fsencode(docs) + b"/caf\xe9.txt"))
    try:
        bad.write_text("Dogs bark.")
    except OSError:
        pytest.skip("this file system has no such names")
    report = run(docs)
    assert names(report.added) == ["good.txt"]
    assert [str(skipped) for skipped in report.skipped] == [
        f"{docs}/caf\\xe9.txt: the name is not valid UTF-8; rename it"
    ]
    report = run(docs)
    assert (names(report.unchanged), len(report.skipped)) == (["good.txt"], 1)


def test_links_out_of_a_folder_are_not_read_unless_asked(
    run: Any, write: Write, docs: Path, tmp_path: Path, store_dir: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the password")
    write("good.txt", "Cats purr.")
    (docs / "link.txt").symlink_to(secret)
    report = run(docs)
    assert contents(store_dir) == {"good.txt": "Cats purr."}
    reason = f"a link to a file outside of {docs}; pass follow_links=True to read it"
    assert [(skipped.path.name, skipped.reason) for skipped in report.skipped] == [("link.txt", reason)]
    assert names(run(docs, follow_links=True).added) == ["link.txt"]
    assert contents(store_dir)["link.txt"] == "the password"
    assert names(run(docs).removed) == ["link.txt"]
    assert contents(store_dir) == {"good.txt": "Cats purr."}


def test_a_file_beyond_a_limit_is_skipped(run: Any, write: Write, docs: Path) -> None:
    write("good.txt", "Cats purr.")
    write("large.txt", "x" * 101)
    write("page.html", "<p>" + "x" * 90)
    report = run(docs, limits=ReadLimits(file_bytes=100, unpacked_bytes=50))
    assert names(report.added) == ["good.txt"]
    assert [(s.path.name, s.reason) for s in report.skipped] == [
        ("large.txt", "larger than 0 MiB; split it"),
        ("page.html", "holds more than 0 MiB of text; split it"),
    ]


class TestAnyEmbedding:
    def test_one_that_does_not_say_what_it_reads_gets_a_default_and_a_sentence(
        self, tmp_path: Path, write: Callable[[str, str], Path]
    ) -> None:
        write("birds.txt", "Herons eat fish. " * 200)
        embedding = MockEmbedding(embed_dim=8)
        with pytest.warns(ReaderWarning, match="MockEmbedding does not say how many tokens .* at most 256; pass chunk"):
            report = ingest([tmp_path / "docs"], tmp_path / "store", embed_model=embedding)
        assert report.total_chunks >= 3

    def test_a_chunk_size_that_is_given_is_taken_without_one(
        self, tmp_path: Path, write: Callable[[str, str], Path], recwarn: pytest.WarningsRecorder
    ) -> None:
        write("birds.txt", "Herons eat fish. " * 200)
        ingest([tmp_path / "docs"], tmp_path / "store", embed_model=MockEmbedding(embed_dim=8), chunk_tokens=100)
        assert not [warning for warning in recwarn if issubclass(warning.category, ReaderWarning)]
