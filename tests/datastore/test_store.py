"""After any mix of adding, removing, committing, merging and opening again, exactly the right places are found."""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datastore_tools import (
    SMALL,
    FailingFiles,
    brute_force,
    bytes_on_disk,
    contents,
    continuations,
    found,
    open_store,
    search,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from waiting import join

from reader_rag.datastore import CompactionConfig, Datastore, Source
from reader_rag.errors import (
    ConfigError,
    DatastoreBusyError,
    DatastoreError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
)

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
TEXTS = st.lists(st.integers(0, 3), max_size=25)


class AnyMix(RuleBasedStateMachine):
    """A writer, a reader of the same folder, and a dictionary of what there should be."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = open_store(self.folder / "s", 4)
        self.view = self.store.searcher([""])
        self.reader: Datastore | None = None
        self.now: dict[str, list[int]] = {}
        self.committed: dict[str, list[int]] = {}

    def teardown(self) -> None:
        self.store.close(commit=False)
        shutil.rmtree(self.folder)

    @rule(name=NAMES, text=TEXTS)
    def add(self, name: str, text: list[int]) -> None:
        assert self.store.add(name, text) == (self.now.get(name) != text)
        self.now[name] = text

    @rule(texts=st.dictionaries(NAMES, TEXTS, max_size=3))
    def add_many(self, texts: dict[str, list[int]]) -> None:
        changed = sum(self.now.get(name) != text for name, text in texts.items())
        assert self.store.add_many(texts.items(), segment_tokens=30) == changed
        self.now.update(texts)
        if changed:
            self.committed = dict(self.now)

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        assert self.store.remove(name) == (self.now.pop(name, None) is not None)

    @rule()
    def commit(self) -> None:
        self.store.commit()
        self.committed = dict(self.now)

    @rule(full=st.booleans())
    def compact(self, full: bool) -> None:
        self.store.compact(full=full)
        self.committed = dict(self.now)
        assert all(stats.removed_tokens == 0 for stats in self.store.stats().values())

    @rule(commit=st.booleans())
    def open_again(self, commit: bool) -> None:
        self.store.close(commit=commit)
        if commit:
            self.committed = dict(self.now)
        self.now = dict(self.committed)
        self.store = open_store(self.folder / "s", 4)
        self.view = self.store.searcher([""])

    @rule(context=st.lists(st.integers(0, 3), min_size=1, max_size=8), most=st.integers(1, 9))
    def look(self, context: list[int], most: int) -> None:
        expected = brute_force(self.now, context)
        lengths = sorted((length for _, _, length in expected), reverse=True)
        cursor = search(self.view, context)
        assert found(cursor) == expected
        longest = max(lengths, default=0)
        assert (cursor.longest_match, cursor.longest_match_count) == (longest, lengths.count(longest))
        sample = search(self.view, context, max_matches=most)
        assert sample.matches[1].tolist() == lengths[:most]
        assert set(found(sample)) <= set(expected)
        assert self.view.count(context) == sum(length >= len(context) for length in lengths)

    @rule(context=st.lists(st.integers(0, 3), min_size=1, max_size=8))
    def look_from_elsewhere(self, context: list[int]) -> None:
        if self.reader is None:
            self.reader = open_store(self.folder / "s", 4, read_only=True)
        assert found(search(self.reader.searcher([""]), context)) == brute_force(self.committed, context)

    @invariant()
    def counts(self) -> None:
        if self.now:
            stats = self.store.stats()[""]
            assert (stats.documents, stats.tokens) == (len(self.now), sum(map(len, self.now.values())))


AnyMix.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_any_mix = AnyMix.TestCase


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path / "s") as opened:
        yield opened


# One writer, many readers


def test_a_document_is_found_when_add_returns_and_by_others_when_commit_has(store: Datastore) -> None:
    view = store.searcher([""])
    store.add("a", [1, 2, 3])
    assert view.count([1, 2]) == 1
    with open_store(store.folder, read_only=True) as reader:
        others = reader.searcher([""])
        assert others.count([1, 2]) == 0
        store.commit()
        assert others.count([1, 2]) == 0
        reader.refresh()
        assert others.count([1, 2]) == 1


def test_a_removed_document_is_found_no_more_by_views_that_there_are(store: Datastore) -> None:
    store.add_many([("a", [1, 2, 3]), ("b", [7, 2, 4])])
    cursor = search(store.searcher([""]), [2])
    assert sorted(continuations(cursor)) == [[3], [4]]
    store.remove("a")
    cursor.search()
    assert continuations(cursor) == [[4]]


def test_the_documents_that_are_there_are_found_beside_many_that_were_removed(store: Datastore) -> None:
    store.add_many([(f"d{n}", [1, 2, n % 60]) for n in range(3000)])
    for n in range(3000):
        if n != 1234:
            store.remove(f"d{n}")
    cursor = search(store.searcher([""]), [1, 2], max_matches=4)
    assert [cursor.source_of(k).document for k in range(cursor.found)] == ["d1234"]
    assert cursor.longest_match_count == 1


def test_a_second_writer_is_told_that_there_is_one(store: Datastore) -> None:
    with pytest.raises(DatastoreBusyError, match="another process writes to the datastore .*read_only=True"):
        open_store(store.folder)
    store.close()
    open_store(store.folder).close()


def test_a_reader_changes_nothing(store: Datastore) -> None:
    store.add("a", [1, 2, 3])
    store.commit()
    before = bytes_on_disk(store.folder)
    with open_store(store.folder, read_only=True) as reader:
        assert contents(reader) == {"a": [1, 2, 3]}
        for change in (lambda: reader.add("b", [1]), lambda: reader.remove("a"), reader.commit, reader.compact):
            with pytest.raises(DatastoreError, match="was opened read-only: open it without read_only"):
                change()
    assert bytes_on_disk(store.folder) == before


def test_a_reader_follows_namespaces_that_come_and_go(store: Datastore) -> None:
    with open_store(store.folder, read_only=True) as reader:
        view = reader.searcher(["x"])
        store.add("a", [1, 2, 3], namespace="x")
        store.commit()
        reader.refresh()
        assert view.count([1]) == 1
        store.remove_namespace("x")
        reader.refresh()
        assert view.count([1]) == 0


def test_threads_search_while_one_adds_and_removes(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    done = threading.Event()
    background = CompactionConfig(memtable_tokens=60, merge_factor=3, max_removed_share=0.2)
    with open_store(tmp_path / "s", compaction=background) as store:

        def search() -> None:
            try:
                cursor = store.searcher([""]).cursor()
                cursor.extend([1, 2])
                while not done.wait(0.0005):  # so that these threads do not keep the interpreter to themselves
                    cursor.search()
                    # Each document is 1 2 n n n.
                    assert all(len(set(after)) == 1 and len(after) == 3 for after in continuations(cursor))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=search) for _ in range(2)]
        for thread in threads:
            thread.start()
        for n in range(150):
            store.add(f"d{n}", [1, 2, n % 50 + 3, n % 50 + 3, n % 50 + 3])
            if n % 3 == 0:
                store.remove(f"d{n - 6}")
            if n % 7 == 0:
                store.commit()
        done.set()
        join(*threads)
        assert not errors
        assert len(store.documents()) == 150 - sum(n % 3 == 0 and n >= 6 for n in range(150))


def test_the_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "datastore.md").read_text()
    [block] = re.findall(r"```python\n(from reader_rag.datastore.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block, names)
    cursor = names["cursor"]
    assert cursor.source_of(0) == Source(namespace="ann", document="note-7", position=2)
    assert continuations(cursor) == [[2644, 314], [1789, 30]]


# Removing is real


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


def test_a_removed_namespace_leaves_the_disk_at_once(store: Datastore) -> None:
    encoded = np.arange(10, 30).astype("<u2").tobytes()
    store.add("a", range(10, 30), namespace="x")
    store.commit()
    view = store.searcher(["x"])
    assert view.count([10]) == 1
    assert store.remove_namespace("x")
    assert view.count([10]) == 0
    assert encoded not in bytes_on_disk(store.folder)
    assert store.namespaces() == []
    assert not store.remove_namespace("x")
    store.add("a", [1, 2, 3], namespace="x")
    assert view.count([1]) == 1


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


# Tenants


def test_a_request_sees_its_own_namespaces_and_shared_ones_and_nothing_else(store: Datastore) -> None:
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


def test_what_is_shared_is_known_after_opening_again(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.add("doc", [1, 2, 3], namespace="all")
        store.share("all")
    with open_store(tmp_path / "s") as store, open_store(tmp_path / "s", read_only=True) as reader:
        assert store.searcher([]).count([1]) == reader.searcher([]).count([1]) == 1
        view = reader.searcher([])
        store.share("all", False)
        reader.refresh()
        assert view.count([1]) == 0


def test_namespaces_may_be_called_anything(store: Datastore) -> None:
    names = ["", "..", "a/b", "über\n", "x" * 500]
    for n, name in enumerate(names):
        store.add("doc", [n, n, n], namespace=name)
    store.commit()
    assert sorted(store.namespaces()) == sorted(names)
    assert contents(store, "a/b") == {"doc": [2, 2, 2]}
    assert sorted(path.name for path in store.folder.parent.iterdir()) == ["s"]


# What goes by itself


def test_answers_that_were_longest_of_no_use_go_first(tmp_path: Path) -> None:
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


def test_uses_of_many_documents_do_not_make_a_new_log_at_each_commit(tmp_path: Path) -> None:
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


def test_answers_that_are_too_old_go(tmp_path: Path) -> None:
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


# Many documents


def test_a_broken_off_build_goes_on_where_it_was(tmp_path: Path) -> None:
    corpus = [(f"d{n}", [n % 50, n % 7, n % 3, 1]) for n in range(100)]
    read = 0

    def broken_off() -> Any:
        nonlocal read
        for read, document in enumerate(corpus):
            if read == 60:
                raise KeyboardInterrupt
            yield document

    with open_store(tmp_path / "s") as store, pytest.raises(KeyboardInterrupt):
        store.add_many(broken_off(), segment_tokens=100)
    with open_store(tmp_path / "s") as store:
        assert len(store.documents()) == 40
        told: list[int] = []
        assert store.add_many(corpus, segment_tokens=100, progress=told.append) == 60
        assert told[-1] == 400
        assert store.add_many(corpus) == 0
        assert contents(store) == dict(corpus)


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


def test_the_background_merges_by_itself(tmp_path: Path) -> None:
    config = CompactionConfig(memtable_tokens=60, merge_factor=3)
    with open_store(tmp_path / "s", compaction=config) as store:
        for n in range(100):
            store.add(f"d{n}", [n % 50, n % 7, n % 3, n % 11, n % 13] * 2)
            store.commit()
        store.compact(wait=False)
        for _ in range(2000):
            if store.stats()[""].segments <= 8:
                break
            threading.Event().wait(0.01)
        assert store.stats()[""].segments <= 8
    with open_store(tmp_path / "s") as store:
        assert len(contents(store)) == 100


# Refusals


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


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -1], "token ids must lie from 0 to 59: -1"),
        ([1, 60], "token ids must lie from 0 to 59: 60"),
        ([1.0], "token ids must be integers, not float64"),
        ([[1]], "token ids must be a flat list, not of shape (1, 1)"),
    ],
)
def test_what_is_no_token_of_the_vocabulary_is_refused(store: Datastore, tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        store.add("a", tokens)
    with pytest.raises(ValueError, match=re.escape(message)):
        store.add_many([("a", tokens)])
    assert store.documents() == []


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    store.close()
    store.close()
    with pytest.raises(DatastoreError, match="is closed: open it again"):
        store.add("a", [1])


def test_an_exception_in_the_block_drops_what_was_not_committed(tmp_path: Path) -> None:
    def work() -> None:
        with open_store(tmp_path / "s") as store:
            store.add("a", [1, 2])
            store.commit()
            store.add("b", [1, 2])
            raise KeyError

    with pytest.raises(KeyError):
        work()
    with open_store(tmp_path / "s") as store:
        assert store.documents() == ["a"]


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"memtable_tokens": 0}, {"merge_factor": 1}, {"max_segment_tokens": 1}, {"max_removed_share": 2.0}):
        with pytest.raises(ConfigError):
            CompactionConfig(**wrong)
    assert SMALL.memtable_tokens == 60


def test_cursors_and_runs_out_of_range_are_refused(store: Datastore) -> None:
    view = store.searcher([""])
    with pytest.raises(ValueError, match="max_matches, max_tokens and min_match must be at least 1: 0, 24, 1"):
        view.cursor(max_matches=0)
    with pytest.raises(ValueError, match="occurrences are found of 1 to 64 tokens, not of 65"):
        view.occurrences([1] * 65)
    with pytest.raises(IndexError, match="no match 0 among 0"):
        view.cursor().source_of(0)
