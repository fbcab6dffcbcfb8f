"""Whether int8 is worth it on this machine: products of both types beside each other."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from reader_rag.errors import ReaderWarning
from reader_rag.model.cpu import int8_products
from reader_rag.model.cpu.int8_products import PackedLinear
from reader_rag.model.cpu.products import FloatRows, Linear, project
from reader_rag.model.cpu.threads import numba_threads
from reader_rag.model.quantization.int8 import Int8Weight
from reader_rag.model.quantization.modules import Int8Linear, quantised_rows

_ROWS = 4
"""Rows of the timed product: a plain step has one, computed as four; with more rows, int8 gains more."""
_ROUNDS = 5
_SLOWER = 1.1
"""Less than a tenth may be chance."""
_WEIGHTS = 8 << 20
"""Least number of weights of a product: in a small one, calling it takes longer than computing it."""
_CACHE_BYTES = 64 << 20
"""Written between two products, so that they read their weights from memory, as steps do."""


def warn_if_int8_is_slower(model: nn.Module, *, compiled: bool) -> None:
    """Give a `ReaderWarning` if a layer of an int8 model takes longer than in bfloat16; nothing changes.

    Args:
        model: The model; one without int8 layers is left alone.
        compiled: Whether the compiled loops compute the model, and would compute it in bfloat16.
    """
    layers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    layers = [layer for layer in layers if layer is not getattr(model, "lm_head", None)]
    if not layers:
        return
    largest = max(layers, key=lambda one: one.in_features * one.out_features)
    int8_s, half_s = product_seconds(largest, compiled=compiled)
    if int8_s > _SLOWER * half_s:
        warnings.warn(
            f"int8 is slower than 16 bits on this machine: products of {_ROWS} rows take {1e3 * int8_s:.2f} ms, and "
            f'{1e3 * half_s:.2f} ms in bfloat16; load the model with quantization="none" and dtype="bfloat16"',
            ReaderWarning,
            stacklevel=2,
        )


def product_seconds(layer: Int8Linear, *, compiled: bool) -> tuple[float, float]:
    """Seconds of products of four rows in int8, and in bfloat16: with a layer, as often repeated as takes 8 MB.

    Args:
        layer: The layer, whose shape and device count.
        compiled: Whether the compiled loops compute the product in bfloat16, else PyTorch.
    """
    inputs, device = layer.in_features, layer.scales.device
    features = layer.out_features * -(-_WEIGHTS // (layer.out_features * inputs))
    x = torch.ones(_ROWS, inputs, device=device)
    values = torch.ones(features, inputs, dtype=torch.int8, device=device)
    ones = torch.ones(features, inputs, dtype=torch.bfloat16, device=device)
    int8 = _int8_product(x, Int8Linear(Int8Weight(values, torch.ones(features, device=device)), limbs=layer.limbs))
    half = _compiled_product(x, ones) if compiled else _torch_product(x, ones)
    other = torch.zeros(_CACHE_BYTES, dtype=torch.uint8, device=device)
    best = [float("inf")] * 2
    for _ in range(_ROUNDS):
        for at, product in enumerate((int8, half)):
            other += 1
            _wait(device)
            before = time.perf_counter()
            product()
            _wait(device)
            best[at] = min(best[at], time.perf_counter() - before)
    return best[0], best[1]


def _int8_product(x: torch.Tensor, layer: Int8Linear) -> Callable[[], torch.Tensor]:
    if not layer.is_packed:
        return lambda: layer(x)
    rows = quantised_rows(_ROWS, layer.values.shape[1], layer.limbs)
    packed = PackedLinear(layer.values.numpy(), layer.scales.numpy(), layer.bias.numpy())
    out = np.zeros((_ROWS, len(layer.scales)), np.float32)  # with the features that fill up the last block

    def product() -> torch.Tensor:
        with numba_threads():
            int8_products.quantise_rows(x.numpy(), _ROWS, rows)
            int8_products.project(rows, _ROWS, packed, out)
        return torch.from_numpy(out)

    return product


def _compiled_product(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    array = weight.view(torch.uint16).numpy()
    layer = Linear(array, np.zeros(len(array), np.float32), array)
    out = np.zeros((_ROWS, len(array)), np.float32)

    def product() -> torch.Tensor:
        with numba_threads():
            project(FloatRows(x.numpy()), _ROWS, layer, out)
        return torch.from_numpy(out)

    return product


def _torch_product(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    rows = x.to(weight.dtype)
    return lambda: linear(rows, weight)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
