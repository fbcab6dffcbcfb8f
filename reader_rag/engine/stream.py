"""What the scheduler's thread hands to the threads and event loops that read answers."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from reader_rag.engine.outputs import Chunk, Generation
from reader_rag.engine.sequence import DecodeSequence

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine


class Delivery:
    """The chunks of one answer on their way from the thread that decodes to the one that reads."""

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._waiting: list[Callable[[], None]] = []
        self.cancelled = False
        """Whether nobody wants the answer any more."""
        self.ended = False
        """Whether no more chunks come."""

    def put(self, chunk: Chunk) -> None:
        """Add a chunk, if anybody still wants it."""
        with self._changed:
            if not self.cancelled:
                self._chunks.append(chunk)
                self._tell()

    def end(self, error: Exception | None = None) -> None:
        """No more chunks come, for this reason if there is one; unless it has ended already."""
        with self._changed:
            if not self.ended:
                self.ended, self._error = True, error
                self._tell()

    def cancel(self, error: Exception | None = None) -> None:
        """Have the answer ended. The garbage collector calls this too, at any time: it waits for nothing else.

        Args:
            error: What to tell the reader; None: it is the reader who wants no more.
        """
        with self._changed:
            self._chunks.clear()
            if self.ended:
                self._error = None
            else:
                self.cancelled = self.ended = True
                self._error = error
                self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def get(self, *, wait: bool) -> Chunk | None:
        """The next chunk.

        Args:
            wait: Whether to wait for it.

        Returns:
            None: there is none yet.

        Raises:
            StopIteration: No more come.
            Exception: What ended the answer.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._chunks or self.ended)
            if self._chunks:
                return self._chunks.popleft()
            if not self.ended:
                return None
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which would hold this frame, which holds it
        raise StopIteration

    def call_when_ready(self, call: Callable[[], None]) -> None:
        """Call once, from any thread, when there is something to `get`; at once if there is."""
        with self._changed:
            if not self._chunks and not self.ended:
                self._waiting.append(call)
                return
        call()


class ScheduledStream(Iterator[Chunk], AsyncIterator[Chunk]):
    """One answer in the making, decoded together with others; see `Engine.submit`.

    It goes on whether it is read or not. Close it (or use it in a `with`, or drop it) to end it early: what it holds is
    freed before the next step. For one reader at a time.
    """

    def __init__(self, engine: Engine, request: DecodeSequence, delivery: Delivery) -> None:
        self._engine = engine
        self._request = request
        self._delivery = delivery
        self._abandoned = weakref.finalize(self, delivery.cancel)
        self._abandoned.atexit = False

    def __next__(self) -> Chunk:
        """Wait for the next chunk.

        Raises:
            StopIteration: The answer is done, or the stream was closed.
        """
        chunk = self._delivery.get(wait=True)
        assert chunk is not None
        return chunk

    async def __anext__(self) -> Chunk:
        """Wait for the next chunk without blocking the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                chunk = self._delivery.get(wait=False)
            except StopIteration:
                raise StopAsyncIteration from None
            if chunk is not None:
                return chunk
            ready: asyncio.Future[None] = loop.create_future()
            self._delivery.call_when_ready(lambda ready=ready: _wake(loop, ready))  # type: ignore[misc]
            await ready

    def __enter__(self) -> ScheduledStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End early; never waits."""
        self._delivery.cancel()

    @property
    def result(self) -> Generation:
        """The answer once it is done; before, or if it was closed early, what was decoded of it."""
        if self._delivery.ended:
            return self._request.result
        with self._engine.lock:  # no step changes it meanwhile
            return self._request.result


def _wake(loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_set, ready)
    except RuntimeError:
        return  # the loop was closed: nobody waits any more


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():  # nor cancelled
        ready.set_result(None)
