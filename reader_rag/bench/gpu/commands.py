"""`reader-rag bench gpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from reader_rag.bench import options
from reader_rag.bench.output import progress
from reader_rag.config import LoadConfig, Quantization
from reader_rag.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from reader_rag.bench.generate.methods import Task
    from reader_rag.bench.gpu.generate import GenerateTime
    from reader_rag.bench.gpu.steps import StepTime
    from reader_rag.engine.engine import Engine


def gpu(
    model: Annotated[Path, typer.Option(help="A config.json: the model has its shape, and random weights.")],
    out: Annotated[Path, typer.Option(help="The Markdown file to write.")],
    traces: Annotated[
        Path | None, typer.Option("--replay", help="Traces whose answers are decoded with these weights.")
    ] = None,
    categories: options.Categories = "rag",
    limit: options.Limit = 10,
    dtype: options.Dtype = LoadConfig.dtype,
    device: options.Device = LoadConfig.device,
    widths: Annotated[str, typer.Option(help="Positions of a step.")] = "1,4,8,16,32,64",
    contexts: Annotated[str, typer.Option(help="Positions before a step.")] = "1000,4000",
    batch: Annotated[str, typer.Option(help="Sequences of a step.")] = "1,4,8,16,32",
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each shape.")] = 20,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer of generate of transformers.")] = 64,
) -> None:
    """Measure a GPU, and write one Markdown page.

    Times of decode steps by width, context and batch, in the model's type and in int8: in the shape they need, in fixed
    shapes, and as CUDA graphs; steps of generate of transformers with its growing and its static cache; with --replay
    also the speed of recorded answers, plain and with drafts, alone and in batches, each with graphs and without,
    strict, and int8; memory and recorded graphs. On the CPU it runs too, without graphs, and the page says so.
    """
    sequences = options.numbers("--batch", batch, least=1)
    shapes = _shapes(
        options.numbers("--widths", widths, least=1),
        options.numbers("--contexts", contexts, least=1),
        sequences,
    )
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} for --out; make it first")
    from reader_rag.bench.gpu.page import page_of
    from reader_rag.bench.report import machine

    load = LoadConfig(dtype=dtype, device=device)
    engine = _engine(model, load, "fast", graphs=True)
    is_gpu = engine.target.device.type == "cuda"
    tasks = [] if traces is None else _tasks(traces, options.names(categories), limit)
    steps: dict[str, Any] = {str(engine.model.dtype).removeprefix("torch."): _steps(engine, shapes, repeats)}
    alone = list(dict.fromkeys((rows, context) for rows, width, context in shapes if width == shapes[0][1]))
    generated = _generated(engine, alone, tokens)
    answers: dict[str, Any] = {}
    if tasks:
        answers["Replayed answers, fixed shapes"] = _answers(engine, tasks)
        for count in (count for count in sequences if 1 < count <= len(tasks)):
            answers[f"Replayed answers, {count} at once, fixed shapes"] = _answers(engine, tasks, count)
    report = {"machine": machine(engine), "is_gpu": is_gpu, "command": _command(model, traces)} | _state(engine)
    engine.close()
    del engine  # and its memory
    for other in _OTHER_ENGINES:
        if not tasks and not other.times_steps:
            continue
        found, replayed = _other(model, replace(load, quantization=other.quantization), other, shapes, repeats, tasks)
        if other.times_steps:
            steps[other.quantization] = found
        if tasks:
            answers[f"Replayed answers, {other.title}"] = replayed
    out.write_text(page_of(report, steps, generated, answers), encoding="utf-8")
    typer.echo(f"written: {out}")


class _Other(NamedTuple):
    """Another engine over the same model.

    Attributes:
        title: On the page.
        exactness: Its mode.
        graphs: Whether its steps have fixed shapes.
        quantization: Of its weights.
        times_steps: Whether its single steps are timed too.
    """

    title: str
    exactness: str
    graphs: bool
    quantization: Quantization = "none"
    times_steps: bool = False


_OTHER_ENGINES = (
    _Other("dynamic", "fast", graphs=False),
    _Other("strict, fixed shapes", "strict", graphs=True),
    _Other("strict", "strict", graphs=False),
    _Other("int8, fixed shapes", "fast", graphs=True, quantization="int8", times_steps=True),
    _Other("int8, strict, fixed shapes", "strict", graphs=True, quantization="int8"),
)


def _other(
    model: Path,
    load: LoadConfig,
    other: _Other,
    shapes: list[tuple[int, int, int]],
    repeats: int,
    tasks: list[tuple[str, Task]],
) -> tuple[list[StepTime] | str, dict[str, Any]]:
    """Times of steps, and replayed answers, of another engine over the same model; why there are none instead."""
    try:
        engine = _engine(model, load, other.exactness, graphs=other.graphs)
    except ModelError as error:  # strict where kernels do not keep the bits; int8 of a model that has none
        return str(error), {"refused": str(error)}
    steps = _steps(engine, shapes, repeats) if other.times_steps else []
    answers = _answers(engine, tasks) if tasks else {}
    engine.close()
    return steps, answers


def _command(model: Path, traces: Path | None) -> str:
    """What measures the same on a machine with a GPU."""
    replay = "" if traces is None else f" --replay {traces}"
    return f"reader-rag bench gpu --model {model}{replay} --dtype bfloat16 --device cuda --out gpu.md"


def _shapes(widths: list[int], contexts: list[int], rows: list[int]) -> list[tuple[int, int, int]]:
    """All widths and contexts of one sequence; batches with the narrowest and a middle width behind the first."""
    alone = [(1, width, context) for context in contexts for width in widths]
    middle = widths[len(widths) // 2]
    together = [(count, width, contexts[0]) for count in rows if count > 1 for width in (widths[0], middle)]
    return list(dict.fromkeys([*alone, *together]))


def _engine(path: Path, load: LoadConfig, exactness: str, *, graphs: bool) -> Engine:
    from reader_rag.bench.generate.random_weights import engine_from_config

    settings = {"exactness": exactness, "forward": "torch", "cuda_graphs": "on" if graphs else "off"}
    return engine_from_config(path, load, settings)


def _steps(engine: Engine, shapes: list[tuple[int, int, int]], repeats: int) -> list[StepTime]:
    from reader_rag.bench.gpu.steps import measure_steps
    from reader_rag.model.target import Target

    target = engine.target
    assert isinstance(target, Target)
    steps: list[StepTime] = engine.between_steps(lambda: measure_steps(target, shapes, repeats, progress()))
    return steps


def _generated(engine: Engine, shapes: list[tuple[int, int]], tokens: int) -> list[GenerateTime]:
    """Times of `generate` of `transformers` on the engine's model, for (sequences, context) each."""
    from reader_rag.bench.gpu.generate import measure_generate

    times: list[GenerateTime] = engine.between_steps(lambda: measure_generate(engine.model, shapes, tokens, progress()))
    return times


def _tasks(traces: Path, categories: list[str], limit: int | None) -> list[tuple[str, Task]]:
    from reader_rag.bench.generate.methods import Task
    from reader_rag.bench.inputs import read_traces
    from reader_rag.config import SamplingParams
    from reader_rag.engine.outputs import Prompt

    return [
        (trace.id, Task(Prompt(trace.prompt), SamplingParams(max_tokens=len(trace.output)), trace.output))
        for trace in read_traces(traces, categories, limit)
        if len(trace.output) > 1
    ]


def _answers(engine: Engine, tasks: list[tuple[str, Task]], batch: int = 1) -> dict[str, Any]:
    """Recorded answers, plain and with drafts, `batch` of them at once."""
    from reader_rag.bench.generate.batched import compare_batch
    from reader_rag.bench.generate.sequential import compare

    methods = ["plain", "reader"]
    if batch > 1:
        report = compare_batch(engine, tasks, methods, batch, progress())
    else:
        report = compare(engine, tasks, methods, progress())
    return report | {"drafts": "trees" if engine.context.verifies_branches else "chains"}


def _state(engine: Engine) -> dict[str, Any]:
    """Memory and graphs after everything was measured."""
    import torch

    from reader_rag.model.fixed_step.step import FixedStep

    step, device = engine.target.fixed_step, engine.target.device
    weights = {id(tensor): tensor.nbytes for tensor in (*engine.model.parameters(), *engine.model.buffers())}
    memory = {"weights": sum(weights.values())}
    graphs = {}
    attention = None
    if isinstance(step, FixedStep):
        memory["key/value cache of the fixed step"] = step.cache.nbytes
        graphs = {"recorded": step.graphs.recorded, "kept": len(step.graphs), "replays": step.graphs.replays}
        graphs["refused shapes"] = len(step.graphs.refused)
        attention = None if step.long_contexts is None else step.long_contexts.chosen
    if device.type == "cuda":
        memory["allocated by PyTorch, peak"] = torch.cuda.max_memory_allocated(device)
        memory["reserved by PyTorch, graphs included"] = torch.cuda.memory_reserved(device)
    return {"memory_bytes": memory, "graphs": graphs, "attention": attention}
