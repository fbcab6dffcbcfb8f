"""Whatever was added, removed, committed, merged and opened again, searches find exactly the matches there are."""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datastore_tools import (
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
    DatastoreError,
)

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
TEXTS = st.lists(st.integers(0, 3), max_size=25)


class AnyOperations(RuleBasedStateMachine):
    """A writer, a reader of the same folder, and a dictionary of the documents that they must have."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = open_store(self.folder / "s", 4)
        self.searcher = self.store.searcher([""])
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
        self.searcher = self.store.searcher([""])

    @rule(context=st.lists(st.integers(0, 3), min_size=1, max_size=8), most=st.integers(1, 9))
    def look(self, context: list[int], most: int) -> None:
        expected = brute_force(self.now, context)
        lengths = sorted((length for _, _, length in expected), reverse=True)
        cursor = search(self.searcher, context)
        assert found(cursor) == expected
        longest = max(lengths, default=0)
        assert (cursor.longest_match, cursor.longest_match_count) == (longest, lengths.count(longest))
        sample = search(self.searcher, context, max_matches=most)
        assert sample.matches[1].tolist() == lengths[:most]
        assert set(found(sample)) <= set(expected)
        assert self.searcher.count(context) == sum(length >= len(context) for length in lengths)

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


AnyOperations.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_any_operations = AnyOperations.TestCase


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path / "s") as opened:
        yield opened


def test_a_document_is_found_after_add_and_by_other_processes_after_commit(store: Datastore) -> None:
    searcher = store.searcher([""])
    store.add("a", [1, 2, 3])
    assert searcher.count([1, 2]) == 1
    with open_store(store.folder, read_only=True) as reader:
        others = reader.searcher([""])
        assert others.count([1, 2]) == 0
        store.commit()
        assert others.count([1, 2]) == 0
        reader.refresh()
        assert others.count([1, 2]) == 1


def test_a_removed_document_is_not_found_by_searchers_made_before(store: Datastore) -> None:
    store.add_many([("a", [1, 2, 3]), ("b", [7, 2, 4])])
    cursor = search(store.searcher([""]), [2])
    assert sorted(continuations(cursor)) == [[3], [4]]
    store.remove("a")
    cursor.search()
    assert continuations(cursor) == [[4]]


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
    [block] = re.findall(r"```python\n(from reader_rag import Datastore\b.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block, names)
    cursor = names["cursor"]
    assert cursor.source_of(0) == Source(namespace="ann", document="note-7", position=2)
    assert continuations(cursor) == [[2644, 314], [1789, 30]]


def test_an_interrupted_build_is_resumed(tmp_path: Path) -> None:
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
        reported: list[int] = []
        assert store.add_many(corpus, segment_tokens=100, progress=reported.append) == 60
        assert reported[-1] == 400
        assert store.add_many(corpus) == 0
        assert contents(store) == dict(corpus)


def test_a_closed_store_refuses_changes(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    store.close()
    store.close()
    with pytest.raises(DatastoreError, match="is closed: open it again"):
        store.add("a", [1])


def test_an_exception_in_the_block_drops_uncommitted_changes(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["\ud800", None, 5, b"x", ["x"]])
def test_names_that_cannot_be_stored_are_refused_and_harm_no_commit(tmp_path: Path, name: Any) -> None:
    calls: list[Callable[[Datastore], object]] = [
        lambda store: store.add(name, [1]),
        lambda store: store.add("x", [1], namespace=name),
        lambda store: store.add_many([(name, [1])]),
        lambda store: store.remove(name),
        lambda store: store.mark_used([name]),
        lambda store: store.has(name),
        lambda store: store.read(name),
        lambda store: store.share(name),
        lambda store: store.searcher([name]).cursor().search(),
    ]
    with open_store(tmp_path) as store:
        store.add("a", [1, 2])
        store.limit("", max_tokens=100)
        for call in calls:
            with pytest.raises(ConfigError, match="strings without lone surrogates as names"):
                call(store)
        store.commit()
    with open_store(tmp_path) as store:
        assert contents(store) == {"a": [1, 2]}


@pytest.mark.parametrize(
    "tokens", [[1.5], [None], "ab", [[1]], [-1], [60], [1 << 70], None, 5, [True], [1, [2]], {1: 2}]
)
def test_tokens_that_are_none_are_refused(tmp_path: Path, tokens: Any) -> None:
    with open_store(tmp_path) as store, pytest.raises(ConfigError, match="token ids must"):
        store.add("a", tokens)


@pytest.mark.parametrize("bound", [-1, float("nan"), float("inf"), "x", [1]])
def test_bounds_that_are_none_are_refused(tmp_path: Path, bound: Any) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(ConfigError, match="max_tokens must be a number"):
            store.limit("", max_tokens=bound)
        with pytest.raises(ConfigError, match="max_age_s must be a number"):
            store.limit("", max_age_s=bound)
