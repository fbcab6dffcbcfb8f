"""`VectorStoreContract`: the behaviour required of a LlamaIndex vector store, as a pytest class to inherit.

    from reader_rag.testing.vector_store import VectorStoreContract

    class TestMyStore(VectorStoreContract):
        def make_store(self, place):
            return MyStore(place / "data")

Every test gets an empty store. Override `close_store` and `break_connection` where their defaults do not suffice.
"""

from __future__ import annotations

import asyncio
import math
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.schema import BaseNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

EAST, NORTHEAST, NORTH, WEST = [1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]
_MANY = 300  # more nodes than the stores send to their databases in one request
_AWKWARD = 'o\'brien & "sons" \\ 100% [naïve] \U0001f40d.txt'


def make_node(name: str, vector: Sequence[float], document: str | None = None, **metadata: Any) -> TextNode:
    """Make a node whose text is its name and whose id is a UUID of the name (some databases allow no other ids).

    Args:
        name: Name of the node.
        vector: Its embedding.
        document: Its `ref_doc_id`; None: no document.
        metadata: Its metadata.
    """
    node = TextNode(id_=node_id(name), text=name, embedding=list(vector), metadata=metadata)
    if document is not None:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    return node


def node_id(name: str) -> str:
    """The id of the node that `make_node` makes for a name."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, name))


def where(key: str, value: Any, operator: FilterOperator = FilterOperator.EQ) -> MetadataFilter:
    """Make a condition on metadata."""
    return MetadataFilter(key=key, value=value, operator=operator)


def result(
    store: BasePydanticVectorStore, vector: Sequence[float], top_k: int = 10, **conditions: Any
) -> VectorStoreQueryResult:
    """Query a store.

    Args:
        store: The store.
        vector: The query's embedding.
        top_k: Most results.
        conditions: Other fields of the query, e.g. `filters`.
    """
    return store.query(VectorStoreQuery(query_embedding=list(vector), similarity_top_k=top_k, **conditions))


def found(store: BasePydanticVectorStore, vector: Sequence[float], top_k: int = 10, **conditions: Any) -> list[str]:
    """Query a store as `result` does, and return the texts of the nodes, nearest first."""
    return texts(result(store, vector, top_k, **conditions).nodes)


def texts(nodes: Sequence[BaseNode] | None) -> list[str]:
    """The texts of nodes."""
    return [node.get_content() for node in nodes or ()]


class VectorStoreContract:
    """Base class for the tests of a vector store; a subclass named `Test...` defines `make_store`.

    Attributes:
        dimension_error: Exception for vectors of another length than the store's.
        connection_error: Exception for a lost connection.
    """

    dimension_error: type[Exception] = Exception
    connection_error: type[Exception] = Exception

    def make_store(self, place: Path) -> BasePydanticVectorStore:
        """Open the store that belongs to a folder; it is empty when the folder is new.

        Args:
            place: A folder of this test only. A store on a server can name its collection after `place.name`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define make_store(place)")

    def close_store(self, store: BasePydanticVectorStore) -> None:
        """Close a store, as the end of its process would. By default calls its `close`, if it has one."""
        close = getattr(store, "close", None)
        if close is not None:
            close()

    def reopen(self, store: BasePydanticVectorStore, place: Path) -> BasePydanticVectorStore:
        """Close a store and open it again, as a process that starts later would."""
        self.close_store(store)
        return self.make_store(place)

    def break_connection(self, store: BasePydanticVectorStore, place: Path) -> None:
        """Disconnect an open store from its data, as a failing network or disk would; `reopen` must restore it.

        The test is skipped where this is not defined.
        """
        pytest.skip(f"{type(self).__name__} does not define break_connection(store, place)")

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """A folder with a unique name."""
        place = tmp_path / f"store_{uuid.uuid4().hex[:12]}"
        place.mkdir()
        return place

    @pytest.fixture
    def store(self, place: Path) -> Iterator[BasePydanticVectorStore]:
        """An empty store."""
        store = self.make_store(place)
        yield store
        self.close_store(store)

    @pytest.fixture
    def compass(self, store: BasePydanticVectorStore) -> BasePydanticVectorStore:
        """Four nodes of three documents."""
        store.add(
            [
                make_node("east", [2.0, 0.0, 0.0], "a", year=2001, land="sea", tags=["sun", "day"]),
                make_node("northeast", [0.5, 0.5, 0.0], "a", year=2002, land="plain", tags=["sun"]),
                make_node("north", [0.0, 3.0, 0.0], "b", year=2003, land="hill", tags=["snow"]),
                make_node("west", [-1.0, 0.0, 0.0], "c", year=2004, land="sea", tags=["night"]),
            ]
        )
        return store

    def test_an_empty_store_returns_no_nodes(self, store: BasePydanticVectorStore) -> None:
        assert found(store, EAST) == []

    def test_add_returns_the_ids_and_queries_return_the_nodes(self, store: BasePydanticVectorStore) -> None:
        node = make_node("text", EAST, "doc", number=7, share=0.25, flag=True, list=["x", "y"])
        node.text = "naïve \U0001f40d\n\t\"quoted\" 'text' \\ 100%"
        assert store.add([node]) == [node.node_id]
        answer = result(store, EAST)
        assert answer.ids == [node.node_id]
        [back] = answer.nodes or []
        assert back.get_content() == node.text
        assert (back.node_id, back.ref_doc_id) == (node.node_id, "doc")
        assert back.metadata == {"number": 7, "share": 0.25, "flag": True, "list": ["x", "y"]}

    def test_a_large_batch_is_added_completely(self, store: BasePydanticVectorStore) -> None:
        nodes = [make_node(f"n{i}", [math.cos(i / 100), math.sin(i / 100), 0.0]) for i in range(_MANY)]
        assert store.add(nodes) == [node.node_id for node in nodes]
        assert sorted(found(store, EAST, _MANY + 1)) == sorted(texts(nodes))

    def test_adding_nothing_changes_nothing(self, compass: BasePydanticVectorStore) -> None:
        assert compass.add([]) == []
        assert len(found(compass, EAST)) == 4

    def test_the_nearest_comes_first_and_is_the_most_similar(self, compass: BasePydanticVectorStore) -> None:
        answer = result(compass, [10.0, 0.0, 0.0])
        assert texts(answer.nodes) == ["east", "northeast", "north", "west"]
        assert answer.ids == [node_id(name) for name in texts(answer.nodes)]
        similarities = answer.similarities or []
        assert len(similarities) == 4
        assert similarities == sorted(similarities, reverse=True)
        assert similarities[0] > similarities[-1]

    def test_top_k_limits_the_result_and_is_filled(self, compass: BasePydanticVectorStore) -> None:
        assert found(compass, EAST, 1) == ["east"]
        assert found(compass, EAST, 3) == ["east", "northeast", "north"]
        assert found(compass, EAST, 50) == ["east", "northeast", "north", "west"]

    @pytest.mark.parametrize(
        ("condition", "expected"),
        [
            (where("year", 2003), ["north"]),
            (where("land", "sea"), ["east", "west"]),
            (where("year", 2003, FilterOperator.NE), ["east", "northeast", "west"]),
            (where("year", 2002, FilterOperator.GT), ["north", "west"]),
            (where("year", 2002, FilterOperator.GTE), ["northeast", "north", "west"]),
            (where("year", 2003, FilterOperator.LT), ["east", "northeast"]),
            (where("year", 2001, FilterOperator.LTE), ["east"]),
            (where("land", ["hill", "plain", "moon"], FilterOperator.IN), ["northeast", "north"]),
            (where("land", ["hill", "plain"], FilterOperator.NIN), ["east", "west"]),
            (where("nothing", 1), []),
        ],
        ids=lambda value: f"{value.key} {value.operator.value}" if isinstance(value, MetadataFilter) else "",
    )
    def test_filters_select_by_metadata(
        self, compass: BasePydanticVectorStore, condition: MetadataFilter, expected: list[str]
    ) -> None:
        assert found(compass, EAST, filters=MetadataFilters(filters=[condition])) == expected

    def test_conditions_combine_by_and_and_by_or(self, compass: BasePydanticVectorStore) -> None:
        sea, late = where("land", "sea"), where("year", 2003, FilterOperator.GTE)
        assert found(compass, EAST, filters=MetadataFilters(filters=[sea, late])) == ["west"]
        either = MetadataFilters(filters=[sea, late], condition=FilterCondition.OR)
        assert found(compass, EAST, filters=either) == ["east", "north", "west"]
        assert found(compass, EAST, filters=MetadataFilters(filters=[])) == ["east", "northeast", "north", "west"]

    def test_filters_apply_before_the_top_k(self, store: BasePydanticVectorStore) -> None:
        near = [make_node(f"near{i}", [1.0, i / 1000, 0.0], kind="noise") for i in range(_MANY)]
        far = [make_node(f"far{i}", [-1.0, float(i), 0.0], kind="wanted") for i in range(3)]
        store.add([*near, *far])
        wanted = MetadataFilters(filters=[where("kind", "wanted")])
        assert found(store, EAST, 3, filters=wanted) == ["far2", "far1", "far0"]
        assert found(store, EAST, 2, filters=wanted) == ["far2", "far1"]

    def test_a_query_can_be_limited_to_documents_and_nodes(self, compass: BasePydanticVectorStore) -> None:
        assert found(compass, EAST, doc_ids=["b", "c", "unknown"]) == ["north", "west"]
        assert found(compass, EAST, 1, doc_ids=["c"]) == ["west"]
        assert found(compass, EAST, node_ids=[node_id("west"), node_id("east"), node_id("none")]) == ["east", "west"]

    def test_documents_nodes_and_filters_together_restrict_a_query(self, compass: BasePydanticVectorStore) -> None:
        east_and_west = [node_id("east"), node_id("west")]
        assert found(compass, EAST, doc_ids=["a"], node_ids=east_and_west) == ["east"]
        sea = MetadataFilters(filters=[where("land", "sea")])
        assert found(compass, EAST, doc_ids=["b", "c"], filters=sea) == ["west"]
        assert found(compass, EAST, doc_ids=["a"], node_ids=[node_id("northeast")], filters=sea) == []

    def test_relationships_of_a_node_are_kept(self, store: BasePydanticVectorStore, place: Path) -> None:
        node = make_node("middle", EAST, "doc")
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="doc", metadata={"title": "Compass"})
        node.relationships[NodeRelationship.PREVIOUS] = RelatedNodeInfo(node_id=node_id("first"))
        node.relationships[NodeRelationship.NEXT] = RelatedNodeInfo(node_id=node_id("last"), metadata={"page": 2})
        store.add([node])
        store = self.reopen(store, place)
        [back] = result(store, EAST).nodes or []
        assert back.ref_doc_id == "doc"
        assert back.relationships == node.relationships
        self.close_store(store)

    def test_adding_a_node_again_replaces_it(self, compass: BasePydanticVectorStore) -> None:
        moved = make_node("east", [0.0, -1.0, 0.0], "b", year=1999)
        moved.text = "moved"
        compass.add([moved])
        assert found(compass, EAST, 1) == ["northeast"]
        assert sorted(found(compass, EAST)) == ["moved", "north", "northeast", "west"]
        assert found(compass, [0.0, -1.0, 0.0], 1, filters=MetadataFilters(filters=[where("year", 1999)])) == ["moved"]
        assert found(compass, EAST, filters=MetadataFilters(filters=[where("year", 2001)])) == []

    def test_delete_removes_one_document_with_all_its_nodes(self, compass: BasePydanticVectorStore) -> None:
        compass.delete("a")
        compass.delete("unknown")
        assert found(compass, EAST) == ["north", "west"]

    def test_names_of_documents_may_hold_any_character(self, store: BasePydanticVectorStore) -> None:
        store.add([make_node("one", EAST, _AWKWARD, path=_AWKWARD), make_node("two", NORTH, "plain", path="plain")])
        assert found(store, EAST, doc_ids=[_AWKWARD]) == ["one"]
        assert found(store, EAST, filters=MetadataFilters(filters=[where("path", _AWKWARD)])) == ["one"]
        store.delete(_AWKWARD)
        assert found(store, EAST) == ["two"]

    def test_additions_and_deletions_persist_over_a_restart(
        self, compass: BasePydanticVectorStore, place: Path
    ) -> None:
        compass.delete("b")
        store = self.reopen(compass, place)
        assert found(store, EAST) == ["east", "northeast", "west"]
        store.add([make_node("south", [0.0, -1.0, 0.0], "d")])
        store.delete("a")
        store = self.reopen(store, place)
        assert found(store, EAST) == ["south", "west"]
        self.close_store(store)

    def test_async_methods_add_query_and_delete(self, store: BasePydanticVectorStore) -> None:
        async def use() -> list[list[str]]:
            await store.async_add([make_node("a", EAST, "x"), make_node("b", NORTH, "y")])
            query = VectorStoreQuery(query_embedding=EAST, similarity_top_k=5)
            before = await asyncio.gather(*(store.aquery(query) for _ in range(4)))
            await store.adelete("x")
            return [texts(answer.nodes) for answer in (*before, await store.aquery(query))]

        assert asyncio.run(use()) == [["a", "b"]] * 4 + [["b"]]

    def test_threads_can_add_delete_and_query_at_once(self, store: BasePydanticVectorStore) -> None:
        store.add([make_node("fixed", EAST)])
        failures: list[BaseException] = []

        def work(name: int) -> None:
            try:
                for i in range(5):
                    store.add([make_node(f"{name}-{i}", NORTH, f"doc{name}")])
                    assert found(store, EAST, 1) == ["fixed"]
                own = found(store, EAST, 50, doc_ids=[f"doc{name}"])
                assert sorted(own) == [f"{name}-{i}" for i in range(5)]
                store.delete(f"doc{name}")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert found(store, EAST, 50) == ["fixed"]

    def test_vectors_of_another_length_raise_and_change_nothing(self, compass: BasePydanticVectorStore) -> None:
        with pytest.raises(self.dimension_error):
            compass.add([make_node("short", [1.0, 0.0])])
        with pytest.raises(self.dimension_error):
            found(compass, [1.0, 0.0])
        assert found(compass, EAST) == ["east", "northeast", "north", "west"]

    def test_a_lost_connection_raises_and_loses_nothing(self, compass: BasePydanticVectorStore, place: Path) -> None:
        self.break_connection(compass, place)
        with pytest.raises(self.connection_error) as querying:
            found(compass, EAST)
        with pytest.raises(self.connection_error) as adding:
            compass.add([make_node("lost", EAST)])
        assert "\n" not in str(querying.value) + str(adding.value)
        store = self.reopen(compass, place)
        assert found(store, EAST) == ["east", "northeast", "north", "west"]
        self.close_store(store)
