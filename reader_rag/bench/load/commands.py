"""`reader-rag bench load` and `bench load-memory`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from reader_rag.bench import options
from reader_rag.bench.option_groups import Loading, with_option_groups
from reader_rag.bench.output import print_report, print_table, progress
from reader_rag.config import LoadConfig, SamplingParams
from reader_rag.errors import ConfigError
from reader_rag.model.registry import DEFAULT_MODEL


@with_option_groups
def load(
    prompts: options.PromptsFile,
    model: options.Model = DEFAULT_MODEL,
    categories: options.Categories = "",
    limit: options.Limit = None,
    loading: Loading = LoadConfig(dtype="float32"),
    max_tokens: options.MaxTokens = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a round; the prompts are used in turn.")] = 200,
    at_once: Annotated[int, typer.Option(min=1, help="Threads that send requests.")] = 16,
    cancelled: Annotated[float, typer.Option(min=0, max=1, help="Share that is cancelled after a few chunks.")] = 0.1,
    bad: Annotated[float, typer.Option(min=0, max=1, help="Share that is invalid, and must fail.")] = 0.05,
    rounds: Annotated[int, typer.Option(min=1, help="How often all of it is repeated.")] = 3,
    as_json: options.Json = False,
) -> None:
    """Send many concurrent requests.

    Some of them are cancelled and some are invalid. Checks every answer, and looks for leaks. Exit status: 1 if an
    answer is wrong, an invalid request was accepted, or memory of the cache is still held.
    """
    if cancelled + bad > 1:
        raise ConfigError(f"--cancelled {cancelled} and --bad {bad} are shares of the same requests; lower one of them")
    from reader_rag.bench.inputs import encode_prompt, read_prompts
    from reader_rag.bench.load.concurrent import LoadPlan, run_load
    from reader_rag.engine.engine import Engine

    engine = Engine.load(model, **vars(loading), profile="off")
    encoded = [encode_prompt(engine, each) for each in read_prompts(prompts, options.names(categories), limit)]
    plan = LoadPlan(requests, at_once, cancelled, bad, rounds)
    report = run_load(engine, encoded, SamplingParams(max_tokens=max_tokens), plan, progress())
    print_report(report, as_json, _show)
    if any(row["wrong"] or row["not_refused"] or row["cache_bytes"] for row in report["rounds"]):
        raise typer.Exit(1)


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}
"""Shapes of models that `load-memory` makes of random weights."""


def load_memory(
    model: Annotated[str | None, typer.Option("--model", help="LLM: alias, local folder or hub id.")] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", help=f"In place of --model: random weights of the shape of {' or '.join(SHAPES)}."),
    ] = None,
    untied: Annotated[bool, typer.Option("--untied", help="Give the shape an output head of its own.")] = False,
    dtype: options.Dtype = LoadConfig.dtype,
    quantization: options.Quantization = LoadConfig.quantization,
    as_json: options.Json = False,
) -> None:
    """Measure memory while a model is loaded.

    Samples the anonymous memory of a new process (Linux, CPU), once with an empty cache of quantised weights and once
    with what the first start has kept. Exit status: 1 if with --quantization int8 a peak lies above the memory of the
    process before, the model's tensors, and two of its largest matrices in float32.
    """
    from reader_rag.bench.load.memory import make_random_model, measure_loading

    if (model is None) == (shape is None):
        raise ConfigError("give either --model NAME or --shape NAME")
    if shape is not None and shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}: use {' or '.join(SHAPES)}")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if shape is not None:
            (folder / "model").mkdir()
            make_random_model(SHAPES[shape] | {"tie_word_embeddings": not untied}, folder / "model")
        place = folder / "model" if model is None else _folder_of(model)
        starts = {}
        for start in ("first", "second"):
            starts[start] = measure_loading(place, folder / "cache", dtype=dtype, quantization=quantization)
    about = {"model": model or shape, "untied": untied, "dtype": dtype, "quantization": quantization}
    print_report({**about, "starts": starts}, as_json, _show_memory)
    if quantization != "none" and any(row["peak_mb"] > row["bound_mb"] for row in starts.values()):
        raise typer.Exit(1)


def _folder_of(model: str) -> Path:
    from reader_rag.model.registry import get_model, resolve_model

    found = resolve_model(model)
    return found if isinstance(found, Path) else get_model(found)


def _show_memory(report: dict[str, Any]) -> None:
    starts: dict[str, dict[str, float]] = report["starts"]
    print_table(
        f"{report['model']}, {report['quantization']}: anonymous memory, MB",
        ["start", *next(iter(starts.values()))],
        ([name, *row.values()] for name, row in starts.items()),
    )


def _show(report: dict[str, Any]) -> None:
    machine, rounds = report["machine"], report["rounds"]
    print_table(
        f"{machine['model']}, {machine['dtype']}, {machine['device']}, {report['prompts']} prompts",
        ["", *(f"round {number}" for number in range(1, len(rounds) + 1))],
        ([name.replace("_", " "), *(row[name] for row in rounds)] for name in rounds[0]),
    )
