"""Tests of the integer products of the compiled loops against integers of unlimited size."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from reader_rag.model.cpu import int8_products as kernels
from reader_rag.model.cpu.int8_products import PackedLinear
from reader_rag.model.cpu.int8_tile import FEATURES
from reader_rag.model.cpu.products import Heads, Norm
from reader_rag.model.cpu.threads import numba_threads
from reader_rag.model.quantization import modules
from reader_rag.model.quantization.int8 import (
    Int8Weight,
    multiply,
    pack,
    quantise_rows,
    quantise_weight,
    split_rows,
    unpack,
)
from reader_rag.model.quantization.modules import Int8Embedding, Int8Linear, fuse, quantised_rows
from reader_rag.util.cpu import cpu_features

pytestmark = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="the compiled loops need the compiler")

SIZES = ((16, 4), (32, 9), (48, 130), (80, 64), (144, 256))
ROWS = (1, 2, 3, 4, 5, 6, 7, 13)


def random_weight(features: int, inputs: int, seed: int = 0) -> Int8Weight:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (features, inputs), dtype=torch.int8, generator=generator)
    return Int8Weight(values, torch.rand(features, generator=generator) + 0.5)


def packed(weight: Int8Weight, bias: float = 0.0) -> PackedLinear:
    scales = weight.scales.numpy()
    return PackedLinear(pack(weight.values).numpy(), scales, np.full(len(scales), bias, np.float32))


def exact(rows: NDArray[np.float32], weight: Int8Weight, limbs: int) -> NDArray[np.float64]:
    """Products of the quantised rows, with integers that do not overflow."""
    values = weight.values.numpy().astype(np.int64).T
    if limbs == 1:
        quantised, scales = quantise_rows(torch.from_numpy(rows))
        sums = quantised.numpy().astype(np.int64) @ values
    else:
        quantised, scales = split_rows(torch.from_numpy(rows))
        both = quantised.numpy().astype(np.int64)
        sums = (256 * both[:, 0] + both[:, 1]) @ values
    return sums * scales.numpy()[:, None].astype(np.float64) * weight.scales.numpy()


@pytest.mark.parametrize("limbs", [1, 2])
@pytest.mark.parametrize(("features", "inputs"), SIZES)
def test_products_are_those_of_integers(features: int, inputs: int, limbs: int) -> None:
    weight = random_weight(features, inputs)
    for count in ROWS:
        rows = np.random.default_rng(count).standard_normal((count, inputs)).astype(np.float32)
        room = quantised_rows(count, -(-inputs // 4), limbs)
        out = np.full((count, features), np.nan, np.float32)
        with numba_threads():
            kernels.quantise_rows(rows, count, room)
            kernels.project(room, count, packed(weight, 0.25), out)
            added = out.copy()
            kernels.project_and_add(room, count, packed(weight), added)
        expected = exact(rows, weight, limbs)
        np.testing.assert_allclose(out, expected + 0.25, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(added, 2 * expected + 0.25, rtol=1e-5, atol=1e-4)


def test_extreme_values_do_not_saturate() -> None:
    inputs = 4096
    values = torch.full((16, inputs), 127, dtype=torch.int8)
    values[1::2] = -127
    rows = np.ones((2, inputs), np.float32)
    rows[1] = -1
    room = quantised_rows(2, inputs // 4, 1)
    out = np.empty((2, 16), np.float32)
    kernels.quantise_rows(rows, 2, room)
    kernels.project(room, 2, packed(Int8Weight(values, torch.ones(16))), out)
    expected = np.float32(127 * 127 * inputs) * np.float32(1 / 127)
    np.testing.assert_allclose(out, np.outer([1, -1], np.tile([expected, -expected], 8)), rtol=1e-6)


@pytest.mark.parametrize("limbs", [1, 2])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(limbs: int) -> None:
    weight = random_weight(80, 36)
    rows = np.random.default_rng(0).standard_normal((11, 36)).astype(np.float32)
    layer = Int8Linear(weight, None, limbs)
    together = layer(torch.from_numpy(rows))
    for count in ROWS[:7]:
        assert torch.equal(layer(torch.from_numpy(rows[:count])), together[:count])


@pytest.mark.parametrize("limbs", [1, 2])
def test_queries_keys_and_values_are_one_product(limbs: int) -> None:
    parts = [random_weight(features, 24, seed) for seed, features in enumerate((48, 16, 16))]
    layers = [Int8Linear(part, None, limbs) for part in parts]
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    expected = [layer(x) for layer in layers]
    fused = fuse(layers)
    room = quantised_rows(5, 6, limbs)
    heads = Heads(*(np.zeros((8, part.values.shape[0]), np.float32) for part in parts))
    kernels.quantise_rows(x.numpy(), 5, room)
    kernels.project_heads(room, 5, fused, heads)
    for layer, wanted, got in zip(layers, expected, heads, strict=True):
        assert torch.equal(layer(x), wanted)
        np.testing.assert_array_equal(got[:5], wanted.numpy())


def test_norms_are_quantised_as_rows_are() -> None:
    x = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    weight = np.random.default_rng(1).standard_normal(40).astype(np.float32)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    values, scales = quantise_rows(torch.from_numpy(normed.astype(np.float32)))
    for count in (1, 6):
        room = quantised_rows(count, 10, 1)
        kernels.norm_rows(x, count, Norm(weight, np.float32(1e-5), np.float32(0), False), room)
        assert np.abs(room.values.astype(int) - values[:count].numpy()).max() <= 1  # sums in another order
        np.testing.assert_allclose(room.scales, scales[:count], rtol=1e-5)
        np.testing.assert_array_equal(room.sums, 128 * room.values.astype(np.int64).sum(1))


@pytest.mark.parametrize("limbs", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad: float, limbs: int) -> None:
    rows = torch.ones(2, 8)
    rows[1, 3] = bad
    out = Int8Linear(random_weight(16, 8), None, limbs)(rows)
    assert torch.isfinite(out[0]).all()
    assert not torch.isfinite(out[1]).any()


def test_a_row_of_zeros_gives_the_bias() -> None:
    bias = torch.arange(16.0)
    assert torch.equal(Int8Linear(random_weight(16, 8), bias)(torch.zeros(1, 8))[0], bias)


@pytest.mark.parametrize("limbs", [1, 2])
@pytest.mark.parametrize(("features", "inputs"), [(17, 9), (33, 40), (50, 64)])
def test_packed_layers_equal_those_that_pytorch_multiplies(
    features: int, inputs: int, limbs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = random_weight(features, inputs), torch.full((features,), 0.5)
    layer = Int8Linear(weight, bias, limbs)
    monkeypatch.setattr(modules, "_numba", SimpleNamespace(DISABLE_JIT=True))
    other = Int8Linear(weight, bias, limbs)
    assert (layer.is_packed, other.is_packed) == (True, False)
    x = torch.randn(2, 7, inputs, generator=torch.Generator().manual_seed(1))
    expected = exact(x.flatten(0, 1).numpy(), weight, limbs) + 0.5
    for one in (layer, other):
        np.testing.assert_allclose(one(x).flatten(0, 1).numpy(), expected, rtol=1e-5, atol=1e-4)


def test_pytorchs_product_is_exact() -> None:
    rows, values = (torch.randint(-127, 128, (n, 31), dtype=torch.int8) for n in (5, 19))
    assert torch.equal(multiply(rows, values).long(), rows.long() @ values.long().t())


def test_what_is_packed_is_unpacked() -> None:
    for features, inputs in (*SIZES, (17, 9)):
        weight = random_weight(features, inputs)
        assert torch.equal(unpack(pack(weight.values), features, inputs), weight.values)
        assert pack(weight.values).shape == (-(-features // FEATURES), -(-inputs // 4), 64)


def test_an_embedding_reads_the_rows_of_its_head() -> None:
    table = torch.randn(35, 22, generator=torch.Generator().manual_seed(0))
    head = Int8Linear(quantise_weight(table), None, 2)
    tokens = torch.tensor([[0, 34], [16, 15]])
    values, scales = head.quantised
    expected = (values.float() * scales[:, None])[tokens]
    torch.testing.assert_close(Int8Embedding(head)(tokens), expected)
    torch.testing.assert_close(Int8Embedding(head, 3.0)(tokens), 3.0 * expected)


_SCRIPT = """
import numpy as np, torch
from reader_rag.model.quantization.int8 import Int8Weight
from reader_rag.model.quantization.modules import Int8Linear
g = torch.Generator().manual_seed(0)
w = Int8Weight(torch.randint(-127, 128, (80, 72), dtype=torch.int8, generator=g), torch.ones(80))
x = torch.randn(7, 72, generator=g)
print(Int8Linear(w)(x).double().sum().item(), Int8Linear(w, None, 2)(x).numpy().tobytes().hex()[:64])
"""


_HIDDEN = ((), ("avx512",), ("avx512", "avxvnni"), ("avx",))
"""Prefixes of the names of instruction sets that are hidden from the compiler."""


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits() -> None:
    """AVX-512 VNNI, 256-bit VNNI, AVX2 and none of them, as far as this CPU has them."""
    found = set()
    for hidden in _HIDDEN:
        features = (f"{'-' if name.startswith(hidden) else '+'}{name}" for name in sorted(cpu_features()))
        environment = os.environ | ({"NUMBA_CPU_FEATURES": ",".join(features)} if hidden else {})
        done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
