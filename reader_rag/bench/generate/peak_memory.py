"""The peak memory of a run."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures peak memory since `reset`: allocated memory on a GPU, else the process's peak resident set size.

    Args:
        device: The model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Start a new measurement."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _CLEAR.exists():
            # "5" resets the peak to the current resident set size. If that is forbidden, the peak since the process
            # started is reported.
            try:
                _CLEAR.write_text("5")
            except OSError:
                return

    def peak_mb(self) -> float | None:
        """The peak in megabytes (1e6 bytes); None if the system does not report it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 1e6
        if not _STATUS.exists():
            return None
        found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
        return int(found[1]) * 1024 / 1e6 if found else None
