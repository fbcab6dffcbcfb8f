"""`VectorStoreContract`: what a LlamaIndex vector store must do to be relied on, as a pytest class to inherit.

    from reader_rag.testing.vector_store import VectorStoreContract

    class TestMyStore(VectorStoreContract):
        def make_store(self, place):
            return MyStore(place / "data")

Every test gets an empty store. Two hooks may need more than they do by default: `close_store` and `break_connection`.
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
_MANY = 300  # more than the stores send to their databases at once
_AWKWARD = 'o\'brien & "sons" \\ 100% [naïve] \U0001f40d.txt'


def make_node(name: str, vector: Sequence[float], document: str | None = None, **metadata: Any) -> TextNode:
    """A node whose id is a UUID made of its name (some databases take no others) and whose text is the name."""
    node = TextNode(id_=node_id(name), text=name, embedding=list(vector), metadata=metadata)
    if document is not None:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    return node


def node_id(name: str) -> str:
    """The id that `make_node` gives."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, name))


def where(key: str, value: Any, operator: FilterOperator = FilterOperator.EQ) -> MetadataFilter:
    """A condition on metadata."""
    return MetadataFilter(key=key, value=value, operator=operator)


def result(
    store: BasePydanticVectorStore, vector: Sequence[float], top_k: int = 10, **conditions: Any
) -> VectorStoreQueryResult:
    """What a store answers to a query."""
    return store.query(VectorStoreQuery(query_embedding=list(vector), similarity_top_k=top_k, **conditions))


def found(store: BasePydanticVectorStore, vector: Sequence[float], top_k: int = 10, **conditions: Any) -> list[str]:
    """The texts that a query finds, nearest first."""
    return texts(result(store, vector, top_k, **conditions).nodes)


def texts(nodes: Sequence[BaseNode] | None) -> list[str]:
    """What the nodes say."""
    return [node.get_content() for node in nodes or ()]


class VectorStoreContract:
    """Inherit it in a class whose name begins with `Test`, and say how a store is made.

    Attributes:
        dimension_error: What vectors of another length raise; the narrower, the better it is tested.
        connection_error: What a lost connection raises.
    """

    dimension_error: type[Exception] = Exception
    connection_error: type[Exception] = Exception

    def make_store(self, place: Path) -> BasePydanticVectorStore:
        """Open the store of a place; it is empty when the place is new.

        Args:
            place: A folder of this test alone. A store on a server can name its collection after `place.name`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how a store is made: write make_store(place)")

    def close_store(self, store: BasePydanticVectorStore) -> None:
        """Let go of a store, as the end of its process would. By default its `close`, if it has one."""
        close = getattr(store, "close", None)
        if close is not None:
            close()

    def reopen(self, store: BasePydanticVectorStore, place: Path) -> BasePydanticVectorStore:
        """The store as a process that is started later opens it."""
        self.close_store(store)
        return self.make_store(place)

    def break_connection(self, store: BasePydanticVectorStore, place: Path) -> None:
        """Cut an open store off from its data, by whatever is nearest to a network or disk that fails.

        Afterwards `reopen` must bring it back. The test is skipped where this is not written.
        """
        pytest.skip(
            f"{type(self).__name__} does not say how a connection is lost: write break_connection(store, place)"
        )

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """A folder whose name no other test has."""
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

    def test_an_empty_store_answers_with_nothing(self, store: BasePydanticVectorStore) -> None:
        assert found(store, EAST) == []

    def test_add_gives_the_ids_and_what_was_added_is_found(self, store: BasePydanticVectorStore) -> None:
        node = make_node("text", EAST, "doc", number=7, share=0.25, flag=True, list=["x", "y"])
        node.text = "naïve \U0001f40d\n\t\"quoted\" 'text' \\ 100%"
        assert store.add([node]) == [node.node_id]
        answer = result(store, EAST)
        assert answer.ids == [node.node_id]
        [back] = answer.nodes or []
        assert back.get_content() == node.text
        assert (back.node_id, back.ref_doc_id) == (node.node_id, "doc")
        assert back.metadata == {"number": 7, "share": 0.25, "flag": True, "list": ["x", "y"]}

    def test_a_large_batch_is_added_whole(self, store: BasePydanticVectorStore) -> None:
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

    def test_top_k_bounds_the_result_and_is_filled(self, compass: BasePydanticVectorStore) -> None:
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
    def test_filters_choose_by_metadata(
        self, compass: BasePydanticVectorStore, condition: MetadataFilter, expected: list[str]
    ) -> None:
        assert found(compass, EAST, filters=MetadataFilters(filters=[condition])) == expected

    def test_conditions_are_joined_by_and_and_by_or(self, compass: BasePydanticVectorStore) -> None:
        sea, late = where("land", "sea"), where("year", 2003, FilterOperator.GTE)
        assert found(compass, EAST, filters=MetadataFilters(filters=[sea, late])) == ["west"]
        either = MetadataFilters(filters=[sea, late], condition=FilterCondition.OR)
        assert found(compass, EAST, filters=either) == ["east", "north", "west"]

    def test_a_filter_does_not_eat_the_top_k(self, store: BasePydanticVectorStore) -> None:
        near = [make_node(f"near{i}", [1.0, i / 1000, 0.0], kind="noise") for i in range(_MANY)]
        far = [make_node(f"far{i}", [-1.0, float(i), 0.0], kind="wanted") for i in range(3)]
        store.add([*near, *far])
        wanted = MetadataFilters(filters=[where("kind", "wanted")])
        assert found(store, EAST, 3, filters=wanted) == ["far2", "far1", "far0"]
        assert found(store, EAST, 2, filters=wanted) == ["far2", "far1"]

    def test_a_query_can_be_kept_to_documents_and_to_nodes(self, compass: BasePydanticVectorStore) -> None:
        assert found(compass, EAST, doc_ids=["b", "c", "unknown"]) == ["north", "west"]
        assert found(compass, EAST, 1, doc_ids=["c"]) == ["west"]
        assert found(compass, EAST, node_ids=[node_id("west"), node_id("east")]) == ["east", "west"]

    def test_adding_a_node_again_replaces_it(self, compass: BasePydanticVectorStore) -> None:
        moved = make_node("east", [0.0, -1.0, 0.0], "b", year=1999)
        moved.text = "moved"
        compass.add([moved])
        assert found(compass, EAST, 1) == ["northeast"]
        assert sorted(found(compass, EAST)) == ["moved", "north", "northeast", "west"]
        assert found(compass, [0.0, -1.0, 0.0], 1, filters=MetadataFilters(filters=[where("year", 1999)])) == ["moved"]
        assert found(compass, EAST, filters=MetadataFilters(filters=[where("year", 2001)])) == []

    def test_delete_takes_one_document_with_all_its_nodes(self, compass: BasePydanticVectorStore) -> None:
        compass.delete("a")
        compass.delete("unknown")
        assert found(compass, EAST) == ["north", "west"]

    def test_names_of_documents_may_hold_any_character(self, store: BasePydanticVectorStore) -> None:
        store.add([make_node("one", EAST, _AWKWARD, path=_AWKWARD), make_node("two", NORTH, "plain", path="plain")])
        assert found(store, EAST, doc_ids=[_AWKWARD]) == ["one"]
        assert found(store, EAST, filters=MetadataFilters(filters=[where("path", _AWKWARD)])) == ["one"]
        store.delete(_AWKWARD)
        assert found(store, EAST) == ["two"]

    def test_what_was_added_and_deleted_outlives_a_restart(self, compass: BasePydanticVectorStore, place: Path) -> None:
        compass.delete("b")
        store = self.reopen(compass, place)
        assert found(store, EAST) == ["east", "northeast", "west"]
        store.add([make_node("south", [0.0, -1.0, 0.0], "d")])
        store.delete("a")
        store = self.reopen(store, place)
        assert found(store, EAST) == ["south", "west"]
        self.close_store(store)

    def test_async_methods_do_the_same(self, store: BasePydanticVectorStore) -> None:
        async def use() -> list[list[str]]:
            await store.async_add([make_node("a", EAST, "x"), make_node("b", NORTH, "y")])
            query = VectorStoreQuery(query_embedding=EAST, similarity_top_k=5)
            before = await asyncio.gather(*(store.aquery(query) for _ in range(4)))
            await store.adelete("x")
            return [texts(answer.nodes) for answer in (*before, await store.aquery(query))]

        assert asyncio.run(use()) == [["a", "b"]] * 4 + [["b"]]

    def test_threads_can_add_delete_and_ask_at_once(self, store: BasePydanticVectorStore) -> None:
        store.add([make_node("fixed", EAST)])
        failures: list[BaseException] = []

        def work(name: int) -> None:
            try:
                for i in range(5):
                    store.add([make_node(f"{name}-{i}", NORTH, f"doc{name}")])
                    assert found(store, EAST, 1) == ["fixed"]
                mine = found(store, EAST, 50, doc_ids=[f"doc{name}"])
                assert sorted(mine) == [f"{name}-{i}" for i in range(5)]
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

    def test_vectors_of_another_length_are_refused_and_change_nothing(self, compass: BasePydanticVectorStore) -> None:
        with pytest.raises(self.dimension_error):
            compass.add([make_node("short", [1.0, 0.0])])
        with pytest.raises(self.dimension_error):
            found(compass, [1.0, 0.0])
        assert found(compass, EAST) == ["east", "northeast", "north", "west"]

    def test_a_lost_connection_is_an_error_and_loses_nothing(
        self, compass: BasePydanticVectorStore, place: Path
    ) -> None:
        self.break_connection(compass, place)
        with pytest.raises(self.connection_error) as asking:
            found(compass, EAST)
        with pytest.raises(self.connection_error) as adding:
            compass.add([make_node("lost", EAST)])
        assert "\n" not in str(asking.value) + str(adding.value)
        store = self.reopen(compass, place)
        assert found(store, EAST) == ["east", "northeast", "north", "west"]
        self.close_store(store)
