"""`DocumentStoreContract`: what ingestion and engines require of a store, in addition to `VectorStoreContract`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import ImageNode, IndexNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

from reader_rag.errors import ConfigError, StoreError, StoreMismatchError
from reader_rag.rag.stores.contract import DocumentRecord, DocumentStore
from reader_rag.testing.vector_store import (
    EAST,
    NORTH,
    WEST,
    VectorStoreContract,
    found,
    make_node,
    node_id,
    result,
    texts,
    where,
)

_MANY = 1200  # more nodes than the stores read from their databases in one request


def _query(**fields: Any) -> VectorStoreQuery:
    """A query whose fields may be of any type."""
    return VectorStoreQuery(**{"query_embedding": EAST, **fields})


class LetterEmbedding(BaseEmbedding):
    """An embedding without weights that counts letters.

    Attributes:
        letters: Length of the vectors.
        shift: Changes the vectors, to make another model of the same length.
    """

    letters: int = 26
    shift: int = 0

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.0] * self.letters
        for letter in text.lower():
            if "a" <= letter <= "z":
                vector[(ord(letter) - ord("a") + self.shift * (ord(letter) % 7)) % self.letters] += 1.0
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class DocumentStoreContract(VectorStoreContract):
    """Base class for the tests of a `DocumentStore`; see `VectorStoreContract`."""

    dimension_error = StoreMismatchError
    connection_error = StoreError

    def make_store(self, place: Path, **options: Any) -> DocumentStore:
        """Open the store that belongs to a folder; it is empty when the folder is new.

        Args:
            place: A folder of this test only. A store on a server can name its collection after `place.name`.
            options: `embed_model` and `tenant` of the store.
        """
        raise NotImplementedError(f"{type(self).__name__} must define make_store(place, **options)")

    def test_similarity_is_the_cosine(self, compass: DocumentStore) -> None:
        assert result(compass, [10.0, 0.0, 0.0]).similarities == pytest.approx([1.0, 2**-0.5, 0.0, -1.0], abs=1e-5)

    def test_results_below_the_cutoff_are_left_out(self, compass: DocumentStore) -> None:
        query = VectorStoreQuery(query_embedding=EAST, similarity_top_k=10)
        assert texts(compass.query(query, similarity_cutoff=0.5).nodes) == ["east", "northeast"]
        compass.similarity_cutoff = -0.5
        assert texts(compass.query(query).nodes) == ["east", "northeast", "north"]
        assert texts(compass.query(query, similarity_cutoff=None).nodes) == ["east", "northeast", "north", "west"]

    @pytest.mark.parametrize(
        ("query", "message"),
        [
            (VectorStoreQuery(EAST, mode=VectorStoreQueryMode.SVM), "mode 'default'.* only, not 'svm'"),
            (VectorStoreQuery(None), "no query_embedding"),
            (VectorStoreQuery(EAST, similarity_top_k=0), "at least 1, not 0"),
            (VectorStoreQuery([float("nan"), 0.0, 0.0]), "NaN or infinity"),
            (_query(query_embedding=["east"]), "query_embedding must be a list of numbers, not .'east'"),
            (_query(similarity_top_k="3"), "similarity_top_k must be a whole number, not '3'"),
            (_query(alpha=float("nan")), "alpha must be a number, not nan"),
            (_query(query_str=b"east"), "query_str must be a text"),
            (_query(doc_ids=["\ud800"]), "doc_ids must be texts that UTF-8 can encode"),
        ],
        ids=["mode", "no vector", "top_k", "nan", "vector", "number", "alpha", "words", "surrogate"],
    )
    def test_invalid_queries_raise(self, compass: DocumentStore, query: VectorStoreQuery, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            compass.query(query)
        with pytest.raises(ConfigError, match="similarity_cutoff must be a number, not 'high'"):
            compass.query(VectorStoreQuery(EAST), similarity_cutoff="high")

    @pytest.mark.parametrize("name", [5, None, [], "\ud800"], ids=["number", "none", "list", "surrogate"])
    def test_names_that_are_no_texts_raise_and_change_nothing(self, compass: DocumentStore, name: Any) -> None:
        for call in (
            lambda: compass.delete(name),
            lambda: compass.delete_nodes([name]),
            lambda: compass.get_nodes([name]),
            lambda: compass.get_nodes(doc_ids=[name]),
            lambda: compass.delete_nodes("east"),  # type: ignore[arg-type]
        ):
            with pytest.raises(ConfigError, match=r"must be texts that|must be a list of texts"):
                call()
        assert compass.num_nodes == 4

    @pytest.mark.parametrize(
        ("filters", "expected"),
        [
            ([where("tags", "sun", FilterOperator.CONTAINS)], ["east", "northeast"]),
            ([where("tags", ["snow", "day"], FilterOperator.ANY)], ["east", "north"]),
            ([where("tags", ["sun", "day"], FilterOperator.ALL)], ["east"]),
            ([where("land", "hill", FilterOperator.TEXT_MATCH)], ["north"]),
            ([where("colour", None, FilterOperator.IS_EMPTY)], ["east", "northeast", "north", "west"]),
            ([where("ref_doc_id", "a"), where("year", 2001)], ["east"]),
            ([MetadataFilters(filters=[where("land", "sea")], condition=FilterCondition.NOT)], ["northeast", "north"]),
            (
                [
                    where("year", 2003, FilterOperator.LTE),
                    MetadataFilters(
                        filters=[
                            where("land", "hill"),
                            where("nothing", 1),
                            where("tags", "day", FilterOperator.CONTAINS),
                        ],
                        condition=FilterCondition.OR,
                    ),
                ],
                ["east", "north"],
            ),
            (
                [MetadataFilters(filters=[where("nothing", 1)], condition=FilterCondition.NOT)],
                ["east", "northeast", "north", "west"],
            ),
        ],
        ids=["contains", "any", "all", "text", "empty", "document", "not", "nested", "not there"],
    )
    def test_filters_on_lists_and_texts_and_nested_filters(
        self, compass: DocumentStore, filters: list[MetadataFilter | MetadataFilters], expected: list[str]
    ) -> None:
        assert found(compass, EAST, filters=MetadataFilters(filters=filters)) == expected
        assert texts(compass.get_nodes(filters=MetadataFilters(filters=filters))) == expected

    def test_a_missing_and_an_empty_list_are_empty(self, store: DocumentStore) -> None:
        store.add([make_node("none", EAST), make_node("no tags", NORTH, tags=[]), make_node("one", WEST, tags=["x"])])
        empty = MetadataFilters(filters=[where("tags", None, FilterOperator.IS_EMPTY)])
        assert found(store, EAST, filters=empty) == ["none", "no tags"]

    def test_empty_lists_of_ids_do_not_restrict_a_query(self, compass: DocumentStore) -> None:
        assert found(compass, EAST, 1, node_ids=[], doc_ids=[]) == ["east"]

    def test_nodes_are_returned_unchanged_and_in_order(self, store: DocumentStore, place: Path) -> None:
        text = make_node("text", EAST, "doc", n=1, list=["x"])
        text.start_char_idx, text.end_char_idx, text.excluded_llm_metadata_keys = 5, 12, ["n"]
        index = IndexNode(id_=node_id("index"), text="points", index_id="elsewhere", embedding=EAST)
        image = ImageNode(id_=node_id("image"), text="seen", image_path="a.png", embedding=EAST)
        store.add([text, index, image])
        store = self._again(store, place)
        back = store.get_nodes()
        assert [type(node) for node in back] == [TextNode, IndexNode, ImageNode]
        expected = [node.model_copy(update={"embedding": None}) for node in (text, index, image)]
        assert [node.to_dict() for node in back] == [node.to_dict() for node in expected]
        self.close_store(store)

    def test_nodes_are_read_by_id_document_and_metadata(self, compass: DocumentStore) -> None:
        assert texts(compass.get_nodes()) == ["east", "northeast", "north", "west"]
        assert texts(compass.get_nodes([node_id("west"), node_id("east")])) == ["east", "west"]
        assert texts(compass.get_nodes(doc_ids=["a"])) == ["east", "northeast"]
        sea = MetadataFilters(filters=[where("land", "sea")])
        assert texts(compass.get_nodes(filters=sea, doc_ids=["a", "b"])) == ["east"]
        assert compass.get_nodes([]) == []
        assert compass.num_nodes == 4

    def test_every_condition_together_selects_nodes(self, compass: DocumentStore) -> None:
        sea = MetadataFilters(filters=[where("land", "sea")])
        named = [node_id("east"), node_id("north"), node_id("west")]
        assert texts(compass.get_nodes(named, sea)) == ["east", "west"]
        assert texts(compass.get_nodes(named, sea, doc_ids=["a", "b"])) == ["east"]
        assert texts(compass.get_nodes(named, sea, doc_ids=["b"])) == []

    def test_nodes_that_meet_every_condition_are_deleted(self, compass: DocumentStore) -> None:
        sea = MetadataFilters(filters=[where("land", "sea")])
        compass.delete_nodes([node_id("north"), node_id("west")], filters=sea)
        assert texts(compass.get_nodes()) == ["east", "northeast", "north"]
        compass.delete_nodes(filters=sea)
        assert texts(compass.get_nodes()) == ["northeast", "north"]
        with pytest.raises(ConfigError, match="use clear"):
            compass.delete_nodes()

    def test_async_methods_read_delete_and_clear(self, compass: DocumentStore) -> None:
        async def use() -> list[list[str]]:
            seen = [texts(await compass.aget_nodes([node_id("east"), node_id("north")]))]
            await compass.adelete_nodes([node_id("north")])
            seen.append(texts(await compass.aget_nodes()))
            await compass.adelete_nodes(filters=MetadataFilters(filters=[where("land", "plain")]))
            seen.append(texts(await compass.aget_nodes()))
            await compass.adelete("c")
            seen.append(texts(await compass.aget_nodes()))
            await compass.aclear()
            return [*seen, texts(await compass.aget_nodes())]

        assert asyncio.run(use()) == [
            ["east", "north"],
            ["east", "northeast", "west"],
            ["east", "west"],
            ["east"],
            [],
        ]

    def test_async_deletion_meets_every_condition(self, compass: DocumentStore) -> None:
        async def use() -> list[list[str]]:
            sea = MetadataFilters(filters=[where("land", "sea")])
            await compass.adelete_nodes([node_id("north"), node_id("west")], filters=sea)
            seen = [texts(await compass.aget_nodes())]
            await asyncio.gather(compass.adelete_nodes(filters=sea), compass.adelete("b"), compass.adelete("unknown"))
            return [*seen, texts(await compass.aget_nodes())]

        assert asyncio.run(use()) == [["east", "northeast", "north"], ["northeast"]]
        with pytest.raises(ConfigError, match="use clear"):
            asyncio.run(compass.adelete_nodes())

    def test_async_deletion_leaves_other_tenants_documents(self, store: DocumentStore) -> None:
        ann, bob = store.for_tenant("ann"), store.for_tenant("bob")
        for tenant in (ann, bob):
            tenant.replace_documents([make_node("one", EAST, "same")], [DocumentRecord("same", "root", "1")])
        asyncio.run(ann.adelete("same"))
        assert (ann.num_nodes, ann.documents()) == (0, [])
        assert (bob.num_nodes, bob.documents()) == (1, [DocumentRecord("same", "root", "1")])
        asyncio.run(bob.adelete_nodes([node_id("one")]))
        assert bob.num_nodes == 0

    def test_async_deletion_persists_over_a_restart(self, compass: DocumentStore, place: Path) -> None:
        async def use() -> None:
            await compass.adelete("a")
            await compass.adelete_nodes([node_id("west")])

        asyncio.run(use())
        store = self._again(compass, place)
        assert texts(store.get_nodes()) == found(store, EAST) == ["north"]
        self.close_store(store)

    def test_a_large_document_is_deleted_completely(self, store: DocumentStore) -> None:
        large = [make_node(f"n{i}", [1.0, i / _MANY, 0.0], "large", part=i % 2) for i in range(_MANY)]
        store.add([*large, make_node("kept", WEST, "other", part=1)])
        odd = MetadataFilters(filters=[where("part", 1), where("ref_doc_id", "large")])
        asyncio.run(store.adelete_nodes(filters=odd))
        assert store.num_nodes == 1 + _MANY // 2
        asyncio.run(store.adelete("large"))
        assert texts(store.get_nodes()) == found(store, EAST) == ["kept"]

    def test_every_condition_together_restricts_a_query(self, compass: DocumentStore) -> None:
        late_or_hill = MetadataFilters(
            filters=[where("year", 2004), where("land", "hill")], condition=FilterCondition.OR
        )
        filters = MetadataFilters(filters=[late_or_hill, where("tags", ["snow", "night"], FilterOperator.ANY)])
        every = [node_id(name) for name in ("east", "northeast", "north", "west")]
        assert found(compass, EAST, filters=filters, node_ids=every, doc_ids=["b", "c"]) == ["north", "west"]
        assert found(compass, EAST, 1, filters=filters, node_ids=every, doc_ids=["c", "a"]) == ["west"]
        assert found(compass, EAST, filters=filters, node_ids=every[:2], doc_ids=["b", "c"]) == []

    def test_every_kind_of_relationship_is_kept(self, store: DocumentStore, place: Path) -> None:
        node = make_node("middle", EAST, "doc")
        for number, kind in enumerate(NodeRelationship):
            related = RelatedNodeInfo(node_id=node_id(f"{kind}"), hash=f"{number}", metadata={"n": [number, None]})
            node.relationships[kind] = [related, related] if kind == NodeRelationship.CHILD else related
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="doc", metadata={"title": "Größe"})
        store.replace_documents([node], [DocumentRecord("doc", "root", "1")])
        store = self._again(store, place)
        [back] = store.get_nodes([node_id("middle")])
        [nearest] = result(store, EAST).nodes or []
        assert back.relationships == nearest.relationships == node.relationships
        self.close_store(store)

    def test_of_a_node_that_is_added_twice_at_once_the_last_is_kept(self, compass: DocumentStore) -> None:
        newest = make_node("east", [0.0, -2.0, 0.0], "c")
        newest.text = "newest"
        compass.add([make_node("east", [0.0, -1.0, 0.0], "b"), newest])
        assert compass.num_nodes == 4
        [nearest] = result(compass, [0.0, -1.0, 0.0], 1).nodes or []
        assert (nearest.node_id, nearest.get_content(), nearest.ref_doc_id) == (node_id("east"), "newest", "c")
        assert found(compass, EAST, doc_ids=["a"]) == ["northeast"]

    def test_clear_removes_everything_and_allows_vectors_of_another_length(self, compass: DocumentStore) -> None:
        compass.clear()
        assert (compass.get_nodes(), compass.num_nodes, compass.documents()) == ([], 0, [])
        compass.add([make_node("new", [1.0, 0.0])])
        assert found(compass, [1.0, 0.0]) == ["new"]

    def test_documents_are_replaced_with_their_nodes(self, store: DocumentStore, place: Path) -> None:
        old = [make_node("a1", EAST, "a"), make_node("a2", NORTH, "a"), make_node("b1", WEST, "b")]
        store.replace_documents(old, [DocumentRecord("a", "root", "1"), DocumentRecord("b", "root", "1")])
        new = [make_node("a2", NORTH, "a", again=True), make_node("a3", EAST, "a")]
        store.replace_documents(new, [DocumentRecord("a", "root", "2")], removed=["b"])
        store = self._again(store, place)
        assert store.documents() == [DocumentRecord("a", "root", "2")]
        assert texts(store.get_nodes()) == ["a2", "a3"]
        assert found(store, EAST) == ["a3", "a2"]
        self.close_store(store)

    def test_deleting_a_document_removes_its_record(self, store: DocumentStore) -> None:
        records = [DocumentRecord("a", "root", "1"), DocumentRecord("b", "root", "1")]
        store.replace_documents([make_node("a1", EAST, "a"), make_node("b1", WEST, "b")], records)
        store.delete("a")
        assert store.documents() == [DocumentRecord("b", "root", "1")]
        assert found(store, EAST) == ["b1"]

    def test_tenants_with_equal_ids_are_separate(self, store: DocumentStore) -> None:
        ann, bob = store.for_tenant("ann"), store.for_tenant("bob 'n' \"co\"")
        for tenant, vector in ((ann, EAST), (bob, NORTH)):
            node = make_node("same id", vector, "same document", whose=tenant.tenant)
            tenant.replace_documents([node], [DocumentRecord("same document", "root", tenant.tenant)])
        assert [node.metadata["whose"] for node in ann.get_nodes()] == ["ann"]
        assert [node.metadata["whose"] for node in result(bob, EAST).nodes or ()] == [bob.tenant]
        assert bob.documents() == [DocumentRecord("same document", "root", bob.tenant)]
        assert texts(bob.get_nodes([node_id("same id")], doc_ids=["same document"])) == ["same id"]
        assert found(ann, EAST, node_ids=[node_id("same id")], doc_ids=["same document"]) == ["same id"]
        assert (store.num_nodes, found(store, EAST), store.documents()) == (0, [], [])
        ann.add([make_node("same id", WEST, "same document", whose="new")])
        bob.delete_nodes([node_id("other")])
        store.delete("same document")
        store.delete_nodes([node_id("same id")])
        assert [node.metadata["whose"] for node in ann.get_nodes()] == ["new"]
        assert [node.metadata["whose"] for node in bob.get_nodes()] == [bob.tenant]
        ann.delete("same document")
        store.clear()
        assert (ann.num_nodes, bob.num_nodes) == (0, 1)
        bob.clear()
        assert bob.num_nodes == 0

    def test_the_top_k_is_filled_from_the_tenants_own_nodes(self, store: DocumentStore) -> None:
        store.for_tenant("many").add([make_node(f"near{i}", [1.0, i / 1000, 0.0]) for i in range(50)])
        store.for_tenant("few").add([make_node("far", WEST)])
        assert found(store.for_tenant("few"), EAST, 3) == ["far"]

    def test_another_embedding_model_raises(self, store: DocumentStore, place: Path) -> None:
        self.close_store(store)
        model = LetterEmbedding(model_name="letters")
        store = self.make_store(place, embed_model=model)
        store.add([make_node("a", model.get_text_embedding("a heron"))])
        self.close_store(store)
        with pytest.raises(StoreMismatchError, match=r"'letters' \(26 numbers per vector\), not 'few' \(20\)"):
            self.make_store(place, embed_model=LetterEmbedding(model_name="few", letters=20))
        with pytest.raises(StoreMismatchError, match="'letters', and 'other' gives other vectors"):
            self.make_store(place, embed_model=LetterEmbedding(model_name="other", shift=1))
        store = self.make_store(place, embed_model=LetterEmbedding(model_name="some/folder"))
        assert store.num_nodes == 1
        self.close_store(store)

    def _again(self, store: DocumentStore, place: Path) -> DocumentStore:
        reopened = self.reopen(store, place)
        assert isinstance(reopened, DocumentStore)
        return reopened
