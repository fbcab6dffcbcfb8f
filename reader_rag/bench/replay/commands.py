"""The `reader-rag bench` commands that work on recorded answers: record, replay, drafting, calibrate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from reader_rag.bench import options
from reader_rag.bench.option_groups import Loading, Only, OptionGroup, with_option_groups
from reader_rag.bench.output import print_report, progress
from reader_rag.bench.replay.tables import show_drafting, show_recall, show_replay
from reader_rag.config import LoadConfig
from reader_rag.errors import ConfigError
from reader_rag.model.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from reader_rag.bench.inputs import Trace
    from reader_rag.bench.replay.replayer import Best, ReplayConfig, Tally
    from reader_rag.datastore import Datastore
    from reader_rag.draft.profile import Profile

Traces = Annotated[
    Path, typer.Argument(help='Answers, a line each: {"id", "category", "model", "prompt": [ids], "output": [ids]}.')
]
Top8 = Annotated[
    Path | None,
    typer.Option("--top8", help="npz file: by trace id, the target's eight best next tokens at each position."),
]
ProfileName = Annotated[
    str,
    typer.Option("--profile", help="auto: the profile for the vocabulary of the prompts; none; or a profile's file."),
]
Nodes = Annotated[int, typer.Option("--nodes", help="Most nodes of a draft tree.")]


@dataclass(frozen=True)
class AnswerOptions(OptionGroup):
    """Which recorded answers are replayed, and what is known of their model.

    Attributes:
        top8: File of the model's best next tokens, or None: successors are not drafted.
        profile: "auto", "none" or a profile's file.
        categories: Categories of the answers, comma-separated; "": all.
        limit: Most answers of each category; None: all.
    """

    top8: Top8 = None
    profile: ProfileName = "auto"
    categories: options.Categories = ""
    limit: options.Limit = None


class Recorded(NamedTuple):
    """Recorded answers, and what is known of their model.

    Attributes:
        traces: The answers.
        best: The model's best next tokens, by trace id.
        profile: The model's profile, or None.
        notes: What is to be said of them under a report.
    """

    traces: list[Trace]
    best: Best
    profile: Profile | None
    notes: list[str]


@with_option_groups
def replay(
    traces: Traces,
    chosen: AnswerOptions = AnswerOptions(),
    nodes: Nodes = 64,
    sources: Annotated[str, typer.Option(help="Comma-separated, out of context, successor.")] = "context,successor",
    calibration: Annotated[
        bool, typer.Option(help="Correct estimated probabilities by what was accepted before.")
    ] = True,
    warm: Annotated[bool, typer.Option(help="Keep what is learned from one answer for the next.")] = False,
    eager: Annotated[
        bool,
        typer.Option(
            "--eager-successors",
            help="Know the successors of all prompt positions at once, not only those that drafts ask for.",
        ),
    ] = False,
    explain: Annotated[
        str | None, typer.Option(help="Show this answer step by step, and report nothing else.", metavar="ID")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer --explain shows text with.", show_default="token ids")
    ] = None,
    peers: Annotated[bool, typer.Option(help="Compare with other drafters, our own chains and two oracles.")] = False,
    ablation: Annotated[bool, typer.Option(help="Repeat it with each part switched off.")] = False,
    drafters: Annotated[
        list[str] | None,
        typer.Option(
            "--simulated-drafter",
            help="Compare with a drafter that is right at this share of positions, at this cost in steps a proposal, "
            "such as 0.8,0.1: tokens in the time of a step by search alone, by the drafter alone, and by both. May be "
            "repeated.",
            metavar="QUALITY,COST",
        ),
    ] = None,
    datastore: options.DatastoreToDraftFrom = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for reliability.png and ablation.png.")] = None,
    as_json: options.Json = False,
) -> None:
    """Count tokens per step on recorded answers.

    Drafts and accepts as an engine does, with the recorded tokens as the model's. No model is loaded.
    """
    from reader_rag.bench.replay.replayer import ReplayConfig
    from reader_rag.bench.replay.replayer import replay as run
    from reader_rag.bench.replay.simulated import Drafter, compare

    simulated = [Drafter.parse(text) for text in drafters or ()]
    config = ReplayConfig(
        nodes=nodes,
        sources=tuple(s for s in sources.split(",") if s),
        warm=warm,
        calibrates=calibration,
        eager=eager,
    )
    recorded = _read(traces, chosen, config)
    if explain is not None:
        _explain(recorded, explain, config, tokenizer)
        return
    with _opened(datastore) as store:
        tallies = run(recorded.traces, config, recorded.best, recorded.profile, datastore=store)
    report: dict[str, Any] = {
        "nodes": nodes,
        "sources": list(config.sources),
        "warm": warm,
        "eager_successors": eager,
        "datastore": None if datastore is None else str(datastore),
        "profile": recorded.profile.name if recorded.profile is not None else None,
        "categories": {category: tally.summary() for category, tally in tallies.items()},
        "reliability": reliability(tallies.values()),
        "notes": recorded.notes,
    }
    if peers:
        report["peers"], missing = _peers(recorded)
        report["notes"] += missing
    if ablation:
        report["ablation"] = _ablation(recorded, config)
    if simulated:
        report["simulated_drafters"] = compare(recorded.traces, config, simulated, recorded.best, recorded.profile)
    if plots is not None:
        _plot(report, plots)
    print_report(report, as_json, show_replay)


def _peers(recorded: Recorded) -> tuple[dict[str, Any], list[str]]:
    """Tokens per step of other drafters by name and category, and notes about those that are not installed."""
    from reader_rag.bench.replay.peers import replay_peers

    rows, missing = replay_peers(recorded.traces, progress(), recorded.profile)
    return {name: {category: {"mat": mat} for category, mat in row.items()} for name, row in rows.items()}, missing


def _plot(report: Mapping[str, Any], folder: Path) -> None:
    """Write the plots of a report of `replay` into a folder."""
    from reader_rag.bench.plots import plot_bars, plot_reliability

    plot_reliability(report["reliability"]["bins"], folder / "reliability.png")
    if "ablation" in report:
        plot_bars(report["ablation"], "tokens per step", folder / "ablation.png")


@with_option_groups
def recall(
    traces: Traces,
    chosen: AnswerOptions = AnswerOptions(),
    known: Annotated[
        Path | None,
        typer.Option(
            "--known", help="Traces of the answers in the datastore.", show_default="the first half of each category"
        ),
    ] = None,
    nodes: Nodes = 64,
    as_json: options.Json = False,
) -> None:
    """Measure the gain from earlier answers.

    Replays recorded answers with earlier answers of the same model in a datastore, and without.
    """
    from reader_rag.bench.inputs import read_traces
    from reader_rag.bench.replay.recall import halves, measure_recall
    from reader_rag.bench.replay.replayer import ReplayConfig

    config = ReplayConfig(nodes=nodes)
    recorded = _read(traces, chosen, config)
    if known is None:
        before, asked = halves(recorded.traces)
    else:
        before, asked = read_traces(known, [], None), recorded.traces
    report = measure_recall(before, asked, config, recorded.best, recorded.profile)
    print_report(report | {"notes": recorded.notes}, as_json, show_recall)


@with_option_groups
def drafting(
    traces: Traces,
    chosen: AnswerOptions = AnswerOptions(categories="rag"),
    as_json: options.Json = False,
) -> None:
    """Time drafting alone, on recorded answers.

    Reports a draft, following a token, indexing a long context, and the first use in a process.
    """
    from reader_rag.bench.replay.drafting import measure_drafting
    from reader_rag.bench.replay.replayer import ReplayConfig

    recorded = _read(traces, chosen, ReplayConfig())
    print_report(measure_drafting(recorded.traces, recorded.best, recorded.profile), as_json, show_drafting)


@with_option_groups
def record(
    out: Annotated[
        Path, typer.Argument(help="Trace file to write; the best next tokens go into an .npz file beside it.")
    ],
    prompts: options.Prompts = None,
    model: options.Model = DEFAULT_MODEL,
    categories: options.Categories = "",
    limit: Annotated[int, typer.Option(min=1, help="Most prompts of each category.")] = 20,
    other_words: Annotated[
        bool, typer.Option("--reworded/--no-reworded", help="Put the prompts into other words.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Decides which texts of this machine the prompts are made from.")] = 0,
    load: Loading = LoadConfig(dtype="float32"),
    max_tokens: options.AnswerTokens = 200,
) -> None:
    """Record answers for bench replay.

    Answers are greedy; the model's best next tokens are recorded too.
    """
    from rich.console import Console

    from reader_rag.bench.local_prompts import prompts_or_local, reworded
    from reader_rag.bench.replay.record import record as run
    from reader_rag.engine.engine import Engine

    chosen = prompts_or_local(prompts, options.names(categories), limit, limit, seed)
    if other_words:
        chosen = reworded(chosen)
    engine = Engine.load(model, options.UNSHARED, **vars(load))
    best = out.with_suffix(".npz")
    count = run(engine, chosen, max_tokens, out, best, Console(stderr=True))
    typer.echo(f"{count} answers in {out}, best next tokens in {best}")


@with_option_groups
def calibrate(
    traces: Traces,
    out: Annotated[Path, typer.Argument(help="npz file to write; the package has its own as draft/priors.npz.")],
    chosen: Annotated[AnswerOptions, Only("top8", "profile")] = AnswerOptions(),
    base: Annotated[
        Path | None,
        typer.Option("--base", help="Count only drafts from a datastore; take all other counts from this file."),
    ] = None,
) -> None:
    """Count acceptance on recorded answers.

    Counts drafted tokens that are accepted by their estimated probability, source and evidence.
    """
    from reader_rag.bench.replay.calibrate import calibrate as count
    from reader_rag.bench.replay.calibrate import calibrate_datastore, save
    from reader_rag.bench.replay.replayer import ReplayConfig

    known = _read(traces, chosen, ReplayConfig())[:3]
    counts = count(*known) if base is None else calibrate_datastore(*known, base)
    save(counts, out)
    typer.echo(f"{int(counts[0].sum())} tokens accepted where {counts[1].sum():.0f} were expected, in {out}")


def reliability(tallies: Any) -> dict[str, Any]:
    """How true the estimates were, over all categories.

    Args:
        tallies: `Tally` of each category.

    Returns:
        `{"bins": [{"predicted", "observed", "nodes"}], "mean_gap"}`; the gap over bins of 200 nodes or more.
    """
    counted: list[Tally] = list(tallies)
    predicted, right, judged = (sum(getattr(t, name) for t in counted) for name in ("predicted", "right", "judged"))
    bins = [
        {"predicted": round(p / n, 4), "observed": round(r / n, 4), "nodes": int(n)}
        for p, r, n in zip(predicted, right, judged, strict=True)
        if n
    ]
    gaps = [abs(row["predicted"] - row["observed"]) for row in bins if row["nodes"] >= 200]
    return {"bins": bins, "mean_gap": round(sum(gaps) / len(gaps), 4) if gaps else None}


@contextmanager
def _opened(folder: Path | None) -> Iterator[Datastore | None]:
    if folder is None:
        yield None
        return
    from reader_rag.datastore import Datastore

    with Datastore.inspect(folder) as store:
        yield store


def _read(traces: Path, chosen: AnswerOptions, config: ReplayConfig) -> Recorded:
    """Read answers, their model's best next tokens, and its profile."""
    from reader_rag.bench.inputs import read_traces
    from reader_rag.bench.replay.replayer import check_best, read_best

    recorded = read_traces(traces, options.names(chosen.categories), chosen.limit)
    if "successor" not in config.sources:
        return Recorded(recorded, {}, None, [])
    best = read_best(chosen.top8) if chosen.top8 is not None else {}
    notes = []
    missing = check_best(recorded, best)
    known = _profile(chosen.profile, recorded)
    if missing:
        kinds = sorted({trace.category for trace in recorded if trace.id in set(missing)})
        notes.append(f"no best next tokens for {len(missing)} answers ({', '.join(kinds)}): successors are off there")
    return Recorded(recorded, best, known, notes)


def _profile(name: str, traces: Sequence[Trace]) -> Profile | None:
    from reader_rag.draft.profile import Profile, profiles
    from reader_rag.model.weights_cache import cache_folder

    if name == "none":
        return None
    if name != "auto":
        loaded = Profile.load(Path(name))
        if max(max(trace.prompt) for trace in traces) >= len(loaded.tokens):
            raise ConfigError(f"--profile {name} is of another vocabulary than {traces[0].id}")
        return loaded
    prompts = [trace.prompt for trace in traces]
    return next((one for one in profiles(cache_folder() / "profiles") if one.fits(prompts)), None)


def _ablation(recorded: Recorded, config: ReplayConfig) -> dict[str, dict[str, float]]:
    """Tokens per step by category, with all parts and with each part switched off."""
    from reader_rag.bench.replay.replayer import replay as run

    profile = recorded.profile
    rows = {"all": (config, profile)}
    for source in config.sources if len(config.sources) > 1 else ():
        less = tuple(other for other in config.sources if other != source)
        rows[f"without {source}"] = (changed(config, sources=less), profile)
    if profile is not None:
        rows["without profile"] = (config, None)
    rows["without calibration"] = (changed(config, calibrates=False), profile)
    if len(config.sources) > 1:
        rows["without merging"] = (changed(config, merges=False), profile)
    return {
        name: {
            category: round(tally.mat, 4)
            for category, tally in run(recorded.traces, setting, recorded.best, known).items()
        }
        for name, (setting, known) in rows.items()
    }


def _explain(recorded: Recorded, wanted: str, config: ReplayConfig, tokenizer: str | None) -> None:
    """Print the steps of one answer.

    Args:
        recorded: The answers.
        wanted: Id of the one.
        config: How it is replayed.
        tokenizer: Model whose tokenizer shows tokens as text; None: they are shown as ids.
    """
    from reader_rag.bench.replay.explain import explain
    from reader_rag.bench.replay.replayer import Replayer, Tally

    traces = recorded.traces
    trace = next((trace for trace in traces if trace.id == wanted), None)
    if trace is None:
        raise ConfigError(f"--explain {wanted}: there is no such id; there are {traces[0].id}, {traces[-1].id}, ...")
    tally = Tally()
    steps = Replayer(config, recorded.best, recorded.profile).run(trace, tally)
    for line in explain(trace, steps, _shower(tokenizer)):
        typer.echo(line)
    typer.echo(f"{tally.tokens} tokens in {tally.steps} steps: {tally.mat:.3f} tokens per step")


def _shower(tokenizer: str | None) -> Callable[[Sequence[int]], str]:
    if tokenizer is None:
        return lambda tokens: " ".join(map(str, tokens))
    from transformers import AutoTokenizer

    from reader_rag.model.registry import resolve_model

    loaded: Any = AutoTokenizer.from_pretrained(resolve_model(tokenizer))
    return lambda tokens: str(loaded.decode(list(tokens)))
