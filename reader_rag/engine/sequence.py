"""One request while it is decoded: prefill, drafts, accepted tokens, and what its answer becomes.

A `DecodeSequence` does nothing by itself. The scheduler's thread prefills it, `step.run_step` asks it for a draft,
verifies it together with others', and hands it the logits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.draft.external.sources import SourceCounts
from reader_rag.draft.external.together import Drafting
from reader_rag.draft.tree import DraftTree
from reader_rag.engine.context import DecodeContext
from reader_rag.engine.outputs import Chunk, CopiedSpan, FinishReason, Generation, Stats
from reader_rag.engine.proposer import IndexedTexts, Proposer, index_texts
from reader_rag.engine.request import Request
from reader_rag.engine.text.detokenizer import Detokenizer
from reader_rag.kv_cache.hidden_states import HiddenStates
from reader_rag.kv_cache.layer_states import LayerOutputs
from reader_rag.kv_cache.tree_cache import TreeCache
from reader_rag.model.interface import Passed, SequenceCache
from reader_rag.model.step_costs import DraftBackoff, asked_positions_pay
from reader_rag.sampling.accept import accept_path
from reader_rag.sampling.logits_processors import any_met
from reader_rag.sampling.logprobs import TokenLogprobs, token_logprobs
from reader_rag.sampling.sampler import Verified, greedy

_log = logging.getLogger(__name__)

_TOKENS_BEFORE = 4
"""Prompt tokens that the first token of an answer is detokenized behind."""


class DecodeSequence:
    """One request while it is decoded. One thread decodes; `result` may be read from any.

    Args:
        context: What it uses of its engine.
        request: The prepared request.

    Attributes:
        request: As given.
        backoff: Decides which steps are made without a draft.
        finish: Why the answer ended; None while it has not.
    """

    def __init__(self, context: DecodeContext, request: Request) -> None:
        self.request = request
        self.backoff = DraftBackoff()
        self.finish: FinishReason | None = None
        self._context = context
        self._changing = threading.RLock()  # a callback may read `result`
        self._max_tokens = min(request.params.max_tokens, context.context_window - len(request.prompt.token_ids))
        self._eos_ids = frozenset[int]() if request.params.ignore_eos else context.eos_ids
        self._tokens, self._logprobs, self._margins = list[int](), list[TokenLogprobs](), list[float]()
        self._taken, self._began = 0, 0.0
        self._complete = self._skips = False
        self._counts, self._accepted = Counter[str](), Counter[str]()
        self._seconds = {"queue": 0.0, "ttft": 0.0, "decode": 0.0, "draft": 0.0}
        self._texts: IndexedTexts | None = None
        self._state: _State | None = None
        self._copied: tuple[CopiedSpan, ...] = ()
        self._source_counts: dict[str, SourceCounts] = {}
        before = request.prompt.token_ids[-_TOKENS_BEFORE:]
        self._text = Detokenizer(context.tokenizer, request.params.stop, before, request.params.include_stop)

    @property
    def positions(self) -> int:
        """Most positions of its KV cache that prompt and answer may take."""
        return len(self.request.prompt.token_ids) + self._max_tokens

    @property
    def prefilling(self) -> bool:
        """Whether no token is emitted yet."""
        return not self._tokens

    @property
    def root(self) -> int:
        """The last emitted token."""
        return self._tokens[-1]

    @property
    def cache(self) -> SequenceCache:
        """The KV cache of prompt and answer up to the root; it exists from the first `prefill` to `release`."""
        assert self._state is not None
        return self._state.cache

    @property
    def outputs(self) -> LayerOutputs | None:
        """Receives the outputs of layers that its draft sources need; see `Proposer.outputs`."""
        return None if self._state is None else self._state.proposer.outputs

    @property
    def acceptance_ratio(self) -> float:
        """Accepted over expected tokens of its drafts; see `Proposer.acceptance_ratio`."""
        return 1.0 if self._state is None else self._state.proposer.acceptance_ratio

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted for it."""
        request = self.request
        return request.params.speculate and request.draft.max_nodes > 0 and self._context.drafting != "none"

    @property
    def keeps_states(self) -> bool:
        """Whether hidden states of its prompt are kept, so that drafts can ask for what follows its positions."""
        return self.drafts and self.request.draft.max_successors > 0 and asked_positions_pay(self._context.target)

    @property
    def state_bytes(self) -> int:
        """Bytes of the hidden states of its prompt, those for draft sources included."""
        target, length = self._context.target, len(self.request.prompt.token_ids)
        layers = len(self.request.hidden_layers(target.layer_count)) if self.drafts else 0
        kept = HiddenStates.bytes_for(length, target.hidden_width if self.keeps_states else 0)
        return kept + LayerOutputs.bytes_for(length, layers, target.model)

    @property
    def learns(self) -> bool:
        """Whether drafting learns from the next pass; not in a step that is made without a draft."""
        return self._state is not None and self._state.proposer.learns and not self._skips

    def prepare(self) -> None:
        """Index prompt and passages; from any thread, before the first `prefill`."""
        if self._texts is None:
            self._texts = index_texts(self._context, self.request, self._max_tokens)

    @torch.inference_mode()
    def prefill(self) -> None:
        """Prefill a chunk of the prompt; the last one emits the first token."""
        state = self._state = self._state or self._begin()
        logits = next(state.prefill)
        if state.cache.length < len(self.request.prompt.token_ids):
            return
        state.keep_prefix()
        if state.states is not None:
            state.proposer.end_prefill(state.states.known, logits)
        with self._changing, self._callbacks():
            token = self.request.sampler(Verified(logits, DraftTree.empty(), state.proposer.index.sequence))(0)
            self._counts["cache_bytes"] = state.cache.nbytes
            self._emit(token)
            self._record(logits, [0], [token])
            self._observe(state, DraftTree.empty(), [], [token])
            self._seconds["ttft"] = time.perf_counter() - self._began

    def drafting(self, *, skip: bool) -> Drafting:
        """Make the best draft that the target can verify now; sources from outside that are asked are yielded.

        Args:
            skip: Whether to make none where no grammar forces a token.
        """
        state = self._state
        assert state is not None
        self._skips = skip  # where no draft has paid for a while, learning for drafts does not either
        if not self.drafts:
            return DraftTree.empty()
        # A step emits one token more than it accepts; a longer draft would be cut off.
        depth = self._max_tokens - len(self._tokens) - 1
        target = self._context.target
        deepest = target.deepest(state.cache.length)
        depth = depth if deepest is None else min(depth, deepest)
        tree = state.proposer.skip() if skip else (yield from state.proposer.drafting(depth, state.cache.length))
        constraint = self.request.constraint
        if constraint is not None:
            tree = constraint.shape(tree, state.proposer.index.sequence, self.request.draft.max_nodes, depth)
            state.proposer.skip()  # what a grammar allows says nothing about what the model prefers
        return tree if self._context.verifies_branches else tree.chain()

    def ask(self, tree: DraftTree, verified: int) -> NDArray[np.int32]:
        """The positions of the prompt whose logits are to be computed beside a draft's, the most useful first.

        Args:
            tree: The last draft.
            verified: How many of its nodes are verified.

        Returns:
            int32 [n], at most `ASKED`.
        """
        state = self._state
        if state is None or state.states is None or not self.learns:
            return np.zeros(0, np.int32)
        return state.proposer.ask(tree, verified)

    @property
    def prompt_states(self) -> HiddenStates:
        """Hidden states of the prompt, which has positions that `ask` returned."""
        assert self._state is not None
        assert self._state.states is not None
        return self._state.states

    @property
    def wants_logits(self) -> bool:
        """Whether more of its logits is used than best and drawn tokens: to process, to report or to constrain."""
        request, sampler = self.request, self.request.sampler
        chooses = sampler is not greedy and request.draw is None and getattr(sampler, "needs_logits", True)
        return chooses or request.params.logprobs is not None or request.params.record_margins

    def learn(self, tree: DraftTree, passed: Passed, positions: NDArray[np.int32] | None, asked: Passed | None) -> None:
        """Learn for later drafts from a pass, rejected nodes included; before `accept`.

        Args:
            tree: As for `accept`.
            passed: As for `accept`.
            positions: int32 [n], positions of the prompt that `ask` returned, which the pass computed too; None: none.
            asked: What it computed for them.
        """
        assert self._state is not None
        if positions is not None and asked is not None:
            self._state.proposer.learn_asked(positions, asked.logits, asked.top)
        if self.learns:
            self._state.proposer.learn(self.root, tree, passed.logits, passed.top)

    def accept(self, tree: DraftTree, passed: Passed) -> tuple[int, Counter[str]]:
        """Emit the target's tokens along the draft and commit the accepted path.

        Args:
            tree: What was verified: the first nodes of the last draft.
            passed: What the pass computed.

        Returns:
            How many tokens were emitted, and the accepted nodes by source.
        """
        state, (logits, top, drawn) = self._state, passed
        assert state is not None
        with self._changing, self._callbacks():
            argmax = None if top is None else top.argmax
            choose = self.request.sampler(Verified(logits, tree, state.proposer.index.sequence, argmax, drawn))
            accepted, emitted = accept_path(tree, lambda node: choose(node + 1), self._emit)
            rows = [0, *(node + 1 for node in accepted)]
            state.cache.commit(rows)
            self._counts.update(steps=1, drafted=len(tree))
            self._record(logits, rows[: len(emitted)], emitted)
            return len(emitted), self._observe(state, tree, accepted, emitted)

    def queued(self, seconds: float) -> None:
        """Count the time that it waited in the queue."""
        self._seconds["queue"] = seconds

    def spent(self, seconds: float, drafting: float, sequences: int) -> None:
        """Count the time of a step.

        Args:
            seconds: All of it.
            drafting: Of that, for making its draft.
            sequences: Sequences of the step.
        """
        self._seconds["decode"] += seconds
        self._seconds["draft"] += drafting
        if self._state is not None:
            self._state.proposer.spent(seconds, sequences)

    def take(self) -> Chunk:
        """What was emitted since the last call."""
        new = slice(self._taken, len(self._tokens))
        self._taken = len(self._tokens)
        return Chunk(self._text.take(), tuple(self._tokens[new]), self.finish, tuple(self._logprobs[new]))

    def release(self) -> None:
        """Free the KV cache and the draft index. A complete answer goes to the prefix cache and the datastore.

        An error in a step keeps nothing more, even where the answer was about to end.
        """
        if self._state is None:
            return
        with self._changing:
            self._copied = self._state.proposer.provenance.spans(self._text.text, self._text.ends)
            state, self._state = self._state, None
        try:
            if self._complete:
                state.keep_prefix()
        finally:
            state.cache.release()
            if state.states is not None:
                state.states.release()
            with self._callbacks():
                state.proposer.forget()
        request, lookup = self.request, self._context.lookup
        if self._complete and request.recalls and lookup is not None:
            lookup.keep(request.tenant, request.prompt.token_ids, self._tokens, state.proposer.used_documents)

    @property
    def result(self) -> Generation:
        """The answer; what there is of it if it is not done."""
        with self._changing:
            state = self._state
            text, ends = self._text.text, self._text.ends
            return Generation(
                text=text,
                token_ids=tuple(self._tokens),
                finish_reason=self.finish or "length",
                stats=self._stats(),
                copied=self._copied if state is None else state.proposer.provenance.spans(text, ends),
                logprobs=tuple(self._logprobs),
                margins=tuple(self._margins),
            )

    def _stats(self) -> Stats:
        return Stats(
            prompt_tokens=len(self.request.prompt.token_ids),
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
            prediction_accepted=self._counts["prediction_accepted"],
            prediction_rejected=self._counts["prediction_rejected"],
            draft_sources={name: replace(counts) for name, counts in self._source_counts.items()},
        )

    def _begin(self) -> _State:
        request = self.request
        if self.drafts:
            self._context.costs.measure(request.draft.max_nodes)
        self._began = time.perf_counter()
        self.prepare()
        assert self._texts is not None
        texts, self._texts = self._texts, None
        draft = request.draft if self.drafts else replace(request.draft, max_successors=0, calibrates=False)
        proposer = Proposer(self._context, request, draft, texts)
        self._source_counts = proposer.source_counts
        target, states = self._context.target, None
        if self.keeps_states:
            states = HiddenStates(len(request.prompt.token_ids), target.hidden_width, target.device)
        cache = target.new_cache(self.positions, draft.max_nodes)
        state = _State(self._context, request, proposer, cache, states)
        self._counts["reused_tokens"] = state.reused
        return state

    def _callbacks(self) -> AbstractContextManager[None]:
        """Around what may call code of the caller's."""
        return self._context.callbacks.running() if self.request.has_callbacks else nullcontext()

    def _emit(self, token: int) -> bool:
        """Append one token, as plain decoding does; returns whether the answer ends with it."""
        self._tokens.append(token)
        if token in self._eos_ids:
            self._text.ends.append(len(self._text.text))
            self.finish = "stop"
        elif self._text.push(token) or self._criterion_met():
            self.finish = "stop"
        elif len(self._tokens) >= self._max_tokens:
            self.finish = "length"
        return self.finish is not None

    def _observe(self, state: _State, tree: DraftTree, accepted: list[int], emitted: list[int]) -> Counter[str]:
        """Hand a verified draft to the proposer; returns accepted nodes by source."""
        sources = state.proposer.observe(tree, accepted, emitted)
        self._accepted += sources
        if state.proposer.prediction is not None:
            self._counts["prediction_accepted"] = state.proposer.prediction.accepted
            self._counts["prediction_rejected"] = state.proposer.prediction.rejected
        if self.finish is not None:
            self._text.finish()
            self._complete = True
        return sources

    def _criterion_met(self) -> bool:
        if not self.request.criteria:
            return False
        ids = torch.tensor([[*self.request.prompt.token_ids, *self._tokens]], device=self._context.target.device)
        return any_met(self.request.criteria, ids)

    def _record(self, logits: torch.Tensor, rows: list[int], tokens: list[int]) -> None:
        params = self.request.params
        if params.logprobs is not None:
            self._logprobs += token_logprobs(logits, rows, tokens, params.logprobs)
        if params.record_margins:
            best = logits[rows].float().topk(2, dim=-1).values
            self._margins.extend((best[:, 0] - best[:, 1]).tolist())


class _State:
    """What a sequence holds from its first prefill to its end.

    Args:
        context: The engine's.
        request: The request.
        proposer: Its drafts.
        cache: An empty KV cache.
        states: Where hidden states of the prompt are kept; None: they are not.

    Attributes:
        proposer, cache, states: As given.
        prefill: Logits of the chunks of the prompt, computed when they are read.
        reused: Leading tokens of the prompt that were taken from the prefix cache.
    """

    def __init__(
        self,
        context: DecodeContext,
        request: Request,
        proposer: Proposer,
        cache: SequenceCache,
        states: HiddenStates | None,
    ) -> None:
        self.proposer = proposer
        self.cache = cache
        self.states = states
        self._context = context
        self._request = request
        self.reused = self._restore_prefix()
        self.prefill: Iterator[torch.Tensor] = context.target.prefill_chunks(
            request.prompt.token_ids[self.reused :], cache, states, proposer.outputs
        )

    def _restore_prefix(self) -> int:
        """Fill KV cache and hidden states from the prefix cache; returns how many positions."""
        reuse, prefixes, prompt = self._context.reuse, self._context.prefix_cache, self._request.prompt.token_ids
        if reuse is None or prefixes is None or not reuse.positions(len(prompt), len(prompt)):
            return 0
        return prefixes.restore(self._request.tenant, prompt, cast(TreeCache, self.cache), self.states)

    def keep_prefix(self) -> None:
        """Put the committed keys and values into the prefix cache, and the hidden states."""
        reuse, prefixes = self._context.reuse, self._context.prefix_cache
        if reuse is None or prefixes is None:
            return
        count = reuse.positions(len(self._request.prompt.token_ids), self.cache.length)
        try:
            tokens = self.proposer.index.sequence[:count]
            prefixes.insert(self._request.tenant, tokens, cast(TreeCache, self.cache), self.states)
        except Exception:
            # The answer is right without; but nothing that is half kept may be found.
            prefixes.clear()
            _log.exception("a prefix could not be kept in the prefix cache")
