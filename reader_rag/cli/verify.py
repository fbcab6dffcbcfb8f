"""`reader-rag verify`: whether drafts change anything, on one's own model and prompts."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from reader_rag.bench.output import progress
from reader_rag.errors import ConfigError, ReaderWarning
from reader_rag.model.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from reader_rag.bench.inputs import BenchPrompt
    from reader_rag.bench.verify.verification import Verification
    from reader_rag.engine.engine import Engine
    from reader_rag.engine.outputs import Prompt

_OWN = 4
"""Prompts of each kind where no file is given."""
_SHOWN = 20


def verify(
    model: Annotated[str, typer.Option(help="Alias, local folder or hub id.")] = DEFAULT_MODEL,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Prompts, a line each: {"id", "category", "turns": [text, ...]}.',
            show_default="questions about Python's documentation and installed packages",
        ),
    ] = None,
    categories: Annotated[str, typer.Option(help="Comma-separated; empty: all.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of each category.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    exactness: Annotated[
        Literal["fast", "strict"], typer.Option(help="fast, or strict: every bit must be the same.")
    ] = "fast",
    forward: Annotated[
        Literal["auto", "torch"],
        typer.Option(help="auto, or torch: call the model's own forward where compiled loops know it."),
    ] = "auto",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among so many; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Nucleus of the sampling.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least probability, as a part of the highest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1: none.")] = 1.0,
    seeds: Annotated[str, typer.Option(help="Comma-separated; each prompt is sampled with each.")] = "0",
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode prompts with drafts and without, and report every difference.

    Exit status: 1 if tokens differ where they must not (float32, or --exactness strict, where every bit of the logits
    must be the same too), and for an error, which is one line on standard error and no report.
    """
    from reader_rag.bench.local_prompts import prompts_or_local
    from reader_rag.bench.verify.verification import verify as run
    from reader_rag.config import SamplingParams
    from reader_rag.engine.engine import Engine

    generation = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    numbers, held = _seeds(seeds), prompts_or_local(prompts, [c for c in categories.split(",") if c], limit, _OWN)
    engine = Engine.load(
        model,
        dtype=dtype,
        device=device,
        exactness=exactness,
        forward=forward,
        prefix_bytes=0,
        trust_remote_code=trust_remote_code,
    )
    outcome = run(engine, _encoded(engine, held), generation, numbers, progress())
    if as_json:
        typer.echo(json.dumps(outcome.to_dict(), indent=1))
    else:
        for line in lines(outcome):
            typer.echo(line)
    if not outcome.passed:
        raise typer.Exit(1)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        seeds = []
    if not seeds or not all(0 <= seed < 2**64 for seed in seeds):
        raise ConfigError(f"--seeds takes numbers from 0 up, comma-separated, not {text!r}")
    return seeds


def _encoded(engine: Engine, held: list[BenchPrompt]) -> list[tuple[str, Prompt]]:
    """The prompts in tokens; those that the model has no room for are left out, with a note."""
    has_template = bool(getattr(engine.tokenizer, "chat_template", None))
    encoded = []
    for p in held:
        chat = [{"role": "user", "content": p.text}]
        prompt = engine.encode_chat(chat) if has_template else engine.encode(p.text)
        if len(prompt.token_ids) >= engine.context_window:
            warnings.warn(f"{p.id}: longer than the model's context window, left out", ReaderWarning, stacklevel=2)
            continue
        encoded.append((p.id, prompt))
    if not encoded:
        raise ConfigError("every prompt is longer than the model's context window; give shorter ones")
    return encoded


def lines(outcome: Verification) -> list[str]:
    """A report of what was compared, what differed, and whether that is as promised."""
    machine = outcome.machine
    found = [
        f"{machine['model']}, {machine['dtype']}, {machine['exactness']}, {machine['device']}",
        f"{outcome.tokens} tokens of {outcome.answers} answers compared: {len(outcome.differences)} differ; "
        f"{outcome.other_bits} positions whose logits differ in some bit",
        f"{outcome.accepted} of {outcome.drafted} drafted tokens were accepted"
        + ("" if outcome.drafted else ": nothing was drafted, so nothing was put to the test"),
    ]
    for held in outcome.differences[:_SHOWN]:
        seed = "" if held.seed is None else f", seed {held.seed}"
        found.append(
            f"  {held.prompt}{seed}, token {held.position}: plain {held.plain!r}, drafted {held.reader!r}, "
            f"margin {'unknown' if held.margin is None else format(held.margin, '.4g')}"
        )
    if len(outcome.differences) > _SHOWN:
        found.append(f"  and {len(outcome.differences) - _SHOWN} more (--json lists all)")
    if outcome.drafted and outcome.plain_tokens:
        plain, reader = outcome.plain_tokens / outcome.plain_s, outcome.reader_tokens / outcome.reader_s
        found.append(f"plain {plain:.1f} tokens/s, drafted {reader:.1f}: {reader / plain:.2f} times")
    if outcome.passed and outcome.must_agree:
        found.append("passed: the same " + ("tokens and the same bits" if outcome.strict else "tokens"))
    elif outcome.passed:
        found.append(f"{machine['dtype']} rounds, and --exactness fast allows for that; strict does not")
    else:
        found.append("FAILED: this must not happen; please report it with the command and this output")
    return found
