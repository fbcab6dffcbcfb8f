"""The `reader-rag bench` commands that need vLLM, each run in vLLM's environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reader_rag.bench.terminal import progress
from reader_rag.connectors.vllm_args import DRAFTED
from reader_rag.errors import ConfigError
from reader_rag.model.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from reader_rag.bench.vllm.compare import VllmTask
    from reader_rag.draft.step_table import StepTable

Model = Annotated[str, typer.Option(help="Alias, local folder or hub id.")]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help='Prompts, a line each: {"id", "category", "turns": [text, ...]}.',
        show_default="questions about Python's documentation and installed packages",
    ),
]
Categories = Annotated[str, typer.Option(help="Comma-separated; empty: all.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Most prompts of each category.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Length = Annotated[int, typer.Option("--max-model-len", min=16, help="Most tokens of a prompt with its answer.")]
Drafted = Annotated[
    int, typer.Option("-k", "--drafted", min=1, help="Most tokens drafted for a request in a step (reader).")
]
DatastoreFolder = Annotated[Path | None, typer.Option(help="Folder of texts that reader drafts from too.")]
Costs = Annotated[Path | None, typer.Option(help="Cost table of reader, from bench vllm-costs.")]
Eager = Annotated[bool, typer.Option(help="Have vLLM compile nothing: starts sooner, runs slower.")]
GpuMemory = Annotated[float, typer.Option(min=0, max=1, help="Share of a GPU's memory for each engine.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_OWN = 8
"""Prompts of each kind where no file is given."""


def vllm(
    prompts: Prompts = None,
    model: Model = DEFAULT_MODEL,
    categories: Categories = "",
    limit: Limit = None,
    dtype: Dtype = "bfloat16",
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
    max_model_len: Length = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered at once.")] = 1,
    drafted: Drafted = DRAFTED,
    datastore: DatastoreFolder = None,
    costs: Costs = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    methods: Annotated[str, typer.Option(help="Out of plain, ngram, suffix, reader.")] = "plain,ngram,suffix,reader",
    eager: Eager = False,
    gpu_memory: GpuMemory = 0.2,
    as_json: Json = False,
) -> None:
    """Answer the same prompts in vLLM by several drafters in turn, and compare speed and tokens."""
    from reader_rag.bench.vllm.compare import Sampling, compare_vllm
    from reader_rag.bench.vllm.engine import Options

    source, tasks = _tasks(model, prompts, categories, limit, max_model_len, max_tokens)
    options = Options(
        source, dtype, batch, max_model_len, drafted, _path(datastore), _path(costs), eager, gpu_memory=gpu_memory
    )
    chosen = [name for name in methods.split(",") if name]
    report = compare_vllm(options, tasks, chosen, Sampling(max_tokens, temperature, seed), progress())
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _print(report)


def vllm_stress(
    prompts: Prompts = None,
    model: Model = DEFAULT_MODEL,
    categories: Categories = "",
    limit: Limit = None,
    dtype: Dtype = "float32",
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 500,
    aborted: Annotated[float, typer.Option(min=0, max=1, help="Share that is aborted.")] = 0.15,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 48,
    max_model_len: Length = 1024,
    batch: Annotated[int, typer.Option(min=1, help="Requests of a step, at most.")] = 16,
    cache_tokens: Annotated[int, typer.Option(min=32, help="Positions of the key/value cache.")] = 1024,
    whole: Annotated[bool, typer.Option(help="Ask the prompts whole, not beginnings of mixed lengths.")] = False,
    drafted: Drafted = DRAFTED,
    datastore: DatastoreFolder = None,
    costs: Costs = None,
    seed: Annotated[int, typer.Option(help="Of what is asked and aborted.")] = 0,
    eager: Eager = True,
    gpu_memory: GpuMemory = 0.4,
    as_json: Json = False,
) -> None:
    """Ask much of a vLLM with too small a cache, abort some of it, and compare every answer with plain decoding's.

    Exit status: 1 if an answer is wrong.
    """
    from reader_rag.bench.vllm.engine import Options
    from reader_rag.bench.vllm.stress import StressPlan, cut, stress

    if cache_tokens < max_model_len:
        raise ConfigError(f"--cache-tokens {cache_tokens}: vLLM wants room for one request of {max_model_len} tokens")
    source, tasks = _tasks(model, prompts, categories, limit, max_model_len, max_tokens)
    options = Options(
        source, dtype, batch, max_model_len, drafted, _path(datastore), _path(costs), eager, gpu_memory=gpu_memory
    )
    plan = StressPlan(requests, aborted, max_tokens, 2 * batch, seed)
    report = stress(options, cache_tokens, tasks if whole else cut(tasks, seed), plan, progress())
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _print_stress(report)
    if report["wrong"]:
        raise typer.Exit(1)


def vllm_costs(
    out: Annotated[Path, typer.Option(help="File to write.")],
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "bfloat16",
    rows: Annotated[str, typer.Option(help="Requests at once.")] = "1,2,4,8,16",
    drafted: Annotated[str, typer.Option(help="Drafted tokens of each.")] = "0,1,2,4,8,16",
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="How often all lengths have their turn.")] = 5,
    max_model_len: Length = 4096,
    eager: Eager = False,
    gpu_memory: GpuMemory = 0.8,
) -> None:
    """Measure what a step costs in the vLLM of this environment, by requests and drafted tokens.

    Run it on an idle machine that is like the one that serves. `reader-rag vllm-args --costs` passes the table on.
    """
    from reader_rag.bench.vllm.costs import measure_costs
    from reader_rag.bench.vllm.engine import Options
    from reader_rag.model.registry import resolve_model

    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    numbers, lengths = _numbers("--rows", rows), _numbers("--drafted", drafted)
    options = Options(
        str(resolve_model(model)),
        dtype,
        max(numbers),
        max_model_len,
        max(1, *lengths),
        eager=eager,
        gpu_memory=gpu_memory,
    )
    table = measure_costs(options, numbers, lengths, context, rounds, progress())
    table.write(out)
    _print_costs(table)
    typer.echo(out)


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as cause:
        raise ConfigError(f"{name} {text}: give whole numbers, e.g. 1,2,4,8") from cause


def _tasks(
    model: str, path: Path | None, categories: str, limit: int | None, max_model_len: int, max_tokens: int
) -> tuple[str, list[VllmTask]]:
    """The model's folder or id, and the prompts in its tokens."""
    from reader_rag.bench.inputs import held_prompts
    from reader_rag.bench.vllm.compare import read_tasks
    from reader_rag.model.registry import resolve_model

    source = str(resolve_model(model))
    return source, read_tasks(source, held_prompts(path, categories, limit, _OWN), max_model_len, max_tokens)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    machine = report["machine"]
    console = Console()
    for category, held in report["categories"].items():
        title = f"{category}: {held['prompts']} prompts, {report['batch']} at once, vLLM {machine['vllm']}, "
        table = Table(title=title + f"{machine['dtype']}, {machine['device']}")
        table.add_column("method")
        for heading in ("tokens/s", "with prompts", "tokens/step", "drafted/step", "accepted", "first token s"):
            table.add_column(heading, justify="right")
        for name, row in held["methods"].items():
            cells = [value for key, value in row.items() if key != "tokens"]
            shown = (cells[0], cells[1], cells[3], cells[4], cells[5], cells[2])
            table.add_row(name, *("-" if cell is None else f"{cell:g}" for cell in shown))
        console.print(table)
        for name, ratio in held["ratios"].items():
            if ratio["median"] is not None:
                spread = f"median {ratio['median']:.2f}, from {ratio['min']:.2f} to {ratio['max']:.2f}"
                console.print(f"{name}: {ratio['total']:.2f} times over all tokens ({spread})")
    for name, same in report.get("identical", {}).items():
        console.print(f"{name} = plain: {same['compared'] - len(same['different'])} of {same['compared']}")
        for one in same["different"]:
            console.print(f"  {_parted(one)}")


def _parted(one: dict[str, Any]) -> str:
    margin = "unknown" if one["margin"] is None else f"{one['margin']:.3g}"
    return f"{one['id']}, token {one['position']}: plain {one['plain']}, here {one['other']}, margin {margin}"


def _print_stress(report: dict[str, Any]) -> None:
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
            typer.echo(f"  {_parted(one)}")


def _print_costs(table: StepTable) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table("requests", title=f"ms of a step, vLLM {table.vllm}, {table.device}")
    for length in table.drafted:
        shown.add_column(f"{length} drafted", justify="right")
    for number, row in zip(table.rows, table.seconds, strict=True):
        shown.add_row(str(number), *(f"{1e3 * cell:.2f}" for cell in row))
    Console(stderr=True).print(shown)
