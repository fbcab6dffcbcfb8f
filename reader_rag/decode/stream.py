"""One answer in the making: prefill, then draft, verify, commit until it is done."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reader_rag.config import DraftConfig, GenerationConfig
from reader_rag.decode.best import best_tokens
from reader_rag.decode.costs import remembered
from reader_rag.decode.grammar import Constraint
from reader_rag.decode.learned import Learned
from reader_rag.decode.logprobs import token_logprobs
from reader_rag.decode.provenance import Provenance
from reader_rag.decode.select import Selector, Verified
from reader_rag.decode.step import AnyCache
from reader_rag.decode.text import TextAssembler
from reader_rag.decode.types import (
    Chunk,
    CopiedSpan,
    FinishReason,
    Generation,
    Passage,
    Prompt,
    Stats,
    TokenLogprobs,
)
from reader_rag.decode.walk import walk
from reader_rag.draft.builder import TreeBuilder
from reader_rag.draft.context import ContextIndex
from reader_rag.draft.tree import SOURCES, SUCCESSOR, DraftTree
from reader_rag.model_cache import cache_folder

if TYPE_CHECKING:
    from reader_rag.decode.engine import Engine

StoppingCriterion = Callable[[torch.Tensor, None], Any]
"""A `StoppingCriteria` of `transformers`, or a function like it: token ids [1, length] and None to whether to stop."""

_TOKENS_BEFORE = 4
"""Prompt tokens that the first token of an answer is decoded behind."""


class GenerationStream(Iterator[Chunk]):
    """One answer in the making; see `Engine.stream`.

    Close it (or use it in a `with`) to end early: its cache is freed at once.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        generation: GenerationConfig,
        passages: Sequence[Passage],
        tenant: str,
        draft: DraftConfig,
        selector: Selector,
        criteria: Sequence[StoppingCriterion],
        constraint: Constraint | None,
    ) -> None:
        self.tenant = tenant
        self._engine = engine
        self._prompt = prompt
        self._generation = generation
        self._passages = tuple(passages)
        self._draft = draft
        self._max_tokens = min(generation.max_tokens, engine.context_window - len(prompt.token_ids))
        self._select = selector
        self._criteria = criteria
        self._constraint = constraint
        # An answer that goes on after them has no ends.
        self._ends_at = frozenset[int]() if generation.ignore_eos else engine.eos_ids
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._margins: list[float] = []
        self._finish: FinishReason | None = None
        self._counts: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._seconds = {"ttft": 0.0, "decode": 0.0, "draft": 0.0}
        self._state: _State | None = None
        self._closed = False
        self._busy = threading.Lock()
        self._copied: tuple[CopiedSpan, ...] = ()
        self._text = TextAssembler(
            engine.tokenizer, generation.stop, prompt.token_ids[-_TOKENS_BEFORE:], generation.include_stop
        )

    def __next__(self) -> Chunk:
        """Run one step of the engine: the prefill at first, then one verified draft each.

        Raises:
            StopIteration: The answer is done, or the stream was closed.
        """
        with self._busy:
            if self._closed or self._finish is not None:
                raise StopIteration
            before = len(self._tokens)
            try:
                with self._engine.lock, torch.inference_mode():
                    self._step() if self._state else self._begin()
            except BaseException:
                self._closed = True
                self._release()
                raise
            if self._finish is not None:
                self._release()
            new = tuple(self._tokens[before:])
            chunk = Chunk(self._text.take(), new, self._finish, tuple(self._logprobs[before:]))
        if self._closed:  # by another thread during the step, which left the cache to this one
            self.close()
        return chunk

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End early and free the cache; a step that is running in another thread is finished first, by that thread."""
        self._closed = True
        if self._busy.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._busy.release()

    @property
    def result(self) -> Generation:
        """The answer; what there is of it if the stream was closed early or is not done."""
        stats = Stats(
            prompt_tokens=len(self._prompt.token_ids),
            completion_tokens=len(self._tokens),
            steps=self._counts["steps"],
            drafted=self._counts["drafted"],
            accepted=sum(self._accepted.values()),
            accepted_by_source=dict(self._accepted),
            ttft_s=self._seconds["ttft"],
            decode_s=self._seconds["decode"],
            draft_s=self._seconds["draft"],
            cache_bytes=self._counts["cache_bytes"],
        )
        copied = self._state.provenance.spans(self._text.text, self._text.ends) if self._state else self._copied
        return Generation(
            text=self._text.text,
            token_ids=tuple(self._tokens),
            finish_reason=self._finish or "length",
            stats=stats,
            copied=copied,
            logprobs=tuple(self._logprobs),
            margins=tuple(self._margins),
        )

    def _begin(self) -> None:
        """Index the texts, prefill the prompt, emit its first token."""
        started = time.perf_counter()
        if self._drafts and self._engine.target.fixed is None:
            costs = self._engine.costs
            if costs is None or costs.max_nodes < self._draft.max_nodes:
                self._engine.costs = remembered(self._engine.target, self._draft.max_nodes, cache_folder() / "costs")
                started = time.perf_counter()
        draft = self._draft if self._drafts else replace(self._draft, max_successors=0, calibrates=False)
        learned = self._engine.learned.of(self.tenant, draft)
        state = self._state = _State(self._engine, self._prompt, self._passages, draft, self._max_tokens, learned)
        seen = state.learn_prompt if draft.max_successors else None
        logits = self._engine.target.prefill(self._prompt.token_ids, state.cache, seen)
        nothing = DraftTree.empty()
        token = self._select(Verified(logits, nothing, state.index.sequence))(0)
        self._counts["cache_bytes"] = state.cache.nbytes
        self._take(token)
        self._record(logits, [0], [token])
        self._emit(state, nothing, [], [token])
        self._seconds["ttft"] = time.perf_counter() - started

    def _step(self) -> None:
        """Draft, verify, accept, commit."""
        state = self._state
        assert state is not None
        started = time.perf_counter()
        root = self._tokens[-1]
        tree = self._make_draft(state)
        drafted = time.perf_counter()
        position = state.cache.length
        logits = self._engine.target.verify(root, tree, state.cache)
        state.learn(root, tree, logits)
        target = self._select(Verified(logits, tree, state.index.sequence))
        accepted, emitted = walk(tree, lambda node: target(node + 1), self._take)
        rows = [0, *(node + 1 for node in accepted)]
        state.cache.keep(rows)
        self._counts["steps"] += 1
        self._counts["drafted"] += len(tree)
        self._record(logits, rows[: len(emitted)], emitted)
        if self._engine.costs is not None:
            self._engine.costs.observe(len(tree) + 1, position, time.perf_counter() - drafted)
        self._emit(state, tree, accepted, emitted)
        self._seconds["draft"] += drafted - started
        self._seconds["decode"] += time.perf_counter() - started

    @property
    def _drafts(self) -> bool:
        return self._generation.speculate and self._draft.max_nodes > 0 and self._engine.drafting != "none"

    def _make_draft(self, state: _State) -> DraftTree:
        """The best tree of the size that pays; empty where a plain step is faster."""
        if not self._drafts:
            return DraftTree.empty()
        # A step emits one token more than it accepts; a draft longer than that would be thrown away.
        depth = self._max_tokens - len(self._tokens) - 1
        target, costs = self._engine.target, self._engine.costs
        deepest = target.deepest(state.cache.length)
        if deepest is not None:
            depth = min(depth, deepest)
        rests = costs is not None and costs.rests()
        tree = state.builder.skip() if rests else state.builder.build(state.index, max_depth=depth)
        if self._constraint is not None:
            tree = self._constraint.shape(tree, state.index.sequence, self._draft.max_nodes, depth)
            state.builder.skip()  # what is allowed says nothing of what the model tends to say
        if target.fixed is not None or self._engine.drafting == "chain":
            tree = tree.chain()
        if costs is None or rests:
            return tree
        return tree.head(costs.best_size(tree, state.cache.length, state.builder.luck))

    def _take(self, token: int) -> bool:
        """Take one emitted token, as plain decoding would; whether the answer ends with it."""
        self._tokens.append(token)
        if token in self._ends_at:
            self._text.ends.append(len(self._text.text))
            self._finish = "stop"
        elif self._text.push(token) or self._criterion_met():
            self._finish = "stop"
        elif len(self._tokens) >= self._max_tokens:
            self._finish = "length"
        return self._finish is not None

    def _emit(self, state: _State, tree: DraftTree, accepted: list[int], emitted: list[int]) -> None:
        """Note where the emitted tokens came from, and learn how the draft fared."""
        for k, token in enumerate(emitted):
            if k < len(accepted):
                self._accepted[state.copied(tree, accepted[k], token)] += 1
            else:
                state.provenance.undrafted(token)
        state.builder.observe(emitted)
        state.index.extend(emitted)
        if self._finish is not None:
            self._text.finish()

    def _criterion_met(self) -> bool:
        if not self._criteria:
            return False
        ids = torch.tensor([[*self._prompt.token_ids, *self._tokens]], device=self._engine.target.device)
        # All are asked, as in `transformers`: one that counts its calls must not miss any.
        met = [bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self._criteria]
        return any(met)

    def _record(self, logits: torch.Tensor, rows: list[int], tokens: list[int]) -> None:
        if self._generation.logprobs is not None:
            self._logprobs += token_logprobs(logits, rows, tokens, self._generation.logprobs)
        if self._generation.record_margins:
            best = logits[rows].float().topk(2, dim=-1).values
            self._margins.extend((best[:, 0] - best[:, 1]).tolist())

    def _release(self) -> None:
        if self._state is not None:
            self._copied = self._state.provenance.spans(self._text.text, self._text.ends)
            self._state = None


class _State:
    """What a stream holds while it runs: cache, draft index, provenance."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        passages: Sequence[Passage],
        draft: DraftConfig,
        max_tokens: int,
        learned: Learned,
    ) -> None:
        self.cache: AnyCache = engine.target.new_cache(len(prompt.token_ids) + max_tokens, draft.max_nodes)
        self.index = ContextIndex(
            prompt.token_ids,
            max_occurrences=draft.max_occurrences,
            max_passage_tokens=draft.max_passage_tokens,
            reserve=max_tokens,
        )
        self.builder = TreeBuilder(
            max_nodes=draft.max_nodes,
            max_depth=draft.max_depth,
            min_probability=draft.min_probability,
            max_occurrences=draft.max_occurrences,
            successors=learned.successors,
            calibration=learned.calibration,
        )
        self._successors = learned.successors if draft.max_successors else None
        self.provenance = Provenance(self.index, prompt)
        for passage in passages:
            if passage.text.strip() and not self.provenance.mark(passage):
                text = engine.tokenize(passage.text, special=False)
                self.provenance.add(passage, text.token_ids, text.offsets)

    def learn_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Learn from a chunk of the prompt; see `SeenLogits`."""
        assert self._successors is not None
        self._successors.learn_text(self.index.sequence, start, best_tokens(logits))

    def learn(self, root: int, tree: DraftTree, logits: torch.Tensor) -> None:
        """Learn from a verified tree, the nodes that are not accepted included.

        Args:
            root: The last accepted token; the last of the index.
            tree: The drafted nodes.
            logits: [1 + nodes, vocabulary].
        """
        if self._successors is None:
            return
        sequence = self.index.sequence
        tokens = np.concatenate([np.array([root], np.int32), tree.tokens])
        before = np.concatenate([sequence[-2:-1] if len(sequence) > 1 else [-1], tokens[tree.parents + 1]])
        self._successors.learn(before, tokens, best_tokens(logits))

    def copied(self, tree: DraftTree, node: int, token: int) -> str:
        """Note where an accepted node came from; returns its source's name."""
        source, position = int(tree.sources[node]), int(tree.positions[node])
        if source == SUCCESSOR:
            self.provenance.undrafted(token)
            return SOURCES[SUCCESSOR]
        self.provenance.drafted(source, position)
        return SOURCES[source] if self.index.locate(source, position).passage_id is None else "passage"
