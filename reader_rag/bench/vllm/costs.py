"""Seconds of a vLLM step by the number of requests and of drafted tokens."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from reader_rag.bench.vllm.engine import Driver, greedy
from reader_rag.bench.vllm.options import Options
from reader_rag.bench.vllm.worker import Worker
from reader_rag.draft.step_table import StepTable
from reader_rag.errors import ConfigError

_MEASURED = 2
"""Steps timed in a row for one length; the step before them still verifies drafts of the previous length."""


class FixedDrafts:
    """A drafter for vLLM's `custom_class` whose drafts have a fixed length and are almost never accepted.

    Attributes:
        length: Tokens of a draft, for all drafters of this process.
    """

    length: ClassVar[int] = 0

    def __init__(self, vllm_config: Any) -> None:
        self._vocabulary = int(vllm_config.model_config.get_vocab_size())

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.integer],
        token_ids_cpu: NDArray[np.integer],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Arbitrary tokens for each row that has just got one; arguments are those that vLLM passes."""
        return [
            [(sampled[-1] + 7 * (place + 1)) % self._vocabulary for place in range(self.length)] if sampled else []
            for sampled in sampled_token_ids
        ]


def measure_costs(
    options: Options,
    rows: Sequence[int],
    drafted: Sequence[int],
    context: int = 512,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> StepTable:
    """Time steps of a vLLM engine.

    Args:
        options: Settings of the engine; `at_once` and `drafted` are at least the largest that is measured.
        rows: Numbers of requests in a step, rising from 1.
        drafted: Numbers of drafted tokens of each request, rising from 0.
        context: Tokens of a request before those that are verified.
        rounds: How often every length is measured.
        progress: Called with what runs next.

    Returns:
        The table of step costs.

    Raises:
        ConfigError: The numbers do not rise, or vLLM refuses the settings.
        MissingDependencyError: vLLM is not installed.
    """
    # Checks the numbers before an hour is spent.
    StepTable(tuple(rows), tuple(drafted), ((1.0,) * len(drafted),) * len(rows))
    # A request grows by one token in each step, and by drafts that are accepted by chance.
    needed = context + 2 * rounds * len(drafted) * (_MEASURED + 1) + max(drafted)
    if needed > options.max_model_len:
        raise ConfigError(f"measuring needs {needed} tokens a request: raise --max-model-len or lower --context")
    from reader_rag.bench.vllm.compare import machine

    with Worker(options, "fixed") as worker:
        worker.wait()
        worker.run(time_steps, 1, [0, max(drafted)], context, 1)
        seconds = []
        for number in rows:
            progress(f"{number} requests")
            seconds.append(worker.run(time_steps, number, list(drafted), context, rounds))
    found = machine(options)
    return StepTable(
        tuple(rows),
        tuple(drafted),
        tuple(seconds),
        model=options.model,
        device=f"{found['device']}, {options.dtype}",
        vllm=found["vllm"],
    )


def time_steps(engine: Any, rows: int, drafted: Sequence[int], context: int, rounds: int) -> tuple[float, ...]:
    """Median seconds of a step for each number of drafted tokens; runs in the worker process.

    Args:
        engine: vLLM's engine, which drafts with `FixedDrafts`.
        rows: Requests of a step.
        drafted: Numbers of tokens that are drafted for each request.
        context: Tokens of each prompt.
        rounds: How often every number is measured.
    """
    draw = random.Random(rows)
    vocabulary = len(engine.get_tokenizer())
    driver = Driver(engine)
    params = greedy(engine.model_config.max_model_len - context, ignore_eos=True)
    FixedDrafts.length = 0
    begun = [driver.add([draw.randrange(vocabulary) for _ in range(context)], params) for _ in range(rows)]
    while not all(answer.tokens for _, answer in begun):
        driver.step()
    taken: dict[int, list[float]] = {length: [] for length in drafted}
    for _ in range(rounds):
        for length in drafted:
            FixedDrafts.length = length
            driver.step()
            for _ in range(_MEASURED):
                started = time.perf_counter()
                driver.step()
                taken[length].append(time.perf_counter() - started)
    for name, _ in begun:
        driver.abort(name)
    return tuple(round(statistics.median(taken[length]), 6) for length in drafted)
