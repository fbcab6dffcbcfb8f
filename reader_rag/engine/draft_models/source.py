"""ModelSource: a draft source over a model, whatever kind of model it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.draft.source import Ask, Budget, Proposal, RequestState, Verified
from reader_rag.draft.tree import DraftTree
from reader_rag.kv_cache.prefix_cache import PrefixCache
from reader_rag.sampling.sampler import ProcessedSampler
from reader_rag.sampling.sampler import Verified as Pass


@dataclass(frozen=True)
class DraftRequest:
    """What a draft model needs to know of a request.

    Attributes:
        positions: Most tokens of prompt and answer.
        tenant: Whose request it is; nothing computed for one tenant is reused for another.
        vocabulary: Number of token ids of the target.
        width: Of the target's logits, at least `vocabulary`.
        tokens: Most tokens that are drafted one behind the other.
        branches: Tokens that are drafted at each position; the best one is followed.
        sampler: Draws as the request's sampler does, with processors and a state of its own; None: the best token.
    """

    positions: int
    tenant: str
    vocabulary: int
    width: int
    tokens: int
    branches: int
    sampler: ProcessedSampler | None = None


class Stream(Protocol):
    """A draft model on one sequence; what it reads, its `DraftModel` computes.

    Attributes:
        request: What is drafted for.
        hidden_layers: Layers of the target whose outputs `observe` gets; empty: none.
        nbytes: Most bytes that it holds.
    """

    request: DraftRequest
    hidden_layers: tuple[int, ...]
    nbytes: int

    @property
    def model(self) -> DraftModel:
        """The model."""

    def observe(self, verified: Verified) -> None:
        """Take the target's hidden states.

        Args:
            verified: What the target emitted.
        """

    def translated(self, sequence: NDArray[np.int32], proposal: Proposal) -> Proposal:
        """A draft in the target's vocabulary.

        Args:
            sequence: int32 [length], what it continues.
            proposal: The draft; the first tokens at each depth are its chain.

        Returns:
            `proposal` itself for a model of the target's vocabulary; else a chain.
        """

    def release(self) -> None:
        """Free the memory."""


@dataclass
class DraftTally:
    """What a draft model did. A chain is its best token, the best one behind that, and so on.

    Attributes:
        asked: Drafts that were verified, or merged into one that was.
        drafted: Tokens of their chains up to where the step ended.
        right: How many of them the target emitted too.
    """

    asked: int = 0
    drafted: int = 0
    right: int = 0


class DraftModel(ABC):
    """A model that drafts, shared by the requests of an engine: those that ask in one step share its passes.

    Args:
        name: In messages.
        prefixes: What it computed of earlier sequences, in blocks; None: nothing is kept.

    Attributes:
        name: As given.
        prefixes: As given.
        tally: What it did for all requests.
    """

    def __init__(self, name: str, prefixes: PrefixCache | None = None) -> None:
        self.name = name
        self.prefixes = prefixes
        self.tally = DraftTally()

    @property
    def prefix_bytes(self) -> int:
        """Most bytes of its prefix cache."""
        return 0 if self.prefixes is None else self.prefixes.max_bytes

    @abstractmethod
    def open(self, request: DraftRequest) -> Stream:
        """Begin a sequence; memory is allocated when it is first used.

        Args:
            request: The request.
        """

    def forget(self, tenant: str) -> None:
        """Drop what is kept of a tenant's texts.

        Args:
            tenant: The tenant's name.
        """
        if self.prefixes is not None:
            self.prefixes.forget(tenant)

    def bytes_of(self, streams: Sequence[Any]) -> int:
        """Most bytes that it holds for sequences that are decoded together.

        Args:
            streams: The sequences.
        """
        return sum(int(stream.nbytes) for stream in streams)

    @abstractmethod
    def follow(self, streams: Sequence[Any], sequences: Sequence[NDArray[np.int32]]) -> list[torch.Tensor | None]:
        """Read sequences up to their ends.

        Args:
            streams: At least one, of this model, each once.
            sequences: int32 [length] each, all tokens of each one; what was drafted since the last call may not be
                among them.

        Returns:
            For each, logits [1, the target's vocabulary or another width] after its last token, which hold until the
            next pass of the model; None: there can be none.
        """

    @abstractmethod
    def advance(self, streams: Sequence[Any], tokens: Sequence[int]) -> list[torch.Tensor]:
        """Read a drafted token of each of some sequences.

        Args:
            streams: At least one, of this model, each once.
            tokens: The tokens, each behind the last one that its stream read.

        Returns:
            Logits as `follow` returns them.
        """

    @torch.inference_mode()
    def propose_together(self, asks: Sequence[Ask]) -> list[Proposal]:
        """Draft for several requests in common passes; see `SourceGroup.propose_together`."""
        drafts = [_Draft(ask) for ask in asks]
        going = [draft for draft in drafts if draft.wanted]
        found = self.follow([draft.stream for draft in going], [draft.tokens for draft in going]) if going else []
        while True:
            going = [draft for draft, one in zip(going, found, strict=True) if one is not None and draft.extend(one)]
            if not going:
                return [draft.end() for draft in drafts]
            found = [*self.advance([draft.stream for draft in going], [draft.last for draft in going])]


class ModelSource:
    """Drafts with a model: a chain of its best tokens, and beside each of them the next best ones.

    A drawn answer is drafted by drawing: the scores are those of the request's sampler, with the noise that the target
    will draw with, so a model that is right about the probabilities is right about the draw too.

    Args:
        stream: The model on the request's sequence.

    Attributes:
        stream: As given.
        group: The model, which drafts for several requests at once.
        name: Of the model, in messages and metrics.
        needs_hidden_states: Whether the model computes from hidden states of the target.
        hidden_layers: The layers whose outputs it needs.
        nbytes: Most bytes that the model holds for the request.
        chain: The best tokens of the last draft, each behind the one before.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.group = stream.model
        self.name = stream.model.name
        self.hidden_layers = stream.hidden_layers
        self.needs_hidden_states = bool(stream.hidden_layers)
        self.nbytes = stream.nbytes
        self.chain: list[int] = []

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        """Draft a chain with branches; see `DraftSource.propose`."""
        return self.group.propose_together([Ask(self, state, budget)])[0]

    def observe(self, verified: Verified) -> None:
        """Hand the model the target's hidden states, and count; see `DraftSource.observe`."""
        chain, self.chain = self.chain[: len(verified.tokens)], []
        if chain:
            same = [token == emitted for token, emitted in zip(chain, verified.tokens, strict=False)]
            tally = self.group.tally
            tally.asked += 1
            tally.drafted += len(chain)
            tally.right += [*same, False].index(False)
        self.stream.observe(verified)

    def forget(self) -> None:
        """Free what the model holds; see `DraftSource.forget`."""
        self.stream.release()


class _Draft:
    """A draft of one request in the making.

    Args:
        ask: The request, with a `ModelSource`.

    Attributes:
        stream: The model on its sequence.
        tokens: int32 [length], its tokens.
        last: The last token of the chain.
    """

    def __init__(self, ask: Ask) -> None:
        source: Any = ask.source
        self.stream: Stream = source.stream
        self.tokens = ask.state.tokens
        self.last = -1
        self._source: ModelSource = source
        self._request = source.stream.request
        self._depth = min(self._request.tokens, ask.budget.max_depth)
        self._most = ask.budget.max_nodes
        self._deepest = min(ask.budget.max_depth, ask.budget.max_nodes)
        self._nodes, self._parents, self._logprobs = list[int](), list[int](), list[float]()
        self._parent = -1
        source.chain = []
        self._sequence = np.empty(len(self.tokens) + max(self._depth, 0), np.int32)
        self._sequence[: len(self.tokens)] = self.tokens

    @property
    def wanted(self) -> bool:
        """Whether anything may be drafted."""
        return self._depth >= 1 and self._most >= 1

    def extend(self, logits: torch.Tensor) -> bool:
        """Add the best tokens of a position; returns whether the position behind the best of them is wanted too.

        Args:
            logits: Of the position, as `DraftModel.follow` returns them.
        """
        chain = self._source.chain
        at = len(self.tokens) + len(chain)
        best, chances = self._best(logits, self._sequence[:at])
        if not best:
            return False
        self.last, followed = best[0], len(self._nodes)
        chain.append(self.last)
        self._nodes += best
        self._parents += [self._parent] * len(best)
        self._logprobs += chances
        self._parent = followed
        if len(chain) == self._depth or len(self._nodes) >= self._most:
            return False
        self._sequence[at] = self.last
        return True

    def end(self) -> Proposal:
        """What was drafted."""
        found = Proposal(self._nodes[: self._most], self._parents[: self._most], self._logprobs[: self._most])
        if not self._nodes:
            return found
        translated = self.stream.translated(self.tokens, found)
        if translated is found:
            return found
        self._source.chain = list(map(int, translated.tokens[: self._deepest]))
        return Proposal(self._source.chain, translated.parents[: self._deepest], translated.logprobs[: self._deepest])

    def _best(self, logits: torch.Tensor, sequence: NDArray[np.int32]) -> tuple[list[int], list[float]]:
        """The best next tokens of a sequence, the best first, and their log-probabilities."""
        request = self._request
        if logits.shape[1] != request.width:
            missing = max(request.width - logits.shape[1], 0)
            logits = torch.nn.functional.pad(logits[:, : request.width], (0, missing), value=-torch.inf)
        scores = logits[0].float()
        if request.sampler is not None:
            scores = request.sampler.perturbed(Pass(logits, DraftTree.empty(), sequence), 0)
        scores = scores[: request.vocabulary]
        found = scores.log_softmax(0).topk(min(request.branches, len(scores)))
        chances, tokens = found.values.clamp(max=0.0).tolist(), found.indices.tolist()
        # A token of no chance is none; and NaN fails every comparison.
        possible = sum(chance > -np.inf for chance in chances)
        return tokens[:possible], chances[:possible]
