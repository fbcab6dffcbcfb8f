"""The lock is taken in turn, and by its own thread again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from reader_rag.engine.fair_lock import FairLock


def test_who_holds_it_may_take_it_again() -> None:
    lock = FairLock()
    with lock, lock:
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(lock.acquire, False).result()
        assert lock.acquire(False)
        lock.release()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lock.acquire, False).result()
        other.submit(lock.release).result()


def test_only_who_holds_it_gives_it_back() -> None:
    lock = FairLock()
    with pytest.raises(RuntimeError, match="not held by this thread"):
        lock.release()
    with lock, ThreadPoolExecutor(1) as other, pytest.raises(RuntimeError, match="not held by this thread"):
        other.submit(lock.release).result()


def test_a_thread_that_takes_it_again_and_again_lets_others_go_between() -> None:
    lock, turns, stop = FairLock(), [0], threading.Event()

    def busy() -> None:
        while not stop.is_set():
            with lock:
                turns[0] += 1

    thread = threading.Thread(target=busy)
    with lock:
        thread.start()
    waited = []
    for _ in range(50):
        before = turns[0]
        with lock:
            waited.append(turns[0] - before)
    stop.set()
    thread.join()
    # Those that run while this thread is on its way to the lock are not its fault: they are few.
    assert sorted(waited)[25] < 1000
