"""`reader-rag bench generate`, `reader-rag bench speed-bench` and `reader-rag bench cache`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from reader_rag.bench import options
from reader_rag.bench.option_groups import Loading, Only, with_option_groups
from reader_rag.bench.output import json_bytes, print_report, print_table, progress
from reader_rag.config import DraftConfig, EngineConfig, LoadConfig, SamplingParams
from reader_rag.errors import ConfigError
from reader_rag.model.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from reader_rag.bench.generate.methods import Task
    from reader_rag.engine.engine import Engine


@with_option_groups
def generate(
    prompts: Annotated[Path | None, typer.Option(help=options.PROMPTS_FORM)] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            "--replay", help="Traces whose tokens are emitted instead of the model's: real acceptance with any weights."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="LLM: alias, local folder or hub id; with --replay also a config.json, for random weights."),
    ] = DEFAULT_MODEL,
    categories: options.Categories = "",
    limit: options.Limit = None,
    load: Loading = LoadConfig(),
    config: Annotated[
        EngineConfig, Only("draft_model", "draft_quantization", "exactness", "forward", "strict_width")
    ] = options.UNSHARED,
    max_tokens: options.AnswerTokens = SamplingParams.max_tokens,
    max_nodes: Annotated[int | None, typer.Option(min=0, help="Most nodes of a draft tree.")] = None,
    successors: Annotated[bool, typer.Option(help="Draft from the model's own next tokens too.")] = True,
    batch: Annotated[str, typer.Option(help="Prompts decoded at once; several sizes: 1,2,4,8.")] = "1",
    params: Annotated[SamplingParams, Only("temperature", "top_p", "seed", "ignore_eos")] = SamplingParams(seed=0),
    methods: Annotated[
        str, typer.Option(help="Methods, comma-separated: plain, reader, hf, hf-lookup, llama-cpp.")
    ] = "plain,reader,hf,hf-lookup",
    gguf: Annotated[
        Path | None,
        typer.Option(help="The model as a GGUF file, for llama-cpp.", show_default="that of the model's package"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Begin no further prompt after so many seconds, for each size of --batch."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare decoding methods on prompts.

    Runs the methods in turn on the same prompts; reports speed, tokens per step, memory and differing answers. The
    time of a whole question is that of prefill and decoding, with the wait for a place in the batch. No method keeps
    anything of a prompt for the next one. Methods: plain and reader are this package's engine without and with
    drafts; hf is `generate` of transformers, hf-lookup the same with its prompt lookup; llama-cpp is llama.cpp on a
    GGUF file of the model, on as many threads, without and with its n-gram drafts. Of several variants of a method,
    the one that decodes fastest is reported. llama.cpp's answers may have other words and lengths than those of plain;
    --ignore-eos gives all the same length. With several sizes of --batch, --json prints a list of reports.
    """
    sizes = options.numbers("--batch", batch, least=1)
    if (prompts is None) == (traces is None):
        raise ConfigError("give either --prompts FILE or --replay TRACES")
    from reader_rag.bench.generate.batched import compare_batch
    from reader_rag.bench.generate.gguf_file import choose_gguf
    from reader_rag.bench.generate.llama_cpp import import_xllamacpp
    from reader_rag.bench.generate.sequential import LLAMA_CPP, check_methods, compare

    chosen = options.names(methods)
    check_methods(chosen)
    if LLAMA_CPP in chosen:
        import_xllamacpp()
        gguf = choose_gguf(model, gguf)
    engine = _engine(model, load, replace(config, draft=_draft(max_nodes, successors)), traces is not None)
    params = replace(params, max_tokens=max_tokens)
    tasks = _tasks(engine, prompts, traces, options.names(categories), limit, params)
    reports = (
        compare(engine, tasks, chosen, progress(), gguf, seconds)
        if size == 1
        else compare_batch(engine, tasks, chosen, size, progress(), seconds)
        for size in sizes
    )
    _print_each(reports, len(sizes), as_json)


def _draft(max_nodes: int | None, successors: bool) -> DraftConfig:
    """How drafts are made.

    Args:
        max_nodes: Most nodes of a tree; None: the default.
        successors: Whether the model's own next tokens are drafted too.
    """
    default = DraftConfig()
    return DraftConfig(
        max_nodes=default.max_nodes if max_nodes is None else max_nodes,
        max_successors=default.max_successors if successors else 0,
    )


def _print_each(reports: Iterable[dict[str, Any]], count: int, as_json: bool) -> None:
    """Print each report when it is complete, so that an interrupted run keeps the finished ones.

    Args:
        reports: The reports, made one by one.
        count: Their number; several are one list of JSON.
        as_json: Whether JSON is printed, not tables.
    """
    from reader_rag.bench.generate.tables import show_report

    opening, closing = ("[", "]") if count > 1 else ("", "")
    for number, report in enumerate(reports, 1):
        if not as_json:
            show_report(report)
            continue
        before, after = opening if number == 1 else "", closing if number == count else ","
        typer.echo(before.encode() + json_bytes(report, indent=1) + after.encode())


@with_option_groups
def speed_bench(
    data: Annotated[Path, typer.Option("--data", help="Folder of SPEED-Bench, as NVIDIA's prepare_data.py writes it.")],
    splits: Annotated[
        str, typer.Option(help="Comma-separated, out of qualitative, throughput_1k, _2k, _8k, _16k, _32k.")
    ] = "qualitative",
    model: options.Model = DEFAULT_MODEL,
    categories: options.Categories = "",
    limit: options.Limit = None,
    load: Loading = LoadConfig(),
    max_tokens: options.AnswerTokens = SamplingParams.max_tokens,
    params: Annotated[SamplingParams, Only("temperature", "seed", "ignore_eos")] = SamplingParams(seed=0),
    methods: Annotated[str, typer.Option(help="Methods, comma-separated: plain, reader, hf, hf-lookup.")] = (
        "plain,reader,hf,hf-lookup"
    ),
    as_json: options.Json = False,
) -> None:
    """Compare methods on NVIDIA's SPEED-Bench.

    Reports for each category what bench generate reports, one prompt at a time; --json has all of it. Conversations
    are run to the end of their first answer. Prompts that do not fit the model's context window are left out, and
    counted. The files are read, never downloaded.
    """
    from reader_rag.bench.generate.sequential import check_methods
    from reader_rag.bench.generate.speed_bench import SPLITS, compare_categories, read_split
    from reader_rag.bench.generate.tables import show_categories
    from reader_rag.bench.inputs import selected

    chosen, wanted = options.names(methods), options.names(splits)
    check_methods(chosen)
    if "llama-cpp" in chosen:
        raise ConfigError("speed-bench has no llama-cpp: compare with it in bench generate")
    unknown = sorted(set(wanted) - set(SPLITS))
    if unknown or not wanted:
        raise ConfigError(f"--splits {splits}: SPEED-Bench has {', '.join(SPLITS)}")
    prompts = {
        split: selected(read_split(data, split), data / split, options.names(categories), limit) for split in wanted
    }
    engine = _engine(model, load, options.UNSHARED, random_weights=False)
    report: dict[str, Any] = {"splits": {}}
    for split, some in prompts.items():
        reports, left_out = compare_categories(engine, some, chosen, replace(params, max_tokens=max_tokens), progress())
        report["splits"][split] = {"left_out": left_out, "categories": reports}
    print_report(report, as_json, show_categories)


def cache(
    batch: Annotated[str, typer.Option(help="Sequences of a batch; several sizes: 8,32.")] = "1,2,4,8,16,32",
    context: Annotated[int, typer.Option(min=2, help="Positions of the longest context.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the longest answer.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the cache.")] = 8,
    heads: Annotated[int, typer.Option(min=1, help="Heads of a layer.")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Type of keys and values.")
    ] = "float32",
    as_json: options.Json = False,
) -> None:
    """Compare policies of the batch cache.

    Reports time, bytes moved and memory. No model is loaded.
    """
    sizes = options.numbers("--batch", batch, least=1)
    from reader_rag.bench.generate.cache_policies import CacheShape, measure_caching

    shape = CacheShape(context, tokens, layers, heads, width, device, dtype)
    print_report({"shape": asdict(shape), "runs": measure_caching(sizes, shape, progress())}, as_json, _show_caching)


def _engine(model: str, load: LoadConfig, config: EngineConfig, random_weights: bool) -> Engine:
    from reader_rag.engine.engine import Engine

    if model.endswith(".json"):
        if not random_weights:
            raise ConfigError(f"--model {model} is a configuration without weights: use it with --replay only")
        from reader_rag.bench.generate.random_weights import engine_from_config

        return engine_from_config(Path(model), load, vars(config))
    return Engine.load(model, config, **asdict(load))


def _tasks(
    engine: Engine,
    prompts: Path | None,
    traces: Path | None,
    categories: list[str],
    limit: int | None,
    params: SamplingParams,
) -> list[tuple[str, Task]]:
    from reader_rag.bench.generate.methods import Task
    from reader_rag.bench.inputs import encode_prompt, read_prompts, read_traces
    from reader_rag.engine.outputs import Prompt

    if prompts is not None:
        return [(p.id, Task(encode_prompt(engine, p), params)) for p in read_prompts(prompts, categories, limit)]
    assert traces is not None
    return [
        (t.id, Task(Prompt(t.prompt), params, t.output[: params.max_tokens]))
        for t in read_traces(traces, categories, limit)
        if len(t.output) > 1
    ]


def _show_caching(report: dict[str, Any]) -> None:
    columns = {
        "batch": "{batch}",
        "policy": "{policy}",
        "steps": "{steps}",
        "ms/step": "{ms_per_step_p50:.2f}",
        "mean": "{ms_per_step_mean:.2f}",
        "moved MB": "{moved_mb:.0f}",
        "moves/entry": "{moves_per_entry:.2f}",
        "rearranged": "{rearrangements}",
        "peak MB": "{peak_mb:.1f}",
        "of the bound": "{share_of_bound:.3f}",
    }
    runs = [run | {"moved_mb": run["moved_bytes"] / 1e6, "peak_mb": run["peak_bytes"] / 1e6} for run in report["runs"]]
    print_table(None, list(columns), ([text.format(**run) for text in columns.values()] for run in runs))
