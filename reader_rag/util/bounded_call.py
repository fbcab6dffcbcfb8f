"""`bounded_call`: ends code of others that does not return, such as a chat template, from any thread."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

ResultT = TypeVar("ResultT")

_WATCH_S = 0.05


class BoundExceeded(BaseException):
    """The call that `bounded_call` made has exceeded a bound. No `except Exception` of the called code stops it."""


def bounded_call(call: Callable[[], ResultT], *, seconds: float, memory_bytes: int) -> ResultT:
    """Call a function, and end it with an exception when it takes too long or too much memory.

    Another thread has the interpreter raise the exception between two instructions of Python code. A single operation
    of C code, such as the multiplication of two long numbers, is not interrupted: the call ends after it.

    Args:
        call: The function.
        seconds: Most seconds that it may take.
        memory_bytes: Most bytes that the process may grow by while it runs.

    Returns:
        What the function returns.

    Raises:
        BoundExceeded: It took too long or too much memory; the message says which.
    """
    watch = _Watch(threading.get_ident(), seconds, memory_bytes)
    watch.start()
    try:
        try:
            return call()
        finally:
            watch.end()
    except BoundExceeded:
        watch.end()  # again, because the exception may have been raised in the first one
        raise BoundExceeded(watch.reason) from None


class _Watch(threading.Thread):
    """Raises `BoundExceeded` in another thread when it exceeds a bound, again and again until it has ended.

    Args:
        thread: Identifier of the other thread.
        seconds: Most seconds.
        memory_bytes: Most growth of the process.
    """

    def __init__(self, thread: int, seconds: float, memory_bytes: int) -> None:
        super().__init__(name="reader-rag-watch", daemon=True)
        self.reason = ""
        self._watched = thread
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._ended = threading.Event()
        self._raising = threading.Lock()

    def run(self) -> None:
        begin, size = time.monotonic(), None
        while not self._ended.wait(_WATCH_S):
            used = psutil.Process().memory_info().rss
            size = used if size is None else size
            if time.monotonic() - begin > self._seconds:
                self.reason = f"takes longer than {self._seconds:g} s"
            elif used - size > self._memory_bytes:
                self.reason = f"takes more than {self._memory_bytes >> 20} MiB of memory"
            if self.reason:
                with self._raising:
                    if not self._ended.is_set():
                        _raise_in(self._watched, BoundExceeded)

    def end(self) -> None:
        """Raise nothing any more; on the watched thread."""
        self._ended.set()
        with self._raising:
            if self.reason:
                _raise_in(self._watched, None)  # one that is not yet raised


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    argument = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)
