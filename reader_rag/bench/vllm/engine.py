"""A vLLM engine in this process, driven step by step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from reader_rag.bench.vllm.options import Options
from reader_rag.connectors.vllm_args import PROPOSER, additional_config
from reader_rag.errors import ConfigError, MissingDependencyError
from reader_rag.util.one_line import first_line

METHODS: dict[str, Mapping[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    "reader": {"method": "custom_class", "model": PROPOSER},
    "fixed": {"method": "custom_class", "model": "reader_rag.bench.vllm.costs.FixedDrafts"},
}
"""`speculative_config` by name; `Options.drafted` is added to those with a class."""
COMPARED = ("plain", "ngram", "suffix", "reader")
"""The methods for comparisons."""

_SETTINGS = {
    # The engine runs in the process that drives it, so that a step is one call and can be timed.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Otherwise vLLM would bind each engine to cores of its choice.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass
class Answer:
    """The answer to one request.

    Attributes:
        tokens: Its tokens.
        steps: Steps that emitted tokens of it, after the first.
        first_s: Seconds from the group's start to its first token.
    """

    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    first_s: float = 0.0


@dataclass(frozen=True)
class Group:
    """Requests that were added together.

    Attributes:
        answers: The answer to each request.
        emitted: Tokens that were emitted after each request had its first, by decode steps alone.
        decode_s: Seconds of those steps.
        wall_s: Seconds of everything, prefill included.
        drafted: Drafted tokens that were verified.
        accepted: Drafted tokens that were accepted.
    """

    answers: list[Answer]
    emitted: int
    decode_s: float
    wall_s: float
    drafted: int
    accepted: int


def require_vllm() -> None:
    """Check that vLLM is installed, without importing it, which takes seconds.

    Raises:
        MissingDependencyError: It is not installed.
    """
    if find_spec("vllm") is None:
        raise MissingDependencyError(
            "this needs vLLM in the same environment: pip install vllm, or make install-vllm for one on the CPU"
        )


def import_vllm() -> Any:
    """Import vLLM, set up to run engines in this process."""
    require_vllm()
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import vllm

    return vllm


def make_engine(options: Options, method: str, **more: Any) -> Any:
    """Make a vLLM engine (`LLMEngine`).

    Args:
        options: Its settings.
        method: A name of `METHODS`.
        more: Arguments of vLLM's `EngineArgs` that replace those of `options`.

    Raises:
        ConfigError: There is no such method, or vLLM refuses the settings.
        MissingDependencyError: vLLM is not installed, or a package of the method.
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
    _correct_sampling()
    if options.cache_tokens is not None:
        # The block size is set, as only a loaded engine would tell it. vLLM uses one block itself.
        chosen["block_size"] = _BLOCK
        chosen["num_gpu_blocks_override"] = 1 + -(-options.cache_tokens // _BLOCK)
    try:
        return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**chosen))
    except (ValueError, RuntimeError) as cause:
        raise ConfigError(f"vLLM does not start: {_root(cause)}") from cause


_BLOCK = 32
"""Block size for `cache_tokens`; all of vLLM's attention backends support it."""


def _correct_sampling() -> None:
    """Apply temperatures to the positions of drafted tokens on the CPU.

    vLLM 0.32 divides their logits by uninitialised memory there (vllm-project/vllm, issue 55005), with any drafter.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = _expanded


def _expanded(values: Any, ends: Any, total: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Each request's value repeated for each of its drafted tokens, like `rejection_sampler.expand_batch_to_tokens`."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts, output_size=total)


def _need_suffix_decoding() -> None:
    if find_spec("arctic_inference") is None:
        raise MissingDependencyError("method suffix needs arctic-inference: pip install arctic-inference")


def _root(error: BaseException) -> str:
    """The first line of the error that caused the others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def greedy(max_tokens: int, **more: Any) -> Any:
    """Greedy `SamplingParams` of vLLM.

    Args:
        max_tokens: Most tokens of an answer.
        more: Further arguments, or other values.
    """
    vllm = import_vllm()
    from vllm.sampling_params import RequestOutputKind

    return vllm.SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "output_kind": RequestOutputKind.DELTA, **more}
    )


class Driver:
    """Adds requests to an engine, runs its steps, and collects the answers.

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
        """Add a request.

        Args:
            prompt: Token ids.
            params: vLLM's `SamplingParams`.

        Returns:
            Its name, and the answer that `step` fills.
        """
        name = f"bench-{self._added}"
        self._added += 1
        answer = Answer()
        self._open[name] = (answer, time.perf_counter())
        # vLLM derives a name of its own, which `abort_request` needs.
        self._held[name] = self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        return name, answer

    def step(self) -> int:
        """Run one step of the engine; returns the number of emitted tokens."""
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
        """Abort a request."""
        self.engine.abort_request([self._held[name]], internal=True)
        self._forget(name)

    def is_open(self, name: str) -> bool:
        """Whether a request has not ended."""
        return name in self._open

    def _forget(self, name: str) -> None:
        del self._open[name], self._held[name]


def run_group(engine: Any, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> Group:
    """Add requests together and run steps until all have ended.

    Args:
        engine: A vLLM `LLMEngine` without other requests.
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
    """Like `run_group`, but yield after prefill and then every `turn_s` seconds; time at a `yield` is not counted.

    Args:
        engine: A vLLM `LLMEngine` without other requests.
        prompts: Token ids of each.
        params: vLLM's `SamplingParams` of each.
        turn_s: Seconds of decode steps between two `yield`s.
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
    """vLLM's counters in this process so far, by the names of its metrics."""
    found = dict.fromkeys(_COUNTED, 0)
    for metric in engine.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if name in found:
            found[name] += int(metric.value)
    return found


def margin(engine: Any, prompt: Sequence[int], first: int, second: int) -> float | None:
    """The difference of the log-probabilities of two tokens after a text.

    Args:
        engine: A vLLM `LLMEngine`.
        prompt: Token ids of the text.
        first: A token id.
        second: Another token id.

    Returns:
        That of `first` less that of `second`; None if one is not among the ten most probable tokens.
    """
    from vllm.sampling_params import RequestOutputKind

    params = greedy(1, logprobs=_TOP_LOGPROBS, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("margin", {"prompt_token_ids": list(prompt)}, params)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    found = outputs[-1].outputs[0].logprobs[0]
    if first not in found or second not in found:
        return None
    return float(found[first].logprob - found[second].logprob)


_TOP_LOGPROBS = 10
"""Most probable tokens that vLLM reports."""
