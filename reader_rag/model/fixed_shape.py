"""Shapes of passes that rounding depends on: never measured, so that a machine always rounds the same way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from reader_rag.model.compiled.forward import slow_products

_ROW_BLOCK = 4
"""Rows that the CPU's matrix products compute together; see `FixedShape`."""
_CHUNK_S = 0.3
"""Seconds that a chunk of a prompt takes, as near as powers of two come: other sequences wait for it."""
_LEAST_CHUNK, _MOST_CHUNK = 32, 512
"""Bounds of a chunk: below, products are slow for each row; above, attention masks and activations take much memory."""
_PRODUCTS = {"AVX512": (7e10, 7.5e10), "AVX2": (3e10, 7.5e9)}
"""Products that two cores add up in a second, about, in PyTorch with 32 and with 16 bits, by the kind of CPU."""
_PRODUCTS_ELSEWHERE = 1e10, 2.5e9


def chunk_size(model: PreTrainedModel) -> int:
    """Tokens of a prompt that the model's own forward pass computes at once.

    Args:
        model: The model, where it lies.

    Returns:
        On accelerators 512. On the CPU the power of two from 32 to 512 whose pass takes about 300 ms on two cores, by
        the number of weights, their type and the kind of CPU.
    """
    if model.device.type != "cpu":
        return _MOST_CHUNK
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    apart = {id(tensor) for end in ends if end is not None for tensor in (*end.parameters(), *end.buffers())}
    tensors = (*model.parameters(), *model.buffers())
    weights = sum(tensor.numel() for tensor in tensors if id(tensor) not in apart)
    wide, narrow = _PRODUCTS.get(torch.backends.cpu.get_cpu_capability(), _PRODUCTS_ELSEWHERE)
    products = wide if model.dtype == torch.float32 else narrow
    size = 1 << max(round(math.log2(_CHUNK_S * products / max(weights, 1))), 0)
    return min(max(size, _LEAST_CHUNK), _MOST_CHUNK)


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

    def past(self, shown: int) -> int:
        """Positions that are committed whatever the root's position is, where so many are attended to.

        Args:
            shown: Of `shown`.
        """
        return max(shown - self.bucket - self.width, 0)

    def longest_chain(self, root: int) -> int:
        """Most drafted tokens whose positions plain decoding attends to in the same shape."""
        return min(self.width - 1, self.shown(root) - self.width - root)
