"""A crash, a full disk or a power cut at any write leaves the last commit, and no part of another."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datastore_tools import SMALL, Crash, FailingFiles, brute_force, contents, disk_full, found, open_store, search

from reader_rag.datastore import Datastore
from reader_rag.errors import DatastoreWriteError, ReaderWarning

State = dict[str, dict[str, list[int]]]


def everything(store: Datastore) -> State:
    """The documents of each namespace that has any."""
    return {name: held for name in store.namespaces() if (held := contents(store, name))}


class Script:
    """All operations that write, in order; records the last commit, and the one in progress."""

    def __init__(self, retry: bool = False) -> None:
        self.now: State = {}
        self.committed: State = {}
        self.in_progress: State = {}
        self._retry = retry

    def _do(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except DatastoreWriteError:
            if not self._retry:
                raise
            action()  # there is room again

    def _commits(self, action: Callable[[], Any]) -> None:
        self.in_progress = {name: dict(held) for name, held in self.now.items() if held}
        self._do(action)
        self.committed = self.in_progress

    def add(self, store: Datastore, name: str, tokens: list[int], namespace: str = "") -> None:
        if namespace not in self.now:
            self.now[namespace] = {}
        self._do(lambda: store.add(name, tokens, namespace=namespace))
        self.now[namespace][name] = tokens

    def run(self, store: Datastore) -> None:
        texts = [[(n * k) % 50 for k in range(12)] for n in range(1, 12)]
        for n in range(3):
            self.add(store, f"d{n}", texts[n])
        self._commits(store.commit)
        self._do(lambda: store.remove("d1"))
        del self.now[""]["d1"]
        self.add(store, "d0", texts[3])
        self.add(store, "x", texts[4], "tenant")
        # Of several namespaces each is committed by itself: here only one has changes.
        self.in_progress = {**self.committed, "tenant": {"x": texts[4]}}
        with contextlib.suppress(KeyError):
            self._do(store._catalog._opened["tenant"].commit)  # type: ignore[attr-defined]
        self.committed = self.in_progress
        self._commits(store.commit)
        for n in range(4, 8):  # enough for a segment
            self.add(store, f"d{n}", texts[n])
        self._commits(store.commit)
        self.now[""].update({"d0": texts[8], "m": texts[9]})
        self._commits(lambda: store.add_many([("d0", texts[8]), ("m", texts[9])]))
        self._do(lambda: store.remove("d4"))
        del self.now[""]["d4"]
        self._commits(lambda: store.compact(full=True))
        self._commits(lambda: store.share("tenant"))
        self._commits(lambda: store.limit("", max_tokens=1000))
        del self.now["tenant"]
        self._commits(lambda: store.remove_namespace("tenant"))
        self.add(store, "last", texts[10])
        self._commits(store.commit)


def steps_of_the_script(folder: Path) -> int:
    files = FailingFiles()
    with open_store(folder, files=files) as store:
        Script().run(store)
    return files.steps


def release(store: Datastore | None) -> None:
    """Release the writer's lock, as the end of a process does."""
    if store is not None and store._lock is not None:
        store._lock.release(force=True)


def test_the_script_reaches_all_kinds_of_writes(tmp_path: Path) -> None:
    files, script = FailingFiles(), Script()
    with open_store(tmp_path / "s", files=files) as store:
        script.run(store)
        assert everything(store) == script.committed
    assert set(files.log) == {"create", "write", "sync", "truncate", "overwrite", "rename", "unlink", "sync_folder"}


@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
def test_a_crash_at_any_write_leaves_the_last_commit(tmp_path: Path, power_cut: bool) -> None:
    steps = steps_of_the_script(tmp_path / "whole")
    assert steps > 80
    for at in range(steps):
        folder, script, store = tmp_path / f"{at}", Script(), None
        files = FailingFiles(at, power_cut=power_cut)
        with contextlib.suppress(Crash):
            store = open_store(folder, files=files)
            script.run(store)
        files.lose_power()
        release(store)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReaderWarning)  # an interrupted commit is reported
            with open_store(folder) as again:
                held = everything(again)
                assert held in (script.committed, script.in_progress), f"step {at}: {files.log[at]}"
                assert again.verify() == []
                documents = {f"{space} {name}": text for space in held for name, text in held[space].items()}
                cursor = search(again.searcher(["", "tenant"]), [2, 4, 6])
                assert len(found(cursor)) == len(brute_force(documents, [2, 4, 6]))
                # What the crash left is deleted, and the datastore can be written.
                named = (
                    {entry.file for entry in again._catalog._opened[""].manifest.segments}
                    if "" in again._catalog._opened
                    else set()
                )
                files_there = {path.name for path in folder.rglob("*.seg")}
                assert files_there >= named
                again.add("after", [1, 2, 3])
        with open_store(folder) as again:
            assert contents(again)["after"] == [1, 2, 3]
            left = {path.name for path in folder.rglob("*.seg")}
            assert left == {e.file for name in again.namespaces() for e in again._catalog.get(name).manifest.segments}  # type: ignore[union-attr]


def test_nothing_is_lost_when_a_full_disk_has_room_again(tmp_path: Path) -> None:
    steps = steps_of_the_script(tmp_path / "whole")
    for at in range(3, steps):  # before that there is no store yet
        script = Script(retry=True)
        files = FailingFiles(at, disk_full, lasting=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReaderWarning)
            try:
                store = open_store(tmp_path / f"{at}", files=files)
            except DatastoreWriteError:
                store = open_store(tmp_path / f"{at}", files=files)
            with store:
                script.run(store)
                assert everything(store) == script.now | script.committed, f"step {at}: {files.log[at]}"
            with open_store(tmp_path / f"{at}") as again:
                assert everything(again) == script.committed, f"step {at}: {files.log[at]}"


def test_a_disk_that_stays_full_leaves_the_last_commit(tmp_path: Path) -> None:
    steps = steps_of_the_script(tmp_path / "whole")
    for at in range(8, steps, 3):
        script, store = Script(), None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReaderWarning)
            with contextlib.suppress(DatastoreWriteError):
                store = open_store(tmp_path / f"{at}", files=FailingFiles(at, disk_full))
                script.run(store)
            if store is not None:
                with contextlib.suppress(DatastoreWriteError):
                    store.close(commit=False)
            with open_store(tmp_path / f"{at}") as again:
                assert everything(again) in (script.committed, script.in_progress)


def test_a_full_disk_is_reported_and_the_next_commit_works(tmp_path: Path) -> None:
    files = FailingFiles()
    with open_store(tmp_path / "s", files=files) as store:
        store.add("a", [1, 2, 3])
        store.commit()
        files._fail_at, files._fail = files.steps + 1, disk_full  # the write, after the truncation
        store.add("b", [4, 5, 6])
        with pytest.raises(DatastoreWriteError, match="No space left on device; free some space and commit again"):
            store.commit()
        assert store.searcher([""]).count([4, 5]) == 1  # it is searchable nevertheless
        with open_store(tmp_path / "s", read_only=True) as reader:
            assert contents(reader) == {"a": [1, 2, 3]}
        files._fail_at = None
        store.commit()
    with open_store(tmp_path / "s") as store:
        assert contents(store) == {"a": [1, 2, 3], "b": [4, 5, 6]}


def test_a_read_only_file_system_is_reported(tmp_path: Path) -> None:
    open_store(tmp_path / "s").close()

    def forbidden() -> OSError:
        return OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(DatastoreWriteError, match="Read-only file system; open it with read_only=True"):
        open_store(tmp_path / "s", files=FailingFiles(0, forbidden)).add("a", [1])


@pytest.mark.skipif(os.name == "nt" or (hasattr(os, "geteuid") and os.geteuid() == 0), reason="root may write anywhere")
def test_a_folder_without_permission_is_reported(tmp_path: Path) -> None:
    open_store(tmp_path / "s").close()
    (tmp_path / "s").chmod(0o500)
    try:
        with pytest.raises(DatastoreWriteError, match="read_only=True"):
            open_store(tmp_path / "s").add("a", [1])
        with open_store(tmp_path / "s", read_only=True) as reader:
            assert reader.documents() == []
    finally:
        (tmp_path / "s").chmod(0o700)


CHILD = """
import sys, warnings
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from datastore_tools import open_store
n = 0
store = open_store(Path(sys.argv[1]))
while True:
    n += 1
    store.add("a", [n % 60] * 20)
    store.add(f"b{n % 7}", [n % 60] * 20)
    store.remove(f"b{(n + 3) % 7}")
    store.add("c", [n % 60] * 20)
    store.commit()
    if n % 5 == 0:
        store.compact()
    print(n, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
def test_a_killed_process_leaves_a_whole_commit(tmp_path: Path) -> None:
    for lines in (3, 8):
        command = [sys.executable, "-c", CHILD, str(tmp_path / "s"), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(lines):
                last = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            child.wait(timeout=60)
            rest = child.stdout.read().split()
            last = int(rest[-1]) if rest and rest[-1].isdigit() else last
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReaderWarning)
            with open_store(tmp_path / "s") as store:
                held = contents(store)
        assert held["a"] == held["c"]
        assert held["a"][0] in ((last % 60), (last + 1) % 60)
        assert SMALL.memtable_tokens == 60


READER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from datastore_tools import contents, open_store
store = open_store(Path(sys.argv[1]), read_only=True)
print("ready", flush=True)
seen, most = 0, 0
while True:
    searcher = store.searcher([""])
    held = contents(store)
    numbers = {name[1:] for name in held if name != "end"}
    assert all(held.get("a" + n) == held.get("b" + n) for n in numbers), held
    assert len(held) >= most
    most = len(held)
    assert searcher.count([1, 2]) >= len(numbers)
    seen += 1
    if "end" in held:
        break
print(seen, len(held))
"""


def test_two_processes_read_while_one_writes(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        command = [sys.executable, "-c", READER, str(tmp_path / "s"), str(Path(__file__).parent)]
        children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        try:
            for child in children:
                assert child.stdout is not None
                assert child.stdout.readline() == "ready\n"
            for n in range(60):
                for kind in "ab":
                    store.add(f"{kind}{n}", [1, 2, n % 60, n % 7, n % 11])
                store.commit()
                if n % 5 == 4:
                    store.compact(full=n % 2 == 0)
            store.add("end", [0])
            store.commit()
            for child in children:
                output = child.communicate(timeout=60)[0]
                assert child.returncode == 0
                assert output.split()[1] == "121"
        finally:
            for child in children:
                child.kill()
                child.wait(timeout=60)
