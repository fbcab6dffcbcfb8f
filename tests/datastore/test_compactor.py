"""Segments are merged by size and rewritten when documents were removed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datastore_tools import (
    SMALL,
    FailingFiles,
    contents,
    open_store,
)
from waiting import wait_until

from reader_rag.datastore import CompactionConfig
from reader_rag.datastore.compactor import choose_segments
from reader_rag.datastore.memtable import SegmentState
from reader_rag.datastore.segment import Document, build_segment
from reader_rag.datastore.token_codec import TokenCodec
from reader_rag.errors import (
    ConfigError,
)


def test_a_segment_is_rewritten_when_removals_are_old_or_many(tmp_path: Path) -> None:
    now = [0.0]
    config = CompactionConfig(memtable_tokens=60, max_removed_share=0.4, max_removed_age_s=100, background=False)
    with open_store(tmp_path / "s", compaction=config, clock=lambda: now[0]) as store:
        store.add_many([(f"d{n}", [n, n, n]) for n in range(10)])
        writer: Any = store._catalog.writer("")
        store.remove("d0")
        assert writer.seconds_until_due() is None  # not committed
        store.commit()
        assert writer.seconds_until_due() == 100
        now[0] = 99
        writer.compact()
        assert store.stats()[""].removed_tokens == 3
        now[0] = 100
        writer.compact()
        assert store.stats()[""].removed_tokens == 0
        for n in range(1, 6):
            store.remove(f"d{n}")
        store.commit()
        assert writer.seconds_until_due() == 0
        writer.compact()
        assert store.stats()[""].removed_tokens == 0


def test_merging_keeps_segments_few_and_writes_each_token_a_few_times(tmp_path: Path) -> None:
    files = FailingFiles()
    with open_store(tmp_path / "s", files=files) as store:
        for n in range(400):
            store.add(f"d{n}", [n % 50, n % 7, n % 3, n % 11, n % 13] * 2)
            store.commit()
            store._catalog.writer("").compact()  # type: ignore[attr-defined]
        stats = store.stats()[""]
        # 66 segments of 60 tokens: at most two of each of the sizes 60, 180, 540, 1620.
        assert stats.segments <= 8
        assert stats.tokens == 4000
        assert files.written < 400 * 10 * 6 * 6 + 400 * 1200
        store.compact(full=True)
        assert store.stats()[""].segments == 1
        assert len(contents(store)) == 400


def test_segments_are_merged_in_the_background(tmp_path: Path) -> None:
    config = CompactionConfig(memtable_tokens=60, merge_factor=3)
    with open_store(tmp_path / "s", compaction=config) as store:
        for n in range(100):
            store.add(f"d{n}", [n % 50, n % 7, n % 3, n % 11, n % 13] * 2)
            store.commit()
        store.compact(wait=False)
        wait_until(lambda: store.stats()[""].segments <= 8, "the merge")
    with open_store(tmp_path / "s") as store:
        assert len(contents(store)) == 100


def segment_of(documents: int, length: int, removed: Iterable[int] = (), since: float | None = None) -> SegmentState:
    """A segment of documents of one length, some of them removed."""
    codec = TokenCodec(2)
    stored = codec.encode(np.ones(length, np.int64))
    state = SegmentState(build_segment([Document(f"{n}", stored, 0, 0, 0) for n in range(documents)], codec, 10))
    state.tombstones = state.committed_tombstones = set(removed)
    state.tombstones_since = since
    return state


CONFIG = CompactionConfig(memtable_tokens=10, merge_factor=3, max_segment_tokens=1000, max_removed_age_s=100)


def test_so_many_segments_of_one_size_are_merged_as_the_merge_factor_says() -> None:
    small, large = [segment_of(2, 5) for _ in range(3)], segment_of(20, 5)
    assert choose_segments(small[:2], CONFIG, 0) == []
    assert choose_segments([*small[:2], large], CONFIG, 0) == []
    assert choose_segments([*small, large], CONFIG, 0) == small


def test_segments_that_would_be_too_large_together_are_not_merged() -> None:
    config = CompactionConfig(memtable_tokens=10, merge_factor=2, max_segment_tokens=30)
    a, b, c = (segment_of(2, 5) for _ in range(3))
    assert choose_segments([a, b, c], config, 0) == [a, b]
    assert choose_segments([segment_of(3, 5), segment_of(3, 5)], config, 0) == []


def test_a_full_compaction_merges_segments_of_all_sizes() -> None:
    small, large = segment_of(2, 5), segment_of(20, 5)
    assert choose_segments([large, small], CONFIG, 0, full=True) == [small, large]
    assert choose_segments([large], CONFIG, 0, full=True) == []


def test_a_segment_is_due_by_the_share_and_the_age_of_its_removed_documents() -> None:
    few = segment_of(20, 5, removed=[3], since=50)
    assert choose_segments([few], CONFIG, 149) == []
    assert choose_segments([few], CONFIG, 150) == [few]
    assert choose_segments([few], CONFIG, 0, force=True) == [few]
    many = segment_of(20, 5, removed=range(4), since=50)
    assert choose_segments([many], CONFIG, 50) == [many]
    few.committed_tombstones = set()
    assert choose_segments([few], CONFIG, 150, force=True) == []


def test_configurations_out_of_range_are_refused() -> None:
    for wrong in ({"memtable_tokens": 0}, {"merge_factor": 1}, {"max_segment_tokens": 1}, {"max_removed_share": 2.0}):
        with pytest.raises(ConfigError):
            CompactionConfig(**wrong)
    assert SMALL.memtable_tokens == 60
