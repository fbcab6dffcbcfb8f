"""Operations on a register of numbers are those on each of them, in the written order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import config as numba_config
from numba import njit

from reader_rag.model.cpu import attention_sums
from reader_rag.model.cpu import simd as lanes
from reader_rag.model.cpu.simd import LANES

pytestmark = pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="vectors need the compiler")


@njit
def _loaded(values: Any, i: int, j: int, out: Any) -> None:
    lanes.store(out, 0, 0, lanes.load(values, i, j))


@njit
def _combined(rows: Any, out: Any) -> None:
    a, b, c = lanes.load(rows, 0, 0), lanes.load(rows, 1, 0), lanes.load(rows, 2, 0)
    lanes.store(out, 0, 0, lanes.add(a, b))
    lanes.store(out, 1, 0, lanes.subtract(a, b))
    lanes.store(out, 2, 0, lanes.multiply(a, b))
    lanes.store(out, 3, 0, lanes.maximum(a, b))
    lanes.store(out, 4, 0, lanes.multiply_add(a, b, c))
    lanes.store(out, 5, 0, lanes.floor(a))


@njit
def _transposed(rows: Any, out: Any) -> None:
    lanes.prefetch(rows, rows.shape[0], 3)
    lanes.transpose(rows, 1, 3, out, 2, 5)


@njit
def _transposed_pairs(rows: Any, out: Any) -> None:
    lanes.transpose_bfloat16(rows, 1, 3, out, 2, 5)
    lanes.store(out, 0, 0, lanes.load_bfloat16(rows, 1, 3))


@njit
def _exponentials(values: Any, out: Any) -> None:
    for j in range(0, values.shape[1], LANES):
        lanes.store(out, 0, j, attention_sums.exponential(lanes.load(values, 0, j)))


@njit
def _powers(values: Any, out: Any) -> None:
    lanes.store(out, 0, 0, lanes.power_of_two(lanes.load(values, 0, 0)))
    lanes.store(out, 1, 0, lanes.spread(values[0, 3]))


def row() -> Any:
    return np.zeros((1, LANES), np.float32)


def test_elements_are_read_wherever_they_begin() -> None:
    values, out = np.arange(3 * (LANES + 12), dtype=np.float32).reshape(3, -1), row()
    _loaded(values, 2, 5, out)
    assert out[0].tolist() == values[2, 5 : 5 + LANES].tolist()


def test_each_lane_is_computed_by_itself() -> None:
    random = np.random.default_rng(1)
    a = random.uniform(-9, 9, LANES).astype(np.float32)
    low, high = np.full(LANES, -2.5, np.float32), np.full(LANES, 2.5, np.float32)
    out = np.zeros((6, LANES), np.float32)
    _combined(np.stack([a, low, high]), out)
    assert out[0].tolist() == (a + low).tolist()
    assert out[1].tolist() == (a - low).tolist()
    assert out[2].tolist() == (a * low).tolist()
    assert out[3].tolist() == np.maximum(a, low).tolist()
    assert out[4] == pytest.approx(a.astype(np.float64) * low + high, rel=1e-6)
    assert out[5].tolist() == np.floor(a).tolist()


def test_what_is_no_number_stays_none() -> None:
    a, b = np.zeros((2, LANES), np.float32)
    a[:5], b[:5] = [np.nan, 1, np.nan, np.inf, -np.inf], [1, np.nan, np.nan, 5, 5]
    out = np.zeros((6, LANES), np.float32)
    _combined(np.stack([a, b, b]), out)
    assert np.isnan(out[3, [1, 2]]).all()


def test_a_block_is_transposed_wherever_it_begins() -> None:
    rows = np.arange((LANES + 2) * (LANES + 7), dtype=np.float32).reshape(LANES + 2, -1)
    out = np.zeros((LANES + 3, LANES + 6), np.float32)
    _transposed(rows, out)
    assert (out[2 : 2 + LANES, 5 : 5 + LANES] == rows[1 : 1 + LANES, 3 : 3 + LANES].T).all()
    out[2 : 2 + LANES, 5 : 5 + LANES] = 0
    assert not out.any()


def test_a_block_of_bfloat16_is_widened_and_transposed() -> None:
    numbers = np.arange((LANES + 2) * (2 * LANES + 7), dtype=np.float32).reshape(LANES + 2, -1) % 256 - 99
    out = np.zeros((2 * LANES + 3, LANES + 6), np.float32)
    _transposed_pairs((numbers.view(np.uint32) >> 16).astype(np.uint16), out)
    assert (out[2 : 2 + 2 * LANES, 5 : 5 + LANES] == numbers[1 : 1 + LANES, 3 : 3 + 2 * LANES].T).all()
    assert (out[0, :LANES] == numbers[1, 3 : 3 + LANES]).all()
    out[2 : 2 + 2 * LANES, 5 : 5 + LANES] = out[0, :LANES] = 0
    assert not out.any()


def test_powers_of_two_and_one_number_for_all() -> None:
    values, out = np.zeros((1, LANES), np.float32), np.zeros((2, LANES), np.float32)
    values[0, :8] = [-126, -3, -1, 0, 1, 2, 10, 127]
    _powers(values, out)
    assert out[0].tolist() == [2.0 ** int(power) for power in values[0]]
    assert out[1].tolist() == [0] * LANES


def test_the_exponential_is_that_of_numpy() -> None:
    values = np.linspace(-80, 0, 20_000, dtype=np.float32)[None]
    out = np.zeros_like(values)
    _exponentials(values, out)
    assert np.abs(out / np.exp(values.astype(np.float64)) - 1).max() < 3e-7
    ends = row()
    ends[0, :4] = [-1000, -np.inf, np.nan, -88]
    _exponentials(ends, out[:, :LANES])
    assert out[0, [0, 1, 3]].tolist() == [0, 0, 0]
    assert np.isnan(out[0, 2])
    assert out[0, 4] == 1
