"""Continuous batching: requests of any threads share the steps of one worker thread.

Between two steps requests join and leave. A step is one chunk of one prompt, if any is to be read, and one verified
draft of every answer, so a long prompt delays the others by one chunk at a time.
"""

from __future__ import annotations

import atexit
import threading
import time
import traceback
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import torch

from reader_rag.config import BatchConfig
from reader_rag.engine.observer import Load, Outcome
from reader_rag.engine.outputs import Chunk
from reader_rag.engine.sequence import DecodeSequence, Request
from reader_rag.engine.step import advance
from reader_rag.engine.stream import Delivery, ScheduledStream
from reader_rag.errors import BusyError, ConfigError
from reader_rag.kv_cache.batch_cache import ROOM

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

_ROWS_ON_CPU, _ROWS_ELSEWHERE = 8, 32
_SHARE_OF_FREE_MEMORY = 0.5
_IDLE_S = 10.0
"""After so long without a request the worker thread ends; the next request starts another."""

_running: weakref.WeakSet[Scheduler] = weakref.WeakSet()
_closed_at_exit = threading.Lock()


@atexit.register
def _close_all() -> None:
    """A thread that is in the middle of a step when the interpreter goes would crash it."""
    with _closed_at_exit:
        running = list(_running)
    for scheduler in running:
        scheduler.close()


@dataclass(eq=False)
class _Row:
    """A request, from when it was submitted until it has ended."""

    request: DecodeSequence
    delivery: Delivery
    submitted: float
    patient: bool


class _Queue:
    """Requests that wait: tenants in turn, the requests of a tenant in the order they came."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, deque[_Row]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._by_tenant.values())

    def __iter__(self) -> Iterator[_Row]:
        for rows in self._by_tenant.values():
            yield from rows

    def append(self, row: _Row) -> None:
        self._by_tenant.setdefault(row.request.asked.tenant, deque()).append(row)

    def first(self) -> _Row | None:
        """Whose turn it is."""
        return next(iter(self), None)

    def remove(self, row: _Row, *, had_its_turn: bool = False) -> None:
        """Take a request out; where it had its tenant's turn, the next one waits until all others had theirs."""
        tenant = row.request.asked.tenant
        rows = self._by_tenant[tenant]
        rows.remove(row)
        if had_its_turn:
            self._by_tenant.move_to_end(tenant)
        if not rows:
            del self._by_tenant[tenant]


class Scheduler:
    """Decodes the requests of all threads together.

    Room for a request's prompt and longest answer is reserved before it begins, so none is ever put back. A request
    that waits for room is not overtaken by smaller ones.

    Args:
        engine: What decodes; others may use it too, between the steps.
        limits: How many requests are decoded at once, and how long others wait.

    Attributes:
        limits: As given.
    """

    def __init__(self, engine: Engine, limits: BatchConfig) -> None:
        self._engine = engine
        self.limits = limits
        self._changed = threading.Condition()
        self._telling = threading.RLock()
        self._waiting = _Queue()
        self._rows: list[_Row] = []
        self._closing = False
        self._worker: threading.Thread | None = None
        self._most_bytes: int | None = limits.max_cache_bytes

    @property
    def max_rows(self) -> int:
        """Most answers in the making at once."""
        if self.limits.max_rows is not None:
            return self.limits.max_rows
        return _ROWS_ON_CPU if self._engine.target.device.type == "cpu" else _ROWS_ELSEWHERE

    @property
    def max_cache_bytes(self) -> int:
        """Most bytes of keys and values at once."""
        if self._most_bytes is None:
            free = _free_bytes(self._engine.target.device) - self._engine.prefix_bytes
            self._most_bytes = max(int(_SHARE_OF_FREE_MEMORY * free), 1)
        return self._most_bytes

    @property
    def load(self) -> Load:
        """What it is busy with."""
        with self._changed:
            return self._load()

    @property
    def is_here(self) -> bool:
        """Whether this is its own thread, which cannot wait for itself."""
        return threading.current_thread() is self._worker

    def submit(self, asked: Request, *, patient: bool = False) -> ScheduledStream:
        """Have a request decoded; never waits.

        Args:
            asked: What it is asked for.
            patient: Whether it waits for its place as long as it takes, whatever the limit.

        Returns:
            Its answer in the making.

        Raises:
            BusyError: As many requests wait already as may, or the engine is being closed.
            ConfigError: It needs more memory than all requests together may take.
        """
        request = DecodeSequence(self._engine, asked)
        row = _Row(request, Delivery(), time.monotonic(), patient)
        needed = self._bytes_of([row])
        if needed > self.max_cache_bytes:
            raise ConfigError(
                f"prompt and answer need {_mebibytes(needed)} of keys and values, and max_cache_bytes is "
                f"{_mebibytes(self.max_cache_bytes)}; lower max_tokens, shorten the prompt or raise the limit"
            )
        request.prepare()
        with self._changed:
            if self._closing:
                raise BusyError("the engine is being closed; ask again later")
            if len(self._waiting) >= self.limits.max_waiting:
                raise BusyError(f"{len(self._waiting)} requests are waiting already (max_waiting); ask again later")
            if self._worker is None or not self._worker.is_alive():
                self._worker = self._start()
            self._waiting.append(row)
            self._changed.notify()
        self._tell_load()
        return ScheduledStream(self._engine, request, row.delivery)

    def close(self) -> None:
        """End all requests with a `BusyError`, and wait for the step that is running."""
        with self._changed:
            for row in [*self._rows, *self._waiting]:
                row.delivery.cancel(BusyError("the engine was closed before the answer was done"))
            worker = self._worker
            self._closing = worker is not None and worker.is_alive()
            self._changed.notify()
        # Whoever holds the engine's lock keeps the step from ending.
        if self._closing and worker is not None and not self.is_here and not self._engine.lock.is_mine:
            worker.join()

    def _load(self) -> Load:
        return Load(len(self._rows), len(self._waiting), self._bytes_of(self._rows))

    def _bytes_of(self, rows: Sequence[_Row]) -> int:
        """Most bytes of keys and values that requests may come to hold together."""
        target = self._engine.target
        sizes = [(row.request.positions, row.request.asked.draft.max_nodes) for row in rows]
        if target.pads and len(rows) > 1:
            positions, nodes = (max(column) for column in zip(*sizes, strict=True))
            return len(rows) * target.cache_bytes(int(ROOM * positions) + 1, nodes)
        return sum(target.cache_bytes(positions, nodes) for positions, nodes in sizes)

    # -- the worker thread --

    def _start(self) -> threading.Thread:
        arguments = (weakref.ref(self), self._changed)
        worker = threading.Thread(target=_work, args=arguments, name="reader-rag-scheduler", daemon=True)
        worker.start()
        return worker

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._rows or self._waiting)

    @property
    def is_awaited(self) -> bool:
        """Whether its thread has something to do, be it to end."""
        return self.has_work or self._closing

    def ends(self) -> bool:
        """Whether its thread may end, which it then does; under `_changed`."""
        if self.has_work:
            return False
        self._worker, self._closing = None, False
        return True

    def work(self) -> None:
        """Decode until there is nothing left to do; on its own thread."""
        with _closed_at_exit:
            _running.add(self)
        while self.has_work:
            try:
                self._turn()
            except BaseException as cause:  # not of one request: all readers must learn of it
                for row in list(self._rows):
                    self._end(row, "failed", cause)

    def _turn(self) -> None:
        """Let requests join and leave, then make a step."""
        longest = self.limits.max_wait_s
        with self._changed:
            cancelled = self._take_out(lambda row: row.delivery.cancelled)
            begun = self._admit()
            now = time.monotonic()
            late = []
            if longest is not None:
                late = self._take_out(lambda row: not row.patient and now - row.submitted > longest)
        for row in cancelled:
            self._tell_end(row, "cancelled")
        for row in late:
            row.delivery.end(BusyError(f"no place within {longest:g} seconds (max_wait_s); ask again later"))
            self._tell_end(row, "failed")
        if cancelled or begun or late:
            self._tell_load()
        with self._engine.lock:
            self._step()

    def _take_out(self, which: Callable[[_Row], bool]) -> list[_Row]:
        """Take waiting requests out of the queue."""
        rows = [row for row in self._waiting if which(row)]
        for row in rows:
            self._waiting.remove(row)
            row.request.queued(time.monotonic() - row.submitted)
        return rows

    def _admit(self) -> bool:
        """Give waiting requests a place; whether any was given one."""
        begun = False
        while len(self._rows) < self.max_rows and (row := self._waiting.first()) is not None:
            if self._bytes_of([*self._rows, row]) > self.max_cache_bytes:
                break
            self._waiting.remove(row, had_its_turn=True)
            self._rows.append(row)
            row.request.queued(time.monotonic() - row.submitted)
            begun = True
        return begun

    def _step(self) -> None:
        """One chunk of the prompt that came first, and one verified draft of every answer."""
        for row in [row for row in self._rows if row.delivery.cancelled]:
            self._end(row, "cancelled")
        reading = next((row for row in self._rows if row.request.reading), None)
        going = {row.request: row for row in self._rows if not row.request.reading}
        if reading is not None:
            try:
                reading.request.read()
            except BaseException as error:
                self._end(reading, "failed", error)
            else:
                self._deliver(reading)
        if going:
            failed = advance(self._engine, list(going))
            for request, row in going.items():
                if request in failed:
                    self._end(row, "failed", failed[request])
                else:
                    self._deliver(row)

    def _deliver(self, row: _Row) -> None:
        request = row.request
        if request.reading:
            return
        chunk = request.take()
        if request.finish is None:
            row.delivery.put(chunk)
        else:
            self._end(row, request.finish, last=chunk)

    def _end(
        self, row: _Row, outcome: Outcome, error: BaseException | None = None, *, last: Chunk | None = None
    ) -> None:
        """Free what a request holds, then hand its last chunk, or its error, to whoever waits for its answer."""
        try:
            row.request.release()
        except Exception as cause:
            outcome, error, last = "failed", error or cause, None
        with self._changed:
            self._rows.remove(row)
        if last is not None:
            row.delivery.put(last)
        row.delivery.end(_told(error))
        self._tell_end(row, outcome)
        self._tell_load()

    def _tell_end(self, row: _Row, outcome: Outcome) -> None:
        self._engine.observers.tell("answered", row.request.result.stats, outcome)

    def _tell_load(self) -> None:
        with self._telling:  # so that what is told last is what was read last, whichever threads tell
            self._engine.observers.tell("loaded", self.load)


def _work(scheduler: weakref.ref[Scheduler], changed: threading.Condition) -> None:
    """A scheduler's thread. While it waits it holds nothing, so that an engine that nobody needs is freed."""

    def awaited() -> bool:
        there = scheduler()
        return there is None or there.is_awaited

    while True:
        with changed:
            changed.wait_for(awaited, _IDLE_S)
            there = scheduler()
            if there is None or there.ends():
                return
        there.work()
        del there


def _told(error: BaseException | None) -> Exception | None:
    """An error as a reader is told it: one that means neither the end of an iteration nor of a program.

    Where it was raised is said by a note. Its traceback would hold the frames of the step, and with them what was
    decoded together with it, of other tenants too, for as long as somebody keeps the error.
    """
    if error is None:
        return None
    where = "".join(traceback.format_exception(error))
    held: BaseException | None = error
    while held is not None:
        held.__traceback__ = None
        held = held.__cause__ or held.__context__
    if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
        error = RuntimeError(f"the answer was ended by {error!r}")
    error.add_note(f"in the thread that decodes:\n{where}")
    return error


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
