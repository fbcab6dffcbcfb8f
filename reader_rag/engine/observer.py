"""Observers of an engine: callbacks for metrics, traces and logs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reader_rag.engine.outputs import Stats

Outcome = Literal["stop", "length", "cancelled", "failed"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """One decode step of a batch.

    Attributes:
        positions: Positions of the forward pass: a root for each sequence, and the drafted nodes that are verified.
        accepted: For each sequence, the number of accepted nodes by source, a name of
            `reader_rag.draft.SOURCES`.
        emitted: For each sequence, the number of tokens it emitted.
        draft_s: Seconds spent proposing drafts.
        seconds: Seconds of the whole step.
    """

    positions: int
    accepted: Sequence[Mapping[str, int]]
    emitted: Sequence[int]
    draft_s: float
    seconds: float


@dataclass(frozen=True)
class Load:
    """How many requests an engine has, and the memory reserved for them.

    Attributes:
        running: Requests that are decoded now.
        waiting: Requests in the queue.
        cache_bytes: Bytes reserved for the KV caches of the running requests.
    """

    running: int
    waiting: int
    cache_bytes: int


class Observer:
    """Base class of observers: override the callbacks that you need.

    The scheduler's thread calls them between steps; the thread that submits a request calls `loaded` too. Return
    quickly and do not call the engine: decoding waits for the callback.
    """

    def stepped(self, report: StepReport) -> None:
        """A decode step has ended.

        Args:
            report: Its counts and times.
        """

    def answered(self, stats: Stats, outcome: Outcome) -> None:
        """A request has ended.

        Args:
            stats: Its counts and times.
            outcome: "stop" or "length" for a finished answer; "cancelled" or "failed".
        """

    def loaded(self, load: Load) -> None:
        """A request was submitted, was admitted to the batch or has ended.

        Args:
            load: The requests and the reserved memory after that.
        """

    def moved(self, rearrangements: int, moved_bytes: int) -> None:
        """Keys and values in the batch cache were moved.

        Args:
            rearrangements: How often all entries of the batch were moved since the last call.
            moved_bytes: Bytes that were moved since the last call.
        """

    def profiled(self, share: float) -> None:
        """More of the model's profile was computed, while no request ran.

        Args:
            share: Share of the vocabulary whose next tokens are known now, 0 to 1.
        """


class Observers(list[Observer]):
    """The observers of an engine. An exception in one is logged; decoding goes on."""

    def tell(self, what: str, *about: Any) -> None:
        """Call a method of every observer.

        Args:
            what: Name of the method.
            about: Arguments of the method.
        """
        for observer in list(self):
            try:
                getattr(observer, what)(*about)
            except Exception:
                _log.exception("%s.%s failed", type(observer).__name__, what)
