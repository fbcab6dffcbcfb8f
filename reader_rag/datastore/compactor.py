"""Compaction: when segments are written, merged and rewritten, and the thread that does it in the background."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reader_rag.datastore.memtable import SegmentState
from reader_rag.errors import ConfigError, ReaderError, ReaderWarning

if TYPE_CHECKING:
    from reader_rag.datastore.writer import NamespaceWriter

_LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True)
class CompactionConfig:
    """When a datastore writes, merges and rewrites segments.

    Attributes:
        memtable_tokens: With so many tokens the memtable is flushed to a segment. At most so many are sorted when a
            datastore is opened.
        merge_factor: So many segments of about one size are merged into one; each size is `merge_factor` times the
            one before.
        max_segment_tokens: Most tokens of a merged segment. Sorting takes 16 bytes of memory for each token of 16-bit
            vocabularies, 22 of larger ones.
        max_removed_share: A segment is rewritten when this share of its tokens was removed, 0 to 1.
        max_removed_age_s: A segment is rewritten this many seconds after the first removal, too.
        background: Merge and rewrite in a thread; otherwise only in `Datastore.compact`.

    Raises:
        ConfigError: A value is out of its range.
    """

    memtable_tokens: int = 1 << 18
    merge_factor: int = 4
    max_segment_tokens: int = 1 << 27
    max_removed_share: float = 0.125
    max_removed_age_s: float = 900.0
    background: bool = True

    def __post_init__(self) -> None:
        if self.memtable_tokens < 1 or self.merge_factor < 2:
            raise ConfigError("memtable_tokens must be at least 1 and merge_factor at least 2")
        if not self.memtable_tokens <= self.max_segment_tokens < 1 << 31:
            raise ConfigError("max_segment_tokens must lie from memtable_tokens to 2**31 - 1")
        if not 0 <= self.max_removed_share <= 1 or self.max_removed_age_s < 0:
            raise ConfigError("max_removed_share must lie from 0 to 1 and max_removed_age_s must not be negative")


def choose_segments(
    segments: Sequence[SegmentState], config: CompactionConfig, now: float, *, force: bool = False, full: bool = False
) -> list[SegmentState]:
    """Choose the segments of the next merge: one that is due to be rewritten, or several of about one size.

    Args:
        segments: All segments of a namespace.
        config: When segments are due.
        now: Seconds since 1970.
        force: Any segment with removed documents is due.
        full: Segments of any size are merged.

    Returns:
        The segments to replace by one; empty: nothing is due.
    """
    for state in segments:
        removed = state.committed_tombstones
        if removed and (
            force
            or state.tokens_of(removed) / max(state.segment.size, 1) >= config.max_removed_share
            or (state.tombstones_since is not None and now >= state.tombstones_since + config.max_removed_age_s)
        ):
            return [state]
    tiers: dict[int, list[SegmentState]] = {}
    for state in segments:
        ratio = max(state.segment.size / config.memtable_tokens, 1)
        tier = 0 if full else int(math.log(ratio, config.merge_factor) + 1e-9)
        tiers.setdefault(tier, []).append(state)
    for _, tier_segments in sorted(tiers.items()):
        chosen: list[SegmentState] = []
        total = 0
        for state in sorted(tier_segments, key=lambda state: state.segment.size):
            if total + state.segment.size <= config.max_segment_tokens:
                chosen.append(state)
                total += state.segment.size
        if len(chosen) > 1 and (full or len(tier_segments) >= config.merge_factor):
            return chosen
    return []


class Compactor:
    """Compacts namespaces on a thread, one at a time, each when it is due.

    Args:
        clock: Seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: dict[NamespaceWriter, float] = {}
        self._options: dict[NamespaceWriter, tuple[bool, bool]] = {}
        self._thread: threading.Thread | None = None
        self._closing = False

    def schedule(self, writer: NamespaceWriter, *, force: bool = False, full: bool = False) -> None:
        """Compact a namespace when it is due, or at once.

        Args:
            writer: Writer of the namespace.
            force: At once; rewrite all segments with removed documents.
            full: At once; merge into as few segments as possible.
        """
        seconds = 0.0 if force or full else writer.seconds_until_due()
        if seconds is None:
            return
        with self._changed:
            if self._closing:
                return
            before = self._options.get(writer, (False, False))
            self._options[writer] = (before[0] or force, before[1] or full)
            self._due[writer] = min(self._due.get(writer, math.inf), self._clock() + seconds)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="datastore-compactor", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread when the merge that is running has ended."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _next(self) -> tuple[NamespaceWriter, bool, bool] | None:
        """Wait for a namespace that is due; None: the compactor is closing."""
        with self._changed:
            while not self._closing:
                if self._due:
                    writer = min(self._due, key=self._due.__getitem__)
                    wait = self._due[writer] - self._clock()
                    if wait <= 0:
                        del self._due[writer]
                        return writer, *self._options.pop(writer)
                    self._changed.wait(min(wait, _LONGEST_WAIT_S))
                else:
                    self._changed.wait()
            return None

    def _run(self) -> None:
        while (job := self._next()) is not None:
            writer, force, full = job
            try:
                writer.compact(force=force, full=full)
            except (ReaderError, OSError, MemoryError, ValueError) as error:
                # The committed state is intact, and the next commit schedules another attempt.
                warnings.warn(f"a datastore could not be compacted: {error}", ReaderWarning, stacklevel=1)
            else:
                self.schedule(writer)
