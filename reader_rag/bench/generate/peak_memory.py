"""The peak memory of a run."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """The peak memory since `reset`: CUDA's count on a GPU, else the process's highest resident size.

    Args:
        device: The model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Start to measure."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _CLEAR.exists():
            # "5" resets the highest resident size to the present one. Where a sandbox forbids it, the peak of the whole
            # process is reported.
            try:
                _CLEAR.write_text("5")
            except OSError:
                return

    def peak_mb(self) -> float | None:
        """Megabytes (1e6 bytes); None where the system does not report them."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 1e6
        if not _STATUS.exists():
            return None
        found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
        return int(found[1]) * 1024 / 1e6 if found else None
