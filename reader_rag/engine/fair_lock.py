"""A reentrant lock that is taken in turn."""

from __future__ import annotations

import threading


class FairLock:
    """As `threading.RLock`, but whoever releases it and wants it again lets those go first who waited meanwhile.

    With an ordinary lock a thread that steps in a loop takes it again before any other thread has woken up.
    """

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._next = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    def acquire(self, blocking: bool = True) -> bool:
        """Take it; see `threading.RLock.acquire`."""
        if not self.is_mine:
            if not self._next.acquire(blocking):
                return False
            try:
                taken = self._held.acquire(blocking)
            finally:
                self._next.release()
            if not taken:
                return False
            self._owner = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        """Give it back; see `threading.RLock.release`.

        Raises:
            RuntimeError: Another thread holds it, or none.
        """
        if not self.is_mine:
            raise RuntimeError("the lock is not held by this thread")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._held.release()

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
