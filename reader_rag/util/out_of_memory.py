"""Memory of the CPU and of accelerators: how much is free, and the errors where none is."""

from __future__ import annotations

import psutil
import torch

_NO_MEMORY_ON_CPU = "can't allocate memory"
"""Part of the message of PyTorch's CPU allocator, which raises a plain `RuntimeError`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the host is out of memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _NO_MEMORY_ON_CPU in str(error)


def free_bytes(device: torch.device) -> int:
    """Bytes of a device's memory that are free.

    Args:
        device: The CPU, or a GPU.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
