"""The runs of one method, each with the memory that it took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from reader_rag.bench.memory import PeakMemory

RunType = TypeVar("RunType")


@dataclass
class Measured(Generic[RunType]):
    """All runs of one variant of a method."""

    runs: list[RunType] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def add(self, run: Callable[[], RunType], memory: PeakMemory) -> None:
        """Run once more."""
        memory.reset()
        self.runs.append(run())
        peak = memory.peak_mb()
        if peak is not None:
            self.peaks.append(peak)

    @property
    def peak_mb(self) -> float | None:
        """Most megabytes of any run; None where the system does not tell."""
        return round(max(self.peaks), 1) if self.peaks else None
