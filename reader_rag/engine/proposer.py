"""The drafts of one sequence: what it may copy from, what it proposes, and what it learns from verified drafts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakMethod

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.config import DraftConfig
from reader_rag.draft.builtin_sources import BuiltinSource
from reader_rag.draft.checked_source import CheckedSource
from reader_rag.draft.context_index import ContextIndex
from reader_rag.draft.external.sources import ExternalSources, SourceCounts
from reader_rag.draft.external.together import Drafting
from reader_rag.draft.prompt_successors import PromptSuccessors
from reader_rag.draft.source import Budget, RequestState, Verified
from reader_rag.draft.tree import DATASTORE, SOURCES, DraftTree
from reader_rag.draft.tree_builder import TreeBuilder
from reader_rag.engine.context import DecodeContext
from reader_rag.engine.request import Request
from reader_rag.engine.text.prediction import Prediction
from reader_rag.engine.text.provenance import Provenance
from reader_rag.errors import DatastoreError
from reader_rag.kv_cache.layer_states import LayerOutputs
from reader_rag.sampling.topk import TopK, top_tokens

_log = logging.getLogger(__name__)

_LEAST_COPY = 3
"""Tokens before one from datastore or prediction that must match prompt or passages, for it to count as copied from
there."""

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True)
class IndexedTexts:
    """What a request may copy from.

    Attributes:
        index: Its draft index.
        provenance: Records which passage and characters each token was copied from.
        prediction: Its predicted answer in the index; None: it has none.
    """

    index: ContextIndex
    provenance: Provenance
    prediction: Prediction | None = None


def index_texts(context: DecodeContext, request: Request, max_tokens: int) -> IndexedTexts:
    """Index what a request may copy from: its prompt, its passages, its prediction, and room for what it emits.

    It takes time where passages are long, and uses nothing but the tokenizer: any thread may call it.

    Args:
        context: The engine's.
        request: The request.
        max_tokens: Most tokens that it emits.
    """
    index = ContextIndex(
        request.prompt.token_ids,
        max_occurrences=request.draft.max_occurrences,
        max_passage_tokens=request.draft.max_passage_tokens,
        reserve=max_tokens,
    )
    provenance = Provenance(index, request.prompt)
    for passage in request.passages:
        if passage.text.strip() and not provenance.mark(passage):
            text = context.tokenize(passage.text)
            provenance.add(passage, text.token_ids, text.offsets)
    prediction = Prediction(index, context.tokenize(request.prediction).token_ids) if request.prediction else None
    return IndexedTexts(index, provenance, prediction)


def _weak(method: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Call a method without holding its object.

    Proposer and source would else hold each other, and with them the files that were searched, until the garbage
    collector runs.
    """
    reference = WeakMethod(method)

    def call(place: int, token: int) -> None:
        bound = reference()
        assert bound is not None  # the proposer's own source calls it
        bound(place, token)

    return call


class Proposer:
    """Proposes the drafts of one sequence and learns from what was verified.

    Args:
        context: The engine's.
        request: The request.
        draft: How drafts are made.
        texts: What it may copy from.

    Attributes:
        index: The draft index of `texts`.
        provenance: The provenance of `texts`.
        prediction: The prediction of `texts`.
    """

    def __init__(self, context: DecodeContext, request: Request, draft: DraftConfig, texts: IndexedTexts) -> None:
        self.index, self.provenance, self.prediction = texts.index, texts.provenance, texts.prediction
        state = context.draft_states.of(request.tenant, draft)
        lookup = context.lookup if request.recalls and draft.max_nodes and request.params.speculate else None
        builder = TreeBuilder(
            max_nodes=draft.max_nodes,
            max_depth=draft.max_depth,
            min_probability=draft.min_probability,
            max_occurrences=draft.max_occurrences,
            max_candidates=0 if lookup is None else 2 * lookup.config.max_places,
            successors=state.successors,
            calibration=state.calibration,
        )
        drafts = request.params.speculate and draft.max_nodes > 0
        self._external = ExternalSources(
            [CheckedSource(source, context.vocabulary) for source in (request.draft_sources if drafts else ())],
            context.draft_states.external(request.tenant, draft),
            gated=draft.gated,
            learns=draft.calibrates,
        )
        joint = builder.joint(draft.max_nodes) if self._external else None
        self._lookup = None if lookup is None else lookup.begin(request.tenant, request.prompt.token_ids)
        # Where a token of the datastore or the prediction has its origin is found from the matches up to it.
        self._one_by_one = self._lookup is not None or self.prediction is not None
        # The successor table learns from rejected nodes too, in `learn`, so the source does not update it.
        before_token = _weak(self._before_token) if self._one_by_one else None
        self._builtin = BuiltinSource(builder, self.index, lookup=self._lookup, before_token=before_token, joint=joint)
        self._successors = state.successors if draft.max_successors else None
        self._prompt = None if self._successors is None else PromptSuccessors(self.index, self._successors)
        self._costs = context.costs
        self._max_nodes = draft.max_nodes
        self._tenant = request.tenant
        self._prompt_length = len(request.prompt.token_ids)
        layers = request.hidden_layers(context.target.layer_count) if drafts else ()
        self._outputs = LayerOutputs(layers) if layers else None
        self._best: NDArray[np.int32] | None = None
        self._verified, self._accepted = DraftTree.empty(), list[int]()
        self._counts: Counter[str] = Counter()

    @property
    def acceptance_ratio(self) -> float:
        """Accepted tokens over expected ones in this sequence; see `TreeBuilder.acceptance_ratio`."""
        return self._builtin.acceptance_ratio

    @property
    def learns(self) -> bool:
        """Whether the best tokens of verified logits are of use: to the successor table or to a source from outside."""
        return self._successors is not None or self._external.active

    @property
    def source_counts(self) -> dict[str, SourceCounts]:
        """By source from outside, how often it was asked, and how its tokens fared."""
        return self._external.counts_by_name

    @property
    def outputs(self) -> LayerOutputs | None:
        """Receives the outputs of layers that sources need; None: no source needs any."""
        return self._outputs if self._external.needs_hidden_states else None

    @property
    def used_documents(self) -> Counter[tuple[str, str]]:
        """Accepted tokens by namespace and document of the datastore."""
        return Counter() if self._lookup is None else self._lookup.used

    def drafting(self, depth: int, length: int) -> Drafting:
        """Make the best draft tree of all sources; sources from outside that are asked are yielded.

        Args:
            depth: Most tokens on a path.
            length: Positions of the KV cache, by which steps cost more or less.
        """
        budget = Budget(self._max_nodes, depth)
        tokens = self.index.sequence
        tokens.flags.writeable = False  # of this view alone
        state = RequestState(tokens, self._prompt_length, self._tenant)
        try:
            tree = self._builtin.propose(state, budget)
        except (DatastoreError, OSError):
            _log.exception("the datastore cannot be searched any more: this answer is drafted without it")
            self._lookup = None
            self._builtin.drop_lookup()
            tree = self._builtin.propose(state, budget)
        if depth <= 0 or not self._external:
            return tree
        costs = self._costs.current
        times = None if costs is None else costs.seconds(length)
        join = partial(self._builtin.join, budget=budget)
        return (yield from self._external.drafting(tree, state, budget, join, times))

    def skip(self) -> DraftTree:
        """No draft for this step; acceptance is not counted for it."""
        self._builtin.skip()
        self._external.skip()
        return DraftTree.empty()

    def observe(self, tree: DraftTree, accepted: list[int], emitted: list[int]) -> Counter[str]:
        """Extend the index by emitted tokens, record where they came from, and count how the draft was accepted.

        Args:
            tree: The verified draft.
            accepted: Accepted nodes, a path from the root.
            emitted: Emitted tokens: those of the accepted nodes, then one that was not drafted.

        Returns:
            Accepted nodes by source.
        """
        best, self._best = self._best, None
        rows = None if best is None or not self._external else best[[0, *(node + 1 for node in accepted)]]
        verified = Verified(tuple(emitted), min(len(accepted), len(emitted)), rows)
        states = None
        if self._outputs is not None:
            self._outputs.commit([0, *(node + 1 for node in accepted)])
            states = self._outputs.take(len(self.index) + len(accepted))
        self._verified, self._accepted, self._counts = tree, accepted, Counter()
        if not self._one_by_one:
            for place, token in enumerate(emitted):
                self._before_token(place, token)
        self._builtin.observe(verified)
        self._external.observe(replace(verified, hidden_states=states))
        return self._counts

    def spent(self, seconds: float, sequences: int) -> None:
        """Count the time of the step that was observed last.

        Args:
            seconds: All of it.
            sequences: Sequences that it extended.
        """
        self._external.spent(seconds, sequences)

    def forget(self) -> None:
        """End the sources from outside: the request has ended."""
        if self._outputs is not None:
            self._outputs.release()
        self._external.forget()

    def end_prefill(self, known: NDArray[np.bool_], logits: torch.Tensor) -> None:
        """Note which positions of the prompt can be asked for, and learn what follows its last token.

        Args:
            known: bool [n], which of the prompt's first n positions have a hidden state.
            logits: [1, vocabulary], after the prompt's last token.
        """
        if self._prompt is not None and len(known):
            self._prompt.add(known)
            self._prompt.learn(np.array([len(self.index) - 1], np.int32), top_tokens(logits))

    def ask(self, tree: DraftTree, verified: int) -> NDArray[np.int32]:
        """The positions of the prompt whose next tokens the coming drafts lack; see `PromptSuccessors.ask`.

        Args:
            tree: The draft.
            verified: How many of its nodes are verified in this step.
        """
        return _NONE if self._prompt is None else self._prompt.ask(tree, verified)

    def learn_asked(self, positions: NDArray[np.int32], logits: torch.Tensor, top: TopK | None) -> None:
        """Learn what follows positions of the prompt that were asked for.

        Args:
            positions: int32 [n].
            logits: [n, vocabulary].
            top: Their best tokens, where they are known already.
        """
        if self._prompt is not None:
            self._prompt.learn(positions, top_tokens(logits) if top is None or top.best is None else top.best)

    def learn(self, root: int, tree: DraftTree, logits: torch.Tensor, top: TopK | None) -> None:
        """Learn successors from a verified tree, rejected nodes included, and keep the best tokens for `observe`.

        Args:
            root: The last emitted token, which is the last of the index.
            tree: The draft.
            logits: [1 + nodes, vocabulary].
            top: Their best tokens, where they are known already.
        """
        self._best = top_tokens(logits) if top is None or top.best is None else top.best
        if self._successors is None:
            return
        sequence = self.index.sequence
        tokens = np.concatenate([np.array([root], np.int32), tree.tokens])
        before = np.concatenate([sequence[-2:-1] if len(sequence) > 1 else [-1], tokens[tree.parents + 1]])
        self._successors.learn(before, tokens, self._best)

    def _before_token(self, place: int, token: int) -> None:
        """Record where an emitted token came from, before the index follows it, and count it if it was drafted.

        Args:
            place: Of the token in its step; the accepted nodes' tokens come first.
            token: Its id.
        """
        if place >= len(self._accepted):
            self.provenance.undrafted(token)
            return
        self._counts[self._record(self._verified, self._accepted[place], token)] += 1
        if self.prediction is not None:
            self.prediction.accept(token, place + 1)

    def _record(self, tree: DraftTree, node: int, token: int) -> str:
        """Record where an accepted node came from; returns its source's name."""
        source, position = int(tree.sources[node]), int(tree.positions[node])
        if source == DATASTORE:
            self._record_elsewhere(token)
            if self._lookup is not None:
                self._lookup.accepted(position)
            return SOURCES[DATASTORE]
        if self.prediction is not None and self.prediction.holds(source, position):
            self._record_elsewhere(token)
            return "prediction"
        if position < 0:  # it was not copied
            self.provenance.undrafted(token)
            return SOURCES[source]
        self.provenance.drafted(source, position)
        return SOURCES[source] if self.index.locate(source, position).passage_id is None else "passage"

    def _record_elsewhere(self, token: int) -> None:
        """Record a token from the datastore or the prediction, which may be a copy of what prompt or passages have."""
        place = self.index.find_copy(token, _LEAST_COPY, None if self.prediction is None else self.prediction.start)
        if place is None:
            self.provenance.undrafted(token)
        else:
            self.provenance.drafted(*place)
