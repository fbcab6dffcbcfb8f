"""`reader-rag verify`: a check of exactness on a model and prompts of the user."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from reader_rag.bench import options
from reader_rag.bench.option_groups import Only, PromptOptions, with_option_groups
from reader_rag.bench.output import print_report, progress, weights_type
from reader_rag.config import DraftConfig, EngineConfig, LoadConfig, SamplingParams
from reader_rag.errors import ConfigError, ReaderWarning
from reader_rag.model.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from reader_rag.bench.inputs import BenchPrompt
    from reader_rag.bench.verify.against import ComparedPrompt
    from reader_rag.bench.verify.verification import Verification
    from reader_rag.engine.engine import Engine
    from reader_rag.engine.outputs import Prompt

Reference = Literal["float32", "bfloat16", "float16"]
_LOCAL_PROMPTS = 4
"""Prompts of each category where no file is given."""
_SHOWN = 20
"""Most differences that are printed."""


@with_option_groups
def verify(
    model: options.Model = DEFAULT_MODEL,
    prompts: PromptOptions = PromptOptions(),
    load: LoadConfig = LoadConfig(),
    config: Annotated[
        EngineConfig, Only("draft_model", "draft_quantization", "exactness", "forward")
    ] = options.UNSHARED,
    params: Annotated[
        SamplingParams, Only("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    ] = SamplingParams(max_tokens=128),
    seeds: Annotated[str, typer.Option(help="Seeds, comma-separated: each prompt is sampled with each.")] = "0",
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded at once.")] = 1,
    against: Annotated[
        Reference | None,
        typer.Option(
            help="Compare the model with itself unquantised in this type, e.g. float32, in place of the check: "
            "agreement and divergence (KL) on its greedy answers.",
            show_default="check drafts",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="With --against: traces, whose answers are compared.", show_default="the model's answers"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check that drafts change no token.

    Decodes prompts with drafts and without, and reports every difference. Exit status: 1 if a token or a bit of its
    logits differs where none may: in compiled loops (CPU; every type, quantised too) and with --exactness strict; 1 if
    a token differs in float32 elsewhere; and 1 for an error, which is one line on standard error without a report.

    With --against, nothing is checked: it reports how far quantisation or rounding changes the model's predictions.
    """
    numbers = _seeds(seeds)
    _check_against(against, params, batch, prompts.prompts, replay)
    from reader_rag.bench.verify.verification import verify as run
    from reader_rag.engine.engine import Engine

    recorded = _recorded(replay, prompts) if replay else []
    chosen = [] if replay else prompts.read(_LOCAL_PROMPTS)
    # A draft model is tested also where it does not pay.
    engine = Engine.load(model, replace(config, draft=DraftConfig(gated=False)), **vars(load))
    if against is not None:
        from reader_rag.bench.verify.against import compare, show

        plain = replace(load, dtype=against, quantization="none")
        reference = Engine.load(model, replace(config, draft_model=None, draft_quantization="none"), **vars(plain))
        comparison = compare(engine, reference, recorded or _asked(engine, chosen), params.max_tokens, progress())
        print_report(comparison.to_dict(), as_json, lambda _: show(comparison))
        return
    encoded = [(p.id, prompt) for p, prompt in _encoded(engine, chosen)]
    outcome = run(engine, encoded, params, numbers, batch, progress())
    print_report(outcome.to_dict(), as_json, lambda _: typer.echo("\n".join(lines(outcome))))
    if not outcome.passed:
        raise typer.Exit(1)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        seeds = []
    if not seeds or not all(0 <= seed < 2**64 for seed in seeds):
        raise ConfigError(f"--seeds takes whole numbers of at least 0, separated by commas, not {text!r}")
    return seeds


def _check_against(
    against: Reference | None, params: SamplingParams, batch: int, prompts: Path | None, replay: Path | None
) -> None:
    """Refuse options that the comparison with another type does not have."""
    if against is None:
        if replay is not None:
            raise ConfigError("--replay goes with --against: without it, the model's own answers are checked")
        return
    if params != SamplingParams(max_tokens=params.max_tokens) or batch > 1:
        raise ConfigError("--against compares greedy answers, one at a time: leave out sampling options and --batch")
    if prompts is not None and replay is not None:
        raise ConfigError("give either --prompts FILE or --replay TRACES")


def _recorded(traces: Path, chosen: PromptOptions) -> list[ComparedPrompt]:
    """The prompts of a trace file with their recorded answers."""
    from reader_rag.bench.inputs import read_traces
    from reader_rag.bench.verify.against import ComparedPrompt
    from reader_rag.engine.outputs import Prompt

    found = read_traces(traces, options.names(chosen.categories), chosen.limit)
    return [ComparedPrompt(t.id, t.category, Prompt(t.prompt), t.output) for t in found]


def _asked(engine: Engine, prompts: list[BenchPrompt]) -> list[ComparedPrompt]:
    """Prompts whose answers the model is yet to give."""
    from reader_rag.bench.verify.against import ComparedPrompt

    return [ComparedPrompt(p.id, p.category, prompt) for p, prompt in _encoded(engine, prompts)]


def _encoded(engine: Engine, prompts: list[BenchPrompt]) -> list[tuple[BenchPrompt, Prompt]]:
    """The prompts and their tokens; those longer than the model's context window are left out, with a warning."""
    from reader_rag.bench.inputs import encode_prompt

    encoded = []
    for p in prompts:
        prompt = encode_prompt(engine, p)
        if len(prompt.token_ids) >= engine.context_window:
            warnings.warn(f"{p.id}: left out, longer than the model's context window", ReaderWarning, stacklevel=2)
            continue
        encoded.append((p, prompt))
    if not encoded:
        raise ConfigError("every prompt is longer than the model's context window; give shorter ones")
    return encoded


def lines(outcome: Verification) -> list[str]:
    """The report for people: what was compared, what differed, and whether that is a failure."""
    machine = outcome.machine
    held = weights_type(machine)
    at_once = f", {outcome.batch} at once" if outcome.batch > 1 else ""
    if at_once and outcome.rows_per_step is not None:
        at_once += f" ({outcome.rows_per_step:.1f} sequences a step)"
    found = [
        f"{machine['model']}, {held}, {machine['exactness']}, {machine['device']}{at_once}",
        f"{outcome.tokens} tokens of {outcome.answers} answers compared: {outcome.differing_tokens} differ; "
        f"{outcome.differing_bits} have logits of other bits",
        f"{outcome.accepted} of {outcome.drafted} drafted tokens were accepted"
        + ("" if outcome.drafted else ": nothing was drafted, so nothing was tested"),
    ]
    if outcome.draft_model is not None:
        name, asked, drafted, right = outcome.draft_model.values()
        found.append(f"{name} made {asked} drafts: {right} of {drafted} tokens of its chains are the model's own")
    for one in outcome.differences[:_SHOWN]:
        seed = "" if one.seed is None else f", seed {one.seed}"
        found.append(
            f"  {one.prompt}{seed}, token {one.position}: plain {one.plain!r}, drafted {one.reader!r}, "
            f"margin {'unknown' if one.margin is None else format(one.margin, '.4g')}"
        )
    if len(outcome.differences) > _SHOWN:
        found.append(f"  and {len(outcome.differences) - _SHOWN} more (--json lists all)")
    if outcome.drafted and outcome.plain_tokens:
        plain, reader = outcome.plain_tokens / outcome.plain_s, outcome.reader_tokens / outcome.reader_s
        found.append(f"plain {plain:.1f} tokens/s, drafted {reader:.1f}: {reader / plain:.2f} times")
    if outcome.passed and outcome.must_agree:
        found.append("passed: the same " + ("tokens and the same bits" if outcome.bits_must_agree else "tokens"))
    elif outcome.passed:
        found.append(f"--exactness fast allows that rounding in {held} changes tokens; strict does not")
    else:
        found.append("FAILED: this must not happen; please report it with the command and this output")
    return found
