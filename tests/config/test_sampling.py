"""Sampling parameters that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from reader_rag.config import Grammar, SamplingParams
from reader_rag.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 1e-5}, "temperature 1e-05 is too small for float32 logits; use 0 for greedy decoding"),
        ({"max_tokens": 4, "min_tokens": 5}, r"min_tokens must be in 0..max_tokens \(4\), not 5"),
        ({"grammar": Grammar.regex("a"), "ignore_eos": True}, "ignore_eos cannot be combined with grammar"),
        ({"grammar": Grammar.regex("a"), "min_tokens": 1}, "min_tokens cannot be combined with grammar"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**values)


def test_the_smallest_temperature_is_above_zero() -> None:
    assert SamplingParams(temperature=1e-4).temperature == 1e-4
