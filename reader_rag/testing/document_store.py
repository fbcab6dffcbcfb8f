"""`DocumentStoreContract`: what ingestion, questions and chats need of a store, besides the vector store's contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import ImageNode, IndexNode, TextNode
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


class LetterEmbedding(BaseEmbedding):
    """Counts letters: a model that is made at once. `shift` makes another model of the same size, `letters` a size."""

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
    """Inherit it where a `DocumentStore` is made; see `VectorStoreContract`."""

    dimension_error = StoreMismatchError
    connection_error = StoreError

    def make_store(self, place: Path, **options: Any) -> DocumentStore:
        """Open the store of a place.

        Args:
            place: As in `VectorStoreContract`.
            options: `embed_model` and `tenant`, for the store.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how a store is made: write make_store")

    def test_similarity_is_the_cosine(self, compass: DocumentStore) -> None:
        assert result(compass, [10.0, 0.0, 0.0]).similarities == pytest.approx([1.0, 2**-0.5, 0.0, -1.0], abs=1e-5)

    def test_a_cutoff_leaves_out_what_is_less_similar(self, compass: DocumentStore) -> None:
        query = VectorStoreQuery(query_embedding=EAST, similarity_top_k=10)
        assert texts(compass.query(query, similarity_cutoff=0.5).nodes) == ["east", "northeast"]
        compass.similarity_cutoff = -0.5
        assert texts(compass.query(query).nodes) == ["east", "northeast", "north"]

    @pytest.mark.parametrize(
        ("query", "message"),
        [
            (VectorStoreQuery(EAST, mode=VectorStoreQueryMode.HYBRID), "mode 'default' only, not 'hybrid'"),
            (VectorStoreQuery(None), "no query_embedding"),
            (VectorStoreQuery(EAST, similarity_top_k=0), "at least 1, not 0"),
            (VectorStoreQuery([float("nan"), 0.0, 0.0]), "NaN or infinity"),
        ],
        ids=["mode", "no vector", "top_k", "nan"],
    )
    def test_what_cannot_be_answered_is_said(
        self, compass: DocumentStore, query: VectorStoreQuery, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            compass.query(query)

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
    def test_filters_over_lists_texts_and_filters(
        self, compass: DocumentStore, filters: list[MetadataFilter | MetadataFilters], expected: list[str]
    ) -> None:
        assert found(compass, EAST, filters=MetadataFilters(filters=filters)) == expected
        assert texts(compass.get_nodes(filters=MetadataFilters(filters=filters))) == expected

    def test_empty_lists_of_ids_restrict_no_query(self, compass: DocumentStore) -> None:
        assert found(compass, EAST, 1, node_ids=[], doc_ids=[]) == ["east"]

    def test_nodes_come_back_as_they_went_in_and_in_that_order(self, store: DocumentStore, place: Path) -> None:
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

    def test_nodes_are_deleted_by_what_meets_every_condition(self, compass: DocumentStore) -> None:
        sea = MetadataFilters(filters=[where("land", "sea")])
        compass.delete_nodes([node_id("north"), node_id("west")], filters=sea)
        assert texts(compass.get_nodes()) == ["east", "northeast", "north"]
        with pytest.raises(ConfigError, match="use clear"):
            compass.delete_nodes()

    def test_clear_takes_everything_and_frees_the_store_for_other_vectors(self, compass: DocumentStore) -> None:
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

    def test_deleting_a_document_forgets_that_it_was_ingested(self, store: DocumentStore) -> None:
        records = [DocumentRecord("a", "root", "1"), DocumentRecord("b", "root", "1")]
        store.replace_documents([make_node("a1", EAST, "a"), make_node("b1", WEST, "b")], records)
        store.delete("a")
        assert store.documents() == [DocumentRecord("b", "root", "1")]
        assert found(store, EAST) == ["b1"]

    def test_tenants_share_nothing_but_the_place(self, store: DocumentStore) -> None:
        ann, bob = store.for_tenant("ann"), store.for_tenant("bob 'n' \"co\"")
        for tenant, vector in ((ann, EAST), (bob, NORTH)):
            node = make_node("same id", vector, "same document", whose=tenant.tenant)
            tenant.replace_documents([node], [DocumentRecord("same document", "root", tenant.tenant)])
        assert [node.metadata["whose"] for node in ann.get_nodes()] == ["ann"]
        assert [node.metadata["whose"] for node in result(bob, EAST).nodes or ()] == [bob.tenant]
        assert bob.documents() == [DocumentRecord("same document", "root", bob.tenant)]
        assert (store.num_nodes, found(store, EAST), store.documents()) == (0, [], [])
        ann.delete("same document")
        store.clear()
        assert (ann.num_nodes, bob.num_nodes) == (0, 1)
        bob.clear()
        assert bob.num_nodes == 0

    def test_another_tenants_nodes_do_not_eat_the_top_k(self, store: DocumentStore) -> None:
        store.for_tenant("many").add([make_node(f"near{i}", [1.0, i / 1000, 0.0]) for i in range(50)])
        store.for_tenant("few").add([make_node("far", WEST)])
        assert found(store.for_tenant("few"), EAST, 3) == ["far"]

    def test_another_embedding_model_is_refused(self, store: DocumentStore, place: Path) -> None:
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
