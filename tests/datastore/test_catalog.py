"""Each request searches its own namespaces and the shared ones; folders of other kinds are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datastore_tools import (
    bytes_on_disk,
    contents,
    continuations,
    open_store,
    search,
)

from reader_rag.datastore import Datastore
from reader_rag.errors import (
    DatastoreBusyError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path / "s") as opened:
        yield opened


def test_a_second_writer_is_refused(store: Datastore) -> None:
    with pytest.raises(DatastoreBusyError, match="another process writes to the datastore .*read_only=True"):
        open_store(store.folder)
    store.close()
    open_store(store.folder).close()


def test_a_reader_sees_namespaces_that_are_made_and_removed(store: Datastore) -> None:
    with open_store(store.folder, read_only=True) as reader:
        searcher = reader.searcher(["x"])
        store.add("a", [1, 2, 3], namespace="x")
        store.commit()
        reader.refresh()
        assert searcher.count([1]) == 1
        store.remove_namespace("x")
        reader.refresh()
        assert searcher.count([1]) == 0


def test_a_removed_namespace_leaves_the_disk_at_once(store: Datastore) -> None:
    encoded = np.arange(10, 30).astype("<u2").tobytes()
    store.add("a", range(10, 30), namespace="x")
    store.commit()
    searcher = store.searcher(["x"])
    assert searcher.count([10]) == 1
    assert store.remove_namespace("x")
    assert searcher.count([10]) == 0
    assert encoded not in bytes_on_disk(store.folder)
    assert store.namespaces() == []
    assert not store.remove_namespace("x")
    store.add("a", [1, 2, 3], namespace="x")
    assert searcher.count([1]) == 1


def test_a_request_searches_its_own_and_shared_namespaces_and_no_others(store: Datastore) -> None:
    for name, token in (("ann", 10), ("bob", 20), ("all", 30)):
        store.add("doc", [1, 2, token], namespace=name)
    store.share("all")
    after = {
        names: sorted(continuations(search(store.searcher(list(names)), [1, 2])))
        for names in ((), ("ann",), ("bob",), ("ann", "bob"), ("nobody",), ("all", "all"))
    }
    assert after == {
        (): [[30]],
        ("ann",): [[10], [30]],
        ("bob",): [[20], [30]],
        ("ann", "bob"): [[10], [20], [30]],
        ("nobody",): [[30]],
        ("all", "all"): [[30]],
    }
    assert store.searcher(["ann"], shared=False).count([1, 2]) == 1
    store.share("all", False)
    assert store.searcher([]).count([1, 2]) == 0


def test_shared_namespaces_are_shared_after_opening_again(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.add("doc", [1, 2, 3], namespace="all")
        store.share("all")
    with open_store(tmp_path / "s") as store, open_store(tmp_path / "s", read_only=True) as reader:
        assert store.searcher([]).count([1]) == reader.searcher([]).count([1]) == 1
        searcher = reader.searcher([])
        store.share("all", False)
        reader.refresh()
        assert searcher.count([1]) == 0


def test_a_namespace_may_have_any_name(store: Datastore) -> None:
    names = ["", "..", "a/b", "über\n", "x" * 500]
    for n, name in enumerate(names):
        store.add("doc", [n, n, n], namespace=name)
    store.commit()
    assert sorted(store.namespaces()) == sorted(names)
    assert contents(store, "a/b") == {"doc": [2, 2, 2]}
    assert sorted(path.name for path in store.folder.parent.iterdir()) == ["s"]


def test_another_tokenizer_or_vocabulary_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.add("a", [1, 2, 3])
    before = bytes_on_disk(tmp_path)
    for read_only in (False, True):
        with pytest.raises(DatastoreMismatchError, match="made with tokenizer 't', not 'u': open it with the model"):
            open_store(tmp_path / "s", tokenizer="u", read_only=read_only)
        with pytest.raises(DatastoreMismatchError, match="made with vocabulary 60, not 61"):
            open_store(tmp_path / "s", 61, read_only=read_only)
    assert bytes_on_disk(tmp_path) == before
    with open_store(tmp_path / "s") as store:
        assert contents(store) == {"a": [1, 2, 3]}


def test_a_folder_that_is_no_datastore_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatastoreNotFoundError, match="no datastore at .*: add documents to it first"):
        open_store(tmp_path / "s", read_only=True)
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(DatastoreNotFoundError, match="holds other files: name an empty or a new folder"):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
