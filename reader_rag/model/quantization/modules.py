"""Modules that take the places of a model's linear layers and embedding in the int8 scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numba
import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from reader_rag.model.cpu.int8_products import PackedLinear, QuantisedRows, project
from reader_rag.model.cpu.int8_products import quantise_rows as quantise_rows_in_place
from reader_rag.model.cpu.int8_tile import FEATURES, INPUTS, OFFSET
from reader_rag.model.cpu.threads import numba_threads
from reader_rag.model.quantization.int8 import (
    Int8Weight,
    multiply,
    pack,
    packed_shape,
    quantise_rows,
    quantise_weight,
    split_rows,
    unpack,
)

_numba: Any = numba.config
_FEATURES_AT_ONCE = 8192


class Int8Linear(nn.Module):
    """A linear layer of int8 weights on int8 activations, in floating point outside.

    On the CPU its weight is packed for the compiled loops; elsewhere it is multiplied by PyTorch. Both give the same
    integers.

    Args:
        weight: The quantised weight.
        bias: Floating point [features]; None: there is none.
        limbs: How many limbs of 8 bits activations have: 1, or 2 for inputs with outliers.

    Attributes:
        limbs: As given.
        in_features: Inputs.
        out_features: Features.
        weight: An empty float32 tensor. Some models ask the weight for the type of a layer's inputs.
        values: The weight, uint8 [blocks, depth, 64] where it is packed, else int8 [features, inputs].
        scales: float32 [features up to a multiple of 16].
        bias: float32 [features up to a multiple of 16].
    """

    weight: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None = None, limbs: int = 1) -> None:
        super().__init__()
        self.limbs = limbs
        self.out_features, self.in_features = weight.values.shape
        self.register_buffer("weight", torch.empty(0), persistent=False)
        self.register_buffer("values", weight.values)
        self.register_buffer("scales", self._padded(weight.scales))
        self.register_buffer("bias", self._padded(torch.zeros(0) if bias is None else bias))
        self._pack()

    @classmethod
    def of(cls, layer: nn.Linear, limbs: int = 1) -> Int8Linear:
        """The quantised form of a linear layer, with activations of so many limbs."""
        return cls(quantise_weight(layer.weight.detach()), layer.bias, limbs)

    @property
    def is_packed(self) -> bool:
        """Whether the weight is packed for the compiled loops."""
        return self.values.dtype == torch.uint8

    @property
    def quantised(self) -> Int8Weight:
        """The weight; a copy where it is packed."""
        values = unpack(self.values, self.out_features, self.in_features) if self.is_packed else self.values
        return Int8Weight(values, self.scales[: self.out_features])

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's outputs, float32 [..., features].

        Args:
            x: Floating point [..., inputs].
        """
        rows = x.reshape(-1, self.in_features).float()
        out = self._project(rows) if self.is_packed else self._multiply(rows)
        return out.reshape(*x.shape[:-1], self.out_features)

    def _project(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(rows), len(self.scales))
        if len(rows):
            inputs = quantised_rows(len(rows), self.values.shape[1], self.limbs)
            packed = PackedLinear(self.values.numpy(), self.scales.numpy(), self.bias.numpy())
            with numba_threads():
                quantise_rows_in_place(rows.contiguous().numpy(), len(rows), inputs)
                project(inputs, len(rows), packed, out.numpy())
        return out[:, : self.out_features]

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        if self.limbs == 1:
            values, scales = quantise_rows(rows)
            products = multiply(values, self.values).float()
        else:
            values, scales = split_rows(rows)
            both = multiply(values.flatten(0, 1), self.values).float().unflatten(0, (len(rows), 2))
            products = both[:, 0] * 256 + both[:, 1]
        return products * scales[:, None] * self.scales[: self.out_features] + self.bias[: self.out_features]

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(packed_shape(self.out_features, self.in_features)[0] * FEATURES, device=values.device)
        padded[: len(values)] = values.detach()
        return padded

    def _pack(self) -> None:
        if self.values.device.type == "cpu" and not _numba.DISABLE_JIT:
            self.values = pack(self.values)

    def _apply(self, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `to`, `cuda` and `cpu` do: the weight moves unpacked, and scales keep their type."""
        self.values = self.quantised.values
        moved = change(self.values)
        for name in ("weight", "values", "scales", "bias"):
            setattr(self, name, getattr(self, name).to(moved.device))
        self._pack()
        return self


class Int8Embedding(nn.Module):
    """An embedding of int8 rows that gives float32.

    Args:
        table: Holds the rows; the output head, where that is tied to the embedding.
        factor: What rows are multiplied with.
    """

    def __init__(self, table: Int8Linear, factor: float = 1.0) -> None:
        super().__init__()
        self.table = table
        self.factor = factor

    @property
    def weight(self) -> torch.Tensor:
        """A tensor of the type and on the device of the embedding's outputs, which models ask for."""
        return self.table.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [..., width] of token ids [...]."""
        table = self.table
        values = table.values
        if table.is_packed:
            blocks, depth, _ = values.shape
            rows = values.view(blocks, depth, FEATURES, INPUTS)[input // FEATURES, :, input % FEATURES]
            values = (rows.flatten(-2)[..., : table.in_features] ^ OFFSET).view(torch.int8)
        else:
            values = values[input]
        return values.float() * (table.scales[input] * self.factor)[..., None]


class HalfEmbedding(nn.Embedding):
    """An embedding with 16-bit weights that gives float32."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [..., width] of token ids [...]."""
        return super().forward(input).float()


class HalfLinear(nn.Linear):
    """A linear layer with 16-bit weights and outputs in float32: one that is not quantised."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [..., features] of floating point [..., inputs]."""
        parts = self.weight.split(_FEATURES_AT_ONCE)  # a float32 copy of all would be twice the size of the weight
        out = torch.cat([linear(input.float(), part.float()) for part in parts], -1)
        return out if self.bias is None else out + self.bias


def is_int8(model: nn.Module) -> bool:
    """Whether linear layers of a model are in int8."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def quantised_rows(rows: int, depth: int, limbs: int) -> QuantisedRows:
    """Room for the inputs of products.

    Args:
        rows: Rows.
        depth: Inputs / 4 of the packed weights.
        limbs: Limbs of 8 bits of each input, 1 or 2.
    """
    values, sums = np.zeros((limbs * rows, depth * INPUTS), np.int8), np.empty(limbs * rows, np.int32)
    return QuantisedRows(values, np.empty(rows, np.float32), sums, limbs)


def fuse(linears: Sequence[Int8Linear]) -> PackedLinear:
    """Lay packed layers that share their inputs one behind the other in memory; they go on working.

    Args:
        linears: At least one, on the CPU, packed.

    Returns:
        One layer of all their blocks.
    """
    fused = []
    for name in ("values", "scales", "bias"):
        parts = [getattr(layer, name) for layer in linears]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        for layer, part in zip(linears, whole.split([len(part) for part in parts]), strict=True):
            setattr(layer, name, part)
        fused.append(whole.numpy())
    return PackedLinear(*fused)
