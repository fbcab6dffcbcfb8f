"""Replays recorded answers against the drafter and counts tokens per step. No model is loaded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reader_rag.bench.inputs import Trace
from reader_rag.config import DatastoreConfig
from reader_rag.datastore import Datastore
from reader_rag.draft import SOURCES, Calibration, ContextIndex, DraftTree, Occurrence, SuccessorTable, TreeBuilder
from reader_rag.draft.builtin_sources import BuiltinSource
from reader_rag.draft.profile import Profile
from reader_rag.draft.prompt_successors import PromptSuccessors
from reader_rag.draft.source import Budget, RequestState, Verified
from reader_rag.draft.tree import DATASTORE, EXTERNAL, SUCCESSOR
from reader_rag.engine.datastore_lookup import RequestLookup
from reader_rag.errors import ConfigError

KNOWN_SOURCES = ("context", "successor")
_RECALL = DatastoreConfig()
_UNBOUNDED = Budget(1024, 1024)
"""Replays are bounded by the builder alone."""
BINS = 20
"""Bins of the reliability diagram."""

Best = Mapping[str, NDArray[np.int32]]
"""By trace id, int32 [prompt + output, 8], the target's best next tokens after each position."""


@dataclass(frozen=True)
class ReplayConfig:
    """Settings of a replay.

    Attributes:
        nodes: Most nodes of a tree.
        sources: Out of `KNOWN_SOURCES`.
        warm: Keep what was learned from one answer to the next.
        calibrates: Whether estimates are corrected: by the shipped counts, and by what is counted while running.
        merges: False drafts a tree of its own from each source, with an equal part of the nodes.
        min_probability: Least path probability of a node.
        eager: Successors of all prompt positions are known before the first draft; False: those that a draft asks for
            are known from the next step on, as in an engine.
    """

    nodes: int = 64
    sources: tuple[str, ...] = KNOWN_SOURCES
    warm: bool = False
    calibrates: bool = True
    merges: bool = True
    min_probability: float = 0.0001
    eager: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(dict.fromkeys(self.sources)))
        unknown = sorted(set(self.sources) - set(KNOWN_SOURCES))
        if unknown or not self.sources:
            raise ConfigError(f"--sources takes {', '.join(KNOWN_SOURCES)}, not {', '.join(unknown) or 'nothing'}")
        if not 1 <= self.nodes <= 1024:
            raise ConfigError(f"--nodes must be 1..1024, not {self.nodes}")


@dataclass
class Tally:
    """Counts over the answers of a category.

    Attributes:
        prompts: Answers.
        tokens: Emitted tokens.
        steps: Steps that emitted them.
        drafted: Drafted nodes.
        accepted: Accepted nodes by source.
        microseconds: Of each draft.
        predicted: float64 [BINS], sum of the estimated probabilities of nodes whose parent was accepted, by estimate.
        right: float64 [BINS], how many of them were accepted.
        judged: float64 [BINS], how many there were.
    """

    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    microseconds: list[float] = field(default_factory=list)
    predicted: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS))
    right: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS))
    judged: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS))

    @property
    def mat(self) -> float:
        """Mean tokens emitted per step."""
        return self.tokens / self.steps if self.steps else 0.0

    def judge(self, tree: DraftTree, path: Sequence[int], ended: bool = False) -> None:
        """Record, for every child of an accepted node, its estimated probability and whether it was accepted.

        Args:
            tree: What was drafted.
            path: The accepted nodes.
            ended: The answer ended with the last of them, so that nothing is known of its children.
        """
        if not len(tree):
            return
        on_path = np.zeros(len(tree) + 1, np.bool_)
        on_path[0] = True
        on_path[np.array(path, np.int64) + 1] = True
        last = path[-1] if path else -1
        judged = on_path[tree.parents + 1] & ~(ended & (tree.parents == last))
        above = np.concatenate([np.ones(1), tree.probabilities])[tree.parents + 1]
        estimate = (tree.probabilities / above)[judged]
        at = np.minimum((estimate * BINS).astype(np.int64), BINS - 1)
        np.add.at(self.predicted, at, estimate)
        np.add.at(self.right, at, on_path[1:][judged])
        np.add.at(self.judged, at, 1.0)

    def percentile(self, percent: float) -> float:
        """A percentile of the microseconds of a draft; 0.0 if there was none."""
        return round(float(np.percentile(self.microseconds, percent)), 1) if self.microseconds else 0.0

    def summary(self) -> dict[str, float]:
        """The row of a report."""
        return {
            "prompts": self.prompts,
            "mat": round(self.mat, 4),
            "drafted_per_step": round(self.drafted / self.steps, 2) if self.steps else 0.0,
            "us_per_draft_p50": self.percentile(50),
            "us_per_draft_p99": self.percentile(99),
            **{f"accepted_from_{source}": count for source, count in sorted(self.accepted.items())},
        }


@dataclass(frozen=True)
class Step:
    """One step of a replay.

    Attributes:
        position: Index in the output of the first token that the step emits.
        tree: What was drafted.
        path: The accepted nodes.
        emitted: The tokens.
        places: Where the accepted nodes were copied from; None: from nowhere, the target's own.
    """

    position: int
    tree: DraftTree
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    places: tuple[Occurrence | None, ...]


class Replayer:
    """Replays traces one after the other.

    Args:
        config: What is replayed.
        best: The target's best next tokens; a trace without them is drafted without successors.
        profile: The model's profile; None: there is none.
        calibration: Starts as this instead of the shipped counts.
        datastore: Searched too, as requests of no named tenant search it; None: there is none.

    Attributes:
        make_source: Makes what drafts, with the arguments of `BuiltinSource`.
    """

    def __init__(
        self,
        config: ReplayConfig,
        best: Best | None = None,
        profile: Profile | None = None,
        calibration: Calibration | None = None,
        datastore: Datastore | None = None,
    ) -> None:
        self.config = config
        self.make_source: Callable[..., BuiltinSource] = BuiltinSource
        self._datastore = datastore
        self._best = best or {}
        self._prior = profile.tokens if profile is not None else None
        self._calibration = calibration
        self._forget()

    def _forget(self) -> None:
        known = "successor" in self.config.sources
        self.successors = SuccessorTable(prior=self._prior) if known else SuccessorTable(0)
        if self._calibration is not None:
            self.calibration = self._calibration
        else:
            self.calibration = Calibration() if self.config.calibrates else Calibration.blank(learns=False)

    def run(self, trace: Trace, tally: Tally) -> list[Step]:
        """Replay one answer.

        Args:
            trace: The answer.
            tally: Counted into.

        Returns:
            Its steps.
        """
        if not self.config.warm:
            self._forget()
        sources = self._sources(trace)
        text = np.array([*trace.prompt, *trace.output], np.int32)
        best = self._best.get(trace.id)
        prompt = self._learn_prompt(trace, sources[0].index)
        emitted = 0
        steps = []
        while emitted < len(trace.output):
            length, ahead = len(trace.prompt) + emitted, trace.output[emitted:]
            state = RequestState(text[:length], len(trace.prompt))
            started = time.perf_counter()
            trees = [source.propose(state, _UNBOUNDED) for source in sources]
            tally.microseconds.append((time.perf_counter() - started) * 1e6)
            if best is not None and prompt is not None:
                # Unlike an engine, a replay does not know what follows rejected nodes: it asks for all of them.
                for tree in trees:
                    asked = prompt.ask(tree)
                    prompt.learn(asked, best[asked])
            best_of, path = _best_path(trees, ahead)
            tree, index = trees[best_of], sources[best_of].index
            tokens = tuple(ahead[: len(path) + 1])
            tally.accepted.update(SOURCES[int(tree.sources[node])] for node in path)
            tally.judge(tree, path, ended=len(path) == len(tokens))
            tally.steps += 1
            tally.drafted += sum(len(tree) for tree in trees)
            steps.append(Step(emitted, tree, tuple(path), tokens, _occurrences(index, tree, path)))
            emitted += len(tokens)
            # A last step teaches nothing: no step follows it.
            known = best if emitted < len(trace.output) else None
            rows = None if known is None else known[length - 1 : length + len(path)]
            for source in sources:
                source.observe(Verified(tokens, len(path), rows))
        for source in sources:
            source.forget()
        tally.prompts += 1
        tally.tokens += len(trace.output)
        return steps

    def _learn_prompt(self, trace: Trace, index: ContextIndex) -> PromptSuccessors | None:
        """Learn the successors of the prompt at once, or prepare to learn those that drafts ask for.

        Returns:
            What drafts ask; None: the prompt's successors are known, or the trace has none.
        """
        best = self._best.get(trace.id)
        if best is None:
            return None
        before_root = len(trace.prompt) - 1  # the last token is the first step's root
        if self.config.eager:
            self.successors.learn_text(np.array(trace.prompt, np.int32), 0, best[:before_root])
            return None
        prompt = PromptSuccessors(index, self.successors)
        prompt.add(np.ones(before_root, np.bool_))
        return prompt

    def _sources(self, trace: Trace) -> list[BuiltinSource]:
        """One source of all parts, or one for each part where they are not merged."""
        active = self.config.sources
        if trace.id not in self._best:
            active = tuple(source for source in active if source != "successor")
        if self._datastore is not None:
            active = (*active, "datastore")
        together = [active] if self.config.merges or not active else [(source,) for source in active]
        nodes = max(self.config.nodes // max(len(together), 1), 1)
        return [self._source(trace, parts, nodes) for parts in together]

    def _source(self, trace: Trace, parts: Sequence[str], nodes: int) -> BuiltinSource:
        """A source of some of "context", "successor" and "datastore"."""
        copies = "context" in parts
        successors = self.successors if "successor" in parts else None
        builder = TreeBuilder(
            max_nodes=nodes,
            min_probability=self.config.min_probability,
            max_occurrences=256 if copies else 1,
            max_candidates=2 * _RECALL.max_places,
            successors=successors,
            calibration=self.calibration,
        )
        index = ContextIndex(trace.prompt, reserve=len(trace.output), max_occurrences=256 if copies else 0)
        for passage in trace.passages if copies else ():
            if passage.stop is not None:
                index.mark_passage(passage.id, passage.start, passage.stop)
            else:
                index.add_passage(passage.id, passage.tokens)
        searched = self._datastore if "datastore" in parts else None
        lookup = None if searched is None else RequestLookup(searched, "", _RECALL)
        if lookup is not None:
            lookup.extend(index.sequence.tolist())
        return self.make_source(builder, index, successors, lookup)


def _occurrences(index: ContextIndex, tree: DraftTree, path: Sequence[int]) -> tuple[Occurrence | None, ...]:
    """Where the tokens of a path were copied from in prompt, answer or passages; None: from nowhere there."""
    return tuple(
        index.locate(int(tree.sources[node]), int(tree.positions[node]))
        if tree.sources[node] not in (DATASTORE, SUCCESSOR, EXTERNAL)
        else None
        for node in path
    )


def _best_path(trees: Sequence[DraftTree], ahead: Sequence[int]) -> tuple[int, list[int]]:
    """Which tree has the longest accepted path, and the nodes of that path."""
    best: tuple[int, list[int]] = (0, [])
    for number, tree in enumerate(trees):
        path: list[int] = []
        while len(path) < len(ahead):
            node = tree.child(path[-1] if path else -1, ahead[len(path)])
            if node is None:
                break
            path.append(node)
        if len(path) > len(best[1]):
            best = (number, path)
    return best


def replay(
    traces: Iterable[Trace],
    config: ReplayConfig,
    best: Best | None = None,
    profile: Profile | None = None,
    calibration: Calibration | None = None,
    datastore: Datastore | None = None,
) -> dict[str, Tally]:
    """Replay traces.

    Args:
        traces: Recorded answers.
        config: What is replayed.
        best: The target's best next tokens, by trace id; a trace without them is drafted without successors.
        profile: The model's profile; None: there is none.
        calibration: Starts as this instead of the shipped counts.
        datastore: Searched too, as requests of no named tenant search it; None: there is none.

    Returns:
        Counts by category.
    """
    replayer = Replayer(config, best, profile, calibration, datastore)
    tallies: dict[str, Tally] = {}
    for trace in traces:
        replayer.run(trace, tallies.setdefault(trace.category, Tally()))
    return tallies


def read_best(path: Path) -> dict[str, NDArray[np.int32]]:
    """The best next tokens of an npz file, by trace id.

    Raises:
        ConfigError: The file cannot be read or is not of that form.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            best = {name: arrays[name].astype(np.int32) for name in arrays.files}
    except Exception as cause:  # a damaged zip file raises a dozen kinds
        raise ConfigError(f"cannot read {path}: {cause}") from cause
    for name, rows in best.items():
        if rows.ndim != 2 or rows.shape[1] != 8:
            raise ConfigError(f"{path}: {name} is not of shape [positions, 8]")
    return best


def check_best(traces: Iterable[Trace], best: Best) -> list[str]:
    """Check that the best next tokens belong to the traces.

    Returns:
        The ids of traces that have none.

    Raises:
        ConfigError: There are some of another length than the trace.
    """
    missing = []
    for trace in traces:
        if trace.id not in best:
            missing.append(trace.id)
        elif len(best[trace.id]) != len(trace.prompt) + len(trace.output):
            raise ConfigError(
                f"--top8 has {len(best[trace.id])} rows for trace {trace.id}, which has "
                f"{len(trace.prompt) + len(trace.output)} tokens: it was made from other traces"
            )
    return missing
