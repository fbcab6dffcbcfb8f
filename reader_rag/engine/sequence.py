"""One answer in the making: its prompt is read, then drafts are made and what was verified of them is accepted.

A `DecodeSequence` does nothing by itself; a driver asks it for its next draft, runs the pass, and hands it the logits:
`batch.advance` for any number of requests at once, under the engine's lock.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from reader_rag.config import DraftConfig, SamplingParams
from reader_rag.draft.context_index import ContextIndex
from reader_rag.draft.tree import DATASTORE, SOURCES, SUCCESSOR, DraftTree
from reader_rag.draft.tree_builder import NO_CANDIDATES, TreeBuilder
from reader_rag.engine.detokenizer import Detokenizer
from reader_rag.engine.draft_state import DraftState
from reader_rag.engine.outputs import (
    Chunk,
    CopiedSpan,
    FinishReason,
    Generation,
    Passage,
    Prompt,
    Stats,
)
from reader_rag.engine.provenance import Provenance
from reader_rag.errors import DatastoreError
from reader_rag.kv_cache.tree_cache import TreeCache
from reader_rag.model.interface import SequenceCache
from reader_rag.model.step_costs import Rest
from reader_rag.sampling.accept import accept_path
from reader_rag.sampling.constrained import Constraint
from reader_rag.sampling.logprobs import TokenLogprobs, token_logprobs
from reader_rag.sampling.sampler import Sampler, Verified
from reader_rag.sampling.topk import TopK, top_tokens

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

StoppingCriterion = Callable[[torch.Tensor, None], Any]
"""A `StoppingCriteria` of `transformers`, or a function like it: token ids [1, length] and None to whether to stop."""

_log = logging.getLogger(__name__)

_LEAST_COPY = 3
"""Tokens before one from the datastore that must stand in prompt or passages too, for it to be copied from there."""
_TOKENS_BEFORE = 4
"""Prompt tokens that the first token of an answer is decoded behind."""


@dataclass(frozen=True)
class Request:
    """What one answer is asked for; see `Engine.stream`.

    Attributes:
        prompt: What to continue.
        generation: Length, stop strings, sampling.
        draft: How drafts are made.
        sampler: Chooses the tokens.
        passages: Texts that the answer may repeat.
        tenant: On whose behalf.
        criteria: Ask whether to stop.
        constraint: The grammar's state, if there is a grammar.
        recalls: Whether the engine's datastore is searched, and may keep the answer.
    """

    prompt: Prompt
    generation: SamplingParams
    draft: DraftConfig
    sampler: Sampler
    passages: tuple[Passage, ...] = ()
    tenant: str = ""
    criteria: Sequence[StoppingCriterion] = ()
    constraint: Constraint | None = None
    recalls: bool = True


class DecodeSequence:
    """One answer in the making. Not for several threads at once.

    Args:
        engine: What decodes it.
        asked: What it is asked for.

    Attributes:
        asked: As given.
        rest: When it goes without drafts.
        finish: Why the answer ended; None while it has not.
    """

    def __init__(self, engine: Engine, asked: Request) -> None:
        self.asked = asked
        self.rest = Rest()
        self.finish: FinishReason | None = None
        self._engine = engine
        length = len(asked.prompt.token_ids)
        self._max_tokens = min(asked.generation.max_tokens, engine.context_window - length)
        # An answer that goes on after them has no ends.
        self._ends_at = frozenset[int]() if asked.generation.ignore_eos else engine.eos_ids
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._margins: list[float] = []
        self._taken = 0
        self._ended = self._rests = False
        self._counts: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._seconds = {"queue": 0.0, "ttft": 0.0, "decode": 0.0, "draft": 0.0}
        self._began = 0.0
        self._texts: _Texts | None = None
        self._state: _State | None = None
        self._copied: tuple[CopiedSpan, ...] = ()
        generation = asked.generation
        self._text = Detokenizer(
            engine.tokenizer, generation.stop, asked.prompt.token_ids[-_TOKENS_BEFORE:], generation.include_stop
        )

    @property
    def positions(self) -> int:
        """Most positions of its cache that prompt and answer may take."""
        return len(self.asked.prompt.token_ids) + self._max_tokens

    @property
    def reading(self) -> bool:
        """Whether the prompt is not read to its end yet."""
        return not self._tokens

    @property
    def root(self) -> int:
        """The last emitted token."""
        return self._tokens[-1]

    @property
    def cache(self) -> SequenceCache:
        """Of prompt and answer up to the root; there is one from the first `read` to `release`."""
        assert self._state is not None
        return self._state.cache

    @property
    def acceptance_ratio(self) -> float:
        """See `TreeBuilder.acceptance_ratio`."""
        return 1.0 if self._state is None else self._state.builder.acceptance_ratio

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted for it."""
        asked = self.asked
        return asked.generation.speculate and asked.draft.max_nodes > 0 and self._engine.drafting != "none"

    def prepare(self) -> None:
        """Index the texts, which takes time where passages are long, and needs no engine's lock."""
        if self._texts is None:
            self._texts = _Texts.of(self._engine, self.asked, self._max_tokens)

    @torch.inference_mode()
    def read(self) -> None:
        """Read a chunk of the prompt; the last one emits the first token."""
        state = self._state = self._state or self._begin()
        logits = next(state.reading)
        if state.cache.length == len(self.asked.prompt.token_ids):
            state.keep()
            nothing = DraftTree.empty()
            token = self.asked.sampler(Verified(logits, nothing, state.index.sequence))(0)
            self._counts["cache_bytes"] = state.cache.nbytes
            self._take(token)
            self._record(logits, [0], [token])
            self._emit(state, nothing, [], [token])
            self._ended = self.finish is not None
            self._seconds["ttft"] = time.perf_counter() - self._began

    def _begin(self) -> _State:
        asked = self.asked
        if self.drafts:
            self._engine.know_costs(asked.draft.max_nodes)
        self._began = time.perf_counter()
        self.prepare()
        assert self._texts is not None
        texts, self._texts = self._texts, None
        draft = asked.draft if self.drafts else replace(asked.draft, max_successors=0, calibrates=False)
        learned = self._engine.learned.of(asked.tenant, draft)
        state = _State(self._engine, asked, texts, draft, self._max_tokens, learned)
        self._counts["reused_tokens"] = state.reused
        return state

    @property
    def learns(self) -> bool:
        """Whether drafting learns from the next pass; not where it rests."""
        return self._state is not None and self._state.learns and not self._rests

    def draft(self, *, rests: bool) -> DraftTree:
        """The best tree that may be verified now.

        Args:
            rests: Whether to do without where nothing forces a token.
        """
        state = self._state
        assert state is not None
        # Where drafts rest because none has paid, what they are made of is not worth much time either.
        self._rests = rests
        if not self.drafts:
            return DraftTree.empty()
        # A step emits one token more than it accepts; a draft longer than that would be thrown away.
        depth = self._max_tokens - len(self._tokens) - 1
        target = self._engine.target
        deepest = target.deepest(state.cache.length)
        if deepest is not None:
            depth = min(depth, deepest)
        tree = state.builder.skip() if rests else state.draft(depth)
        if self.asked.constraint is not None:
            tree = self.asked.constraint.shape(tree, state.index.sequence, self.asked.draft.max_nodes, depth)
            state.builder.skip()  # what is allowed says nothing of what the model tends to say
        if target.fixed is not None or self._engine.drafting == "chain":
            tree = tree.chain()
        return tree

    def accept(self, tree: DraftTree, logits: torch.Tensor, fetched: TopK | None) -> tuple[int, Counter[str]]:
        """Emit what the target says of a draft, and keep what agrees with it.

        Args:
            tree: What was verified: a head of the last draft.
            logits: [1 + nodes, vocabulary].
            fetched: What is known of them already.

        Returns:
            How many tokens were emitted, and the accepted nodes by source.
        """
        state = self._state
        assert state is not None
        if self.learns:
            state.learn(self.root, tree, logits, fetched)
        highest = None if fetched is None else fetched.argmax
        target = self.asked.sampler(Verified(logits, tree, state.index.sequence, highest))
        accepted, emitted = accept_path(tree, lambda node: target(node + 1), self._take)
        rows = [0, *(node + 1 for node in accepted)]
        state.cache.commit(rows)
        self._counts["steps"] += 1
        self._counts["drafted"] += len(tree)
        self._record(logits, rows[: len(emitted)], emitted)
        sources = self._emit(state, tree, accepted, emitted)
        self._ended = self.finish is not None
        return len(emitted), sources

    def queued(self, seconds: float) -> None:
        """Count the time that it waited for a place."""
        self._seconds["queue"] = seconds

    def spent(self, seconds: float, drafting: float) -> None:
        """Count the time of a step.

        Args:
            seconds: All of it.
            drafting: Of that, for making its draft.
        """
        self._seconds["decode"] += seconds
        self._seconds["draft"] += drafting

    def take(self) -> Chunk:
        """What is new since the last time."""
        new = slice(self._taken, len(self._tokens))
        self._taken = len(self._tokens)
        return Chunk(self._text.take(), tuple(self._tokens[new]), self.finish, tuple(self._logprobs[new]))

    def release(self) -> None:
        """Give back the cache and the draft index. What was answered to its end is kept for texts that go on from it.

        An error in a step keeps nothing more, even where the answer was about to end.
        """
        if self._state is None:
            return
        self._copied = self._state.provenance.spans(self._text.text, self._text.ends)
        state, self._state = self._state, None
        try:
            if self._ended:
                with self._engine.lock:
                    state.keep()
        finally:
            state.cache.release()
        asked = self.asked
        if self._ended and asked.recalls and self._engine.recall is not None:
            self._engine.recall.keep(asked.tenant, asked.prompt.token_ids, self._tokens, state.used)

    @property
    def result(self) -> Generation:
        """The answer; what there is of it if it is not done."""
        stats = Stats(
            prompt_tokens=len(self.asked.prompt.token_ids),
            completion_tokens=len(self._tokens),
            steps=self._counts["steps"],
            drafted=self._counts["drafted"],
            accepted=sum(self._accepted.values()),
            accepted_by_source=dict(self._accepted),
            queue_s=self._seconds["queue"],
            ttft_s=self._seconds["ttft"],
            decode_s=self._seconds["decode"],
            draft_s=self._seconds["draft"],
            cache_bytes=self._counts["cache_bytes"],
            reused_tokens=self._counts["reused_tokens"],
        )
        state = self._state
        copied = state.provenance.spans(self._text.text, self._text.ends) if state is not None else self._copied
        return Generation(
            text=self._text.text,
            token_ids=tuple(self._tokens),
            finish_reason=self.finish or "length",
            stats=stats,
            copied=copied,
            logprobs=tuple(self._logprobs),
            margins=tuple(self._margins),
        )

    def _take(self, token: int) -> bool:
        """Take one emitted token, as plain decoding would; whether the answer ends with it."""
        self._tokens.append(token)
        if token in self._ends_at:
            self._text.ends.append(len(self._text.text))
            self.finish = "stop"
        elif self._text.push(token) or self._criterion_met():
            self.finish = "stop"
        elif len(self._tokens) >= self._max_tokens:
            self.finish = "length"
        return self.finish is not None

    def _emit(self, state: _State, tree: DraftTree, accepted: list[int], emitted: list[int]) -> Counter[str]:
        """Note where the emitted tokens came from, and learn how the draft fared; accepted nodes by source."""
        sources: Counter[str] = Counter()
        for k, token in enumerate(emitted):
            if k < len(accepted):
                sources[state.copied(tree, accepted[k], token)] += 1
            else:
                state.provenance.undrafted(token)
            if state.recalls:  # what is told of the next token goes by the matches up to it
                state.follow([token])
        self._accepted += sources
        state.builder.observe(emitted)
        if not state.recalls:
            state.follow(emitted)
        if self.finish is not None:
            self._text.finish()
        return sources

    def _criterion_met(self) -> bool:
        if not self.asked.criteria:
            return False
        ids = torch.tensor([[*self.asked.prompt.token_ids, *self._tokens]], device=self._engine.target.device)
        # All are asked, as in `transformers`: one that counts its calls must not miss any.
        met = [bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.asked.criteria]
        return any(met)

    def _record(self, logits: torch.Tensor, rows: list[int], tokens: list[int]) -> None:
        generation = self.asked.generation
        if generation.logprobs is not None:
            self._logprobs += token_logprobs(logits, rows, tokens, generation.logprobs)
        if generation.record_margins:
            best = logits[rows].float().topk(2, dim=-1).values
            self._margins.extend((best[:, 0] - best[:, 1]).tolist())


@dataclass(frozen=True)
class _Texts:
    """What a request may copy from: its prompt, its passages, and what it emits."""

    index: ContextIndex
    provenance: Provenance

    @classmethod
    def of(cls, engine: Engine, asked: Request, max_tokens: int) -> _Texts:
        """Of a request that has not begun."""
        index = ContextIndex(
            asked.prompt.token_ids,
            max_occurrences=asked.draft.max_occurrences,
            max_passage_tokens=asked.draft.max_passage_tokens,
            reserve=max_tokens,
        )
        provenance = Provenance(index, asked.prompt)
        for passage in asked.passages:
            if passage.text.strip() and not provenance.mark(passage):
                text = engine.tokenize(passage.text, special=False)
                provenance.add(passage, text.token_ids, text.offsets)
        return cls(index, provenance)


class _State:
    """What a request holds while it is decoded: cache, draft index, provenance.

    Args:
        engine: What decodes it.
        asked: What it is asked for.
        texts: What it may copy from.
        draft: How its drafts are made.
        max_tokens: Most tokens of its answer.
        learned: What its tenant's texts taught.

    Attributes:
        reused: Leading tokens of the prompt that the cache holds before anything is read.
    """

    def __init__(
        self, engine: Engine, asked: Request, texts: _Texts, draft: DraftConfig, max_tokens: int, learned: DraftState
    ) -> None:
        prompt = asked.prompt
        self.cache: SequenceCache = engine.target.new_cache(len(prompt.token_ids) + max_tokens, draft.max_nodes)
        self.index, self.provenance = texts.index, texts.provenance
        recall = engine.recall if asked.recalls and draft.max_nodes and asked.generation.speculate else None
        self.builder = TreeBuilder(
            max_nodes=draft.max_nodes,
            max_depth=draft.max_depth,
            min_probability=draft.min_probability,
            max_occurrences=draft.max_occurrences,
            max_candidates=0 if recall is None else 2 * recall.config.max_places,
            successors=learned.successors,
            calibration=learned.calibration,
        )
        self._recollection = None if recall is None else recall.begin(asked.tenant, prompt.token_ids)
        self._successors = learned.successors if draft.max_successors else None
        self._engine = engine
        self._tenant = asked.tenant
        self._prompt_tokens = len(prompt.token_ids)
        self.reused = self._restore(prompt)
        self.reading: Iterator[torch.Tensor] = engine.target.prefill_chunks(
            prompt.token_ids[self.reused :],
            self.cache,
            partial(self.learn_prompt, self.reused) if draft.max_successors and not engine.crowded else None,
        )

    def _restore(self, prompt: Prompt) -> int:
        """Begin the cache with what is kept of the prompt; returns how many positions."""
        reuse, prefixes = self._engine.reuse, self._engine.prefixes
        if reuse is None or prefixes is None or not reuse.positions(self._prompt_tokens, self._prompt_tokens):
            return 0
        return prefixes.restore(self._tenant, prompt.token_ids, cast(TreeCache, self.cache))

    def keep(self) -> None:
        """Keep the committed keys and values for texts of the tenant that begin the same. Under the engine's lock."""
        reuse, prefixes = self._engine.reuse, self._engine.prefixes
        if reuse is None or prefixes is None:
            return
        count = reuse.positions(self._prompt_tokens, self.cache.length)
        try:
            prefixes.insert(self._tenant, self.index.sequence[:count], cast(TreeCache, self.cache))
        except Exception:
            # The answer is right without; but nothing that is half kept may be found.
            prefixes.clear()
            _log.exception("the beginning of a text could not be kept")

    def draft(self, depth: int) -> DraftTree:
        """The best tree of all sources, no path of it longer than `depth`."""
        candidates = NO_CANDIDATES
        if self._recollection is not None:
            try:
                candidates = self._recollection.look_up()
            except (DatastoreError, OSError):
                _log.exception("the datastore cannot be searched any more: this answer is drafted without it")
                self._recollection = None
        return self.builder.build(self.index, candidates=candidates, max_depth=depth)

    @property
    def learns(self) -> bool:
        """Whether successors are remembered."""
        return self._successors is not None

    @property
    def recalls(self) -> bool:
        """Whether drafts come from a datastore."""
        return self._recollection is not None

    def follow(self, tokens: list[int]) -> None:
        """Go on behind emitted tokens."""
        self.index.extend(tokens)
        if self._recollection is not None:
            self._recollection.extend(tokens)

    @property
    def used(self) -> Counter[tuple[str, str]]:
        """Accepted tokens by namespace and document of the datastore."""
        return Counter() if self._recollection is None else self._recollection.used

    def learn_prompt(self, before: int, start: int, logits: torch.Tensor) -> None:
        """Learn from a chunk of the prompt behind the first `before` tokens; see `LogitsCallback`."""
        assert self._successors is not None
        self._successors.learn_text(self.index.sequence, before + start, top_tokens(logits))

    def learn(self, root: int, tree: DraftTree, logits: torch.Tensor, fetched: TopK | None) -> None:
        """Learn from a verified tree, the nodes that are not accepted included; where anything `learns`.

        Args:
            root: The last accepted token; the last of the index.
            tree: The drafted nodes.
            logits: [1 + nodes, vocabulary].
            fetched: What is known of them already.
        """
        assert self._successors is not None
        sequence = self.index.sequence
        tokens = np.concatenate([np.array([root], np.int32), tree.tokens])
        before = np.concatenate([sequence[-2:-1] if len(sequence) > 1 else [-1], tokens[tree.parents + 1]])
        known = None if fetched is None else fetched.best
        self._successors.learn(before, tokens, top_tokens(logits) if known is None else known)

    def copied(self, tree: DraftTree, node: int, token: int) -> str:
        """Note where an accepted node came from; returns its source's name."""
        source, position = int(tree.sources[node]), int(tree.positions[node])
        if source == DATASTORE:
            # An earlier answer may have copied it from what this prompt has, too.
            place = self.index.find_copy(token, _LEAST_COPY)
            if place is None:
                self.provenance.undrafted(token)
            else:
                self.provenance.drafted(*place)
            if self._recollection is not None:
                self._recollection.accepted(position)
            return SOURCES[DATASTORE]
        if source == SUCCESSOR:
            self.provenance.undrafted(token)
            return SOURCES[SUCCESSOR]
        self.provenance.drafted(source, position)
        return SOURCES[source] if self.index.locate(source, position).passage_id is None else "passage"
