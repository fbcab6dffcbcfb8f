"""An answer decoded in the thread that reads it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from reader_rag.engine.observer import Outcome
from reader_rag.engine.outputs import Chunk, Generation
from reader_rag.engine.sequence import DecodeSequence, Request
from reader_rag.engine.step import advance

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine


class GenerationStream(Iterator[Chunk], AsyncIterator[Chunk]):
    """One answer in the making; see `Engine.stream`.

    Close it (or use it in a `with`) to end early: its cache is freed at once.
    """

    def __init__(self, engine: Engine, asked: Request) -> None:
        self._engine = engine
        self._request = DecodeSequence(engine, asked)
        self._closed = False
        self._told = False
        self._busy = threading.Lock()

    def __next__(self) -> Chunk:
        """Run one step of the engine: the prefill at first, then one verified draft each.

        Raises:
            StopIteration: The answer is done, or the stream was closed.
        """
        request = self._request
        with self._busy:
            if self._closed or request.finish is not None:
                self._end(request.finish or "cancelled")
                raise StopIteration
            try:
                self._step()
            except BaseException as error:
                self._closed = True
                self._end("failed" if isinstance(error, Exception) else "cancelled")
                raise
            if request.finish is not None:
                self._end(request.finish)
            chunk = request.take()
        if self._closed:  # by another thread during the step, which left the cache to this one
            self.close()
        return chunk

    async def __anext__(self) -> Chunk:
        """As `next`. The event loop waits meanwhile: `Engine.submit` is what does not block it."""
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    def _step(self) -> None:
        """Read the prompt, chunk by chunk, or verify one draft; others may step between two chunks."""
        request = self._request
        if request.reading:
            request.prepare()
        else:
            with self._engine.lock:
                _raise(advance(self._engine, [request]).get(request))
        while request.reading and not self._closed:
            with self._engine.lock:
                try:
                    request.read()
                except (StopIteration, StopAsyncIteration) as error:
                    _raise(error)

    def _end(self, outcome: Outcome) -> None:
        """Free what the request holds, and tell once how it ended; for whoever holds `_busy`."""
        self._request.release()
        if not self._told:
            self._told = True
            self._engine.observers.tell("answered", self._request.result.stats, outcome)

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End early and free the cache; a step that is running in another thread is finished first, by that thread."""
        self._closed = True
        if self._busy.acquire(blocking=False):
            try:
                self._end(self._request.finish or "cancelled")
            finally:
                self._busy.release()

    @property
    def result(self) -> Generation:
        """The answer; what there is of it if the stream was closed early or is not done."""
        return self._request.result


def _raise(error: BaseException | None) -> None:
    """Raise an error of a request, if there is one; as what does not mean the end of an iteration (PEP 479)."""
    try:
        if isinstance(error, (StopIteration, StopAsyncIteration)):
            raise RuntimeError(f"a processor or criterion raised {error!r}") from error
        if error is not None:
            raise error
    finally:
        del error  # which would hold this frame, which holds it
