"""Recognises errors of memory allocation, on the CPU and on accelerators."""

from __future__ import annotations

import torch

_NO_MEMORY_ON_CPU = "can't allocate memory"
"""Part of the message of PyTorch's CPU allocator, which raises a plain `RuntimeError`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the host is out of memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _NO_MEMORY_ON_CPU in str(error)
