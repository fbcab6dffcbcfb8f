"""The runs of one method, each with the memory that it took."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")

RunType = TypeVar("RunType")


class PeakMemory:
    """The most memory held since `reset`: CUDA's own count on a GPU, else the process's resident high-water mark.

    Args:
        device: Where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Start anew."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _CLEAR.exists():
            # "5" sets the high-water mark to what is resident now; a sandbox may forbid it, and then the peak of the
            # whole process is what is reported.
            try:
                _CLEAR.write_text("5")
            except OSError:
                return

    def peak_mb(self) -> float | None:
        """Megabytes (1e6 bytes), or None where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 1e6
        if not _STATUS.exists():
            return None
        found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
        return int(found[1]) * 1024 / 1e6 if found else None


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
