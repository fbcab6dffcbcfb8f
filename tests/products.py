"""What PyTorch's own kernels do on this machine, found without the code under test."""

from __future__ import annotations

import torch
from torch.nn import functional


def place_changes_bits(dtype: torch.dtype, rows: int) -> bool:
    """Whether a row of a product has other bits at another place, or beside other rows.

    Args:
        dtype: Of weights and activations.
        rows: Rows of the product.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    for features, inputs in ((32, 32), (48, 32), (32, 48), (96, 32), (192, 576)):
        weight, x = random(features, inputs), random(rows, inputs)
        product = functional.linear(x, weight)
        for row in range(rows):
            beside = random(rows, inputs)
            beside[0] = x[row]
            if not torch.equal(functional.linear(beside, weight)[0], product[row]):
                return True
    return False


@torch.inference_mode()
def neighbours_change_bits(layer: torch.nn.Module, inputs: int, rows: int) -> bool:
    """Whether a row of a layer's output has other bits at another place, or beside other rows, large ones among them.

    Args:
        layer: Takes float32 [rows, inputs].
        inputs: Features of a row.
        rows: Rows of the product.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator)
    product = layer(x)
    for row in range(rows):
        for scale in (1.0, 20.0):
            beside = scale * torch.randn(rows, inputs, generator=generator)
            beside[0] = x[row]
            if not torch.equal(layer(beside)[0], product[row]):
                return True
    return False
