"""Every copy of a fixed step between host and device goes through here, and is counted.

A copy to the host waits until the device has finished its queue. The other modules of this room may not copy to the
host in any other way (`.cpu()`, `.item()`, `.tolist()`, `.numpy()`): a test reads their source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class HostBuffer:
    """Integers on the host, seen by NumPy and PyTorch; page-locked where a GPU is to copy them.

    Args:
        size: How many.
        device: Where they are copied to.

    Attributes:
        values: int64 [size].
        tensor: The same memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.values: NDArray[np.int64] = self.tensor.numpy()


class Transfers:
    """Copies between host and device.

    Attributes:
        to_device_calls: Copies to the device so far.
        to_host_calls: Copies to the host so far.
    """

    def __init__(self) -> None:
        self.to_device_calls = self.to_host_calls = 0

    def to_device(self, source: HostBuffer, target: torch.Tensor) -> None:
        """Copy the first values of a buffer.

        Args:
            source: The buffer; it may be written again after the next copy to the host.
            target: int64 [n], on the device.
        """
        self.to_device_calls += 1
        target.copy_(source.tensor[: len(target)], non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> NDArray[Any]:
        """A tensor of integers as an array of the host; waits for the device.

        Args:
            tensor: Of any shape; on the CPU the array shares its memory.
        """
        self.to_host_calls += 1
        array: NDArray[Any] = tensor.to("cpu").numpy()
        return array

    def rows_to_host(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of scores as tensors of the host, copied at once.

        Args:
            parts: At least one, [rows, vocabulary] each, of one type; on the CPU they are returned as they are.
        """
        self.to_host_calls += 1
        if parts[0].device.type == "cpu":
            return list(parts)
        return list(torch.cat(list(parts)).to("cpu").split([len(part) for part in parts]))
