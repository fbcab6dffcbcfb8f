"""The `reader-rag bench` commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from reader_rag.bench.replay import commands as replay_commands
from reader_rag.bench.terminal import progress
from reader_rag.bench.vllm import commands as vllm_commands
from reader_rag.errors import ConfigError
from reader_rag.model.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from reader_rag.bench.generate.methods import Task
    from reader_rag.config import SamplingParams
    from reader_rag.engine.engine import Engine

app = typer.Typer(help="Measure speed and exactness.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure speed and exactness."""


for _command, _example in (
    (replay_commands.replay, "replay traces.jsonl --top8 traces.npz --nodes 64"),
    (replay_commands.drafting, "drafting traces.jsonl --top8 traces.npz"),
    (replay_commands.recall, "recall traces.jsonl --top8 traces.npz"),
    (replay_commands.record, "record traces.jsonl --limit 20"),
    (replay_commands.calibrate, "calibrate traces.jsonl priors.npz --top8 traces.npz"),
    (vllm_commands.vllm, "vllm --prompts prompts.jsonl --categories rag --limit 10"),
    (vllm_commands.vllm_stress, "vllm-stress --requests 500"),
    (vllm_commands.vllm_costs, "vllm-costs --model smollm2-135m --out costs.json"),
):
    app.command(epilog=f"Example: reader-rag bench {_example}")(_command)


@app.command(
    epilog="Example: reader-rag bench generate --prompts prompts.jsonl --categories rag --limit 10 --dtype bfloat16"
)
def generate(
    prompts: Annotated[
        Path | None, typer.Option(help='Prompts, a line each: {"id", "category", "turns": [text, ...]}.')
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Traces whose tokens are forced on the model, so that any weights give real acceptance."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Alias, folder, hub id, or with --replay a config.json for random weights.")
    ] = DEFAULT_MODEL,
    categories: Annotated[str, typer.Option(help="Comma-separated; empty: all.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of each category.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 256,
    max_nodes: Annotated[int | None, typer.Option(min=0, help="Most nodes of a draft tree.")] = None,
    successors: Annotated[bool, typer.Option(help="Draft from the model's own next tokens too.")] = True,
    batch: Annotated[str, typer.Option(help="Prompts decoded at once, e.g. 1,2,4,8.")] = "1",
    exactness: Annotated[str, typer.Option(help="fast or strict.")] = "fast",
    forward: Annotated[
        str, typer.Option(help="auto, or torch: call the model's own forward where compiled loops know it.")
    ] = "auto",
    strict_width: Annotated[
        int | None, typer.Option(help="Positions of a pass in strict mode where shapes are fixed.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of the sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    methods: Annotated[str, typer.Option(help="Out of plain, reader, hf, hf-lookup.")] = "plain,reader,hf,hf-lookup",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode the same prompts by several methods in turn and compare speed, tokens and memory."""
    batches = _batches(batch)
    if (prompts is None) == (replay is None):
        raise ConfigError("give either --prompts FILE or --replay TRACES")
    from dataclasses import replace as changed

    from reader_rag.bench.generate.batches import compare_batch
    from reader_rag.bench.generate.generate import compare
    from reader_rag.config import DraftConfig, SamplingParams

    wanted = [c for c in categories.split(",") if c]
    generation = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    usual = DraftConfig()
    draft = changed(
        usual,
        max_nodes=usual.max_nodes if max_nodes is None else max_nodes,
        max_successors=usual.max_successors if successors else 0,
    )
    settings = {"draft": draft, "exactness": exactness, "forward": forward, "strict_width": strict_width}
    engine = _engine(model, dtype, device, settings, random_weights=replay is not None)
    tasks = _tasks(engine, prompts, replay, wanted, limit, generation)
    chosen = [m for m in methods.split(",") if m]
    several = len(batches) > 1
    for number, size in enumerate(batches):
        if size == 1:
            report = compare(engine, tasks, chosen, progress())
        else:
            report = compare_batch(engine, tasks, chosen, size, progress())
        if not as_json:
            _print(report)
            continue
        # Each as soon as there is one: a run over all sizes takes long, and one that is broken off has measured some.
        opening, closing = "[" if several and not number else "", "]" if several else ""
        typer.echo(opening + json.dumps(report, indent=1) + ("," if number + 1 < len(batches) else closing))


@app.command(epilog="Example: reader-rag bench load --prompts prompts.jsonl --categories rag --limit 10")
def load(
    prompts: Annotated[Path, typer.Option(help='Prompts, a line each: {"id", "category", "turns": [text, ...]}.')],
    model: Annotated[str, typer.Option(help="Alias, folder or hub id.")] = DEFAULT_MODEL,
    categories: Annotated[str, typer.Option(help="Comma-separated; empty: all.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of each category.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a round; the prompts are asked in turn.")] = 200,
    at_once: Annotated[int, typer.Option(min=1, help="Threads that ask.")] = 16,
    cancelled: Annotated[float, typer.Option(min=0, max=1, help="Share closed after a few chunks.")] = 0.1,
    bad: Annotated[float, typer.Option(min=0, max=1, help="Share that must fail.")] = 0.05,
    rounds: Annotated[int, typer.Option(min=1, help="How often.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask many things at once, some of them cancelled and some bad; is every answer right, and is anything left?"""
    from reader_rag.bench.inputs import read_prompts
    from reader_rag.bench.load.load import LoadPlan, run_load
    from reader_rag.config import SamplingParams
    from reader_rag.engine.engine import Engine

    if cancelled + bad > 1:
        raise ConfigError(f"--cancelled {cancelled} and --bad {bad} are shares of the same requests; lower one of them")
    engine = Engine.load(model, dtype=dtype, device=device)
    wanted = [c for c in categories.split(",") if c]
    texts = [prompt.text for prompt in read_prompts(prompts, wanted, limit)]
    asked = [engine.encode_chat([{"role": "user", "content": text}]) for text in texts]
    plan = LoadPlan(requests, at_once, cancelled, bad, rounds)
    report = run_load(engine, asked, SamplingParams(max_tokens=max_tokens), plan, progress())
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _print_load(report)
    if any(row["wrong"] or row["not_refused"] or row["cache_bytes"] for row in report["rounds"]):
        raise typer.Exit(1)


def _print_load(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    machine = report["machine"]
    table = Table(title=f"{machine['model']}, {machine['dtype']}, {machine['device']}, {report['prompts']} prompts")
    table.add_column("")
    for number in range(1, len(report["rounds"]) + 1):
        table.add_column(f"round {number}", justify="right")
    for name in report["rounds"][0]:
        table.add_row(name.replace("_", " "), *(f"{row[name]:g}" for row in report["rounds"]))
    Console().print(table)


def _batches(text: str) -> list[int]:
    sizes = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")]
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--batch {text}: give whole numbers of at least 1, e.g. 1,2,4,8")
    return sizes


@app.command(epilog="Example: reader-rag bench cache --batch 8,32 --layers 8")
def cache(
    batch: Annotated[str, typer.Option(help="Texts at once, comma-separated.")] = "1,2,4,8,16,32",
    context: Annotated[int, typer.Option(min=2, help="Positions of the longest context.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the longest answer.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the cache.")] = 8,
    heads: Annotated[int, typer.Option(min=1, help="Heads of a layer.")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of keys and values.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare where a batch's keys and values may lie: time, bytes moved and memory. No model is loaded."""
    sizes = _batches(batch)
    from reader_rag.bench.generate.caching import CacheShape, measure_caching

    shape = CacheShape(context, tokens, layers, heads, width, device, dtype)
    report = {"shape": asdict(shape), "runs": measure_caching(sizes, shape, progress())}
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _print_caching(report)


def _print_caching(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("batch", "policy")
    for heading in ("steps", "ms/step", "mean", "moved MB", "moves/entry", "rearranged", "peak MB", "of the bound"):
        table.add_column(heading, justify="right")
    for run in report["runs"]:
        table.add_row(
            str(run["batch"]),
            run["policy"],
            str(run["steps"]),
            f"{run['ms_per_step_p50']:.2f}",
            f"{run['ms_per_step_mean']:.2f}",
            f"{run['moved_bytes'] / 1e6:.0f}",
            f"{run['moves_per_entry']:.2f}",
            str(run["rearrangements"]),
            f"{run['peak_bytes'] / 1e6:.1f}",
            f"{run['share_of_bound']:.3f}",
        )
    Console().print(table)


@app.command(epilog="Example: reader-rag bench datastore --tokens 1e6,1e7,1e8 --plot cost.svg")
def datastore(
    tokens: Annotated[str, typer.Option(help="Sizes, comma-separated.")] = "1e6,1e7",
    vocabulary_bits: Annotated[
        int, typer.Option(min=16, max=17, help="17: made up out of the default model's tokens, which take 16.")
    ] = 16,
    folder: Annotated[
        Path | None, typer.Option(help="Where text and datastores are kept for the next run; none: nowhere.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the time of a search by size: a .svg or .png file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Build long-term datastores of the text found on this machine: sorting, bytes, opening, time of a search."""
    sizes = _sizes(tokens)
    import tempfile

    from reader_rag.bench.datastore.datastore import installed_text, measure_datastore, widened

    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        most = max(sizes) + max(sizes) // 50 + 100_000
        text = installed_text(most, place, progress())
        available = int(len(text.tokens) * 0.99)
        if vocabulary_bits == 17:
            text = widened(text)
        vocabulary = 1 << 17 if vocabulary_bits == 17 else 49_152
        rows = measure_datastore(text, sizes, vocabulary, place, progress())
    report = {"vocabulary_bits": vocabulary_bits, "vocabulary": vocabulary, "text_tokens": available, "rows": rows}
    if plot is not None:
        from reader_rag.bench.replay.plots import plot_datastore

        plot_datastore(rows, plot)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _print_datastore(report)
    if available < max(sizes):
        typer.echo(f"This machine has text of {available} tokens only: larger sizes are of that size.", err=True)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(float(part)) for part in text.split(",")]
    except (ValueError, OverflowError):
        sizes = [0]
    if min(sizes) < 1000:
        raise ConfigError(f"--tokens {text}: give numbers of at least 1000, e.g. 1e6,1e7")
    return sizes


def _print_datastore(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"datastores of a vocabulary of {report['vocabulary']} tokens")
    table.add_column("")
    for row in report["rows"]:
        table.add_column(f"{row['tokens'] / 1e6:g} M tokens", justify="right")

    def line(name: str, pick: Callable[[dict[str, Any]], Any]) -> None:
        table.add_row(name, *("-" if pick(row) is None else f"{pick(row):g}" for row in report["rows"]))

    line("documents", lambda row: row["documents"])
    line("bytes a token", lambda row: row["bytes_per_token"])
    line("sorted, million tokens/s", lambda row: row["sorted_tokens_per_s"] / 1e6)
    line("opened, ms", lambda row: row["open_ms"])
    line("resident when opened, MB", lambda row: row["resident_mb_opened"])
    for count in (100, 4000):
        line(f"resident after {count} searches, MB", lambda row, n=count: row[f"resident_mb_searched_{n}"])  # type: ignore[misc]
    for kind in ("new", "copied"):
        for part in ("us_p50", "us_p99", "draft_us_p50", "draft_us_p99", "longest_p50"):
            line(f"{kind} text, {part.replace('_', ' ')}", lambda row, k=kind, p=part: row["queries"][k][p])  # type: ignore[misc]
    line("segments before merging", lambda row: row["as_built"]["segments"])
    line("new text in those, us p50", lambda row: row["as_built"]["us_p50"])
    line("new text in those, us p99", lambda row: row["as_built"]["us_p99"])
    Console().print(table)


def _engine(model: str, dtype: str, device: str, settings: dict[str, Any], *, random_weights: bool) -> Engine:
    from reader_rag.engine.engine import Engine

    if model.endswith(".json"):
        if not random_weights:
            raise ConfigError(f"--model {model}: random weights answer nothing; use a configuration with --replay")
        from reader_rag.bench.generate.random_weights import engine_from_config

        return engine_from_config(Path(model), dtype, device, settings)
    return Engine.load(model, dtype=dtype, device=device, prefix_bytes=0, **settings)


def _tasks(
    engine: Engine,
    prompts: Path | None,
    replay: Path | None,
    categories: list[str],
    limit: int | None,
    generation: SamplingParams,
) -> list[tuple[str, Task]]:
    from reader_rag.bench.generate.methods import Task
    from reader_rag.bench.inputs import read_prompts, read_traces
    from reader_rag.engine.outputs import Prompt

    if prompts is not None:
        return [
            (p.id, Task(engine.encode_chat([{"role": "user", "content": p.text}]), generation))
            for p in read_prompts(prompts, categories, limit)
        ]
    assert replay is not None
    return [
        (t.id, Task(Prompt(t.prompt), generation, t.output[: generation.max_tokens]))
        for t in read_traces(replay, categories, limit)
        if len(t.output) > 1
    ]


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    machine = report["machine"]
    at_once = f", {report['batch']} at once" if report["batch"] > 1 else ""
    title = f"{machine['model']}, {machine['dtype']}, {machine['device']}, {report['prompts']} prompts{at_once}"
    table = Table(title=title)
    table.add_column("method")
    for heading in ("tokens/s", "tokens/step", "ms/step", "first token s", "cache MB", "peak MB"):
        table.add_column(heading, justify="right")
    for name, row in report["variants"].items():
        cells = (
            row["decode_tokens_per_s"],
            row["mat"],
            row["ms_per_step"],
            row["ttft_s"],
            row["cache_mb"],
            row["peak_mb"],
        )
        table.add_row(name, *("-" if cell is None else f"{cell:g}" for cell in cells))
    console = Console()
    console.print(table)
    for name, ratio in report["ratios"].items():
        if ratio["median"] is not None:
            spread = f"median {ratio['median']:.2f}, from {ratio['min']:.2f} to {ratio['max']:.2f}"
            console.print(f"{name}: {ratio['total']:.2f} times over all tokens ({spread})")
    if "identical" in report:
        same = report["identical"]
        differing = f"; different: {', '.join(same['different'])}" if same["different"] else ""
        console.print(f"reader = plain: {same['compared'] - len(same['different'])} of {same['compared']}{differing}")
