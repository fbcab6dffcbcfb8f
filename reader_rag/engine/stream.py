"""How the chunks of an answer get from the thread that decodes to the threads and event loops that read them."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from reader_rag.engine.outputs import Chunk, Generation
from reader_rag.errors import CallbackError

RequestT = TypeVar("RequestT")

_RETRY_S = 0.1
"""Seconds after which `finish_all` tries again to submit to a full queue."""
_CHECK_S = 1.0
"""How often a reader that waits checks that its request can still be decoded."""


class Delivery:
    """The chunks of one answer between the thread that decodes and its reader."""

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._only_end = False
        self.cancelled = False
        """Whether the answer is not wanted any more."""
        self.ended = False
        """Whether no more chunks come."""

    def put(self, chunk: Chunk) -> None:
        """Add a chunk, unless the answer was cancelled or only its end is waited for."""
        with self._changed:
            if not self.cancelled and not self._only_end:
                self._chunks.append(chunk)
                self._notify()

    def end(self, error: BaseException | None = None) -> None:
        """No more chunks come, because of this error if there is one; no effect on an answer that has ended."""
        with self._changed:
            if not self.ended:
                self.ended, self._error = True, error
                self._notify()

    def cancel(self, error: Exception | None = None) -> None:
        """Have the answer ended. The garbage collector calls this too, at any time: it waits for nothing else.

        Args:
            error: What the reader is to receive; None: the reader itself cancels.
        """
        with self._changed:
            self._chunks.clear()
            if self.ended:
                self._error = None
            else:
                self.cancelled = self.ended = True
                self._error = error
                self._notify()

    def get(self, timeout: float) -> Chunk | None:
        """The next chunk.

        Args:
            timeout: Seconds to wait for it.

        Returns:
            None: there is none yet.

        Raises:
            StopIteration: No more come.
            Exception: What ended the answer.
        """
        with self._changed:
            if timeout > 0:
                self._changed.wait_for(lambda: self._chunks or self.ended, timeout)
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

    def wait_for_end(self, timeout: float) -> bool:
        """Wait until no more chunks come, and drop those that do; returns whether the answer has ended.

        The reader is not woken up for each chunk, as `get` is.

        Args:
            timeout: Seconds to wait.
        """
        with self._changed:
            self._only_end = True
            self._chunks.clear()
            return self._changed.wait_for(lambda: self.ended, timeout)

    def call_when_ready(self, call: Callable[[], None]) -> None:
        """Call once, from any thread, when there is something to `get`; at once if there is."""
        with self._changed:
            if not self._chunks and not self.ended:
                self._callbacks.append(call)
                return
        call()

    def _notify(self) -> None:
        self._changed.notify_all()
        callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            call()


class GenerationStream(Iterator[Chunk], AsyncIterator[Chunk]):
    """The answer to one request while it is decoded; see `Engine.submit`.

    Decoding goes on whether it is read or not. Close it (or use it in a `with`, or drop it) to end the request early:
    what it holds is freed before the next step. For one reader at a time.

    Args:
        delivery: Where its chunks come from.
        result: Returns what is decoded so far.
        check: Raises an error if the request cannot be decoded any more.
    """

    def __init__(self, delivery: Delivery, result: Callable[[], Generation], check: Callable[[], None]) -> None:
        self._delivery = delivery
        self._result = result
        self._check = check
        self._abandoned = weakref.finalize(self, delivery.cancel)
        self._abandoned.atexit = False

    def __next__(self) -> Chunk:
        """Wait for the next chunk.

        Raises:
            StopIteration: The answer is done, or the stream was closed.
            BusyError: The request got no place in the batch within `BatchConfig.max_wait_s`.
        """
        while (chunk := self._delivery.get(_CHECK_S)) is None:
            self._check()
        return chunk

    async def __anext__(self) -> Chunk:
        """Wait for the next chunk without blocking the event loop; errors are those of `next`."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                chunk = self._delivery.get(0)
            except StopIteration:
                raise StopAsyncIteration from None
            if chunk is not None:
                return chunk
            ready: asyncio.Future[None] = loop.create_future()
            self._delivery.call_when_ready(lambda ready=ready: _wake(loop, ready))  # type: ignore[misc]
            while not (await asyncio.wait((ready,), timeout=_CHECK_S))[0]:
                self._check()

    def finish(self) -> Generation:
        """Wait for the end of the answer and return it; chunks that were not read are dropped.

        Raises:
            Exception: What ended the answer.
        """
        while not self._delivery.wait_for_end(_CHECK_S):
            self._check()
        try:
            self._delivery.get(0)
        except StopIteration:
            return self.result
        raise AssertionError("an answer that has ended has no more chunks")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End early; never waits."""
        self._delivery.cancel()

    @property
    def result(self) -> Generation:
        """The answer once it is done; before, or if it was closed early, what is decoded of it."""
        return self._result()


def _wake(loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_set, ready)
    except RuntimeError:
        return  # the loop is closed, and nothing waits in it


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():  # nor cancelled
        ready.set_result(None)


def for_reader(error: BaseException | None) -> BaseException | None:
    """An error as its reader receives it: with its type, unless that would end the reader's iteration or task.

    A note says where it was raised. Its traceback is dropped: it would hold the frames of the step, and with them what
    was decoded together, of other tenants too, for as long as the error is referenced.
    """
    if error is None:
        return None
    where = "".join(traceback.format_exception(error))
    held: BaseException | None = error
    while held is not None:
        held.__traceback__ = None
        held = held.__cause__ or held.__context__
    if isinstance(error, (StopIteration, StopAsyncIteration, asyncio.CancelledError)):
        error = CallbackError(f"a callback of the request raised {error!r}, which ended the answer")
    error.add_note(f"in the thread that decodes:\n{where}")
    return error


def finish_all(
    submit: Callable[[RequestT], GenerationStream | None],
    requests: Sequence[RequestT],
    *,
    at_once: int,
    progress: bool,
) -> list[Generation | Exception]:
    """Decode many requests to their ends.

    Args:
        submit: Queues a request; None: the queue is full.
        requests: The requests.
        at_once: How many of them are queued at once.
        progress: Whether to show a progress bar.

    Returns:
        Their answers or errors, in their order.
    """
    results: list[Generation | Exception] = []
    running: deque[GenerationStream] = deque()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("answers", total=len(requests))

        def finish_first() -> None:
            results.append(_result(running.popleft()))
            bar.advance(task)

        try:
            for request in requests:
                while len(running) >= at_once:
                    finish_first()
                while (stream := submit(request)) is None:
                    if running:
                        finish_first()
                    else:
                        time.sleep(_RETRY_S)  # the queue is full of others' requests
                running.append(stream)
            while running:
                finish_first()
        finally:
            for stream in running:
                stream.close()
    return results


def _result(stream: GenerationStream) -> Generation | Exception:
    try:
        return stream.finish()
    except Exception as error:
        return error
