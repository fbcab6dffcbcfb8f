"""Upkeep: the thread that merges and rewrites segments while others search and add."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from reader_rag.errors import ReaderError, ReaderWarning

if TYPE_CHECKING:
    from reader_rag.datastore.writer import Writer

_LONGEST_WAIT_S = 3600.0


class Upkeep:
    """Sees to namespaces, one at a time, when they change and when something of them is due.

    Args:
        clock: Seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wake = threading.Condition()
        self._due: dict[Writer, float] = {}
        self._asked: dict[Writer, tuple[bool, bool]] = {}
        self._thread: threading.Thread | None = None
        self._ending = False

    def see_to(self, writer: Writer, *, force: bool = False, full: bool = False) -> None:
        """Have a namespace tidied when it is due, or soon; see `Writer.tidy`."""
        due = 0.0 if force or full else writer.due_in()
        if due is None:
            return
        with self._wake:
            if self._ending:
                return
            before = self._asked.get(writer, (False, False))
            self._asked[writer] = (before[0] or force, before[1] or full)
            self._due[writer] = min(self._due.get(writer, float("inf")), self._clock() + due)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="datastore-upkeep", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        """End when what is in the making is done."""
        with self._wake:
            self._ending = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _next(self) -> tuple[Writer, bool, bool] | None:
        with self._wake:
            while not self._ending:
                if self._due:
                    writer = min(self._due, key=self._due.__getitem__)
                    wait = self._due[writer] - self._clock()
                    if wait <= 0:
                        del self._due[writer]
                        return writer, *self._asked.pop(writer)
                    self._wake.wait(min(wait, _LONGEST_WAIT_S))
                else:
                    self._wake.wait()
            return None

    def _run(self) -> None:
        while (job := self._next()) is not None:
            writer, force, full = job
            try:
                writer.tidy(force=force, full=full)
            except (ReaderError, OSError, MemoryError, ValueError) as error:
                # What was committed is as it was; it is tried again with the next commit.
                warnings.warn(f"a datastore could not be merged: {error}", ReaderWarning, stacklevel=1)
            else:
                self.see_to(writer)
