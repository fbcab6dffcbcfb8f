"""Where int8 takes longer than 16 bits, a warning says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from reader_rag.errors import ReaderWarning
from reader_rag.model.quantization import speed
from reader_rag.model.quantization.modules import Int8Linear


def model_of(*layers: nn.Module) -> nn.Module:
    model = nn.Sequential(*layers)
    model.lm_head = Int8Linear.of(nn.Linear(64, 640))
    return model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The inputs of layers whose products were timed, and whether in compiled loops; int8 takes 2 ms, bfloat16 1 ms."""
    noted: list[tuple[int, bool]] = []

    def product_seconds(layer: Int8Linear, *, compiled: bool) -> tuple[float, float]:
        noted.append((layer.in_features, compiled))
        return 0.002, 0.001

    monkeypatch.setattr(speed, "product_seconds", product_seconds)
    return noted


def test_the_largest_layer_but_the_head_is_timed(asked: list[tuple[int, bool]]) -> None:
    model = model_of(Int8Linear.of(nn.Linear(64, 64)), Int8Linear.of(nn.Linear(128, 64)), nn.Linear(256, 64))
    with pytest.warns(
        ReaderWarning, match='products of 4 rows take 2.00 ms, and 1.00 ms in bfloat16; load .* quantization="none"'
    ):
        speed.warn_if_int8_is_slower(model, compiled=True)
    assert asked == [(128, True)]


def test_a_model_without_int8_layers_is_left_alone(asked: list[tuple[int, bool]]) -> None:
    speed.warn_if_int8_is_slower(nn.Sequential(nn.Linear(64, 64)), compiled=False)
    assert asked == []


@pytest.mark.parametrize("seconds", [(0.001, 0.002), (0.001, 0.001), (0.00105, 0.001)])
def test_int8_that_is_as_fast_is_no_reason_to_warn(
    seconds: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "product_seconds", lambda layer, compiled: seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        speed.warn_if_int8_is_slower(model_of(Int8Linear.of(nn.Linear(64, 64))), compiled=False)


@pytest.mark.parametrize("compiled", [False, True])
def test_both_products_are_timed(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_WEIGHTS", 1 << 14)
    monkeypatch.setattr(speed, "_CACHE_BYTES", 1 << 10)
    int8_s, half_s = speed.product_seconds(Int8Linear.of(nn.Linear(96, 80)), compiled=compiled)
    assert int8_s > 0.0
    assert half_s > 0.0


@pytest.mark.parametrize("make", [speed._compiled_product, speed._torch_product])
def test_the_product_in_bfloat16_is_one_of_the_whole_weight(make: Any) -> None:
    product = make(torch.ones(4, 96), torch.ones(80, 96, dtype=torch.bfloat16))
    assert product().tolist() == [[96.0] * 80] * 4


@pytest.mark.parametrize("limbs", [1, 2])
def test_the_product_in_int8_is_the_layers(limbs: int) -> None:
    layer = Int8Linear.of(nn.Linear(96, 80, bias=False), limbs)
    x = torch.linspace(-1.0, 1.0, 4 * 96).reshape(4, 96)
    assert torch.equal(speed._int8_product(x, layer)(), layer(x))


def test_a_product_of_any_number_of_features_has_room_for_whole_blocks() -> None:
    layer, x = Int8Linear.of(nn.Linear(24, 33)), torch.linspace(-1, 1, 96).view(4, 24)
    product = speed._int8_product(x, layer)().clone()
    if layer.is_packed:
        assert product.shape == (4, 48)  # the kernel writes blocks of 16
    assert torch.equal(product[:, :33], layer(x))
