"""The shape of every pass in strict mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from reader_rag.model.compiled.forward import slow_products

_ROW_BLOCK = 4
"""Rows that the CPU's matrix products compute together; see `FixedShape`."""


@dataclass(frozen=True)
class FixedShape:
    """Shapes that do not depend on what was drafted, so that rounding does not either.

    Every pass has `width` positions, padded; attention runs over a number of positions that grows by `bucket` and
    depends on the root's position alone.

    Attributes:
        width: Positions of a pass: the root and up to `width - 1` drafted ones. A multiple of 4 keeps the bits of a
            row at every place of the pass: PyTorch's float32 products (MKL) compute rows in blocks of 4 and what is
            left over by another kernel, and its vectorised functions compute the last elements of an array, those
            behind the last multiple of 32, by another formula.
        bucket: Step in which the attended positions grow.
    """

    width: int = 16
    bucket: int = 256

    @classmethod
    def of(cls, model: PreTrainedModel, width: int | None = None) -> FixedShape:
        """The shape for a model where it lies.

        Args:
            model: The model.
            width: Positions of a pass, rounded up to a multiple of 4; None takes what pays on the kind of device
                (docs/exactness.md). It is never measured, so that a machine always rounds the same way.
        """
        if width is None:
            width = cls.width
            if model.device.type == "cpu":
                width = 8 if model.dtype == torch.float32 or not slow_products() else 4
        return cls(-(-width // _ROW_BLOCK) * _ROW_BLOCK)

    def shown(self, root: int) -> int:
        """Positions attended to when the root stands at `root`."""
        return -(-(root + self.width) // self.bucket) * self.bucket

    def longest_chain(self, root: int) -> int:
        """Most drafted tokens whose positions plain decoding attends to in the same shape."""
        return min(self.width - 1, self.shown(root) - self.width - root)
