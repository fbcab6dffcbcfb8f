"""Gumbel noise that has the same bits on every device: from integers and exactly rounded operations alone.

`argmax(scores + noise)` is a draw from `softmax(scores)`. The noise of a token is a function of seed, position and
token id: Philox4x32-10, a counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011),
gives 32 random bits for each, and a table makes -log(-log(u)) of them. A logarithm is rounded otherwise by other
libraries and devices; look-ups, integer arithmetic, the conversion of an integer to float32, and one division and one
addition of float32 are not. So NumPy, numba, and PyTorch on any device compute the same noise.

How bits r become noise: the sign bit of r says whether u is the upper or the lower half of (0, 1), the other 31 bits m
how far it is from that end: (m + 1/2) / 2**32. m as float32 has an exponent and 23 bits behind it, of which the first
`_BITS` choose an entry of the table; the others interpolate between entries, in units of 2**-22. So noise lies within
-3.2 and 23 and is off by at most 2e-6, relative to which the probability of a token is drawn.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_INCREMENTS = 0x9E3779B9, 0xBB67AE85
"""Constants of Philox4x32."""

_BITS = 8
_REST = 23 - _BITS
"""Bits of a float32 behind its exponent that choose an entry of the table, and that interpolate."""
_REST_MASK, _SIGN = (1 << _REST) - 1, 1 << 31
_ONE = 127 << _BITS
"""Exponent and first bits of 1.0."""
_ENTRIES = 2 + (31 << _BITS)
"""Entries of a half: of 0; of numbers from 1 to 2**31, as many for each power of two."""
_UNIT = 2.0**-22
"""What one of the table's integers stands for."""
_BLOCK = 1 << 7
"""Tokens whose bits are computed at once on the CPU; none are where no token of a block is possible."""
_VALUES_AT_ONCE = 1 << 20
"""Most scores of several rows that are drawn from at once: bounds the memory of intermediate results."""


class Draw(NamedTuple):
    """How a sequence draws its tokens from the scores alone.

    Attributes:
        seed: 0..2**64-1.
        temperature: Above 0; scores are divided by it.
    """

    seed: int
    temperature: float = 1.0

    @property
    def words(self) -> tuple[int, int]:
        """Seed and temperature as integers that int64 holds: `DrawInputs.of` reads them."""
        return _signed(self.seed), int(np.float32(self.temperature).view(np.int32))


class _Table(NamedTuple):
    """Noise by bits, for both halves of (0, 1), the upper one first.

    Attributes:
        values: int32 [2 * entries], noise in units.
        slopes: int32 [2 * entries], the next value less this one.
    """

    values: NDArray[np.int32]
    slopes: NDArray[np.int32]


def exact_table() -> NDArray[np.float64]:
    """float64 [2, entries], the table in units before it is rounded to integers.

    No value is so close to the middle between two integers that another logarithm would be rounded to another integer;
    a test says how close.
    """
    mantissas = 1.0 + np.arange(1 << _BITS) / (1 << _BITS)
    numbers = np.concatenate([[0.0], *(2.0**exponent * mantissas for exponent in range(31)), [2.0**31]])
    distance = (numbers + 0.5) / 2.0**32
    upper, lower = -np.log(-np.log1p(-distance)), -np.log(-np.log(distance))
    exact: NDArray[np.float64] = np.stack([upper, lower]) / _UNIT
    return exact


def _table() -> _Table:
    values = np.rint(exact_table()).astype(np.int32)
    slopes = np.diff(values, axis=1, append=values[:, -1:])
    slopes[:, 0] = 0
    return _Table(values.ravel(), slopes.ravel())


TABLE = _table()


# On the CPU


@njit(cache=True, nogil=True)
def _random_bits(seed: Any, position: Any, first: Any, bits: Any) -> None:
    """uint32 [n], a multiple of 4: the bits of tokens from `first` on, a multiple of 4."""
    word, half = np.uint64(_WORD), np.uint64(32)
    for n in range(bits.shape[0] // 4):
        x0, x1 = np.uint64(first // 4 + n), np.uint64(0)
        x2, x3 = position & word, position >> half
        k0, k1 = seed & word, seed >> half
        for _ in range(_ROUNDS):
            low, high = x0 * np.uint64(_MULTIPLIERS[0]), x2 * np.uint64(_MULTIPLIERS[1])
            x0, x1, x2, x3 = (high >> half) ^ x1 ^ k0, high & word, (low >> half) ^ x3 ^ k1, low & word
            k0, k1 = (k0 + np.uint64(_INCREMENTS[0])) & word, (k1 + np.uint64(_INCREMENTS[1])) & word
        bits[4 * n], bits[4 * n + 1] = np.uint32(x0), np.uint32(x1)
        bits[4 * n + 2], bits[4 * n + 3] = np.uint32(x2), np.uint32(x3)


@njit(cache=True, nogil=True, error_model="numpy")
def _perturb(scores: Any, temperature: Any, seed: Any, position: Any, table: Any, out: Any) -> None:
    """`out = scores / temperature + noise`, float32; a score of minus infinity stays one."""
    bits, distances = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.float32)
    signed, words = bits.view(np.int32), distances.view(np.int32)
    for first in range(0, scores.shape[0], _BLOCK):
        count = min(_BLOCK, scores.shape[0] - first)
        possible = False
        for n in range(count):
            out[first + n] = scores[first + n] / temperature
            possible |= scores[first + n] != -np.inf
        if not possible:
            continue
        _random_bits(seed, position, first, bits)
        for n in range(_BLOCK):
            distances[n] = np.float32(signed[n] ^ (signed[n] >> 31))
        for n in range(count):
            place = max((words[n] >> _REST) - _ONE + 1, 0) + ((signed[n] >> 31) & _ENTRIES)
            part = (table.slopes[place] * np.int64(words[n] & _REST_MASK)) >> _REST
            out[first + n] += np.float32(table.values[place] + part) * np.float32(_UNIT)


def perturbed(scores: torch.Tensor, draw: Draw, position: int) -> torch.Tensor:
    """Scores whose highest is the token drawn: `scores / temperature + noise`.

    Args:
        scores: float32 [vocabulary].
        draw: How the sequence draws.
        position: Absolute position of the token drawn.
    """
    if scores.device.type != "cpu":
        seeds = torch.full((1, 1), _signed(draw.seed), dtype=torch.int64, device=scores.device)
        positions = torch.full((1, 1), position, dtype=torch.int64, device=scores.device)
        temperatures = torch.full((1, 1), draw.temperature, dtype=torch.float32, device=scores.device)
        return perturbed_rows(scores[None], DrawInputs(seeds, temperatures, positions), _kept(scores.device))[0]
    given = scores.detach().contiguous().numpy()
    out = np.empty_like(given)
    _perturb(given, np.float32(draw.temperature), np.uint64(draw.seed), np.uint64(position), TABLE, out)
    return torch.from_numpy(out)


def gumbel(seed: int, position: int, size: int) -> NDArray[np.float32]:
    """Noise of all tokens at a position, float32 [size].

    Args:
        seed: 0..2**64-1.
        position: Absolute position of the token drawn.
        size: Vocabulary size.
    """
    noise: NDArray[np.float32] = perturbed(torch.zeros(size), Draw(seed), position).numpy()
    return noise


# On any device


class DrawInputs(NamedTuple):
    """How rows of a pass are drawn from, on the device.

    Attributes:
        seeds: int64 [rows, 1], the bits of a seed.
        temperatures: float32 [rows, 1]; 0: the most probable token is taken.
        positions: int64 [rows, 1], absolute positions of the tokens drawn.
    """

    seeds: torch.Tensor
    temperatures: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, words: torch.Tensor, positions: torch.Tensor) -> DrawInputs:
        """Of the words of some sequences.

        Args:
            words: int64 [2, sequences], `Draw.words` of each sequence; zeros: it takes the most probable token.
            positions: int64 [sequences, width], absolute positions of the tokens drawn.

        Returns:
            For `sequences * width` rows.
        """
        each = words[:, :, None].expand(-1, -1, positions.shape[1]).reshape(2, -1, 1)
        return cls(each[0], each[1].to(torch.int32).view(torch.float32), positions.reshape(-1, 1))


class DeviceTable(NamedTuple):
    """The table of noise on a device.

    Attributes:
        values: int32 [2 * entries], noise in units.
        slopes: int32 [2 * entries], the next value less this one.
    """

    values: torch.Tensor
    slopes: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> DeviceTable:
        """Copy the table to a device."""
        return cls(torch.from_numpy(TABLE.values).to(device), torch.from_numpy(TABLE.slopes).to(device))


_kept = cache(DeviceTable.on)


def drawn_tokens(logits: torch.Tensor, inputs: DrawInputs, table: DeviceTable) -> torch.Tensor:
    """Draw a token after each row of a pass, where the logits are: what `perturbed` would choose.

    Nothing depends on the contents of a tensor but other contents, so that a GPU can record it.

    Args:
        logits: [rows, vocabulary], of any type.
        inputs: For each row.
        table: On the same device.

    Returns:
        int64 [rows, 1]; -1 where the score is NaN or minus infinity.
    """
    step = max(_VALUES_AT_ONCE // logits.shape[1], 1)
    parts = []
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        scores = perturbed_rows(logits[rows], DrawInputs(*(of_row[rows] for of_row in inputs)), table)
        tokens = scores.argmax(-1, keepdim=True)
        parts.append(torch.where(scores.gather(-1, tokens) > -torch.inf, tokens, -1))
    return torch.cat(parts)


def perturbed_rows(logits: torch.Tensor, inputs: DrawInputs, table: DeviceTable) -> torch.Tensor:
    """`perturbed` for several rows, on any device: float32 [rows, vocabulary].

    Args:
        logits: [rows, vocabulary], of any type.
        inputs: For each row.
        table: On the same device.
    """
    draws = inputs.temperatures > 0
    # By a tensor: by a number, a GPU would multiply by its reciprocal, which is rounded otherwise.
    scores = logits.to(torch.float32) / torch.where(draws, inputs.temperatures, 1.0)
    return scores + torch.where(draws, _noise_rows(inputs, table, logits.shape[1]), 0.0)


def _noise_rows(inputs: DrawInputs, table: DeviceTable, size: int) -> torch.Tensor:
    """float32 [rows, size]."""
    bits = _random_rows(inputs.seeds, inputs.positions, size)
    sign = bits >> 31
    words = (bits ^ sign).to(torch.float32).view(torch.int32)
    places = ((words >> _REST) - (_ONE - 1)).clamp_(min=0).add_(sign.bitwise_and_(_ENTRIES)).flatten()
    part = (table.slopes.index_select(0, places).view_as(words) * words.bitwise_and_(_REST_MASK)) >> _REST
    return table.values.index_select(0, places).view_as(part).add_(part).to(torch.float32) * _UNIT


def _random_rows(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """int32 [rows, size]: `_random_bits`, in integers of 64 bits, whose products keep their low 64 bits."""
    x0 = torch.arange(-(-size // 4), device=seeds.device)[None]
    x1 = torch.zeros_like(seeds)
    x2, x3 = positions & _WORD, (positions >> 32) & _WORD
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    for _ in range(_ROUNDS):
        low, high = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1 = ((high >> 32) & _WORD) ^ x1 ^ k0, high & _WORD
        x2, x3 = ((low >> 32) & _WORD) ^ x3 ^ k1, low & _WORD
        k0, k1 = (k0 + _INCREMENTS[0]) & _WORD, (k1 + _INCREMENTS[1]) & _WORD
    words = torch.stack([x0, x1, x2, x3], dim=-1).flatten(1)[:, :size]
    return ((words ^ _SIGN) - _SIGN).to(torch.int32)


def _signed(seed: int) -> int:
    """The integer whose 64 bits in two's complement are those of a seed."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
