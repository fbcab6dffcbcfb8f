"""`ingest` with LlamaIndex documents, readers and node parsers, and with metadata of files."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import SimpleDirectoryReader
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    MarkdownNodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    TokenTextSplitter,
)
from llama_index.core.readers import StringIterableReader
from llama_index.core.readers.base import BaseReader, ReaderConfig
from llama_index.core.schema import Document, MetadataMode, NodeRelationship
from llama_index.core.vector_stores.types import FilterOperator, MetadataFilter, MetadataFilters
from word_embedding import WordEmbedding

from reader_rag.errors import ConfigError, IngestError, ReaderWarning
from reader_rag.rag import FaissStore, IngestReport, SizedEmbedding, make_retriever, open_store
from reader_rag.rag.ingest import ingest

Write = Callable[[str, str | bytes], Path]
HERON = "A heron stands still in shallow water."
OWL = "An owl hunts at night."


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def run(store_dir: Path, embedding: SizedEmbedding) -> Callable[..., IngestReport]:
    """Ingests into the test's store."""

    def run(sources: Any, **options: Any) -> IngestReport:
        return ingest(sources, store_dir, **({"embed_model": embedding} | options))

    return run


def nodes_of(store_dir: Path) -> Sequence[Any]:
    with FaissStore.open(store_dir) as store:
        return store.get_nodes()


def texts(store_dir: Path) -> list[str]:
    return sorted(node.get_content() for node in nodes_of(store_dir))


class TestDocuments:
    def test_they_are_stored_with_their_metadata_and_found_by_it(
        self, run: Any, store_dir: Path, embedding: SizedEmbedding
    ) -> None:
        herons = Document(id_="herons", text=HERON, metadata={"year": 2019, "author": "Ann"})
        later = Document(id_="later", text=HERON + " It is grey.", metadata={"year": 2024, "author": "Bob"})
        report = run([herons, later])
        assert (report.added, report.chunks) == (("herons", "later"), 2)
        for key, operator, value, expected in (
            ("year", FilterOperator.GT, 2020, ["later"]),
            ("author", FilterOperator.EQ, "Ann", ["herons"]),
            ("author", FilterOperator.IN, ["Ann", "Bob"], ["herons", "later"]),
        ):
            filters = MetadataFilters(filters=[MetadataFilter(key=key, operator=operator, value=value)])
            with FaissStore.open(store_dir, embed_model=embedding) as store:
                found = make_retriever(store, embedding, top_k=9, filters=filters).retrieve("heron")
            assert sorted(str(one.node.ref_doc_id) for one in found) == expected
            assert all(one.node.metadata.keys() == {"year", "author"} for one in found)

    @pytest.mark.parametrize("scheme", ["qdrant", "milvus"])
    def test_vector_databases_filter_by_it_too(
        self, scheme: str, tmp_path: Path, embedding: SizedEmbedding, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip(f"llama_index.vector_stores.{scheme}", reason=f"pip install 'reader-rag[{scheme}]'")
        monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
        place = f"{scheme}://{tmp_path}/{scheme}.db/birds"
        documents = [Document(id_=f"d{year}", text=HERON, metadata={"year": year}) for year in (2019, 2024)]
        assert ingest(documents, place, embed_model=embedding).chunks == 2
        assert ingest(documents, place, embed_model=embedding).unchanged == ("d2019", "d2024")
        filters = MetadataFilters(filters=[MetadataFilter(key="year", operator=FilterOperator.GT, value=2020)])
        with open_store(place, embed_model=embedding) as store:
            (found,) = make_retriever(store, embedding, top_k=9, filters=filters).retrieve("heron")
        assert found.node.ref_doc_id == "d2024"

    def test_one_that_changes_replaces_its_nodes_and_the_others_stay(self, run: Any, store_dir: Path) -> None:
        run([Document(id_="a", text=HERON), Document(id_="b", text=OWL)])
        report = run(Document(id_="a", text="Herons fly."))
        assert (report.updated, report.removed, report.total_chunks) == (("a",), (), 2)
        assert texts(store_dir) == [OWL, "Herons fly."]
        assert run(Document(id_="a", text="Herons fly.")).unchanged == ("a",)
        assert run(Document(id_="a", text="Herons fly.", metadata={"x": 1})).updated == ("a",)
        assert nodes_of(store_dir)[-1].metadata == {"x": 1}

    def test_random_ids_do_not_store_the_same_document_twice(self, run: Any, store_dir: Path) -> None:
        first = run([Document(text=HERON), Document(text=OWL)])
        again = run([Document(text=HERON), Document(text=OWL), Document(text=HERON, metadata={"x": 1})])
        assert again.unchanged == first.added
        assert (len(again.added), again.total_chunks) == (1, 3)
        assert len(run([Document(id_="named", text=HERON)]).added) == 1

    def test_parts_of_one_id_are_one_document(self, run: Any, store_dir: Path) -> None:
        parts = [
            Document(id_="book", text=text, metadata={"page_label": str(i)}) for i, text in enumerate((OWL, HERON))
        ]
        assert run(parts).added == ("book",)
        assert [node.metadata["page_label"] for node in nodes_of(store_dir)] == ["0", "1"]
        assert {node.ref_doc_id for node in nodes_of(store_dir)} == {"book"}
        assert run(parts[:1]).total_chunks == 1

    def test_they_stay_when_files_are_ingested_whatever_their_id_looks_like(
        self, run: Any, write: Write, store_dir: Path
    ) -> None:
        path = write("a.txt", HERON)
        run([Document(id_=str(path.parent / "gone.txt"), text=OWL), path])
        assert run(path.parent).removed == ()
        assert texts(store_dir) == sorted([HERON, OWL])
        run(Document(id_=str(path), text="Replaced."))
        assert run(path.parent).updated == (path,)
        path.unlink()
        write("b.txt", "another")
        assert run(path.parent).removed == (path,)

    def test_one_can_be_removed(self, run: Any, store_dir: Path, embedding: SizedEmbedding) -> None:
        run([Document(id_="a", text=HERON), Document(id_="b", text=OWL)])
        with FaissStore.open(store_dir, embed_model=embedding) as store:
            store.delete("a")
            assert [record.path for record in store.documents()] == ["b"]
        assert run(Document(id_="a", text=HERON)).added == ("a",)

    def test_tenants_have_their_own(self, run: Any, store_dir: Path) -> None:
        for tenant in ("ann", "bob"):
            assert run(Document(id_="a", text=f"{HERON} {tenant}"), tenant=tenant).total_chunks == 1

    def test_visible_metadata_is_embedded_and_hidden_is_not(self, run: Any, store_dir: Path, embedding: Any) -> None:
        document = Document(
            id_="a", text=HERON, metadata={"author": "Ann", "secret": "x"}, excluded_embed_metadata_keys=["secret"]
        )
        run(document)
        assert embedding.embedded[0] == f"author: Ann\n\n{HERON}"  # the store embeds a text of its own afterwards
        assert run(document.model_copy(update={"excluded_embed_metadata_keys": []})).updated == ("a",)

    def test_chunks_leave_room_for_the_metadata_that_is_embedded_with_them(
        self, run: Any, store_dir: Path, embedding: SizedEmbedding
    ) -> None:
        run(Document(id_="a", text="one two three four five six. " * 30, metadata={"note": "word " * 20}))
        nodes = nodes_of(store_dir)
        sizes = [embedding.count_tokens(node.get_content(metadata_mode=MetadataMode.EMBED)) for node in nodes]
        assert len(nodes) > 5
        assert max(sizes) <= embedding.max_text_tokens == 48
        with pytest.raises(IngestError, match="its metadata has 62 tokens of the 48 .* excluded_embed_metadata_keys"):
            run(Document(id_="b", text="one two", metadata={"note": "word " * 60}))

    @pytest.mark.parametrize(
        ("document", "reason"),
        [
            (Document(id_="bad", text=" \n"), "holds no text"),
            (Document(id_="bad", text="x", metadata={"when": datetime.date(2024, 1, 1)}), "as JSON: .*date"),
            (Document(id_="bad", text="x", metadata={"n": float("nan")}), "as JSON: Out of range"),
            (Document(id_="bad", text="x\ud800"), "lone surrogate"),
        ],
    )
    def test_those_that_cannot_be_stored_are_skipped_with_a_reason(
        self, run: Any, store_dir: Path, document: Document, reason: str
    ) -> None:
        report = run([document, Document(id_="good", text=HERON)])
        (skipped,) = report.skipped
        assert (skipped.path, skipped.kept_old) == ("bad", False)
        assert str(skipped).startswith("bad: ")
        with pytest.raises(IngestError, match=f"none of the 1 documents can be ingested, e.g. bad: .*{reason}"):
            run(document)

    def test_spans_are_those_in_the_documents_text(self, run: Any, store_dir: Path) -> None:
        document = Document(id_="a", text="\n\n" + "Herons wade. Owls fly at night. " * 20)
        run(document)
        for node in nodes_of(store_dir):
            assert document.text[node.start_char_idx : node.end_char_idx] == node.get_content()

    def test_other_types_are_refused(self, run: Any, store_dir: Path) -> None:
        with pytest.raises(ConfigError, match="takes paths, LlamaIndex Documents and readers, not dict"):
            run([{"text": "x"}])
        with pytest.raises(ConfigError, match="takes paths, LlamaIndex Documents and readers, not int"):
            run(7)
        with pytest.raises(IngestError, match="no path was given"):
            run([])
        assert not store_dir.exists()


class TestReaders:
    def test_what_one_loads_is_ingested(self, run: Any, write: Write, store_dir: Path) -> None:
        write("a.txt", HERON)
        folder = write("b.md", OWL).parent
        reader = SimpleDirectoryReader(folder, filename_as_id=True)
        assert len(run(reader).added) == 2
        assert sorted(node.metadata["file_name"] for node in nodes_of(store_dir)) == ["a.txt", "b.md"]
        assert len(run(reader).unchanged) == 2
        assert len(run(SimpleDirectoryReader(folder)).unchanged) == 2  # random ids, the same content

    def test_its_arguments_are_given_in_a_reader_config(self, run: Any, store_dir: Path) -> None:
        run(ReaderConfig(reader=StringIterableReader(), reader_kwargs={"texts": [HERON, OWL]}))
        assert texts(store_dir) == [HERON, OWL]
        with pytest.raises(ConfigError, match=r"needs arguments: pass what it loads, StringIterableReader\(\.\.\.\)"):
            run(StringIterableReader())

    def test_one_that_loads_nothing_is_an_error(self, run: Any) -> None:
        class Empty(BaseReader):
            def load_data(self) -> list[Document]:  # type: ignore[override]
                return []

        with pytest.raises(IngestError, match="Empty gave no documents"):
            run(Empty())

    def test_files_documents_and_readers_go_together(self, run: Any, write: Write, store_dir: Path) -> None:
        path = write("a.txt", HERON)
        calls: list[tuple[str, int, int]] = []
        reader = ReaderConfig(reader=StringIterableReader(), reader_kwargs={"texts": ["Gulls cry."]})
        report = run([path, Document(id_="owl", text=OWL), reader], progress=lambda *call: calls.append(call))
        assert report.added[:2] == (path, "owl")
        assert [call for call in calls if call[0] == "read"] == [("read", i, 3) for i in range(4)]
        assert texts(store_dir) == [HERON, OWL, "Gulls cry."]


class TestNodeParsers:
    TEXT = "# Owls\n\nAn owl hunts at night. It eats mice.\n\n# Herons\n\nA heron wades. It eats fish. It is grey.\n"

    @pytest.mark.parametrize(
        "parser",
        [
            SentenceSplitter(chunk_size=30, chunk_overlap=5),
            TokenTextSplitter(chunk_size=20, chunk_overlap=0),
            MarkdownNodeParser(),
            SentenceWindowNodeParser(window_size=1),
            HierarchicalNodeParser.from_defaults(chunk_sizes=[60, 20], chunk_overlap=0),
        ],
        ids=lambda parser: type(parser).__name__,
    )
    def test_any_can_split(self, run: Any, write: Write, store_dir: Path, parser: Any) -> None:
        path = write("birds.txt", self.TEXT)
        report = run([path, Document(id_="doc", text=self.TEXT, metadata={"kind": "birds"})], node_parser=parser)
        nodes = nodes_of(store_dir)
        assert (report.chunks, report.ok) == (len(nodes), True)
        assert len(nodes) > 2
        ids = {node.node_id for node in nodes}
        assert {node.ref_doc_id for node in nodes} == {str(path), "doc"}
        for node in nodes:
            if node.start_char_idx is not None:
                assert self.TEXT[node.start_char_idx : node.end_char_idx] == node.text
            for kind, related in node.relationships.items():
                if kind != NodeRelationship.SOURCE:
                    assert {one.node_id for one in (related if isinstance(related, list) else [related])} <= ids
        assert all(node.metadata["kind"] == "birds" for node in nodes if node.ref_doc_id == "doc")
        again = run([path, Document(id_="doc", text=self.TEXT, metadata={"kind": "birds"})], node_parser=parser)
        assert len(again.unchanged) == 2

    def test_other_settings_split_again(self, run: Any, write: Write) -> None:
        path = write("birds.txt", self.TEXT)
        run(path, node_parser=SentenceSplitter(chunk_size=30, chunk_overlap=5))
        assert run(path, node_parser=SentenceSplitter(chunk_size=40, chunk_overlap=5)).updated == (path,)
        assert run(path).updated == (path,)

    def test_passages_that_the_embedding_does_not_read_whole_are_told(self, run: Any, write: Write) -> None:
        path = write("long.txt", "Herons wade in water. " * 40)
        with pytest.warns(ReaderWarning, match="1 of 1 passages are longer than the embedding reads.*SentenceSplitter"):
            run(path, node_parser=SentenceSplitter(chunk_size=1000))

    def test_its_sizes_are_its_own(self, run: Any, write: Write) -> None:
        path = write("a.txt", HERON)
        for options in ({"chunk_tokens": 20}, {"chunk_overlap": 0}):
            with pytest.raises(ConfigError, match="node_parser has its own sizes"):
                run(path, node_parser=SentenceSplitter(), **options)
        with pytest.raises(ConfigError, match="must be a LlamaIndex NodeParser, not str"):
            run(path, node_parser="sentences")


class TestFiles:
    def test_metadata_comes_from_a_callable_and_is_filterable_and_hidden(
        self, run: Any, write: Write, store_dir: Path, embedding: Any
    ) -> None:
        heron, _ = write("2019/a.txt", HERON), write("2024/b.txt", HERON)

        def metadata(path: Path) -> dict[str, Any]:
            return {"year": int(path.parent.name), "file_name": f"{path.stem} of {path.parent.name}"}

        run(heron.parent.parent, metadata=metadata)
        assert embedding.embedded[0] == HERON
        filters = MetadataFilters(filters=[MetadataFilter(key="year", value=2024)])
        with FaissStore.open(store_dir, embed_model=embedding) as store:
            (found,) = make_retriever(store, embedding, top_k=9, filters=filters).retrieve("heron")
        assert found.node.metadata["file_name"] == "b of 2024"
        assert found.node.get_content(metadata_mode=MetadataMode.LLM) == HERON
        assert len(run(heron.parent.parent, metadata=metadata).unchanged) == 2
        assert len(run(heron.parent.parent, metadata=lambda path: {"year": 1}).updated) == 2
        assert len(run(heron.parent.parent).updated) == 2

    def test_metadata_that_cannot_be_stored_is_an_error_and_changes_nothing(
        self, run: Any, write: Write, store_dir: Path
    ) -> None:
        path = write("a.txt", HERON)
        with pytest.raises(ConfigError, match=r"the metadata of .*a\.txt cannot be stored as JSON: .*set"):
            run(path, metadata=lambda path: {"x": {1}})
        with pytest.raises(ConfigError, match="cannot set file_path"):
            run(path, metadata=lambda path: {"file_path": "x"})
        assert not (store_dir / "store.sqlite3").exists()

    def test_text_is_read_in_the_encoding_that_is_given(self, run: Any, write: Write, store_dir: Path) -> None:
        write("a.txt", "Käuzchen".encode("latin-1"))
        path = write("marked.txt", "Höhle".encode("utf-16"))
        assert len(run(path.parent).skipped) == 1
        assert run(path.parent, encoding="latin-1").ok
        assert texts(store_dir) == ["Höhle", "Käuzchen"]
        assert len(run(path.parent, encoding="latin-1").unchanged) == 2
        assert len(run(path.parent, encoding="cp1252").updated) == 2

    @pytest.mark.parametrize("encoding", ["nonsense", "hex", "rot13"])
    def test_an_encoding_that_is_none_is_refused(self, run: Any, write: Write, encoding: str) -> None:
        with pytest.raises(ConfigError, match=f"'{encoding}' is no encoding of text"):
            run(write("a.txt", HERON), encoding=encoding)


def test_every_source_gives_the_same_nodes_again(run: Any, write: Write, store_dir: Path) -> None:
    embedding = WordEmbedding(model_name="words", embedded=[])
    sources = [write("a.txt", HERON), Document(id_="owl", text=OWL)]
    run(sources)
    first = {node.node_id for node in nodes_of(store_dir)}
    other = store_dir.parent / "other"
    ingest(sources, other, embed_model=embedding)
    assert {node.node_id for node in nodes_of(other)} == first
