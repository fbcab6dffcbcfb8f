"""A log returns the changes of whole frames, and reports damaged ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reader_rag.datastore.segment import Document
from reader_rag.datastore.token_codec import Identity
from reader_rag.datastore.write_ahead_log import (
    Added,
    Change,
    Removed,
    Used,
    empty_log,
    encode_change,
    frame,
    read_log,
)
from reader_rag.errors import DatastoreCorruptError, DatastoreMismatchError

IDENTITY = Identity("t", 70_000)
COMMITS: list[list[Change]] = [[Removed("ä"), Used("b", 7)], [Removed("c")], [Used("d", 2**32 - 1)]]


def frames() -> list[bytes]:
    return [frame(b"".join(map(encode_change, changes))) for changes in COMMITS]


def test_changes_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(empty_log(IDENTITY) + b"".join(frames()))
    log = read_log(tmp_path / "log", IDENTITY)
    assert log.changes == [Removed("ä"), Used("b", 7), Removed("c"), Used("d", 2**32 - 1)]
    assert (log.end, log.damaged) == (log.size, ())


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    stored = IDENTITY.codec.encode(np.array([1, 69_999, 5]))
    change = Added(Document("name", stored, 2**64 - 1, 10, 20))
    (tmp_path / "log").write_bytes(empty_log(IDENTITY) + frame(encode_change(change)))
    [read] = read_log(tmp_path / "log", IDENTITY).changes
    assert isinstance(read, Added)
    document = read.document
    assert (document.name, document.digest, document.added_at, document.used_at) == ("name", 2**64 - 1, 10, 20)
    assert IDENTITY.codec.decode(document.stored).tolist() == [1, 69_999, 5]


def test_reading_goes_on_behind_the_frames_that_were_read_before(tmp_path: Path) -> None:
    first, second, third = frames()
    (tmp_path / "log").write_bytes(empty_log(IDENTITY) + first)
    end = read_log(tmp_path / "log", IDENTITY).end
    (tmp_path / "log").write_bytes(empty_log(IDENTITY) + first + second + third)
    assert read_log(tmp_path / "log", IDENTITY, end).changes == [Removed("c"), Used("d", 2**32 - 1)]


@pytest.mark.parametrize("cut", [1, 10])
def test_an_interrupted_last_frame_is_ignored(tmp_path: Path, cut: int) -> None:
    first, second, third = frames()
    (tmp_path / "log").write_bytes(empty_log(IDENTITY) + first + second + third[:-cut])
    log = read_log(tmp_path / "log", IDENTITY)
    assert log.changes == [Removed("ä"), Used("b", 7), Removed("c")]
    assert log.end == len(empty_log(IDENTITY) + first + second)
    assert log.damaged == ()


def test_a_damaged_frame_is_skipped_and_reported(tmp_path: Path) -> None:
    first, second, third = frames()
    broken = second[:-1] + b"x"
    (tmp_path / "log").write_bytes(empty_log(IDENTITY) + first + broken + third)
    log = read_log(tmp_path / "log", IDENTITY)
    assert log.changes == [Removed("ä"), Used("b", 7), Used("d", 2**32 - 1)]
    start = len(empty_log(IDENTITY) + first)
    assert log.damaged == ((start, start + len(second)),)


def test_a_log_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"something else")
    with pytest.raises(DatastoreCorruptError, match="is no write-ahead log of a datastore"):
        read_log(path, IDENTITY)
    path.write_bytes(empty_log(Identity("u", 70_000)))
    with pytest.raises(DatastoreMismatchError, match="made with tokenizer 'u', not 't'"):
        read_log(path, IDENTITY)
