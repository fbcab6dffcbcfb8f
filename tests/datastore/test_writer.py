"""Removed documents leave the disk, and bounded namespaces evict documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datastore_tools import (
    FailingFiles,
    bytes_on_disk,
    contents,
    open_store,
)

from reader_rag.datastore import Datastore


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path / "s") as opened:
        yield opened


def test_a_removed_documents_tokens_leave_the_disk(store: Datastore) -> None:
    secret, other = list(range(10, 30)), list(range(30, 50))
    encoded = np.array(secret, "<u2").tobytes()
    for many in (False, True):
        if many:
            store.add_many([("secret", secret), ("other", other)])
        else:
            store.add("secret", secret)
        store.commit()
        assert encoded in bytes_on_disk(store.folder)
        assert store.remove("secret")
        store.compact()
        assert encoded not in bytes_on_disk(store.folder)
        assert store.searcher([""]).count(secret[:3]) == 0
    assert contents(store) == {"other": other}


def test_a_replaced_documents_old_tokens_leave_the_disk(store: Datastore) -> None:
    encoded = np.arange(10, 30).astype("<u2").tobytes()
    store.add("a", range(10, 30))
    store.commit()
    store.add("a", [5, 6])
    store.compact()
    assert encoded not in bytes_on_disk(store.folder)
    assert contents(store) == {"a": [5, 6]}


def test_the_least_recently_used_documents_are_evicted(tmp_path: Path) -> None:
    now = [0.0]
    with open_store(tmp_path / "s", clock=lambda: now[0]) as store:
        store.limit("answers", max_tokens=30)
        for n in range(3):
            now[0] += 1
            store.add(f"d{n}", [n] * 10, namespace="answers")
        store.commit()
        assert sorted(store.documents(namespace="answers")) == ["d0", "d1", "d2"]
        now[0] += 1
        store.mark_used(["d0", "gone"], namespace="answers")
        store.add("d3", [3] * 10, namespace="answers")
        store.commit()
        assert sorted(store.documents(namespace="answers")) == ["d0", "d2", "d3"]
        now[0] += 1
        store.mark_used(["d2"], namespace="answers")
    with open_store(tmp_path / "s", clock=lambda: now[0]) as store:  # uses outlast the process
        store.compact(full=True)
        store.add("d4", [4] * 20, namespace="answers")
        store.commit()
        assert sorted(store.documents(namespace="answers")) == ["d2", "d4"]


def test_uses_of_many_documents_do_not_begin_a_new_log_at_each_commit(tmp_path: Path) -> None:
    files, now = FailingFiles(), [0.0]
    with open_store(tmp_path / "s", files=files, clock=lambda: now[0]) as store:
        store.limit("", max_tokens=10_000)
        store.add_many([(f"d{n}" + "x" * 50, [n % 60, 1]) for n in range(40)])
        for _ in range(10):
            now[0] += 1
            store.mark_used(store.documents())
            store.commit()
        # Each commit writes 40 uses of 60 bytes, and a log may grow by 960 bytes: each time the uses are in the next.
        assert files.log.count("rename") < 20
        before = files.log.count("rename")
        for n in range(5):
            store.add(f"e{n}", [1, 2])
            store.commit()
        assert files.log.count("rename") == before


def test_documents_above_the_maximum_age_are_evicted(tmp_path: Path) -> None:
    now = [100.0]
    with open_store(tmp_path / "s", clock=lambda: now[0]) as store:
        store.limit("", max_age_s=50)
        store.add("old", [1] * 70)
        store.commit()  # a segment
        now[0] = 140
        store.add("new", [2, 2])
        store.mark_used(["old"])
        store.commit()
        assert store.documents() == ["old", "new"]
        now[0] = 151
        store.commit()
        assert store.documents() == ["new"]
