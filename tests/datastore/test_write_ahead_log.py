"""A log returns the changes of whole frames, and reports damaged ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reader_rag.datastore.segment import Document
from reader_rag.datastore.token_codec import Identity
from reader_rag.datastore.write_ahead_log import (
    RECORD_AT,
    Added,
    Change,
    Removed,
    Used,
    encode_change,
    frame,
    new_log,
    read_log,
)
from reader_rag.errors import DatastoreCorruptError, DatastoreMismatchError

IDENTITY = Identity("t", 70_000)
EMPTY, COMMITTED = new_log(IDENTITY)
COMMITS: list[list[Change]] = [[Removed("ä"), Used("b", 7)], [Removed("c")], [Used("d", 2**32 - 1)]]


def frames() -> list[bytes]:
    return [frame(b"".join(map(encode_change, changes))) for changes in COMMITS]


def test_changes_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(EMPTY + b"".join(frames()))
    log = read_log(tmp_path / "log", IDENTITY)
    assert log.changes == [Removed("ä"), Used("b", 7), Removed("c"), Used("d", 2**32 - 1)]
    assert (log.end, log.damaged) == (log.size, ())


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    stored = IDENTITY.codec.encode(np.array([1, 69_999, 5]))
    change = Added(Document("name", stored, 2**64 - 1, 10, 20))
    (tmp_path / "log").write_bytes(EMPTY + frame(encode_change(change)))
    [read] = read_log(tmp_path / "log", IDENTITY).changes
    assert isinstance(read, Added)
    document = read.document
    assert (document.name, document.digest, document.added_at, document.used_at) == ("name", 2**64 - 1, 10, 20)
    assert IDENTITY.codec.decode(document.stored).tolist() == [1, 69_999, 5]


def test_reading_goes_on_behind_the_frames_that_were_read_before(tmp_path: Path) -> None:
    first, second, third = frames()
    (tmp_path / "log").write_bytes(EMPTY + first)
    end = read_log(tmp_path / "log", IDENTITY).end
    (tmp_path / "log").write_bytes(EMPTY + first + second + third)
    assert read_log(tmp_path / "log", IDENTITY, end).changes == [Removed("c"), Used("d", 2**32 - 1)]


@pytest.mark.parametrize("cut", [1, 10])
def test_an_interrupted_last_frame_is_ignored(tmp_path: Path, cut: int) -> None:
    first, second, third = frames()
    (tmp_path / "log").write_bytes(EMPTY + first + second + third[:-cut])
    log = read_log(tmp_path / "log", IDENTITY)
    assert log.changes == [Removed("ä"), Used("b", 7), Removed("c")]
    assert log.end == len(EMPTY + first + second)
    assert log.damaged == ()


def test_a_damaged_frame_is_skipped_and_reported(tmp_path: Path) -> None:
    first, second, third = frames()
    broken = second[:-1] + b"x"
    (tmp_path / "log").write_bytes(EMPTY + first + broken + third)
    log = read_log(tmp_path / "log", IDENTITY)
    assert log.changes == [Removed("ä"), Used("b", 7), Used("d", 2**32 - 1)]
    start = len(EMPTY + first)
    assert log.damaged == ((start, start + len(second)),)


def test_a_log_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"something else")
    with pytest.raises(DatastoreCorruptError, match="is no write-ahead log of a datastore"):
        read_log(path, IDENTITY)
    path.write_bytes(new_log(Identity("u", 70_000))[0])
    with pytest.raises(DatastoreMismatchError, match="made with tokenizer 'u', not 't'"):
        read_log(path, IDENTITY)


def test_a_frame_that_is_cut_off_was_committed_if_the_record_counts_it(tmp_path: Path) -> None:
    first, second, third = frames()
    recorded = COMMITTED.extended(first).extended(second)
    whole = EMPTY[:RECORD_AT] + recorded.record() + EMPTY[RECORD_AT + len(recorded.record()) :] + first + second + third
    path = tmp_path / "log"
    cuts = {0: "abc", 1: "ab", len(third): "ab", len(third) + 1: "a", len(second + third): "a"}
    for cut, commits in cuts.items():
        path.write_bytes(whole[: len(whole) - cut])
        log = read_log(path, IDENTITY)
        assert (log.recorded, log.damaged) == (recorded.end, ())
        assert log.end == len(EMPTY + b"".join((first, second, third)[: len(commits)]))
    path.write_bytes(whole)
    assert read_log(path, IDENTITY).committed == recorded.extended(third)


def test_whole_frames_that_were_not_committed_are_not_read(tmp_path: Path) -> None:
    first, second, third = frames()
    recorded = COMMITTED.extended(first).extended(third).record()
    head = EMPTY[:RECORD_AT] + recorded + EMPTY[RECORD_AT + len(recorded) :]
    (tmp_path / "log").write_bytes(head + first + second + third)
    log = read_log(tmp_path / "log", IDENTITY)
    assert log.changes == []
    assert len(log.damaged) == 1


def test_a_damaged_record_is_reported_and_the_commits_are_read(tmp_path: Path) -> None:
    damaged = bytearray(EMPTY + b"".join(frames()))
    damaged[RECORD_AT] ^= 1
    (tmp_path / "log").write_bytes(damaged)
    log = read_log(tmp_path / "log", IDENTITY)
    assert len(log.changes) == 4
    assert log.damaged == ((RECORD_AT, RECORD_AT + 16),)
