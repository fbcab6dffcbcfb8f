"""Modules that take the places of a model's linear layers and embedding in the int8 scheme."""

from __future__ import annotations

import torch
from torch import nn

from reader_rag.model.quantization.int8 import Int8Weight, quantise_rows, quantise_weight


class Int8Linear(nn.Module):
    """A linear layer of int8 weights on int8 activations.

    Args:
        weight: The quantised weight.
        bias: Floating point [features]; None: there is none.

    Attributes:
        in_features: Inputs.
        out_features: Features.
    """

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.values.shape
        self.register_buffer("values", weight.values)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """The quantised form of a linear layer."""
        return cls(quantise_weight(linear.weight.detach()), linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's outputs, float32 [..., features].

        Args:
            x: Floating point [..., inputs].
        """
        rows = x.reshape(-1, self.in_features).float()
        values, scales = quantise_rows(rows)
        products = torch._int_mm(values, self.values.t()).float()
        out = products * scales[:, None] * self.scales
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)


class HalfEmbedding(nn.Embedding):
    """An embedding with 16-bit weights that gives float32."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [..., width] of token ids [...]."""
        return super().forward(input).float()
