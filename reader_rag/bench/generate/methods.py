"""The decoding methods that `bench generate` compares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from reader_rag.bench.generate.runs import Run
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Prompt
from reader_rag.sampling.sampler import Sampler, Verified, greedy

LOOKUP_SIZES = (2, 3)
"""n-gram sizes of `transformers`' prompt lookup; the faster one stands for the method."""
LOOKUP_TOKENS = 10
_TENANT = "bench"


@dataclass(frozen=True)
class Task:
    """A prompt that every method decodes.

    Attributes:
        prompt: The prompt.
        generation: Length and sampling.
        forced: Tokens to emit instead of the model's own (replaying a trace), or None.
    """

    prompt: Prompt
    generation: SamplingParams
    forced: tuple[int, ...] | None = None


Method = Callable[[Engine, Task], Run]


class _Forced:
    """A sampler that computes the model's token, so that its time is measured, and emits the trace's token.

    Args:
        prompt_tokens: Number of tokens of the prompt.
        tokens: Token ids of the trace's answer.
    """

    needs_logits = False

    def __init__(self, prompt_tokens: int, tokens: tuple[int, ...]) -> None:
        self._prompt_tokens = prompt_tokens
        self._tokens = tokens

    def __call__(self, verified: Verified) -> Callable[[int], int]:
        greedy(verified)
        return lambda row: self._tokens[verified.position(row) - self._prompt_tokens]


def shortened(task: Task) -> Task:
    """A task of eight tokens for a warm-up run, because kernels are compiled and threads started at first use."""
    forced = None if task.forced is None else task.forced[:8]
    return replace(task, generation=replace(task.generation, max_tokens=8), forced=forced)


def request_of(task: Task, *, speculate: bool) -> tuple[SamplingParams, Sampler | None]:
    """Sampling parameters and sampler of a request to this package's engine.

    Args:
        task: The prompt.
        speculate: Whether to decode with drafts.

    Returns:
        The parameters; the sampler, None if the parameters choose the tokens.
    """
    if task.forced is not None:
        generation = SamplingParams(max_tokens=len(task.forced), ignore_eos=True, speculate=speculate)
        return generation, _Forced(len(task.prompt.token_ids), task.forced)
    return replace(task.generation, speculate=speculate), None


def ours(engine: Engine, task: Task, *, speculate: bool) -> Run:
    """Decode with this package's engine.

    Args:
        engine: The engine.
        task: The prompt.
        speculate: Whether to decode with drafts.
    """
    generation, sampler = request_of(task, speculate=speculate)
    engine.forget(_TENANT)  # every prompt starts with the draft state of a new process
    started = time.perf_counter()
    with engine.submit(task.prompt, generation, sampler=sampler, tenant=_TENANT) as stream:
        next(stream)
        first = time.perf_counter()
        for _ in stream:
            pass
        ended = time.perf_counter()
        stats = stream.result.stats
        prompt, tokens = len(task.prompt.token_ids), stream.result.token_ids
        return Run.of_one(prompt, tokens, first - started, ended - first, stats.steps, stats.cache_bytes)


class Clock(BaseStreamer):
    """A streamer of `generate` that records the time of the first token.

    Attributes:
        puts: Number of calls of `put`; the first one has the prompt.
        first: `time.perf_counter()` at the first token.
    """

    def __init__(self) -> None:
        self.puts = 0
        self.first = 0.0

    def put(self, value: Any) -> None:
        """Called by `generate` with the prompt, then with the tokens of each step."""
        self.puts += 1
        if self.puts == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        """Called by `generate` at the end."""


def transformers_generate(engine: Engine, task: Task, *, lookup: int | None = None) -> Run:
    """Decode with `generate` of `transformers` on the same model.

    Args:
        engine: The engine whose model is used.
        task: The prompt.
        lookup: n-gram size of prompt lookup; None: without prompt lookup.
    """
    model: Any = engine.model
    ids = torch.tensor([list(task.prompt.token_ids)], device=model.device)
    options: dict[str, Any] = {"do_sample": False}
    if task.generation.temperature > 0:
        options = {
            "do_sample": True,
            "temperature": task.generation.temperature,
            "top_p": task.generation.top_p,
            "top_k": task.generation.top_k,
        }
        torch.manual_seed(task.generation.seed or 0)
    if lookup is not None:
        options |= {"prompt_lookup_num_tokens": LOOKUP_TOKENS, "max_matching_ngram_size": lookup}
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    clock = Clock()
    hook = model.register_forward_pre_hook(count)
    try:
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=task.generation.max_tokens,
                eos_token_id=ends_of(engine, task.generation),
                pad_token_id=min(engine.eos_ids, default=0),
                streamer=clock,
                return_dict_in_generate=True,
                **options,
            )
        ended = time.perf_counter()
    finally:
        hook.remove()
    tokens = tuple(out.sequences[0, ids.shape[1] :].tolist())
    held = cache_bytes(out.past_key_values)
    return Run.of_one(ids.shape[1], tokens, clock.first - started, ended - clock.first, steps - 1, held)


def ends_of(engine: Engine, generation: SamplingParams) -> list[int] | None:
    """Tokens at which `generate` ends an answer; None: there are none.

    Args:
        engine: The engine whose model is used.
        generation: Its `ignore_eos` asks for answers of `max_tokens` tokens.
    """
    if generation.ignore_eos:
        return [engine.model.config.get_text_config().vocab_size]  # no token; None would mean the model's own
    return sorted(engine.eos_ids) or None


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values of a cache of `transformers`."""
    tensors = [tensor for layer in getattr(cache, "layers", []) for tensor in (layer.keys, layer.values)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


METHODS: dict[str, dict[str, Method]] = {
    "plain": {"plain": partial(ours, speculate=False)},
    "reader": {"reader": partial(ours, speculate=True)},
    "hf": {"hf": transformers_generate},
    "hf-lookup": {f"hf-lookup n={size}": partial(transformers_generate, lookup=size) for size in LOOKUP_SIZES},
}
"""Methods by name, each with its variants; the fastest variant stands for the method in ratios."""
