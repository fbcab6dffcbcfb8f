"""Which passes attend to their past without a mask, by measured cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from reader_rag.kv_cache.fixed_cache import FixedCache, power_of_two
from reader_rag.model.fixed_step.attention import joined_attention
from reader_rag.model.fixed_step.graphs import GraphRecorder
from reader_rag.model.fixed_step.masks import sees_all
from reader_rag.model.fixed_step.shapes import shown_for

LEAST_PAST = 256
"""Least number of columns for which a second call of attention is tried."""
_PARTS = 4
"""Values of `past` between two powers of two: columns that are masked for all are at most a quarter of the others."""
_CALLS, _ROUNDS = 5, 3
"""Calls that are timed together, and how often; the least time counts."""


class Columns(NamedTuple):
    """What a pass attends to.

    Attributes:
        past: Columns that all its positions see, in every sequence; 0: there is one call with a mask over all.
        shown: Columns altogether.
    """

    past: int
    shown: int


class LongContexts:
    """Chooses the columns of a pass: one call with a mask, or two of which the first has none.

    Args:
        cache: Keys and values of the passes.
        kinds: The model's attention kinds and their spans (`attention_kinds`).
        heads: Heads of queries.
        seconds: Seconds of a call of a function; None: two calls are chosen wherever they are possible.
        least: Least number of columns for which two calls are tried.

    Attributes:
        least: As given.
        chosen: By (rows, width, past rounded down to a power of two, columns behind it), whether there are two calls.
    """

    def __init__(
        self,
        cache: FixedCache,
        kinds: Mapping[str, int],
        heads: int,
        seconds: Callable[[Callable[[], Any]], float] | None,
        least: int = LEAST_PAST,
    ) -> None:
        self._cache, self._spans, self._heads = cache, list(kinds.values()), heads
        self._seconds = seconds
        self.least = least
        self.chosen: dict[tuple[int, int, int, int], bool] = {}

    def columns(self, shortest: int, longest: int, rows: int, width: int) -> Columns:
        """The columns of a pass, by the cheaper of both ways.

        Args:
            shortest: Committed positions of the shortest sequence.
            longest: Those of the longest.
            rows: Rows of the pass.
            width: Positions of each.
        """
        one = Columns(0, shown_for(longest + width))
        two = self._split(shortest, longest, width)
        if two is None or two.past < self.least:
            return one
        lower = power_of_two(two.past + 1) // 2
        key = (rows, width, lower, two.shown - two.past)
        if key not in self.chosen:
            self.chosen[key] = self._is_cheaper(two, one, rows, width)
        return two if self.chosen[key] else one

    def _split(self, shortest: int, longest: int, width: int) -> Columns | None:
        """Past and other columns where there are two calls; None: some position of every kind of layer sees less."""
        block = max(power_of_two(shortest + 1) // 2 // _PARTS, 1)
        past = shortest // block * block
        behind = block
        while behind < longest - past:
            behind *= 2
        shown = min(past + behind + width, self._cache.columns)
        if not any(sees_all(span, shown) for span in self._spans):
            return None
        return Columns(past, shown)

    @torch.inference_mode()
    def _is_cheaper(self, two: Columns, one: Columns, rows: int, width: int) -> bool:
        """Whether two calls take less time than one, over the keys of one layer as they are."""
        if self._seconds is None:
            return True
        keys, values = next(layer.states for layer in self._cache.fixed_layers if layer.states)
        query = torch.randn(rows, self._heads, width, keys.shape[-1], dtype=keys.dtype, device=keys.device)
        module = cast(Any, SimpleNamespace(num_key_value_groups=self._heads // keys.shape[1], is_causal=True))
        times = []
        for past, shown in (two, one):
            shown = min(shown, keys.shape[2] - 1)
            mask = torch.ones(rows, 1, width, shown - past, dtype=torch.bool, device=keys.device)
            key, value = keys[:rows, :, :shown], values[:rows, :, :shown]

            def call(key: torch.Tensor = key, value: torch.Tensor = value, mask: torch.Tensor = mask) -> None:
                joined_attention(module, query, key, value, mask)

            times.append(self._seconds(call))
        return times[0] < times[1]


def seconds_on(device: torch.device, recorder: GraphRecorder | None) -> Callable[[Callable[[], Any]], float]:
    """A function that measures what a call of another costs where passes run.

    Args:
        device: Of the passes.
        recorder: Records them: launches, which a replayed pass does not pay, are not counted. None: they are called.

    Returns:
        Seconds of a call, as a function of the called one.
    """

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds(function: Callable[[], Any]) -> float:
        function()
        run = function if recorder is None else recorder.record(function).replay
        run()
        times = []
        for _ in range(_ROUNDS):
            synchronize()
            began = time.perf_counter()
            for _ in range(_CALLS):
                run()
            synchronize()
            times.append((time.perf_counter() - began) / _CALLS)
        return min(times)

    return seconds
