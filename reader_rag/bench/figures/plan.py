"""What `bench report` runs: sections, each of some commands with a budget of minutes, and the packages of its peers."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reader_rag.bench.generate.gguf_file import choose_gguf
from reader_rag.errors import ConfigError


@dataclass(frozen=True)
class Peer:
    """A package that is compared with where it is installed.

    Attributes:
        module: Its module, whose presence is checked.
        what: What is left out without it.
        get: How to install it.
    """

    module: str
    what: str
    get: str


PEERS: Mapping[str, Peer] = {
    "xllamacpp": Peer("xllamacpp", "llama.cpp", "pip install 'reader-rag[peers]'"),
    "arctic-inference": Peer(
        "arctic_inference", "SuffixDecoding and vLLM's suffix rule", "pip install 'reader-rag[peers]'"
    ),
    "vllm": Peer("vllm", "the speed inside vLLM", "make install-vllm, in an environment of its own"),
    "matplotlib": Peer("matplotlib", "plots", "pip install 'reader-rag[bench]'"),
}


@dataclass(frozen=True)
class Absent:
    """A peer that is left out.

    Attributes:
        package: Its package.
        what: What is left out.
        reason: Why, and how to have it.
    """

    package: str
    what: str
    reason: str


@dataclass(frozen=True)
class Part:
    """One command of a section.

    Attributes:
        label: What it measures, e.g. "float32"; unique within the section.
        arguments: Arguments of `reader-rag`; files as paths.
        minutes: Its budget: it is ended when it runs longer, and what earlier parts left of theirs is used up.
        has_report: Whether it prints a JSON report.
        timed_runs: Number of runs that take `--seconds`, and so end in time with fewer prompts; 0: none does.
    """

    label: str
    arguments: tuple[str | Path, ...]
    minutes: float
    has_report: bool = True
    timed_runs: int = 0

    @property
    def command(self) -> str:
        """The command line, with files by their names."""
        return shlex.join(["reader-rag", *(one.name if isinstance(one, Path) else one for one in self.arguments)])


@dataclass(frozen=True)
class Section:
    """Figures of one subject, in one table.

    Attributes:
        name: Names the section in `--only`, in files, and in the marks of pages.
        title: Heading.
        about: A sentence on what the table shows.
        parts: The commands.
    """

    name: str
    title: str
    about: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Inputs:
    """What is measured.

    Attributes:
        model: Alias, folder or hub id of the model; a path is shown by its name.
        prompts: Prompts file.
        categories: Its categories.
        traces: Recorded answers; None: recorded by the first section.
        top8: The target's best next tokens of the traces; None: those recorded with the traces.
        work: Folder of files that are made on the way.
        limit: Most prompts of a category in the timed sections.
        max_tokens: Most tokens of an answer in the timed sections.
        minutes: Budget of all sections.
    """

    model: str | Path
    prompts: Path
    categories: tuple[str, ...]
    traces: Path | None
    top8: Path | None
    work: Path
    limit: int = 10
    max_tokens: int = 128
    minutes: float = 60.0


RAG = "rag"
"""The category of questions with retrieved passages."""


def absent_peers(model: str | Path) -> tuple[Absent, ...]:
    """The peers that cannot be compared with here.

    Args:
        model: Name of the model; llama.cpp needs it as a GGUF file.
    """
    absent = [
        Absent(package, peer.what, f"not installed: {peer.get}")
        for package, peer in PEERS.items()
        if importlib.util.find_spec(peer.module) is None
    ]
    if all(one.package != "xllamacpp" for one in absent):
        try:
            choose_gguf(str(model), None)
        except ConfigError as cause:
            reason = str(cause).replace(str(model), Path(model).name)
            absent.append(Absent("xllamacpp", PEERS["xllamacpp"].what, reason))
    return tuple(absent)


def plan(inputs: Inputs, absent: Sequence[Absent]) -> list[Section]:
    """The sections, in the order in which they run; their budgets add up to `inputs.minutes`.

    Args:
        inputs: What is measured.
        absent: Peers to leave out.
    """
    missing = {one.package for one in absent}
    sections = [
        _speed(inputs, "xllamacpp" not in missing),
        *_other_prompts(inputs),
        _batches(inputs),
        _exactness(inputs),
        _memory(inputs),
        *_replay(inputs),
    ]
    if "vllm" not in missing:
        sections.append(_vllm(inputs))
    share = inputs.minutes / sum(part.minutes for section in sections for part in section.parts)
    return [
        replace(section, parts=tuple(_limited(part, part.minutes * share) for part in section.parts))
        for section in sections
    ]


def _limited(part: Part, minutes: float) -> Part:
    """A part with another budget."""
    arguments = part.arguments
    if part.timed_runs:
        seconds = 60 * max(minutes - _STARTING_MINUTES, minutes / 2) / part.timed_runs
        arguments = (*arguments, "--seconds", str(max(round(seconds), 1)))
    return replace(part, arguments=arguments, minutes=minutes)


_TYPES: Mapping[str, tuple[str, ...]] = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8"),
}
"""Options by type of the weights."""
_STARTING_MINUTES = 3.0
"""Of a budget: loading or quantising a model, compiling loops, and the prompt that runs when the time is over."""


def _generate(inputs: Inputs, label: str, minutes: float, *options: str, categories: str, limit: int) -> Part:
    arguments: tuple[str | Path, ...] = (
        *("bench", "generate", "--model", inputs.model, "--prompts", inputs.prompts, "--categories", categories),
        *("--limit", str(limit), "--max-tokens", str(inputs.max_tokens), *options, "--json"),
    )
    return Part(label, arguments, minutes, timed_runs=1)


def _speed(inputs: Inputs, with_llama_cpp: bool) -> Section:
    parts = []
    for label, options in _TYPES.items():
        methods = "plain,reader,hf,hf-lookup" + (",llama-cpp" if with_llama_cpp and label == "int8" else "")
        parts.append(_generate(inputs, label, 9, *options, "--methods", methods, categories=RAG, limit=inputs.limit))
    return Section(
        "speed",
        "Speed, one question at a time",
        "Questions with retrieved passages; every method decodes the same prompts in turn, on the same threads.",
        tuple(parts),
    )


def _other_prompts(inputs: Inputs) -> list[Section]:
    """Each category without retrieved passages."""
    others = [category for category in inputs.categories if category != RAG]
    if not others:
        return []
    limit = max(inputs.limit // 2, 1)
    parts = tuple(
        _generate(inputs, name, 1.5, "--dtype", "bfloat16", "--methods", "plain,reader", categories=name, limit=limit)
        for name in others
    )
    about = "Prompts of other kinds: the less an answer repeats of its prompt, the less drafts gain."
    return [Section("other-prompts", "Other prompts", about, parts)]


def _batches(inputs: Inputs) -> Section:
    sizes = (1, 4, 8)
    options = ("--dtype", "bfloat16", "--methods", "plain,reader", "--batch", ",".join(map(str, sizes)))
    part = _generate(inputs, "bfloat16", 4, *options, categories=RAG, limit=2 * inputs.limit)
    return Section(
        "batches",
        "Several questions at once",
        "The more sequences a pass holds, the less room it has for drafts.",
        (replace(part, timed_runs=len(sizes)),),
    )


def _exactness(inputs: Inputs) -> Section:
    few = str(max(inputs.limit // 3, 1))
    shared: tuple[str | Path, ...] = (
        *("verify", "--model", inputs.model, "--prompts", inputs.prompts, "--limit", few),
        *("--max-tokens", str(inputs.max_tokens // 2)),
    )
    parts = [Part(label, (*shared, *options, "--json"), 2.0) for label, options in _TYPES.items()]
    parts.append(Part("float32, four at once", (*shared, "--dtype", "float32", "--batch", "4", "--json"), 2.0))
    return Section(
        "exactness",
        "Exactness",
        "Drafted and plain decoding of the same prompts, compared token by token and by the bits of the logits.",
        tuple(parts),
    )


def _memory(inputs: Inputs) -> Section:
    parts = tuple(
        # The first start in int8 quantises the model.
        Part(
            label,
            ("bench", "load-memory", "--model", inputs.model, *options, "--json"),
            3.0 if label == "int8" else 1.0,
        )
        for label, options in _TYPES.items()
    )
    return Section(
        "memory",
        "Memory of loading a model",
        "Anonymous memory of a new process in megabytes: when its libraries are loaded, at the peak, and when the "
        "model is ready; at the first start and at later ones, which find what the first has kept.",
        parts,
    )


def _replay(inputs: Inputs) -> list[Section]:
    """What is counted and timed on recorded answers, which are recorded first if there are none."""
    sections = []
    traces, top8 = inputs.traces, inputs.top8
    if traces is None:
        traces = inputs.work / "traces.jsonl"
        top8 = traces.with_suffix(".npz")
        arguments = (
            *("bench", "record", traces, "--model", inputs.model, "--prompts", inputs.prompts),
            *("--limit", str(inputs.limit), "--max-tokens", str(inputs.max_tokens)),
        )
        about = "Greedy answers in float32, on which the sections below count and time."
        sections.append(Section("record", "Recorded answers", about, (Part("float32", arguments, 5.0, False),)))
    options: tuple[str | Path, ...] = (traces, *(() if top8 is None else ("--top8", top8)))
    return [
        *sections,
        Section(
            "tokens-per-step",
            "Tokens per step, beside other drafters",
            "Counted on recorded answers: each drafter proposes, and what the model said is accepted.",
            (Part("all", ("bench", "replay", *options, "--peers", "--ablation", "--json"), 6.0),),
        ),
        Section(
            "drafting",
            "Time of drafting",
            "Microseconds, on recorded answers.",
            (Part("all", ("bench", "drafting", *options, "--categories", RAG, "--json"), 1.0),),
        ),
        Section(
            "recall",
            "Earlier answers as drafts",
            "The first half of each category is in a datastore; tokens per step of the second half.",
            (Part("all", ("bench", "recall", *options, "--json"), 2.0),),
        ),
    ]


def _vllm(inputs: Inputs) -> Section:
    arguments: tuple[str | Path, ...] = (
        *("bench", "vllm", "--model", inputs.model, "--prompts", inputs.prompts, "--categories", RAG),
        *("--limit", str(max(inputs.limit // 2, 1)), "--json"),
    )
    about = "The same engine with other drafters."
    return Section("vllm", "Inside vLLM", about, (Part("bfloat16", arguments, 8.0),))
