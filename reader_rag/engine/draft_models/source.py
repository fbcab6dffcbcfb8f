"""ModelSource: a draft source over a model, whatever kind of model it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.draft.source import Budget, Proposal, RequestState, Verified
from reader_rag.draft.tree import DraftTree
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
    """A draft model on one sequence.

    Attributes:
        hidden_layers: Layers of the target whose outputs `observe` gets; empty: none.
        nbytes: Most bytes that it holds.
    """

    hidden_layers: tuple[int, ...]
    nbytes: int

    def follow(self, tokens: NDArray[np.int32]) -> torch.Tensor | None:
        """Read the sequence up to its end.

        Args:
            tokens: int32 [length], all of its tokens; what was drafted since the last call may not be among them.

        Returns:
            Logits [1, the target's vocabulary or another width] after the last token; None: there can be none.
        """

    def advance(self, token: int) -> torch.Tensor:
        """Read a drafted token.

        Args:
            token: Behind the last one that was read.

        Returns:
            Logits as `follow` returns them.
        """

    def observe(self, verified: Verified) -> None:
        """Take the target's hidden states.

        Args:
            verified: What the target emitted.
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


class DraftModel(Protocol):
    """A model that drafts, shared by the requests of an engine.

    Attributes:
        name: In messages.
        tally: What it did for all requests.
    """

    name: str
    tally: DraftTally

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


class ModelSource:
    """Drafts with a model: a chain of its best tokens, and beside each of them the next best ones.

    A drawn answer is drafted by drawing: the scores are those of the request's sampler, with the noise that the target
    will draw with, so a model that is right about the probabilities is right about the draw too.

    Args:
        stream: The model on the request's sequence.
        request: The request.
        tally: Counts what is drafted; None: nothing counts.
        name: Of the model, in messages and metrics.

    Attributes:
        name: As given.
        needs_hidden_states: Whether the model computes from hidden states of the target.
        hidden_layers: The layers whose outputs it needs.
        nbytes: Most bytes that the model holds for the request.
    """

    def __init__(
        self, stream: Stream, request: DraftRequest, tally: DraftTally | None = None, name: str = "draft model"
    ) -> None:
        self.name = name
        self.hidden_layers = stream.hidden_layers
        self.needs_hidden_states = bool(stream.hidden_layers)
        self.nbytes = stream.nbytes
        self._stream = stream
        self._request = request
        self._tally = tally or DraftTally()
        self._chain: list[int] = []

    @torch.inference_mode()
    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        """Draft a chain with branches; see `DraftSource.propose`."""
        request = self._request
        depth = min(request.tokens, budget.max_depth)
        self._chain = []
        tokens, parents, logprobs = list[int](), list[int](), list[float]()
        if depth < 1 or budget.max_nodes < 1 or (logits := self._stream.follow(state.tokens)) is None:
            return Proposal(tokens, parents, logprobs)
        length = len(state.tokens)
        sequence = np.empty(length + depth, np.int32)
        sequence[:length] = state.tokens
        parent = -1
        for place in range(depth):
            best, chances = self._best(logits, sequence[: length + place])
            followed = len(tokens)
            tokens += best
            parents += [parent] * len(best)
            logprobs += chances
            parent = followed
            self._chain += best[:1]
            if place + 1 == depth or len(tokens) >= budget.max_nodes or not best:
                break
            sequence[length + place] = best[0]
            logits = self._stream.advance(best[0])
        most = budget.max_nodes
        return Proposal(tokens[:most], parents[:most], logprobs[:most])

    def observe(self, verified: Verified) -> None:
        """Hand the model the target's hidden states, and count; see `DraftSource.observe`."""
        chain, self._chain = self._chain[: len(verified.tokens)], []
        if chain:
            same = [token == emitted for token, emitted in zip(chain, verified.tokens, strict=False)]
            self._tally.asked += 1
            self._tally.drafted += len(chain)
            self._tally.right += [*same, False].index(False)
        self._stream.observe(verified)

    def forget(self) -> None:
        """Free what the model holds; see `DraftSource.forget`."""
        self._stream.release()

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
