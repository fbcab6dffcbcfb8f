"""Continuous batching: requests of any threads are decoded by one worker thread.

Between two steps requests join and leave. A step is one chunk of one prompt, if any is to be prefilled, and one
verified draft of every running sequence, so a long prompt delays the others by one chunk at a time.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from reader_rag.config import BatchConfig
from reader_rag.engine.context import DecodeContext
from reader_rag.engine.observer import Load, Outcome
from reader_rag.engine.outputs import Chunk
from reader_rag.engine.request import Request, draft_bytes
from reader_rag.engine.sequence import DecodeSequence
from reader_rag.engine.step import run_step
from reader_rag.engine.stream import Delivery, GenerationStream, for_reader
from reader_rag.errors import BusyError, ConfigError, EngineClosedError, NestedCallError
from reader_rag.kv_cache.batch_cache import ROOM
from reader_rag.model.profile.task import ProfileTask
from reader_rag.util.out_of_memory import free_bytes
from reader_rag.util.own_thread import call_for

_ROWS_ON_CPU, _ROWS_ELSEWHERE = 8, 32
_SHARE_OF_FREE_MEMORY = 0.5
_IDLE_S = 10.0
"""Seconds without a request after which the worker thread ends; the next request starts another."""
_BLOCKED_S = 600.0
ResultT = TypeVar("ResultT")

_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()
_closed_at_exit = threading.Lock()


@atexit.register
def _close_all() -> None:
    """End all worker threads: one in the middle of a step would crash the interpreter as it shuts down."""
    with _closed_at_exit:
        running = list(_running)
    for scheduler in running:
        scheduler.close()


@dataclass(eq=False)
class _Row:
    """A request from when it is submitted until it has ended.

    Attributes:
        sequence: Its state.
        delivery: Where its chunks go.
        submitted: `time.monotonic()` of when it was submitted.
        patient: Whether it waits in the queue without limit.
    """

    sequence: DecodeSequence
    delivery: Delivery
    submitted: float
    patient: bool


class _Queue:
    """Requests that wait for a place in the batch: tenants in turn, the requests of a tenant in order."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, deque[_Row]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._by_tenant.values())

    def __iter__(self) -> Iterator[_Row]:
        for rows in self._by_tenant.values():
            yield from rows

    def append(self, row: _Row) -> None:
        self._by_tenant.setdefault(row.sequence.request.tenant, deque()).append(row)

    def remove(self, row: _Row, *, admitted: bool = False) -> None:
        """Take a request out; if it was admitted, its tenant's next one waits until every other tenant had a turn."""
        tenant = row.sequence.request.tenant
        rows = self._by_tenant[tenant]
        rows.remove(row)
        if admitted:
            self._by_tenant.move_to_end(tenant)
        if not rows:
            del self._by_tenant[tenant]


class Scheduler:
    """Decodes the requests of all threads on one worker thread.

    Memory for a request's prompt and longest answer is reserved before it is admitted, so none is ever preempted. A
    request that waits for memory is not overtaken by smaller ones.

    Args:
        context: What decoding uses of the engine.
        limits: How many sequences are decoded at once, and how long others wait.
        prefix_bytes: Most bytes of the prefix cache, which lie beside the sequences' KV caches.
        profile_task: What the worker thread does when there has been no request for a while; None: nothing.

    Attributes:
        limits: As given; they may be replaced at any time.
        profile_task: As given.
    """

    def __init__(
        self, context: DecodeContext, limits: BatchConfig, prefix_bytes: int, profile_task: ProfileTask | None = None
    ) -> None:
        self._context = context
        self.limits = limits
        self._prefix_bytes = prefix_bytes
        self.profile_task = profile_task
        self._changed = threading.Condition()
        self._reporting = threading.RLock()
        self._waiting = _Queue()
        self._rows: list[_Row] = []
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closing = False
        self._closed = False
        self._worker: threading.Thread | None = None
        self._available_bytes: int | None = None
        self._reported_moves = (0, 0)

    @property
    def max_rows(self) -> int:
        """Most sequences that are decoded at once."""
        if self.limits.max_rows is not None:
            return self.limits.max_rows
        return _ROWS_ON_CPU if self._context.target.device.type == "cpu" else _ROWS_ELSEWHERE

    @property
    def max_cache_bytes(self) -> int:
        """Most bytes of their keys, values and hidden states."""
        if self.limits.max_cache_bytes is not None:
            return self.limits.max_cache_bytes
        if self._available_bytes is None:
            free = free_bytes(self._context.target.device) - self._prefix_bytes
            self._available_bytes = max(int(_SHARE_OF_FREE_MEMORY * free), 1)
        return self._available_bytes

    @property
    def load(self) -> Load:
        """Running and waiting requests, and the memory that is reserved."""
        with self._changed:
            return Load(len(self._rows), len(self._waiting), self._bytes_of(self._rows))

    @property
    def _on_worker(self) -> bool:
        """Whether this is the worker thread, which cannot wait for itself."""
        return threading.current_thread() is self._worker

    def submit(self, request: Request, *, patient: bool = False) -> GenerationStream:
        """Queue a request; never waits.

        Args:
            request: The prepared request.
            patient: Whether it may wait in the queue without limit.

        Returns:
            Its answer while it is decoded.

        Raises:
            BusyError: The queue is full.
            ConfigError: It needs more memory than all requests together may take.
            EngineClosedError: The engine was closed.
            NestedCallError: A logits processor or stopping criterion of this engine calls.
        """
        self.refuse_nested()
        sequence = DecodeSequence(self._context, request)
        row = _Row(sequence, Delivery(), time.monotonic(), patient)
        needed = self._bytes_of([row])
        if needed > self.max_cache_bytes:
            raise ConfigError(
                f"prompt and answer need {_mebibytes(needed)} of keys and values, and max_cache_bytes is "
                f"{_mebibytes(self.max_cache_bytes)}; lower max_tokens, shorten the prompt or raise the limit"
            )
        sequence.prepare()
        with self._changed:
            self._refuse_closed()
            if len(self._waiting) >= self.limits.max_waiting:
                raise BusyError(f"the queue is full: {len(self._waiting)} requests wait (max_waiting); try again later")
            self._waiting.append(row)
            self._wake_worker()
        self._report_load()
        return GenerationStream(row.delivery, lambda: sequence.result, lambda: self._check(row))

    def refuse_nested(self) -> None:
        """Refuse calls from within a step.

        Raises:
            NestedCallError: This is the worker thread.
        """
        if self._on_worker:
            raise NestedCallError(
                "a logits processor or stopping criterion cannot call the engine that runs it: "
                "call it before the request, or use another engine"
            )

    def between_steps(self, call: Callable[[], ResultT]) -> ResultT:
        """Call a function on the worker thread while no step runs, and wait for its result.

        Args:
            call: What to call. It may use everything that belongs to the worker thread.

        Raises:
            BusyError: The step that runs does not end within `BatchConfig.max_wait_s`.
        """
        if self._on_worker:
            return call()
        future: Future[ResultT] = Future()
        limit = self.limits.max_wait_s or _BLOCKED_S
        with self._changed:
            self._refuse_closed()
            self._calls.append((call, future))
            self._wake_worker()
        if not wait([future], limit).done and future.cancel():
            raise BusyError(f"no step has ended within {limit:g} seconds (max_wait_s); try again later")
        return future.result()

    def close(self) -> None:
        """End all requests with a `BusyError`, wait for the step that is running, and end the profile task.

        Later calls raise an `EngineClosedError`.
        """
        with self._changed:
            self._closed = True
            for row in [*self._rows, *self._waiting]:
                row.delivery.cancel(
                    BusyError("the engine was closed before the answer was finished; submit the request again")
                )
            worker = self._worker
            self._closing = worker is not None and worker.is_alive()
            self._changed.notify()
        if self._closing and worker is not None and not self._on_worker:
            worker.join()
        if self.profile_task is not None:
            self.profile_task.close()

    def _refuse_closed(self) -> None:
        """Refuse calls after `close`; under `_changed`."""
        if self._closed:
            raise EngineClosedError("the engine was closed: load another one (or make another ReaderLLM)")

    def _check(self, row: _Row) -> None:
        """End a request that waits while a callback of another request blocks the worker thread.

        Raises:
            BusyError: The callback has blocked it for `BatchConfig.max_wait_s`, or 600 s where that is None.
        """
        limit, since = self.limits.max_wait_s or _BLOCKED_S, self._context.callbacks.since
        if since is not None and time.monotonic() - max(since, row.submitted) > limit:
            row.delivery.cancel()
            raise BusyError(
                f"a logits processor or stopping criterion has not returned for {limit:g} seconds (max_wait_s); "
                "does it wait for an answer of this engine?"
            )

    def _bytes_of(self, rows: Sequence[_Row]) -> int:
        """Most bytes of keys, values and hidden states that requests may come to hold together."""
        target = self._context.target
        states = sum(row.sequence.state_bytes for row in rows) + draft_bytes([row.sequence.request for row in rows])
        sizes = [(row.sequence.positions, row.sequence.request.draft.max_nodes) for row in rows]
        if target.fixed_step is not None and rows:
            return states + target.fixed_step.cache_bytes(sizes)
        if target.pads and len(rows) > 1:
            positions, nodes = (max(column) for column in zip(*sizes, strict=True))
            return states + len(rows) * target.cache_bytes(int(ROOM * positions) + 1, nodes)
        return states + sum(target.cache_bytes(positions, nodes) for positions, nodes in sizes)

    def _wake_worker(self) -> None:
        """Have the worker thread look at what there is to do; under `_changed`."""
        if self._worker is None or not self._worker.is_alive():
            arguments = (weakref.ref(self), self._changed)
            self._worker = threading.Thread(target=_work, args=arguments, name="reader-rag-scheduler", daemon=True)
            self._worker.start()
        self._changed.notify()

    # -- the worker thread --

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits, or something is to be called."""
        return bool(self._rows or self._waiting or self._calls)

    @property
    def is_awaited(self) -> bool:
        """Whether the worker thread has something to do, or is to end."""
        return self.has_work or self._closing

    def ends(self) -> bool:
        """Whether the worker thread ends; under `_changed`."""
        if self.has_work:
            return False
        self._worker, self._closing = None, False
        return True

    def idle_pause_s(self, idling: bool) -> float | None:
        """Seconds without a request after which the profile task goes on; None: it does not."""
        return None if self.profile_task is None else self.profile_task.pause_s(idling)

    def work(self) -> None:
        """Decode until there is nothing left to do; on the worker thread."""
        with _closed_at_exit:
            _running.add(self)
        while self.has_work:
            try:
                self._turn()
            except BaseException as cause:  # not of one request: all readers receive it
                for row in list(self._rows):
                    self._end(row, "failed", cause)

    def _turn(self) -> None:
        """Let requests join and leave, then run a step."""
        limit = self.limits.max_wait_s
        with self._changed:
            cancelled = self._take_out(lambda row: row.delivery.cancelled)
            admitted = self._admit()
            now = time.monotonic()
            late = self._take_out(lambda row: limit is not None and not row.patient and now - row.submitted > limit)
            calls = list(self._calls)
            self._calls.clear()
        for row in cancelled:
            self._report_end(row, "cancelled")
        for row in late:
            row.delivery.end(BusyError(f"no place in the batch within {limit:g} seconds (max_wait_s); try again later"))
            self._report_end(row, "failed")
        if cancelled or admitted or late:
            self._report_load()
        for row in [row for row in self._rows if row.delivery.cancelled]:
            self._end(row, "cancelled")
        for call, future in calls:
            call_for(future, call)
        self._step()

    def _take_out(self, which: Callable[[_Row], bool]) -> list[_Row]:
        """Take requests out of the queue."""
        rows = [row for row in self._waiting if which(row)]
        for row in rows:
            self._waiting.remove(row)
            row.sequence.queued(time.monotonic() - row.submitted)
        return rows

    def _admit(self) -> bool:
        """Admit requests from the queue to the batch; returns whether any was admitted."""
        admitted = False
        while len(self._rows) < self.max_rows and (row := next(iter(self._waiting), None)) is not None:
            if self._bytes_of([*self._rows, row]) > self.max_cache_bytes:
                break
            self._waiting.remove(row, admitted=True)
            self._rows.append(row)
            row.sequence.queued(time.monotonic() - row.submitted)
            admitted = True
        return admitted

    def _step(self) -> None:
        """Prefill one chunk of the prompt that came first, and run a decode step of all other sequences."""
        prefilling = next((row for row in self._rows if row.sequence.prefilling), None)
        decoding = {row.sequence: row for row in self._rows if not row.sequence.prefilling}
        if prefilling is not None:
            try:
                prefilling.sequence.prefill()
            except BaseException as error:
                self._end(prefilling, "failed", error)
            else:
                self._deliver(prefilling)
        if decoding:
            failed = run_step(self._context, list(decoding))
            for sequence, row in decoding.items():
                if sequence in failed:
                    self._end(row, "failed", failed[sequence])
                else:
                    self._deliver(row)
        self._report_moves()

    def _deliver(self, row: _Row) -> None:
        sequence = row.sequence
        if sequence.prefilling:
            return
        chunk = sequence.take()
        if sequence.finish is None:
            row.delivery.put(chunk)
        else:
            self._end(row, sequence.finish, last=chunk)

    def _end(
        self, row: _Row, outcome: Outcome, error: BaseException | None = None, *, last: Chunk | None = None
    ) -> None:
        """Free what a request holds, then hand its last chunk, or its error, to its reader."""
        try:
            row.sequence.release()
        except Exception as cause:
            outcome, error, last = "failed", error or cause, None
        with self._changed:
            self._rows.remove(row)
        if last is not None:
            row.delivery.put(last)
        row.delivery.end(for_reader(error))
        self._report_end(row, outcome)
        self._report_load()

    def _report_end(self, row: _Row, outcome: Outcome) -> None:
        self._context.observers.tell("answered", row.sequence.result.stats, outcome)

    def _report_load(self) -> None:
        with self._reporting:  # the last load reported is the last one read, whichever threads report
            self._context.observers.tell("loaded", self.load)

    def _report_moves(self) -> None:
        (times, moved), (before, moved_before) = self._context.target.moved, self._reported_moves
        if moved > moved_before:
            self._reported_moves = times, moved
            self._context.observers.tell("moved", times - before, moved - moved_before)


def _work(scheduler: weakref.ref[Scheduler], changed: threading.Condition) -> None:
    """The worker thread. While it waits it holds no reference to the scheduler, so that an unused engine is freed."""

    def awaited() -> bool:
        there = scheduler()
        return there is None or there.is_awaited

    idling = False
    while True:
        there = scheduler()
        pause = None if there is None else there.idle_pause_s(idling)
        del there
        with changed:
            idling = not changed.wait_for(awaited, _IDLE_S if pause is None else pause) and pause is not None
            there = scheduler()
            if there is None or (not idling and there.ends()):
                return
        if idling and there.profile_task is not None:
            there.profile_task.run()
        else:
            there.work()
        del there


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
