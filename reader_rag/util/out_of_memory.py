"""What running out of memory looks like."""

from __future__ import annotations

import torch

_NO_MEMORY_ON_CPU = "can't allocate memory"
"""What PyTorch's allocator for the CPU says, in an error of no kind of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no more memory, on whichever device."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _NO_MEMORY_ON_CPU in str(error)
