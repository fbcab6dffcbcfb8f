"""A search finds every match of the end of a text, the longest first, or an even sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datastore_tools import (
    SMALL,
    brute_force,
    continuations,
    found,
    open_store,
    search,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from reader_rag.datastore import Datastore, token_codec
from reader_rag.datastore.kernels import layout
from reader_rag.datastore.kernels.layout import MatchBuffers, SegmentTable
from reader_rag.datastore.kernels.search import STATE_ROWS, find_matches
from reader_rag.datastore.segment import Document, build_segment
from reader_rag.datastore.token_codec import TokenCodec

DOCUMENTS = {"a": [1, 2, 3, 4, 5], "b": [9, 2, 3, 6], "c": [3, 7, 3]}


@pytest.fixture(params=[60, 70_000, 1 << 24], ids=["16 bits", "24 bits", "32 bits"])
def vocabulary(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path / "s") as opened:
        yield opened


def test_the_longest_match_comes_first_then_shorter_ones_with_their_continuations(
    tmp_path: Path, vocabulary: int
) -> None:
    with open_store(tmp_path / "s", vocabulary) as store:
        for name, tokens in DOCUMENTS.items():
            store.add(name, tokens)
        cursor = search(store.searcher([""]), [8, 1, 2, 3])
        assert cursor.matches[1].tolist() == [3, 2, 1]
        assert continuations(cursor) == [[4, 5], [6], [7, 3]]
        assert [cursor.source_of(k).document for k in range(3)] == ["a", "b", "c"]
        assert [cursor.source_of(k).position for k in range(3)] == [3, 3, 1]
        assert (cursor.longest_match, cursor.longest_match_count) == (3, 1)


def test_the_end_of_a_document_is_no_match(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.add("a", [1, 2])
        store.add("b", [3, 4])
        searcher = store.searcher([""])
        assert search(searcher, [1]).found == 1
        assert search(searcher, [2]).found == 0  # 3 follows in another document
        assert search(searcher, [2, 3]).matches[1].tolist() == [1]


def test_continuations_end_with_the_document_or_after_max_tokens(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.add("a", [1, 10, 11, 12, 13])
        cursor = search(store.searcher([""]), [1], max_tokens=2)
        assert continuations(cursor) == [[10, 11]]
        assert cursor.continuations[:3].tolist() == [10, 11, -1]
        assert continuations(search(store.searcher([""]), [1], max_tokens=9)) == [[10, 11, 12, 13]]


def test_matches_are_compared_to_64_tokens(tmp_path: Path) -> None:
    text = [n % 7 + n % 5 for n in range(100)]
    with open_store(tmp_path / "s") as store:
        store.add("a", text)
        assert search(store.searcher([""]), text[:64]).longest_match == 64
        assert search(store.searcher([""]), text[:90]).longest_match == 64
        assert search(store.searcher([""]), text[:63]).longest_match == 63


def test_matches_below_the_minimum_length_are_left_out(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        for name, tokens in DOCUMENTS.items():
            store.add(name, tokens)
        searcher = store.searcher([""])
        assert search(searcher, [1, 2, 3], min_match=2).matches[1].tolist() == [3, 2]
        assert search(searcher, [1, 2, 3], min_match=4).found == 0


def test_tokens_that_no_document_has_match_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.add("a", [1, 2, 3])
        searcher = store.searcher([""])
        for strange in (50, 60, 65_535, 2**31 - 1, -1):
            assert search(searcher, [1, strange]).found == 0
            assert search(searcher, [strange, 1]).matches[1].tolist() == [1]
        assert search(searcher, []).found == 0


def test_a_sample_is_spread_evenly_over_all_segments(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", compaction=SMALL) as store:
        # The token before 59 decides their order: 50 places, in two parts.
        for start in (0, 25):
            store.add_many([(f"d{n}", [n, 59, n]) for n in range(start, start + 25)])
        cursor = search(store.searcher([""]), [58, 59], max_matches=5)
        assert cursor.matches[1].tolist() == [1] * 5
        assert [after for [after] in continuations(cursor)] == [5, 15, 25, 35, 45]
        assert cursor.longest_match_count == 50


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), max_size=12),
    st.sampled_from([4, 40, 1 << 16, 1 << 24]),
    st.sampled_from([0, 1000]),
)
def test_matches_are_those_of_brute_force(
    texts: list[list[int]], context: list[int], vocabulary: int, ranked: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_codec, "_RANKED", ranked)
        codec = TokenCodec.for_vocabulary(vocabulary)
        segment = build_segment(
            [Document(f"{n}", codec.encode(np.array(text, np.int64)), 0, 0, 0) for n, text in enumerate(texts)],
            codec,
            vocabulary,
        )
        expected = brute_force({f"{n}": text for n, text in enumerate(texts)}, context)
        assert len(segment.positions) == sum(max(len(text) - 1, 0) for text in texts)
        rows = np.zeros((int(len(segment.positions) > 0), layout.COLUMNS), np.int64)
        rows[:] = [
            *(segment.tokens.ctypes.data, segment.size, segment.positions.ctypes.data, len(segment.positions)),
            segment.bucket_starts.ctypes.data if len(segment.bucket_starts) else 0,
            *(len(segment.bucket_starts) - 1, 0, 0),
        ]
        buffers = MatchBuffers(np.zeros(256 * 6, np.int32), np.zeros((2, 256), np.int32), np.zeros((2, 256), np.int64))
        table = SegmentTable(rows, segment.tokens[:0], codec.separator, vocabulary)
        state = np.zeros((STATE_ROWS, 1), np.int64)
        number, longest, matches = find_matches(table, np.array([-1, *context], np.int32), 1, 5, state, buffers)
        lengths = [length for _, _, length in expected]
        assert (longest, matches) == (max(lengths, default=0), lengths.count(max(lengths, default=0)))
        got = []
        for k in range(number):
            position = int(buffers.origins[1, k])
            document = segment.document_at(position)
            position -= int(segment.starts[document])
            got.append((f"{document}", position, int(buffers.matches[1, k])))
            after = buffers.continuations[buffers.matches[0, k] :].tolist()
            assert after[: after.index(-1)] == texts[document][position : position + 5]
        assert sorted(got) == expected
        assert buffers.matches[1, :number].tolist() == sorted(lengths, reverse=True)


def test_a_damaged_suffix_array_causes_no_access_outside_the_text(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    with open_store(tmp_path / "s", vocabulary=4) as store:
        store.add_many([("a", random.integers(0, 4, 500))])
        searcher = store.searcher([""])
        assert search(searcher, [1, 2]).found > 0
        snapshot = searcher.snapshot()
        rows = snapshot.table[0]
        positions = random.integers(-(2**31), 2**31, len(snapshot.searchable[0][0].positions)).astype(np.int32)
        rows[0, layout.POSITIONS] = positions.ctypes.data
        bucket_starts = random.integers(-(2**31), 2**31, 5).astype(np.int32)
        for address in (rows[0, layout.BUCKET_STARTS], bucket_starts.ctypes.data):
            rows[0, layout.BUCKET_STARTS] = address
            for _ in range(50):
                found(search(searcher, random.integers(0, 4, 10).tolist()))


def test_a_document_is_found_among_thousands_of_removed_ones(store: Datastore) -> None:
    store.add_many([(f"d{n}", [1, 2, n % 60]) for n in range(3000)])
    for n in range(3000):
        if n != 1234:
            store.remove(f"d{n}")
    cursor = search(store.searcher([""]), [1, 2], max_matches=4)
    assert [cursor.source_of(k).document for k in range(cursor.found)] == ["d1234"]
    assert cursor.longest_match_count == 1


def test_no_removed_document_is_in_a_sample_of_thousands_of_matches(store: Datastore) -> None:
    store.add_many([(f"d{n}", [1, 2, n % 60]) for n in range(6000)])
    for n in range(0, 6000, 3):
        store.remove(f"d{n}")
    cursor = search(store.searcher([""]), [1, 2], max_matches=50)
    sources = [int(cursor.source_of(k).document[1:]) for k in range(cursor.found)]
    assert len(set(sources)) == cursor.found > 40
    assert all(n % 3 for n in sources)


def test_cursors_and_runs_out_of_range_are_refused(store: Datastore) -> None:
    searcher = store.searcher([""])
    with pytest.raises(ValueError, match="max_matches, max_tokens and min_match must be at least 1: 0, 24, 1"):
        searcher.cursor(max_matches=0)
    with pytest.raises(ValueError, match="occurrences are found of 1 to 64 tokens, not of 65"):
        searcher.occurrences([1] * 65)
    with pytest.raises(IndexError, match="no match 0 among 0"):
        searcher.cursor().source_of(0)
