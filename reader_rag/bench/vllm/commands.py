"""The `reader-rag bench` commands that need vLLM, each run in vLLM's environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reader_rag.bench import options
from reader_rag.bench.option_groups import Only, PromptOptions, Without, with_option_groups
from reader_rag.bench.output import print_report, print_table, progress, ratio_line
from reader_rag.bench.vllm.options import Options
from reader_rag.errors import ConfigError

if TYPE_CHECKING:
    from reader_rag.bench.vllm.compare import VllmTask
    from reader_rag.draft.step_table import StepTable

_LOCAL_PROMPTS = 8
"""Prompts of each category where no file is given."""


@with_option_groups
def vllm(
    prompts: PromptOptions = PromptOptions(),
    engine: Annotated[Options, Without("cache_tokens")] = Options(),
    max_tokens: options.AnswerTokens = 128,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    methods: Annotated[str, typer.Option(help="Out of plain, ngram, suffix, reader.")] = "plain,ngram,suffix,reader",
    as_json: options.Json = False,
) -> None:
    """Compare drafters in vLLM.

    Runs the drafters in turn on the same prompts; reports speed, tokens per step and differing answers.
    """
    from reader_rag.bench.vllm.compare import Sampling, compare_vllm

    engine = engine.resolved()
    tasks = _tasks(engine, prompts, max_tokens)
    sampling = Sampling(max_tokens, temperature, seed)
    report = compare_vllm(engine, tasks, options.names(methods), sampling, progress())
    print_report(report, as_json, _show)


@with_option_groups
def vllm_stress(
    prompts: PromptOptions = PromptOptions(),
    engine: Options = Options(
        dtype="float32", max_model_len=1024, at_once=16, cache_tokens=1024, eager=True, gpu_memory=0.4
    ),
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 500,
    aborted: Annotated[float, typer.Option(min=0, max=1, help="Share of the requests that is aborted.")] = 0.15,
    max_tokens: options.MaxTokens = 48,
    whole: Annotated[bool, typer.Option(help="Use whole prompts, not prefixes of mixed lengths.")] = False,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Check the answers of an overloaded vLLM.

    Sends many requests to a vLLM whose KV cache is too small, aborts some, and compares every answer with plain
    decoding's. Exit status: 1 if one is wrong.
    """
    from reader_rag.bench.vllm.stress import StressPlan, cut, stress

    cache_tokens = engine.cache_tokens or engine.max_model_len
    if cache_tokens < engine.max_model_len:
        raise ConfigError(
            f"--cache-tokens {cache_tokens}: vLLM needs room for one request of {engine.max_model_len} tokens; raise "
            "it, or lower --max-model-len"
        )
    engine = engine.resolved()
    tasks = _tasks(engine, prompts, max_tokens)
    plan = StressPlan(requests, aborted, max_tokens, 2 * engine.at_once, seed)
    report = stress(engine, cache_tokens, tasks if whole else cut(tasks, seed), plan, progress())
    print_report(report, as_json, _show_stress)
    if report["wrong"]:
        raise typer.Exit(1)


@with_option_groups
def vllm_costs(
    out: Annotated[Path, typer.Option(help="File to write.")],
    engine: Annotated[Options, Only("model", "dtype", "max_model_len", "eager", "gpu_memory")] = Options(
        gpu_memory=0.8
    ),
    rows: Annotated[str, typer.Option(help="Requests of a step, comma-separated.")] = "1,2,4,8,16",
    drafted: Annotated[str, typer.Option(help="Drafted tokens of each request, comma-separated.")] = "0,1,2,4,8,16",
    context: Annotated[int, typer.Option(min=1, help="Tokens of the text before them.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="How often every length is measured.")] = 5,
) -> None:
    """Measure how long vLLM steps take.

    Writes a table of seconds by the number of requests and of drafted tokens. Run it on an idle machine like the one
    that serves; reader-rag vllm-args --costs takes the table.
    """
    from reader_rag.bench.vllm.costs import measure_costs

    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    numbers, lengths = options.numbers("--rows", rows), options.numbers("--drafted", drafted)
    engine = replace(engine.resolved(), at_once=max(numbers), drafted=max(1, *lengths))
    table = measure_costs(engine, numbers, lengths, context, rounds, progress())
    table.write(out)
    _show_costs(table)
    typer.echo(out)


def _tasks(engine: Options, prompts: PromptOptions, max_tokens: int) -> list[VllmTask]:
    """The prompts in the model's tokens."""
    from reader_rag.bench.vllm.compare import read_tasks

    return read_tasks(engine.model, prompts.read(_LOCAL_PROMPTS), engine.max_model_len, max_tokens)


def _show(report: dict[str, Any]) -> None:
    machine = report["machine"]
    columns = {
        "tokens/s": "decode_tokens_per_s",
        "with prompts": "tokens_per_s_with_prompts",
        "tokens/step": "mat",
        "drafted/step": "drafted_per_step",
        "accepted": "accepted_share",
        "first token s": "ttft_s",
    }
    for category, found in report["categories"].items():
        print_table(
            f"{category}: {found['prompts']} prompts, {report['batch']} at once, vLLM {machine['vllm']}, "
            f"{machine['dtype']}, {machine['device']}",
            ("method", *columns),
            ((name, *(row[field] for field in columns.values())) for name, row in found["methods"].items()),
        )
        for name, ratio in found["ratios"].items():
            if line := ratio_line(name, ratio):
                typer.echo(line)
    for name, same in report.get("identical", {}).items():
        typer.echo(f"{name} = plain: {same['compared'] - len(same['different'])} of {same['compared']}")
        for one in same["different"]:
            typer.echo(f"  {_difference(one)}")


def _difference(one: dict[str, Any]) -> str:
    margin = "unknown" if one["margin"] is None else f"{one['margin']:.3g}"
    return f"{one['id']}, token {one['position']}: plain {one['plain']}, here {one['other']}, margin {margin}"


def _show_stress(report: dict[str, Any]) -> None:
    for name in ("requests", "aborted", "tokens", "preemptions", "drafted", "accepted", "cache_tokens"):
        typer.echo(f"{name.replace('_', ' ')}: {report[name]}")
    memory = ", ".join(f"{held:.0f}" for held in report["memory_mb"])
    typer.echo(
        f"memory, MB: {memory} (grown by {report['grown_mb']} since the first were answered, plain decoding by "
        f"{report['grown_mb_plain']})"
    )
    for name in ("ties", "wrong"):
        typer.echo(f"{name}: {len(report[name])}")
        for one in report[name]:
            typer.echo(f"  {_difference(one)}")


def _show_costs(table: StepTable) -> None:
    print_table(
        f"ms of a step, vLLM {table.vllm}, {table.device}",
        ["requests", *(f"{length} drafted" for length in table.drafted)],
        (
            [str(number), *(f"{1e3 * cell:.2f}" for cell in row)]
            for number, row in zip(table.rows, table.seconds, strict=True)
        ),
        to_error=True,
    )
