"""The memtable finds documents at once, in few sorted runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from reader_rag.datastore.memtable import Memtable, SegmentState
from reader_rag.datastore.segment import Document, build_segment
from reader_rag.datastore.token_codec import Identity

IDENTITY = Identity("t", 60)


def document(name: str, tokens: list[int], used_at: int = 0) -> Document:
    return Document(name, IDENTITY.codec.encode(np.array(tokens)), 0, 0, used_at)


def test_documents_are_sorted_in_runs_whose_sizes_fall_by_half() -> None:
    memtable = Memtable(IDENTITY)
    for n in range(100):
        memtable.add([document(f"d{n}", [n % 60, 1, 2])])
    sizes = [run.segment.size for run in memtable.runs]
    assert len(sizes) <= 7
    assert all(before >= 2 * (after - 1) for before, after in pairwise(sizes))
    assert sorted(name for run in memtable.runs for name in run.segment.names) == sorted(memtable.documents)
    assert memtable.tokens == 300


def test_a_removed_document_leaves_the_runs() -> None:
    memtable = Memtable(IDENTITY)
    memtable.add([document("a", [1, 2]), document("b", [3])])
    assert memtable.remove("a")
    assert not memtable.remove("a")
    assert memtable.tokens == 1
    assert [run.find("a") for run in memtable.runs] == [-1]
    assert memtable.remove("b")
    assert memtable.runs == []


def test_a_merged_segment_inherits_what_happened_to_its_inputs() -> None:
    def segment(*names: str) -> SegmentState:
        documents = [document(name, [1, 2], used_at=5) for name in names]
        return SegmentState(build_segment(documents, IDENTITY.codec, IDENTITY.vocabulary))

    left, right, merged = segment("a", "b", "c"), segment("d", "e"), segment("a", "c", "d", "e")
    before = np.array(right.used_at)
    left.tombstones = {1, 2}
    left.committed_tombstones = {1, 2}
    left.tombstones_since = 8.0
    right.tombstones = {0}
    right.mark_used(1, 9)
    merged.inherit(left, np.array([True, False, True]), np.array(left.used_at), 0)
    merged.inherit(right, np.array([True, True]), before, 2)
    assert merged.tombstones == {1, 2}
    assert merged.committed_tombstones == {1}
    assert merged.tombstones_since == 8.0
    assert merged.used_at.tolist() == [5, 5, 5, 9]
