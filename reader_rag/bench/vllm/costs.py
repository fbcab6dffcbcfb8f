"""`reader-rag bench vllm-costs`: what a step of vLLM costs by requests and drafted tokens."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from reader_rag.bench.vllm.engine import Driver, Options, greedy
from reader_rag.bench.vllm.worker import Worker
from reader_rag.draft.step_table import StepTable
from reader_rag.errors import ConfigError

_MEASURED = 2
"""Steps timed before the next length has its turn; the step before them still verifies the last length's tokens."""


class FixedDrafts:
    """Drafts as many tokens as it is told, for vLLM's `custom_class`; they are next to never right.

    Attributes:
        length: Tokens for each request; for all drafters of this process.
    """

    length: ClassVar[int] = 0

    def __init__(self, vllm_config: Any) -> None:
        self._vocabulary = int(vllm_config.model_config.get_vocab_size())

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.integer],
        token_ids_cpu: NDArray[np.integer],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Tokens that have nothing to do with the text, for each row that has just got one."""
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
        options: The engine; `at_once` and `drafted` must not be below the most that is measured.
        rows: Requests at once, rising from 1.
        drafted: Drafted tokens of each, rising from 0.
        context: Tokens before those that are verified.
        rounds: How often all lengths have their turn.
        progress: Told what runs next.

    Returns:
        The table.

    Raises:
        ConfigError: The numbers do not rise so, or vLLM refuses the settings.
        MissingDependencyError: vLLM is not installed.
    """
    # Refused before an hour is spent on it.
    StepTable(tuple(rows), tuple(drafted), ((1.0,) * len(drafted),) * len(rows))
    # A request grows by one token a step, and by those that were right by chance.
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
    """Median seconds of a step for each number of drafted tokens; runs in the worker."""
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
