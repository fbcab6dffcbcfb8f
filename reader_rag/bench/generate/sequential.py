"""`reader-rag bench generate` with one prompt at a time: decoding methods on the same model and prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reader_rag.bench.generate.gguf_file import check_gguf
from reader_rag.bench.generate.llama_cpp import LlamaCpp
from reader_rag.bench.generate.methods import METHODS, Task, shortened
from reader_rag.bench.generate.peak_memory import PeakMemory
from reader_rag.bench.generate.runs import Runs, make_report
from reader_rag.engine.engine import Engine
from reader_rag.errors import ConfigError

LLAMA_CPP = "llama-cpp"


def compare(
    engine: Engine,
    tasks: Sequence[tuple[str, Task]],
    methods: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
    gguf: Path | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Run the methods in turn, prompt by prompt, in this process.

    Args:
        engine: The engine whose model is used.
        tasks: Pairs of prompt id and task.
        methods: Names of `METHODS`, and "llama-cpp".
        progress: Called with what runs next.
        gguf: The model as a GGUF file, for "llama-cpp".
        seconds: Begin no further prompt when so many seconds have passed; None: run all.

    Returns:
        The JSON report, as `make_report` describes it, of the prompts that were run; with "llama-cpp" also "llama_cpp":
        file, type, version.

    Raises:
        ConfigError: An unknown method, one that cannot replay a trace or sample, or a GGUF file of another model.
        MissingDependencyError: llama.cpp is not installed.
        ModelError: llama.cpp cannot use the file.
    """
    check_methods(methods)
    limit = math.inf if seconds is None else time.monotonic() + seconds
    others = sorted(set(methods) - {"plain", "reader"})
    if others and any(task.forced is not None for _, task in tasks):
        raise ConfigError(f"{' and '.join(others)} cannot replay a trace: use --methods plain,reader only")
    known = dict(METHODS)
    about: dict[str, Any] = {}
    if LLAMA_CPP in methods:
        peer, about = _llama_cpp(engine, [task for _, task in tasks], gguf)
        known[LLAMA_CPP] = peer.variants()
    variants = {name: variant for method in methods for name, variant in known[method].items()}
    for variant in variants.values():
        variant(engine, shortened(tasks[0][1]))
    measured = {name: Runs() for name in variants}
    memory = PeakMemory(engine.target.device)
    done: list[str] = []
    for number, (task_id, task) in enumerate(tasks, 1):
        if done and time.monotonic() > limit:
            break
        done.append(task_id)
        for name, variant in variants.items():
            progress(f"{number}/{len(tasks)} {task_id} {name}")
            measured[name].add(partial(variant, engine, task), memory)
    fastest = {method: max(known[method], key=lambda name: measured[name].decode_tokens_per_s) for method in methods}
    report = make_report(engine, done, measured, fastest, 1)
    return report | ({"llama_cpp": about} if about else {})


def check_methods(methods: Sequence[str]) -> None:
    """Check names of methods.

    Args:
        methods: Names of `METHODS`, and "llama-cpp".

    Raises:
        ConfigError: There is none, or an unknown one.
    """
    known = (*METHODS, LLAMA_CPP)
    unknown = sorted(set(methods) - set(known))
    if unknown or not methods:
        raise ConfigError(f"unknown method {', '.join(unknown)}; there are {', '.join(known)}")


def _llama_cpp(engine: Engine, tasks: Sequence[Task], gguf: Path | None) -> tuple[LlamaCpp, dict[str, Any]]:
    """llama.cpp with as many threads as the engine, and what a report says about it."""
    if gguf is None:
        raise ConfigError("llama-cpp reads the model from a GGUF file: name one")
    if engine.target.device.type != "cpu":
        raise ConfigError("llama-cpp is compared on the CPU: add --device cpu")
    if any(task.generation.temperature > 0 for task in tasks):
        raise ConfigError(
            "llama-cpp is compared in greedy decoding: leave out --temperature, or llama-cpp of --methods"
        )
    longest = max(len(task.prompt.token_ids) + task.generation.max_tokens for task in tasks)
    peer = LlamaCpp(gguf, longest, torch.get_num_threads())
    return peer, peer.about() | check_gguf(gguf, engine)
