"""Times of steps in `generate` of `transformers`: with its growing cache, its static cache, and that compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from reader_rag.bench.generate.methods import Clock
from reader_rag.util.one_line import first_line

_WAYS: dict[str, dict[str, Any]] = {
    "growing cache": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
}
_COMPILED: dict[str, dict[str, Any]] = {"static cache, compiled": {"cache_implementation": "static"}}
"""On accelerators, `generate` compiles steps over a static cache by itself."""


@dataclass(frozen=True)
class GenerateTime:
    """The time of a step of `generate`.

    Attributes:
        way: Which cache it has, and whether steps are compiled.
        rows: Sequences.
        context: Tokens of each prompt.
        ms: Mean milliseconds of a step, one token of each sequence; None: it failed.
        why: The first line of the error; empty: there was none.
    """

    way: str
    rows: int
    context: int
    ms: float | None
    why: str = ""


@torch.inference_mode()
def measure_generate(
    model: PreTrainedModel,
    shapes: Sequence[tuple[int, int]],
    tokens: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[GenerateTime]:
    """Time plain decoding by `generate` of `transformers`.

    Args:
        model: The model.
        shapes: (rows, tokens of a prompt) of each.
        tokens: Tokens of each answer, at least 2.
        say: Called with what runs next.

    Returns:
        A time for each shape and way, in the order of `shapes`.
    """
    ways = _WAYS | (_COMPILED if model.device.type != "cpu" else {})
    times: list[GenerateTime] = []
    for rows, context in shapes:
        for way, options in ways.items():
            say(f"generate, {way}: {rows} x 1 positions behind {context}")
            try:
                seconds = [_timed(model, rows, context, tokens, options) for _ in range(2)][-1]  # the first warms up
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                times.append(GenerateTime(way, rows, context, None, "out of memory"))
            except Exception as error:  # no compiler, no such cache for this model: the page says so
                times.append(GenerateTime(way, rows, context, None, first_line(error)))
            else:
                times.append(GenerateTime(way, rows, context, 1e3 * seconds))
    return times


def _timed(model: Any, rows: int, context: int, tokens: int, options: dict[str, Any]) -> float:
    """Mean seconds of a step behind the first token."""
    ids = torch.ones(rows, context, dtype=torch.int64, device=model.device)
    clock = Clock()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=[model.config.get_text_config().vocab_size],  # no token
        pad_token_id=0,
        streamer=clock,
        **options,
    )
    return (time.perf_counter() - clock.first) / (tokens - 1)
