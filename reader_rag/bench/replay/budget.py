"""Measures what calibration gains when only the nodes that pay for their verification are verified.

    python -m reader_rag.bench.replay.budget traces.jsonl traces.npz

The simulated cost of a step over n drafted tokens is 1 + n * cost plain steps. Prints, by cost and category, tokens per
second with calibration over tokens per second without; then again with half of the answers in a datastore.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reader_rag.bench.inputs import Trace, read_traces
from reader_rag.bench.replay.recall import answers_in_datastore, halves
from reader_rag.bench.replay.replayer import Best, ReplayConfig, Replayer, Tally, read_best
from reader_rag.datastore import Datastore
from reader_rag.draft import DraftTree
from reader_rag.draft.builtin_sources import BuiltinSource
from reader_rag.draft.kernels.pool import rank
from reader_rag.draft.profile import Profile, profiles
from reader_rag.draft.source import Budget, RequestState

COSTS = (0.005, 0.03, 0.1, 0.5)
"""Cost of a drafted token in plain steps: on a GPU, on a CPU in float32, in 16 bits, and in 16 bits without AVX-512."""


class _BudgetedSource(BuiltinSource):
    """Proposes only the nodes that pay for their verification, which the engine would verify.

    Args:
        cost: Cost of a drafted token in plain steps.
        parts: Arguments of `BuiltinSource`.
    """

    def __init__(self, cost: float, *parts: Any) -> None:
        super().__init__(*parts)
        self._cost = cost

    def propose(self, state: RequestState, budget: Budget) -> DraftTree:
        tree = super().propose(state, budget)
        times = 1.0 + self._cost * np.arange(len(tree) + 1)
        ratio, owners = np.array([self.acceptance_ratio]), np.empty(len(tree), np.int32)
        size, _ = rank(tree.probabilities, tree.depths, np.array([len(tree)]), ratio, False, times, 0.0, owners)
        return tree.head(size)


def tokens_per_plain_step(
    traces: Sequence[Trace],
    cost: float,
    best: Best,
    profile: Profile | None,
    *,
    calibrates: bool,
    datastore: Datastore | None = None,
) -> dict[str, float]:
    """Tokens emitted in the time of a plain step, by category.

    Args:
        traces: Recorded answers.
        cost: Cost of a drafted token in plain steps.
        best: The target's most probable next tokens, by trace id.
        profile: The model's profile; None: there is none.
        calibrates: Whether estimated probabilities are calibrated.
        datastore: A datastore that is searched for drafts too; None: there is none.
    """
    replayer = Replayer(ReplayConfig(calibrates=calibrates), best, profile, datastore=datastore)
    replayer.make_source = partial(_BudgetedSource, cost)
    times: defaultdict[str, float] = defaultdict(float)
    tokens: Counter[str] = Counter()
    for trace in traces:
        times[trace.category] += sum(1.0 + cost * len(step.tree) for step in replayer.run(trace, Tally()))
        tokens[trace.category] += len(trace.output)
    return {category: tokens[category] / times[category] for category in tokens}


def main(traces_path: Path, best_path: Path) -> None:
    """Print the table.

    Args:
        traces_path: Recorded answers, as for `bench replay`.
        best_path: Their most probable next tokens, as for `bench replay --top8`.
    """
    traces, best = read_traces(traces_path, [], None), read_best(best_path)
    profile = next((one for one in profiles() if one.fits([trace.prompt for trace in traces])), None)
    known, asked = halves(traces)
    with answers_in_datastore(known, asked) as datastore:
        for name, replayed, searched in (("alone", traces, None), ("with a datastore", asked, datastore)):
            for cost in COSTS:
                given, without = (
                    tokens_per_plain_step(replayed, cost, best, profile, calibrates=on, datastore=searched)
                    for on in (True, False)
                )
                row = ", ".join(f"{category} {given[category] / without[category]:.3f}" for category in given)
                print(f"{name}, {cost} plain steps a drafted token: {row}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
