"""The plan of `bench report`: sections with their budgets of minutes, and the packages of its peers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reader_rag.bench.figures import sections
from reader_rag.bench.figures.parts import Inputs, Part, Section
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
    "vllm": Peer("vllm", "the speed inside vLLM", "make install-vllm, and --only vllm in its environment"),
    "matplotlib": Peer("matplotlib", "plots", "pip install 'reader-rag[bench]'"),
}


APART = ("vllm",)
"""Sections of packages that need an environment of their own: a run without these packages keeps their results."""


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
    wanted = [
        sections.speed(inputs, "xllamacpp" not in missing),
        *sections.other_prompts(inputs),
        sections.batches(inputs),
        sections.exactness(inputs),
        sections.rounding(inputs),
        sections.memory(inputs),
        *sections.replayed(inputs),
        sections.datastore(inputs),
        sections.cache(inputs),
    ]
    if "vllm" not in missing:
        wanted.append(sections.vllm(inputs))
    share = inputs.minutes / sum(part.minutes for section in wanted for part in section.parts)
    return [
        replace(section, parts=tuple(_limited(part, part.minutes * share) for part in section.parts))
        for section in wanted
    ]


_STARTING_MINUTES = 3.0
"""Of a budget: loading or quantising a model, compiling loops, and the prompt that runs when the time is over."""


def _limited(part: Part, minutes: float) -> Part:
    """A part with another budget."""
    arguments = part.arguments
    if part.timed_runs:
        seconds = 60 * max(minutes - _STARTING_MINUTES, minutes / 2) / part.timed_runs
        arguments = (*arguments, "--seconds", str(max(round(seconds), 1)))
    return replace(part, arguments=arguments, minutes=minutes)
