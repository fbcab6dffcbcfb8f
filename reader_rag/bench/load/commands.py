"""`reader-rag bench load`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from reader_rag.bench import options
from reader_rag.bench.output import print_report, print_table, progress
from reader_rag.config import LoadConfig, SamplingParams
from reader_rag.errors import ConfigError
from reader_rag.model.registry import DEFAULT_MODEL


def load(
    prompts: options.PromptsFile,
    model: options.Model = DEFAULT_MODEL,
    categories: options.Categories = "",
    limit: options.Limit = None,
    dtype: options.Dtype = "float32",
    quantization: options.Quantization = LoadConfig.quantization,
    device: options.Device = "auto",
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
    from reader_rag.bench.inputs import read_prompts
    from reader_rag.bench.load.concurrent import LoadPlan, run_load
    from reader_rag.engine.engine import Engine

    engine = Engine.load(model, dtype=dtype, quantization=quantization, device=device, profile="off")
    texts = [prompt.text for prompt in read_prompts(prompts, options.names(categories), limit)]
    encoded = [engine.encode_chat([{"role": "user", "content": text}]) for text in texts]
    plan = LoadPlan(requests, at_once, cancelled, bad, rounds)
    report = run_load(engine, encoded, SamplingParams(max_tokens=max_tokens), plan, progress())
    print_report(report, as_json, _show)
    if any(row["wrong"] or row["not_refused"] or row["cache_bytes"] for row in report["rounds"]):
        raise typer.Exit(1)


def _show(report: dict[str, Any]) -> None:
    machine, rounds = report["machine"], report["rounds"]
    print_table(
        f"{machine['model']}, {machine['dtype']}, {machine['device']}, {report['prompts']} prompts",
        ["", *(f"round {number}" for number in range(1, len(rounds) + 1))],
        ([name.replace("_", " "), *(row[name] for row in rounds)] for name in rounds[0]),
    )
