"""Damaged files are reported and set aside; the rest is served."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from datastore_tools import bytes_on_disk, contents, open_store, search

from reader_rag.datastore import segment_file
from reader_rag.datastore import write_ahead_log as wal
from reader_rag.datastore.manifest import NAMESPACE_MANIFEST
from reader_rag.datastore.namespace import folder_name
from reader_rag.datastore.segment import Document
from reader_rag.datastore.token_codec import checksum
from reader_rag.errors import DatastoreCorruptError, DatastoreError, DatastoreMismatchError, ReaderWarning
from reader_rag.util.files import Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store with two segments, the first with `a` and `b`, and a log with `d`."""
    with open_store(tmp_path / "s") as store:
        store.add_many([("a", [1, 2, 3] * 10), ("b", [4, 5, 6] * 10)])
        store.add_many([("c", [7, 8, 9] * 10)])
        store.add("d", [1, 2, 9])
    return tmp_path / "s"


def segments(folder: Path) -> list[Path]:
    return sorted((folder / folder_name("")).glob("*.seg"), key=lambda path: int(path.stem))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data)


def body_start(path: Path) -> int:
    return path.read_bytes().index(np.array([0xFFFF, 1, 2, 3], "<u2").tobytes())


@pytest.mark.parametrize("how", ["header", "table", "cut off", "gone", "empty", "another file"])
def test_a_segment_that_is_damaged_at_opening_is_set_aside(folder: Path, how: str) -> None:
    path = segments(folder)[0]
    if how == "header":
        flip(path, 40)
    elif how == "table":
        flip(path, path.read_bytes().index(b"ab", body_start(path)))  # the names
    elif how == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(segments(folder)[1].read_bytes())
    rest = {"c": [7, 8, 9] * 10, "d": [1, 2, 9]}
    with open_store(folder, read_only=True) as reader:
        with pytest.warns(ReaderWarning, match="the rest is served"):
            assert contents(reader) == rest
        assert [damage.namespace for damage in reader.verify()] == [""]
    with open_store(folder) as store:
        with pytest.warns(ReaderWarning, match=f"{path.name}.*; the rest is served"):
            assert store.searcher([""]).count([7, 8]) == 10
        assert contents(store) == rest
        assert any(path.name in what for what in store.stats()[""].damaged)
        store.add("a", [1, 2, 3] * 10)
    assert (folder / folder_name("") / "damaged" / path.name).exists() == (how != "gone")
    with open_store(folder) as store:  # reported once
        assert contents(store) == {**rest, "a": [1, 2, 3] * 10}
        assert store.stats()[""].damaged == (f"{path.name} was set aside",)
        assert store.verify() == []


def test_verify_names_the_block_and_the_documents(folder: Path) -> None:
    path = segments(folder)[0]
    flip(path, body_start(path) + 2 * 5)
    with open_store(folder, read_only=True) as reader:
        [damage] = reader.verify()
        assert (damage.file, damage.what, damage.documents) == (path.name, "bytes 0 to 126 of its tokens", ("a", "b"))


def test_verify_finds_damage_of_the_suffix_array(folder: Path) -> None:
    path = segments(folder)[0]
    with open_store(folder, read_only=True) as reader:
        [(first, _), *_] = reader.searcher([""]).snapshot().searchable
    flip(path, path.read_bytes().index(first.positions.tobytes()))
    with open_store(folder, read_only=True) as reader:
        [damage] = reader.verify()
        assert (damage.file, damage.what, damage.documents) == (path.name, "bytes 0 to 232 of its suffix array", ())


def test_damage_is_located_by_block(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(segment_file, "BLOCK", 16)
    with open_store(tmp_path / "t") as store:
        store.add_many([(name, [n] * 20) for n, name in enumerate("wxyz")])
    path = segments(tmp_path / "t")[0]
    flip(path, path.read_bytes().index(np.array([2] * 20, "<u2").tobytes()) + 20)
    with open_store(tmp_path / "t", read_only=True) as reader:
        [damage] = reader.verify()
        assert damage.documents == ("y",)


def test_a_segment_with_damaged_tokens_is_set_aside_when_it_is_merged(folder: Path) -> None:
    path = segments(folder)[0]
    flip(path, body_start(path) + 2 * 5)
    with open_store(folder) as store:
        with pytest.warns(ReaderWarning, match="is damaged in 1 blocks; it is set aside in damaged"):
            store.compact(full=True)
        assert contents(store) == {"c": [7, 8, 9] * 10, "d": [1, 2, 9]}
        assert store.verify()[0].what.endswith("is damaged in 1 blocks")
    with open_store(folder) as store:
        assert contents(store) == {"c": [7, 8, 9] * 10, "d": [1, 2, 9]}


def test_an_interrupted_commit_is_dropped_and_reported(folder: Path) -> None:
    [log] = (folder / folder_name("")).glob("*.log")
    before = log.read_bytes()
    with open_store(folder) as store:
        store.add("e", [3, 3, 3])
    log.write_bytes(before + log.read_bytes()[len(before) : -3])
    with open_store(folder, read_only=True) as reader:
        assert "e" not in contents(reader)
    with open_store(folder) as store:
        with pytest.warns(ReaderWarning, match="bytes of an interrupted commit are dropped"):
            assert sorted(contents(store)) == ["a", "b", "c", "d"]
        store.add("f", [4, 4])
    with open_store(folder) as store:
        assert sorted(contents(store)) == ["a", "b", "c", "d", "f"]


@pytest.mark.parametrize("read_only", [True, False])
def test_a_log_that_is_shorter_than_what_was_committed_is_damaged(tmp_path: Path, read_only: bool) -> None:
    ends = []
    with open_store(tmp_path / "s") as store:
        for n, name in enumerate("abc"):
            store.add(name, [n, 2, 3])
            store.commit()
            [log] = (tmp_path / "s" / folder_name("")).glob("*.log")
            ends.append(log.stat().st_size)
    data = log.read_bytes()
    for size in range(0, len(data), 2):
        folder = tmp_path / f"s{size}"
        shutil.copytree(tmp_path / "s", folder)
        (folder / folder_name("") / log.name).write_bytes(data[:size])
        names = "abc"[: sum(end <= size for end in ends)]
        with open_store(folder, read_only=read_only) as store:
            with pytest.warns(ReaderWarning, match="lacks its last [0-9]+ committed bytes|cannot be read"):
                assert "".join(sorted(contents(store))) == names, size
            assert store.verify() != []
        if not read_only:
            with open_store(folder) as store, warnings.catch_warnings():
                warnings.simplefilter("error")  # reported once
                assert "".join(sorted(contents(store))) == names, size
        shutil.rmtree(folder)


def test_commits_that_changed_places_in_a_log_are_found(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        ends = [wal.new_log(store._identity)[1].end]
        for name in "ab":
            store.add(name, [2, 3, 4])
            store.commit()
            [log] = (tmp_path / "s" / folder_name("")).glob("*.log")
            ends.append(log.stat().st_size)
    data, (start, middle, end) = log.read_bytes(), ends
    log.write_bytes(data[:start] + data[middle:end] + data[start:middle])
    with pytest.warns(ReaderWarning, match="1 commits cannot be read"), open_store(tmp_path / "s") as store:
        assert contents(store) == {}
    assert (tmp_path / "s" / folder_name("") / "damaged" / log.name).exists()


def test_a_document_that_was_replaced_in_the_log_does_not_return(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.add("a", [1, 2, 3])
        store.commit()
        [log] = (tmp_path / "s" / folder_name("")).glob("*.log")
        before = log.read_bytes()
        store.add("a", [4, 5, 6])
        store.commit()
    log.write_bytes(before)
    with pytest.warns(ReaderWarning, match="committed bytes"), open_store(tmp_path / "s") as store:
        assert contents(store) == {}


def test_a_removal_stays_where_a_process_ended_before_it_wrote_the_manifest(folder: Path) -> None:
    class EndsBefore(Files):
        def replace(self, path: Path, data: bytes) -> None:
            raise OSError(5, "the process ends here")

    [log] = (folder / folder_name("")).glob("*.log")
    before = log.read_bytes()
    store = open_store(folder, files=EndsBefore())
    for name in ("a", "d"):
        store.remove(name)
    store.close()
    open_store(folder).close()
    with open_store(folder) as store:
        assert sorted(contents(store)) == ["b", "c"]
    log.write_bytes(before)
    with pytest.warns(ReaderWarning, match="committed bytes"), open_store(folder) as store:
        assert sorted(contents(store)) == ["b", "c"]


def test_a_damaged_commit_is_reported_and_later_ones_are_kept(folder: Path) -> None:
    with open_store(folder) as store:
        store.add("e", [3, 3, 3])
    [log] = (folder / folder_name("")).glob("*.log")
    flip(log, log.read_bytes().index(np.array([1, 2, 9], "<u2").tobytes()))
    with pytest.warns(ReaderWarning, match="1 commits cannot be read; the rest is served"), open_store(folder) as store:
        assert sorted(contents(store)) == ["a", "b", "c", "e"]
    assert (folder / folder_name("") / "damaged" / log.name).exists()
    with open_store(folder) as store:
        assert sorted(contents(store)) == ["a", "b", "c", "e"]


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_without_the_log_the_segments_are_served(folder: Path, how: str) -> None:
    [log] = (folder / folder_name("")).glob("*.log")
    if how == "gone":
        log.unlink()
    else:
        log.write_bytes(b"")
    with open_store(folder) as store:
        with pytest.warns(ReaderWarning, match="the write-ahead log cannot be read"):
            assert sorted(contents(store)) == ["a", "b", "c"]
        store.add("e", [1, 1])
    with open_store(folder) as store:
        assert sorted(contents(store)) == ["a", "b", "c", "e"]


def test_a_namespace_with_a_damaged_manifest_is_left_out_and_others_are_served(folder: Path) -> None:
    with open_store(folder) as store:
        store.add("x", [1, 2, 3], namespace="other")
    flip(folder / folder_name("") / NAMESPACE_MANIFEST, 60)
    for read_only in (False, True):
        with open_store(folder, read_only=read_only) as store:
            with pytest.warns(ReaderWarning, match="is damaged: restore it.*; the rest is served"):
                assert store.searcher(["", "other"]).count([1, 2]) == 1
            with pytest.raises(DatastoreCorruptError, match="is damaged: restore it"):
                store.documents()
            assert [damage.what for damage in store.verify()] == ["its manifest cannot be read"]
    with open_store(folder) as store:
        with pytest.raises(DatastoreCorruptError):
            store.add("y", [1])
        assert store.remove_namespace("")
        store.add("y", [1, 5])
    with open_store(folder) as store:
        assert contents(store) == {"y": [1, 5]}


def test_a_damaged_datastore_manifest_is_reported(folder: Path) -> None:
    flip(folder / "datastore.json", 60)
    with pytest.raises(DatastoreCorruptError, match="datastore.json is damaged: restore it"):
        open_store(folder)


@pytest.mark.parametrize("file", ["datastore.json", NAMESPACE_MANIFEST, "segment", "log"])
def test_a_file_of_another_version_is_refused_and_not_changed(folder: Path, file: str) -> None:
    if file == "datastore.json":
        path = folder / file
    elif file == NAMESPACE_MANIFEST:
        path = folder / folder_name("") / file
    else:
        path = segments(folder)[0] if file == "segment" else next((folder / folder_name("")).glob("*.log"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b" 1 ", b" 9 ", 1) if path.suffix == ".json" else data[:8] + b"\x09" + data[9:])
    before = bytes_on_disk(folder)
    for read_only in (False, True):
        with pytest.raises(DatastoreMismatchError, match="has format 9 and this version reads [13]: use the version"):
            contents(open_store(folder, read_only=read_only))
    assert bytes_on_disk(folder) == before


def test_a_segment_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "t", tokenizer="u") as store:
        store.add_many([("a", [1, 2, 3])])
    source = tmp_path / "t" / folder_name("")
    for path in source.iterdir():
        (folder / folder_name("") / path.name).write_bytes(path.read_bytes())
    with open_store(folder, read_only=True) as reader, pytest.raises(DatastoreMismatchError, match="tokenizer 'u'"):
        contents(reader)


def test_a_segment_file_names_its_tokenizer_and_vocabulary(folder: Path) -> None:
    data = segments(folder)[0].read_bytes()
    assert data[:8] == b"RRAGSEG\n"
    start = data.index(b"{")
    header = json.loads(data[start : start + int.from_bytes(data[12:16], "little")])
    assert (header["tokenizer"], header["vocabulary"], header["token_bytes"]) == ("t", 60, 2)
    assert (header["documents"], header["tokens"]) == (2, 63)


def removed_and_replaced(folder: Path) -> dict[str, list[int]]:
    """A closed store in whose log documents were removed and replaced; returns what it holds."""
    with open_store(folder) as store:
        store.add_many([("a", [1, 2, 3] * 10), ("b", [4, 5, 6] * 10)])
        store.add("c", [7, 8, 9])
        store.commit()
        for name in ("a", "c"):
            store.remove(name)
            store.commit()
        store.add("b", [6, 6, 6])
        store.commit()
    return {"b": [6, 6, 6]}


@pytest.mark.parametrize("read_only", [True, False])
def test_no_flipped_byte_of_the_log_brings_removed_text_back(tmp_path: Path, read_only: bool) -> None:
    expected = removed_and_replaced(tmp_path / "s")
    [log] = (tmp_path / "s" / folder_name("")).glob("*.log")
    tried = silent = refused = 0
    for at in range(log.stat().st_size):
        folder = tmp_path / f"s{at}"
        shutil.copytree(tmp_path / "s", folder)
        flip(folder / folder_name("") / log.name, at)
        tried += 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with open_store(folder, read_only=read_only) as store:
                    found = contents(store)
            except DatastoreMismatchError:  # a byte of the version
                refused += 1
                continue
        assert found in (expected, {}), at
        silent += not caught
        shutil.rmtree(folder)
    assert tried > 300
    assert (silent, refused) == (0, 4)


@pytest.mark.parametrize("read_only", [True, False])
def test_no_cut_of_the_log_brings_removed_text_back(tmp_path: Path, read_only: bool) -> None:
    removed_and_replaced(tmp_path / "s")
    [log] = (tmp_path / "s" / folder_name("")).glob("*.log")
    for size in range(0, log.stat().st_size, 3):
        folder = tmp_path / f"s{size}"
        shutil.copytree(tmp_path / "s", folder)
        path = folder / folder_name("") / log.name
        path.write_bytes(path.read_bytes()[:size])
        with pytest.warns(ReaderWarning), open_store(folder, read_only=read_only) as store:
            assert contents(store) == {}, size
        shutil.rmtree(folder)


def test_a_log_of_version_2_is_read_and_replaced(folder: Path) -> None:
    [log] = (folder / folder_name("")).glob("*.log")
    data = log.read_bytes()
    log.write_bytes(data[:8] + struct.pack("<I", 2) + data[28:])  # the same without the record
    expected = {"a": [1, 2, 3] * 10, "b": [4, 5, 6] * 10, "c": [7, 8, 9] * 10, "d": [1, 2, 9]}
    for read_only in (True, False):
        with open_store(folder, read_only=read_only) as store, warnings.catch_warnings():
            warnings.simplefilter("error")
            assert contents(store) == expected
    [log] = (folder / folder_name("")).glob("*.log")
    assert log.read_bytes()[8:12] == struct.pack("<I", wal.FORMAT_VERSION)


def test_a_log_of_version_1_is_read_and_replaced(folder: Path) -> None:
    [log] = (folder / folder_name("")).glob("*.log")
    with open_store(folder, read_only=True) as reader:
        identity = reader._catalog._identity
    change = wal.Added(Document("d", identity.codec.encode(np.array([1, 2, 9])), 5, 1, 1))
    payloads = [
        json.dumps({"tokenizer": identity.tokenizer, "vocabulary": identity.vocabulary}).encode(),
        wal.encode_change(change),
        wal.encode_change(wal.Removed("c")),
    ]
    frames = b"".join(struct.pack("<QI", len(payload), checksum(payload)) + payload for payload in payloads)
    log.write_bytes(b"RRAGLOG\n" + struct.pack("<I", 1) + frames)
    expected = {"a": [1, 2, 3] * 10, "b": [4, 5, 6] * 10, "d": [1, 2, 9]}
    with open_store(folder, read_only=True) as reader:
        assert contents(reader) == expected
    with open_store(folder) as store:
        assert contents(store) == expected
        store.remove("d")
    [log] = (folder / folder_name("")).glob("*.log")
    assert log.read_bytes()[8:12] == struct.pack("<I", wal.FORMAT_VERSION)
    with open_store(folder) as store:
        assert sorted(contents(store)) == ["a", "b"]


def test_damaged_segments_yield_no_token_outside_the_vocabulary(folder: Path) -> None:
    path = segments(folder)[0]
    begin = body_start(path)
    whole = path.read_bytes()
    tried = 0
    for offset in range(2, 120, 2):
        damaged = bytearray(whole)
        damaged[begin + offset : begin + offset + 2] = b"\xfe\xff"  # above every token, below the separator
        path.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_store(folder, read_only=True) as store:
                cursor = store.searcher([""]).cursor(max_matches=8, max_tokens=16)
                for context in ([1, 2], [2, 3], [3, 1], [4, 5], [5, 6]):
                    cursor.extend(context)
                    cursor.search()
                    assert cursor.continuations.max() < store._identity.vocabulary
                    tried += 1
    path.write_bytes(whole)
    assert tried == 295


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("place", ["datastore.json", "manifest", "log", "segment", "lock"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "ring"])
def test_a_special_file_in_place_of_another_is_damage_and_never_waited_for(
    folder: Path, kind: str, place: str, read_only: bool
) -> None:
    space = folder / folder_name("")
    [log] = space.glob("*.log")
    places = {"datastore.json": folder / "datastore.json", "manifest": space / NAMESPACE_MANIFEST, "log": log}
    path = {**places, "segment": segments(folder)[0], "lock": folder / "writer.lock"}[place]
    path.unlink(missing_ok=True)
    make = {"pipe": os.mkfifo, "folder": Path.mkdir, "device": _link_to_zeros, "ring": lambda at: at.symlink_to(at)}
    make[kind](path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(DatastoreError), open_store(folder, read_only=read_only) as store:
            assert set(store.documents()) <= {"a", "b", "c", "d"}
            store.verify()


def _link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")  # endless: whoever reads or copies it to its end fills the memory, or the disk


_ODD = [None, -1, 1.5, True, "", "..", "../x", "/etc/passwd", "a\0b", "\ud800", [], [[1]], {}, 1 << 70]


@pytest.mark.parametrize("value", _ODD, ids=repr)
def test_a_manifest_with_values_of_other_types_is_damaged(folder: Path, value: object) -> None:
    """Its checksum is right: only one who means harm writes such a file."""
    path = folder / folder_name("") / NAMESPACE_MANIFEST
    content = json.loads(path.read_bytes().split(b"\n")[1])
    changed = [content | {key: value} for key in content if content[key] != value and key not in ("namespace",)]
    changed += [content | {"segments": [content["segments"][0] | {key: value}]} for key in content["segments"][0]]
    for each in changed:
        text = json.dumps(each).encode()
        path.write_bytes(b"reader_rag-datastore 1 %08x\n%s\n" % (checksum(text), text))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(DatastoreCorruptError), open_store(folder, read_only=True) as store:
                assert set(store.documents()) <= {"a", "b", "c", "d"}
                store.stats()
    path.write_bytes(b"reader_rag-datastore 1 %08x\n%s\n" % (checksum(b"[" * 9000), b"[" * 9000))
    with open_store(folder, read_only=True) as store, pytest.raises(DatastoreCorruptError, match="is damaged"):
        store.documents()


@pytest.mark.parametrize("read_only", [True, False])
def test_a_folder_that_was_moved_from_another_namespace_is_refused(tmp_path: Path, read_only: bool) -> None:
    with open_store(tmp_path / "s") as store:
        store.add("secret", [1, 2, 3], namespace="ann")
        store.add("own", [4, 5, 6], namespace="bob")
    shutil.rmtree(tmp_path / "s" / folder_name("bob"))
    shutil.copytree(tmp_path / "s" / folder_name("ann"), tmp_path / "s" / folder_name("bob"))
    with open_store(tmp_path / "s", read_only=read_only) as store:
        with pytest.raises(DatastoreCorruptError, match="holds another namespace"):
            store.documents(namespace="bob")
        with pytest.warns(ReaderWarning, match="holds another namespace"):
            assert not search(store.searcher(["bob"]), [1, 2]).found
        assert store.namespaces() == ["ann"]
        assert store.documents(namespace="ann") == ["secret"]


@pytest.mark.parametrize("name", ["ns-0123", "removed-ns-0123", folder_name("")])
def test_what_a_link_in_a_datastore_leads_to_is_never_removed(folder: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    (victim / "inner").mkdir(parents=True)
    (victim / "inner" / "letter.txt").write_text("kept")
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).symlink_to(victim)
    with open_store(folder) as store:
        store.remove_namespace("")
        assert not (folder / name).exists()
    assert (victim / "inner" / "letter.txt").read_text() == "kept"


def test_a_file_in_place_of_a_removed_folder_is_removed(folder: Path) -> None:
    (folder / "removed-ns-0123").write_text("x")
    with open_store(folder) as store:
        assert contents(store)
    assert not (folder / "removed-ns-0123").exists()
