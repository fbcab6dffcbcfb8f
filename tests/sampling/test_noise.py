"""Noise for sampling: the same bits from compiled loops and from PyTorch, a published generator, the distribution."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from reader_rag.sampling import noise
from reader_rag.sampling.noise import DeviceTable, Draw, DrawInputs, drawn_tokens, gumbel, perturbed, perturbed_rows

SEEDS = [0, 7, 2**32 + 3, 2**63, 2**64 - 1]
POSITIONS = [0, 1, 100, 2**31 + 5, 2**40 + 3]
TABLE = DeviceTable.on(torch.device("cpu"))


def bits_of(values: np.ndarray) -> list[int]:
    assert values.dtype == np.float32
    return values.view(np.int32).tolist()


def inputs_of(draws: list[Draw], positions: list[list[int]]) -> DrawInputs:
    words = torch.tensor([draw.words for draw in draws]).T
    return DrawInputs.of(words, torch.tensor(positions))


# The generator


@pytest.mark.parametrize(
    ("seed", "position", "token", "expected"),
    [  # the known answers of Random123 whose counter this package uses
        (0, 0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ],
)
def test_the_bits_are_those_of_philox(seed: int, position: int, token: int, expected: list[int]) -> None:
    bits = np.empty(4, np.uint32)
    noise._random_bits(np.uint64(seed), np.uint64(position), token, bits)
    assert bits.tolist() == expected
    rows = noise._random_rows(torch.tensor([[seed]]), torch.tensor([[position]]), 4)
    assert rows.numpy().view(np.uint32).tolist() == [expected]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as its paper writes it, in integers of any size."""
    for _ in range(10):
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (high >> 32) ^ counter[1] ^ key[0],
            high & 0xFFFFFFFF,
            (low >> 32) ^ counter[3] ^ key[1],
            low & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_the_generator_written_down_gives_the_known_answers() -> None:
    assert philox([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


def test_seed_position_and_token_are_key_and_counter() -> None:
    for seed, position in zip(SEEDS, POSITIONS, strict=True):
        expected: list[int] = []
        for block in range(3):
            expected += philox([block, 0, position & 0xFFFFFFFF, position >> 32], [seed & 0xFFFFFFFF, seed >> 32])
        bits = np.empty(12, np.uint32)
        noise._random_bits(np.uint64(seed), np.uint64(position), 0, bits)
        assert bits.tolist() == expected


# From bits to noise


def test_no_logarithm_of_this_precision_gives_another_table() -> None:
    exact = noise.exact_table()
    from_a_tie = np.abs(exact - np.floor(exact) - 0.5).min()
    assert from_a_tie > 100 * np.spacing(np.abs(exact).max())
    digest = hashlib.blake2b(noise.TABLE.values.astype("<i4").tobytes(), digest_size=8).hexdigest()
    assert digest == "c39cb3ed019cce0e"


def test_noise_is_the_double_logarithm_of_its_bits() -> None:
    bits = np.empty(4096, np.uint32)
    noise._random_bits(np.uint64(3), np.uint64(9), 0, bits)
    distance = (np.where(bits >> 31, ~bits, bits).astype(np.float64) + 0.5) / 2.0**32
    uniform = np.where(bits >> 31, distance, 1.0 - distance)
    assert gumbel(3, 9, 4096) == pytest.approx(-np.log(-np.log(uniform)), abs=4e-6)


def test_noise_of_the_rarest_bits() -> None:
    """The ends and the middle of the table, which no short draw meets."""
    rare = np.array([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    words = torch.from_numpy(rare.view(np.int32))[None]
    original = noise._random_rows
    try:
        noise._random_rows = lambda *_: words
        rows = noise._noise_rows(inputs_of([Draw(0)], [[0]]), TABLE, len(rare))[0].double().numpy()
    finally:
        noise._random_rows = original
    distance = (np.where(rare >> 31, ~rare, rare).astype(np.float64) + 0.5) / 2.0**32
    exact = np.where(rare >> 31, -np.log(-np.log(distance)), -np.log(-np.log1p(-distance)))
    assert rows == pytest.approx(exact, abs=4e-6)


# The same on every device


@pytest.mark.parametrize("size", [1, 3, 4, 1023, 1024, 1025, 5000])
def test_loops_and_tensors_give_the_same_bits(size: int) -> None:
    rows = perturbed_rows(
        torch.zeros(len(SEEDS), size),
        inputs_of([Draw(seed) for seed in SEEDS], [[position] for position in POSITIONS]),
        TABLE,
    )
    for row, seed, position in zip(rows.numpy(), SEEDS, POSITIONS, strict=True):
        assert bits_of(row) == bits_of(gumbel(seed, position, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 1.3])
def test_scores_have_the_same_bits_too(temperature: float, dtype: torch.dtype) -> None:
    logits = (8 * torch.randn(6, 3000, generator=torch.Generator().manual_seed(1))).to(dtype)
    logits[2, 5:] = -torch.inf
    logits[:, 7] = torch.nan
    draw = Draw(5, temperature)
    rows = perturbed_rows(logits, inputs_of([draw, draw], [[3, 4, 5], [6, 7, 8]]), TABLE)
    for n, row in enumerate(rows):
        assert bits_of(row.numpy()) == bits_of(perturbed(logits[n].float(), draw, 3 + n).numpy())


def test_rows_are_drawn_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 500, generator=torch.Generator().manual_seed(2))
    logits[3] = -torch.inf
    logits[4, 9] = torch.nan
    inputs = inputs_of([Draw(5, 0.9)], [[4, 5, 5, 6, 7, 8, 9]])
    whole = drawn_tokens(logits, inputs, TABLE)
    sizes = []

    def noted(logits: torch.Tensor, *more: object) -> torch.Tensor:
        sizes.append(logits.numel())
        return perturbed_rows(logits, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(noise, "_VALUES_AT_ONCE", 1000)
    monkeypatch.setattr(noise, "perturbed_rows", noted)
    assert torch.equal(drawn_tokens(logits, inputs, TABLE), whole)
    assert sizes == [1000, 1000, 1000, 500]
    expected = [
        int(perturbed(row, Draw(5, 0.9), p).argmax()) for row, p in zip(logits, [4, 5, 5, 6, 7, 8, 9], strict=True)
    ]
    assert whole[:, 0].tolist() == [token if n not in (3, 4) else -1 for n, token in enumerate(expected)]


def test_a_sequence_that_does_not_draw_takes_the_most_probable_token() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    inputs = DrawInputs.of(torch.tensor([[9, 0], [Draw(9).words[1], 0]]), torch.tensor([[1, 2], [3, 4]]))
    tokens = drawn_tokens(logits, inputs, TABLE)[:, 0].tolist()
    assert tokens[2:] == logits[2:].argmax(-1).tolist()
    assert tokens[:2] == [int(perturbed(logits[n], Draw(9), 1 + n).argmax()) for n in range(2)]


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device, draw = torch.device("cuda"), Draw(2**64 - 9, 0.7)
    logits = 8 * torch.randn(6, 3000, generator=torch.Generator().manual_seed(1))
    inputs = DrawInputs(*(part.to(device) for part in inputs_of([draw], [[3, 4, 5, 6, 7, 8]])))
    rows = perturbed_rows(logits.to(device), inputs, DeviceTable.on(device)).cpu()
    for n, row in enumerate(rows):
        assert bits_of(row.numpy()) == bits_of(perturbed(logits[n], draw, 3 + n).numpy())
        assert torch.equal(perturbed(logits[n].to(device), draw, 3 + n).cpu(), row)
