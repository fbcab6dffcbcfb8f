"""Replays recorded answers with a simulated drafter of given quality and cost beside search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from reader_rag.bench.inputs import Trace
from reader_rag.bench.replay.replayer import Best, ReplayConfig, Replayer, Tally, replay
from reader_rag.draft import ContextIndex, DraftTree, SuccessorTable, TreeBuilder
from reader_rag.draft.builtin_sources import BuiltinSource, Lookup
from reader_rag.draft.checked_source import CheckedSource
from reader_rag.draft.external.sources import ExternalSources
from reader_rag.draft.external.state import ExternalState
from reader_rag.draft.external.together import draft_alone
from reader_rag.draft.profile import Profile
from reader_rag.draft.source import Budget, Proposal, RequestState, Verified
from reader_rag.errors import ConfigError

_DEPTH = 5
"""Tokens on the path of a proposal; each has one alternative."""
_DEEPEST = 40
"""Most tokens on a path of a tree, as `DraftConfig.max_depth`."""


@dataclass(frozen=True)
class Drafter:
    """A simulated drafter.

    Attributes:
        quality: Share of positions at which its best token is the model's, 0 to 1.
        cost: Time of a proposal in steps, from 0 on.
    """

    quality: float
    cost: float

    @classmethod
    def parse(cls, text: str) -> Drafter:
        """A drafter as the option names it, "QUALITY,COST".

        Raises:
            ConfigError: It is not of that form, or out of range.
        """
        try:
            quality, cost = (float(part) for part in text.split(","))
        except ValueError:
            quality = cost = -1.0
        if not (0.0 <= quality <= 1.0 and 0.0 <= cost < float("inf")):
            raise ConfigError(
                f"--simulated-drafter takes QUALITY,COST, a share in 0..1 and steps from 0 on, such as 0.8,0.1; "
                f"not {text!r}"
            )
        return cls(quality, cost)

    def __str__(self) -> str:
        return f"{self.quality:.0%} right, {self.cost:.0%} of a step"


class SimulatedSource:
    """Proposes a chain with an alternative to each token, each right by chance; see `DraftSource`.

    It says how sure it is of its token, a number that is uniform in 0..1. At that sureness its token is right with a
    probability that rises with it and is the quality on average; so what it says is useful, and untrue unless the
    quality is a half. Where its token is wrong, the alternative is right half as often as the token would be, and all
    below the wrong token is wrong. Each further token on the path is right a tenth less often. The same position of the
    same answer always has the same draw.

    Args:
        trace: The answer.
        drafter: Quality and cost.
        vocabulary: Number of token ids; wrong tokens are drawn from them.
    """

    needs_hidden_states = False
    name = "simulated"

    def __init__(self, trace: Trace, drafter: Drafter, vocabulary: int) -> None:
        self.proposal_seconds = drafter.cost
        self._output = trace.output
        self._quality = drafter.quality
        random = np.random.default_rng([int.from_bytes(trace.id.encode()), 24])
        size = (len(trace.output), _DEPTH)
        self._sure, self._luck, self._other_luck = random.random((3, *size))
        self._wrong = random.integers(0, vocabulary, (2, *size))

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        """Propose behind the tokens so far."""
        first = len(state.tokens) - state.prompt_length
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        above, on_path = -1, True
        for depth in range(min(_DEPTH, budget.max_depth, budget.max_nodes // 2, len(self._output) - first)):
            at = first + depth, depth
            truth, sure = self._output[at[0]], float(self._sure[at])
            right = self._right(sure) * 0.9**depth
            hit = on_path and self._luck[at] < right
            other = on_path and not hit and self._other_luck[at] < right / 2
            tokens += [truth if hit else int(self._wrong[0][at]), truth if other else int(self._wrong[1][at])]
            parents += [above, above]
            chances += [max(sure, 0.01), max((1.0 - sure) / 2, 0.01)]
            above, on_path = len(tokens) - 2, hit
        return Proposal(tokens, parents, np.log(np.array(chances)))

    def _right(self, sure: float) -> float:
        """How often its token is right where it is so sure."""
        if self._quality <= 0.5:
            return 2.0 * self._quality * sure
        return 1.0 - 2.0 * (1.0 - self._quality) * (1.0 - sure)

    def observe(self, verified: Verified) -> None:
        """Nothing is learned."""

    def forget(self) -> None:
        """Nothing is kept."""


class _Drafted(BuiltinSource):
    """Search and a simulated drafter.

    Args:
        drafters: The drafter.
        alone: Whether it drafts without search.
        nodes: Most nodes of a tree.
        parts: Arguments of `BuiltinSource`.

    Attributes:
        seconds: Time of all steps, in steps without a drafter.
    """

    def __init__(
        self,
        drafters: ExternalSources,
        cost: float,
        nodes: int,
        alone: bool,
        builder: TreeBuilder,
        index: ContextIndex,
        successors: SuccessorTable | None,
        lookup: Lookup | None,
    ) -> None:
        if alone:
            builder = TreeBuilder(max_nodes=nodes, max_occurrences=1, calibration=builder.calibration)
            index, successors, lookup = ContextIndex(index.sequence, max_occurrences=0), None, None
        super().__init__(builder, index, successors, lookup, joint=builder.joint(nodes))
        self.seconds = 0.0
        self._drafters = drafters
        self._cost = cost
        self._budget = Budget(nodes, _DEEPEST)
        self._asked = 0

    def propose(self, state: RequestState, budget: Budget) -> DraftTree:
        tree = super().propose(state, budget)
        join = partial(self.join, budget=self._budget)
        return draft_alone(self._drafters.drafting(tree, state, self._budget, join))

    def observe(self, verified: Verified) -> None:
        super().observe(verified)
        self._drafters.observe(verified)
        asked = self._drafters.counts[0].asked
        seconds = 1.0 + self._cost * (asked - self._asked)
        self._asked = asked
        self._drafters.spent(seconds)
        self.seconds += seconds


@dataclass
class Outcome:
    """What a category's answers took.

    Attributes:
        tokens: Emitted tokens.
        steps: Steps that emitted them.
        seconds: Their time, in steps without a drafter.
        asked: Steps in which the drafter was asked.
        proposed: Nodes that it proposed.
        accepted: Of these, nodes whose tokens were emitted.
    """

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    asked: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """Tokens in the time of a step without a drafter."""
        return self.tokens / self.seconds if self.seconds else 0.0


def replay_drafted(
    traces: Iterable[Trace],
    config: ReplayConfig,
    drafter: Drafter,
    best: Best,
    profile: Profile | None,
    *,
    alone: bool = False,
    gated: bool = True,
) -> dict[str, Outcome]:
    """Replay answers with a drafter. What is known of the drafter is kept from answer to answer, as in an engine.

    Args:
        traces: Recorded answers.
        config: What is replayed.
        drafter: Quality and cost.
        best: The target's best next tokens, by trace id.
        profile: The model's profile; None: there is none.
        alone: Whether the drafter drafts without search.
        gated: Whether it is asked only where it pays.

    Returns:
        By category.
    """
    answers = list(traces)
    vocabulary = 1 + max(max(*trace.prompt, *trace.output) for trace in answers)
    replayer = Replayer(config, best, profile)
    known = ExternalState()
    outcomes: dict[str, Outcome] = {}
    for trace in answers:
        source = CheckedSource(SimulatedSource(trace, drafter, vocabulary), vocabulary)
        drafters = ExternalSources([source], known, gated=gated and not alone, learns=config.calibrates)
        made: list[_Drafted] = []

        def make(*parts: Any, drafters: ExternalSources = drafters, made: list[_Drafted] = made) -> _Drafted:
            made.append(_Drafted(drafters, drafter.cost, config.nodes, alone, *parts))
            return made[-1]

        replayer.make_source = make
        tally, outcome = Tally(), outcomes.setdefault(trace.category, Outcome())
        replayer.run(trace, tally)
        counts = drafters.counts[0]
        outcome.tokens += tally.tokens
        outcome.steps += tally.steps
        outcome.seconds += made[0].seconds
        outcome.asked += counts.asked
        outcome.proposed += counts.proposed
        outcome.accepted += counts.accepted
    return outcomes


def compare(
    traces: Iterable[Trace], config: ReplayConfig, drafters: Iterable[Drafter], best: Best, profile: Profile | None
) -> dict[str, dict[str, dict[str, float]]]:
    """Tokens in the time of a step with search alone, with each drafter alone, and with both.

    Args:
        traces: Recorded answers.
        config: What is replayed.
        drafters: The drafters.
        best: The target's best next tokens, by trace id.
        profile: The model's profile; None: there is none.

    Returns:
        By drafter and category: tokens in the time of a step by "search" alone, by the "drafter" alone, by both
        "together", and by both without the gate ("ungated"); "ratio" is "together" over the better of "search" and
        "drafter", "asked" the share of steps together in which the drafter is asked, "accepted" the share of the nodes
        that it then proposes which are emitted.
    """
    answers = list(traces)
    search = replay(answers, config, best, profile)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for drafter in drafters:
        run = partial(replay_drafted, answers, config, drafter, best, profile)
        alone, together, ungated = run(alone=True), run(), run(gated=False)
        rows[str(drafter)] = {
            category: {
                "search": tally.mat,
                "drafter": alone[category].rate,
                "together": together[category].rate,
                "ungated": ungated[category].rate,
                "ratio": together[category].rate / max(tally.mat, alone[category].rate),
                "asked": together[category].asked / together[category].steps,
                "accepted": together[category].accepted / max(together[category].proposed, 1),
            }
            for category, tally in search.items()
        }
    return rows
