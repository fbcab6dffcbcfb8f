"""vLLM as the benchmarks drive it: an engine in this process, step by step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from reader_rag.connectors.vllm_args import DEFAULT_DRAFT_TOKENS, PROPOSER, additional_config
from reader_rag.errors import ConfigError, MissingDependencyError
from reader_rag.util.one_line import first_line

METHODS: dict[str, Mapping[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    "reader": {"method": "custom_class", "model": PROPOSER},
    "fixed": {"method": "custom_class", "model": "reader_rag.bench.vllm.costs.FixedDrafts"},
}
"""Speculation by name, as vLLM is told of it; how much a class drafts is said by `Options`."""
COMPARED = ("plain", "ngram", "suffix", "reader")
"""Those that answer well."""

_SETTINGS = {
    # The engine runs in the process that drives it, so that a step is one call and can be timed.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Counts of processes are ours to make; vLLM would pin the engine to cores of its own choice.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Options:
    """The engine to make.

    Attributes:
        model: Local folder or hub id.
        dtype: Of weights and activations.
        at_once: Most requests of a step.
        max_model_len: Most tokens of a prompt with its answer.
        drafted: Most tokens that `reader` drafts for one request.
        datastore: Folder that `reader` drafts from too.
        costs: Cost table of `reader`.
        eager: Whether vLLM compiles nothing.
        cache_tokens: Positions of the key/value cache; None: as vLLM decides.
        gpu_memory: Share of a GPU's memory that vLLM takes.
    """

    model: str
    dtype: str = "bfloat16"
    at_once: int = 1
    max_model_len: int = 4096
    drafted: int = DEFAULT_DRAFT_TOKENS
    datastore: str | None = None
    costs: str | None = None
    eager: bool = False
    cache_tokens: int | None = None
    gpu_memory: float = 0.2


@dataclass
class Answer:
    """What one request got.

    Attributes:
        tokens: Its tokens.
        steps: Steps that gave it tokens after the first one.
        first_s: Seconds from the group's start to its first token.
    """

    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    first_s: float = 0.0


@dataclass(frozen=True)
class Group:
    """Requests that were begun together.

    Attributes:
        answers: One for each.
        emitted: Tokens that came after each request had its first: nothing but decoding.
        seconds: How long that took.
        wall_s: Seconds for everything, prompts included.
        drafted: Tokens that were verified.
        accepted: Those of them that were right.
    """

    answers: list[Answer]
    emitted: int
    seconds: float
    wall_s: float
    drafted: int
    accepted: int


def require_vllm() -> None:
    """Look whether vLLM is there, which takes no time; importing it takes seconds.

    Raises:
        MissingDependencyError: It is not installed.
    """
    if find_spec("vllm") is None:
        raise MissingDependencyError(
            "this needs vLLM in the same environment: pip install vllm, or make install-vllm for one on the CPU"
        )


def import_vllm() -> Any:
    """The package, told to run in this process."""
    require_vllm()
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import vllm

    return vllm


def make_engine(options: Options, method: str, **more: Any) -> Any:
    """A vLLM engine (`LLMEngine`).

    Args:
        options: What it runs.
        method: A name of `METHODS`.
        more: Further arguments of vLLM's `EngineArgs`, in place of those that are chosen here.

    Raises:
        ConfigError: There is no such method, or vLLM refuses the settings.
        MissingDependencyError: vLLM is not installed, or what the method needs.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method {method}; there are {', '.join(METHODS)}")
    vllm = import_vllm()
    config = METHODS[method]
    chosen: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.at_once,
        "enforce_eager": options.eager,
        "gpu_memory_utilization": options.gpu_memory,
        "speculative_config": None if config is None else {**config},
    }
    if config is not None and config["method"] == "custom_class":
        chosen["speculative_config"]["num_speculative_tokens"] = options.drafted
    if method == "reader":
        chosen["additional_config"] = additional_config(options.datastore, options.costs)
    if method == "suffix":
        _need_suffix_decoding()
    chosen |= more
    _mend_sampling()
    if options.cache_tokens is not None:
        # The size of a block is known only to the engine: made once to ask would take as long again. One is vLLM's own.
        chosen["block_size"] = _BLOCK
        chosen["num_gpu_blocks_override"] = 1 + -(-options.cache_tokens // _BLOCK)
    try:
        return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**chosen))
    except (ValueError, RuntimeError) as cause:
        raise ConfigError(f"vLLM does not start: {_root(cause)}") from cause


_BLOCK = 32
"""Positions of a block of a cache of a given size; all of vLLM's attention backends take it."""


def _mend_sampling() -> None:
    """Have temperatures reach the positions of drafted tokens on the CPU.

    vLLM 0.32 divides their logits by memory that nothing was written to there (vllm-project/vllm, issue 55005), with
    any drafter, so that what is sampled would tell nothing of ours.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = _expanded


def _expanded(values: Any, ends: Any, total: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Each request's value for each of its drafted tokens, as `rejection_sampler.expand_batch_to_tokens` has it."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts, output_size=total)


def _need_suffix_decoding() -> None:
    if find_spec("arctic_inference") is None:
        raise MissingDependencyError("method suffix needs arctic-inference: pip install arctic-inference")


def _root(error: BaseException) -> str:
    """The first line of what went wrong first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def greedy(max_tokens: int, **more: Any) -> Any:
    """vLLM's `SamplingParams`; `more` are further ones."""
    vllm = import_vllm()
    from vllm.sampling_params import RequestOutputKind

    return vllm.SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "output_kind": RequestOutputKind.DELTA, **more}
    )


class Driver:
    """Adds requests to an engine, steps it, and collects what comes out.

    Args:
        engine: A vLLM `LLMEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._added = 0
        self._open: dict[str, tuple[Answer, float]] = {}
        self._held: dict[str, str] = {}

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def add(self, prompt: Sequence[int], params: Any) -> tuple[str, Answer]:
        """Begin a request.

        Args:
            prompt: Token ids.
            params: vLLM's `SamplingParams`.

        Returns:
            Its name, and where its tokens will be.
        """
        name = f"bench-{self._added}"
        self._added += 1
        answer = Answer()
        self._open[name] = (answer, time.perf_counter())
        # vLLM makes a name of its own of it, by which alone it can be aborted.
        self._held[name] = self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        return name, answer

    def step(self) -> int:
        """One step of the engine: how many tokens came out."""
        emitted = 0
        for output in self.engine.step():
            name = output.request_id
            if name not in self._open:
                continue
            answer, begun = self._open[name]
            new = output.outputs[0].token_ids
            if new and not answer.tokens:
                answer.first_s = time.perf_counter() - begun
            elif new:
                answer.steps += 1
            answer.tokens += new
            emitted += len(new)
            if output.finished:
                self._forget(name)
        return emitted

    def abort(self, name: str) -> None:
        """End a request where it is."""
        self.engine.abort_request([self._held[name]], internal=True)
        self._forget(name)

    def is_open(self, name: str) -> bool:
        """Whether a request has not ended."""
        return name in self._open

    def _forget(self, name: str) -> None:
        del self._open[name], self._held[name]


def run_group(engine: Any, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> Group:
    """Begin some requests together and step to their ends.

    Args:
        engine: A vLLM `LLMEngine` that has nothing else to do.
        prompts: Token ids of each.
        params: vLLM's `SamplingParams` of each.
    """
    running = pausing_group(engine, prompts, params)
    while True:
        try:
            next(running)
        except StopIteration as end:
            group: Group = end.value
            return group


def pausing_group(
    engine: Any, prompts: Sequence[Sequence[int]], params: Sequence[Any], turn_s: float = math.inf
) -> Generator[None, None, Group]:
    """As `run_group`, but pause where all prompts are read, and then every so often; pauses are not timed.

    Args:
        engine: A vLLM `LLMEngine` that has nothing else to do.
        prompts: Token ids of each.
        params: vLLM's `SamplingParams` of each.
        turn_s: Seconds after which the next step waits for the next turn.
    """
    before = counters(engine)
    driver = Driver(engine)
    started = time.perf_counter()
    answers = [driver.add(prompt, some)[1] for prompt, some in zip(prompts, params, strict=True)]
    while driver.open and not all(answer.tokens for answer in answers):
        driver.step()
    reading = time.perf_counter() - started
    emitted, decoding = 0, 0.0
    while driver.open:
        yield
        started = time.perf_counter()
        emitted += driver.step()
        while driver.open and time.perf_counter() - started < turn_s:
            emitted += driver.step()
        decoding += time.perf_counter() - started
    after = counters(engine)
    return Group(
        answers,
        emitted,
        decoding,
        reading + decoding,
        drafted=after["spec_decode_num_draft_tokens"] - before["spec_decode_num_draft_tokens"],
        accepted=after["spec_decode_num_accepted_tokens"] - before["spec_decode_num_accepted_tokens"],
    )


_COUNTED = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "num_preemptions")


def counters(engine: Any) -> dict[str, int]:
    """What vLLM has counted so far in this process, by the names of its metrics."""
    found = dict.fromkeys(_COUNTED, 0)
    for metric in engine.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if name in found:
            found[name] += int(metric.value)
    return found


def margin(engine: Any, prompt: Sequence[int], first: int, second: int) -> float | None:
    """By how much a model prefers one token to another after a text.

    Args:
        engine: A vLLM `LLMEngine`.
        prompt: Token ids.
        first: A token.
        second: Another.

    Returns:
        The difference of their log-probabilities; None where one is not among the most probable tokens.
    """
    from vllm.sampling_params import RequestOutputKind

    params = greedy(1, logprobs=_LOOKED_AT, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("margin", {"prompt_token_ids": list(prompt)}, params)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    found = outputs[-1].outputs[0].logprobs[0]
    if first not in found or second not in found:
        return None
    return float(found[first].logprob - found[second].logprob)


_LOOKED_AT = 10
"""Most probable tokens among which two are looked for that are said to be equal."""
