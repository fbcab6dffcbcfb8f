"""Tells whoever wants to know what the engine does: metrics, traces, logs."""

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
    """One verify step.

    Attributes:
        positions: Of the pass: a root for each text, and the drafted nodes.
        accepted: For each text its accepted nodes by source, a name of `reader_rag.draft.SOURCES`.
        emitted: For each text the tokens it emitted.
        draft_s: Seconds spent making drafts.
        seconds: All of the step.
    """

    positions: int
    accepted: Sequence[Mapping[str, int]]
    emitted: Sequence[int]
    draft_s: float
    seconds: float


@dataclass(frozen=True)
class Load:
    """What an engine is busy with.

    Attributes:
        running: Answers in the making.
        waiting: Requests that wait for a place.
        cache_bytes: Reserved for the keys and values of the running ones.
    """

    running: int
    waiting: int
    cache_bytes: int


class Observer:
    """Override what is of interest.

    Called by the thread that decodes, between steps, `loaded` by those that submit and `answered` by those that read
    or close too. Be quick, and ask the engine nothing: others may wait for its lock meanwhile.
    """

    def stepped(self, report: StepReport) -> None:
        """A verify step is done."""

    def answered(self, stats: Stats, outcome: Outcome) -> None:
        """A request has ended, one way or another."""

    def loaded(self, load: Load) -> None:
        """A request came, was given a place or has ended."""

    def moved(self, rearrangements: int, moved_bytes: int) -> None:
        """Keys and values of texts decoded together were moved, so many times all of them."""


class Observers(list[Observer]):
    """All who are told; one that fails is logged and does not disturb the answers."""

    def tell(self, what: str, *about: Any) -> None:
        """Call a method of each.

        Args:
            what: Its name.
            about: Its arguments.
        """
        for observer in list(self):
            try:
                getattr(observer, what)(*about)
            except Exception:
                _log.exception("%s.%s failed", type(observer).__name__, what)
