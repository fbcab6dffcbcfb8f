"""`reader-rag bench gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reader_rag.bench import options
from reader_rag.bench.output import progress
from reader_rag.config import LoadConfig
from reader_rag.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from reader_rag.bench.generate.methods import Task
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
) -> None:
    """Measure a GPU, and write one Markdown page.

    Times of decode steps by width, context and batch: in the shape they need, in fixed shapes, and as CUDA graphs; with
    --replay also the speed of recorded answers, plain and with drafts, each with graphs and without, and strict; memory
    and recorded graphs. On the CPU it runs too, without graphs, and the page says so.
    """
    shapes = _shapes(
        options.numbers("--widths", widths, least=1),
        options.numbers("--contexts", contexts, least=1),
        options.numbers("--batch", batch, least=1),
    )
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} for --out; make it first")
    from reader_rag.bench.gpu.page import page_of
    from reader_rag.bench.report import machine

    load = LoadConfig(dtype=dtype, device=device)
    engine = _engine(model, load, "fast", graphs=True)
    steps = _steps(engine, shapes, repeats)
    answers: dict[str, Any] = {}
    report = {"machine": machine(engine), "is_gpu": engine.target.device.type == "cuda"}
    if traces is not None:
        tasks = _tasks(traces, options.names(categories), limit)
        answers["Replayed answers, fixed shapes"] = _answers(engine, tasks)
    report |= _state(engine)
    engine.close()
    del engine  # and its memory
    if traces is not None:
        for title, exactness, graphs in _OTHER_ENGINES:
            try:
                other = _engine(model, load, exactness, graphs=graphs)
            except UnsupportedModelError as error:  # strict, where kernels do not keep the bits
                answers[f"Replayed answers, {title}"] = {"refused": str(error)}
                continue
            answers[f"Replayed answers, {title}"] = _answers(other, tasks)
            other.close()
    out.write_text(page_of(report, steps, answers), encoding="utf-8")
    typer.echo(f"written: {out}")


_OTHER_ENGINES = (("dynamic", "fast", False), ("strict, fixed shapes", "strict", True), ("strict", "strict", False))


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


def _answers(engine: Engine, tasks: list[tuple[str, Task]]) -> dict[str, Any]:
    from reader_rag.bench.generate.sequential import compare

    return compare(engine, tasks, ["plain", "reader"], progress())


def _state(engine: Engine) -> dict[str, Any]:
    """Memory and graphs after everything was measured."""
    import torch

    from reader_rag.model.fixed_step.step import FixedStep

    step, device = engine.target.fixed_step, engine.target.device
    weights = {id(tensor): tensor.nbytes for tensor in (*engine.model.parameters(), *engine.model.buffers())}
    memory = {"weights": sum(weights.values())}
    graphs = {}
    if isinstance(step, FixedStep):
        memory["key/value cache of the fixed step"] = step.cache.nbytes
        graphs = {"recorded": step.graphs.recorded, "kept": len(step.graphs), "replays": step.graphs.replays}
        graphs["refused shapes"] = len(step.graphs.refused)
    if device.type == "cuda":
        memory["allocated by PyTorch, peak"] = torch.cuda.max_memory_allocated(device)
        memory["reserved by PyTorch, graphs included"] = torch.cuda.memory_reserved(device)
    return {"memory_bytes": memory, "graphs": graphs}
