"""The protocol of draft sources: whatever proposes tokens that the target then verifies.

A source cannot change an answer, only how many steps it takes: the target verifies every proposed token.

    class Repeat:
        needs_hidden_states = False

        def propose(self, state, budget):  # the last three tokens, once more
            return Proposal.chain(state.tokens[-3:].tolist()[: budget.max_depth])

        def observe(self, verified): ...

        def forget(self): ...

    engine = Engine(model, tokenizer, draft_sources=[Repeat])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.tree import DraftTree
from reader_rag.errors import ConfigError


@dataclass(frozen=True, eq=False)
class RequestState:
    """What a source proposes for.

    Attributes:
        tokens: int32 [length], prompt and answer so far; a view that is valid during the call, not to be written.
        prompt_length: How many of them are the prompt's.
        tenant: Whose request it is. What is learned from one tenant's text must not be proposed to another.
    """

    tokens: NDArray[np.int32]
    prompt_length: int
    tenant: str = ""


@dataclass(frozen=True)
class Budget:
    """How much a source may propose.

    Attributes:
        max_nodes: Most nodes of a proposal; one with more is refused.
        max_depth: Most tokens on a path; deeper nodes are dropped.
    """

    max_nodes: int
    max_depth: int


@dataclass(frozen=True, eq=False)
class Proposal:
    """A tree of tokens that may come next.

    Attributes:
        tokens: int [nodes], token ids.
        parents: int [nodes], the index of each one's parent, -1: it follows the sequence. A parent comes before its
            children.
        logprobs: float [nodes], natural logarithm of the estimated probability that the target emits the token, given
            its parent; at most 0. They decide which nodes are verified, so they should be true on average.
    """

    tokens: Sequence[int] | NDArray[np.integer]
    parents: Sequence[int] | NDArray[np.integer]
    logprobs: Sequence[float] | NDArray[np.floating]

    @classmethod
    def chain(cls, tokens: Sequence[int], probability: float = 0.5) -> Proposal:
        """A proposal without branches.

        Args:
            tokens: The tokens of the path; none: nothing is proposed.
            probability: Of each token, given those before.
        """
        return cls(tokens, np.arange(-1, len(tokens) - 1), np.full(len(tokens), np.log(probability)))


@dataclass(frozen=True, eq=False)
class Verified:
    """What the target emitted in a step.

    Attributes:
        tokens: The emitted tokens: those of the accepted path, then one that the target chose itself.
        accepted: How many of them were drafted, by any source.
        best: int32 [accepted + 1, 8], the target's best next tokens at the sequence's last token and at each accepted
            one, the best first; None where the engine did not compute them.
        hidden_states: A handle to the target's hidden states, for a source that declares `needs_hidden_states`: at the
            same positions, and in the first call of a request at those of its prompt, but what was taken from the
            prefix cache. Engines hand out a `reader_rag.kv_cache.layer_states.LayerStates`. None for all others.
    """

    tokens: tuple[int, ...]
    accepted: int
    best: NDArray[np.int32] | None = None
    hidden_states: object | None = None


class Ask(NamedTuple):
    """One of several sources that are asked in one call.

    Attributes:
        source: The source.
        state: Its request.
        budget: Most nodes, and most tokens on a path.
    """

    source: DraftSource
    state: RequestState
    budget: Budget


class SourceGroup(Protocol):
    """Sources of several requests that draft in one call, such as those over one model."""

    def propose_together(self, asks: Sequence[Ask]) -> Sequence[Proposal | DraftTree]:
        """Propose for several requests.

        Args:
            asks: At least one, each with a source of this group.

        Returns:
            For each what `DraftSource.propose` returns.
        """


class DraftSource(Protocol):
    """Proposes tokens for one request at a time, on the thread that decodes.

    A step calls `propose`, and `observe` with what the target emitted; `propose` is left out in steps that are made
    without a draft, and where its tokens are not expected to pay for its time (`DraftConfig.gated`). `forget` follows
    the last step. An error in any of them, or a proposal that is not valid, switches the source off for the request,
    with one warning; the answer goes on.

    Three attributes are optional. `proposal_seconds` says how many seconds a call of `propose` takes, where the source
    knows it; without it, or where it is None, calls are timed. It decides in which steps the source is asked: work that
    is needed for proposals alone, such as a pass of a model over what was emitted since the last one, belongs into
    `propose`. `name` names the source in statistics and metrics; the default is the name of its class. `group`, a
    `SourceGroup`, is asked in place of the sources themselves where several of one group are asked in a step.

    A source that needs hidden states may have an attribute `hidden_layers`, the layers whose outputs it wants: n for
    the output of the n-th decoder layer, 0 for the embeddings. Without it, it gets the output of the last one.

    Attributes:
        needs_hidden_states: Whether `Verified.hidden_states` is wanted.
    """

    @property
    def needs_hidden_states(self) -> bool: ...

    def propose(self, state: RequestState, budget: Budget) -> Proposal | DraftTree:
        """Propose what may follow the request's tokens.

        Args:
            state: The request.
            budget: Most nodes, and most tokens on a path.

        Returns:
            A tree; one without nodes proposes nothing.
        """

    def observe(self, verified: Verified) -> None:
        """Learn from what the target emitted.

        Args:
            verified: The emitted tokens. The next `RequestState.tokens` ends with them.
        """

    def forget(self) -> None:
        """Drop what is kept of the request: it has ended."""


SourceFactory = Callable[[], DraftSource]
"""Makes the source of one request; a class without arguments is one. What is to be shared between requests, such as a
model, belongs to the factory."""


def make_sources(factories: Sequence[SourceFactory], layers: int = 0) -> tuple[DraftSource, ...]:
    """Make the sources of a request.

    Args:
        factories: One for each source.
        layers: Layers of the target whose outputs sources may ask for; 0: it hands out none.

    Raises:
        ConfigError: A factory makes no draft source, or one that needs hidden states which the engine does not provide.
    """
    for make in factories:
        if not callable(make):
            raise ConfigError(f"draft_sources are functions that make a source, not {type(make).__name__}")
    sources = tuple(make() for make in factories)
    for source in sources:
        name = type(source).__name__
        missing = [method for method in ("propose", "observe", "forget") if not callable(getattr(source, method, None))]
        if missing:
            raise ConfigError(f"{name} is no draft source: it has no {', '.join(missing)}")
        wanted = hidden_layers_of(source, layers)
        if wanted and not layers:
            raise ConfigError(
                f"the draft source {name} needs hidden states, and this model does not hand them out: leave it out"
            )
        if any(not 0 <= layer <= layers for layer in wanted):
            raise ConfigError(f"the draft source {name} needs the layers {wanted}, and the model has 0..{layers}")
    return sources


def hidden_layers_of(source: DraftSource, layers: int) -> tuple[int, ...]:
    """The layers whose outputs a source needs; empty: none.

    Args:
        source: The source.
        layers: Layers of the target; the default is the last one.
    """
    if not getattr(source, "needs_hidden_states", False):
        return ()
    return tuple(getattr(source, "hidden_layers", ())) or (layers,)
