"""Other training-free draft sources replayed on recorded answers, with an upper bound of copying (oracles).

The peers are prompt lookup, prompt lookup trees (dejavuu's rule), vLLM's n-gram and suffix rules, SuffixDecoding, and
this package's own chains, which engines without tree verification use. Each is a class with the `DraftSource` protocol;
`RULES`, `SUFFIX_DECODING` and `ORACLES` name them.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from reader_rag.bench.inputs import Trace
from reader_rag.draft.chains import ChainDrafter
from reader_rag.draft.profile import Profile
from reader_rag.draft.source import Budget, DraftSource, Proposal, RequestState, SourceFactory, Verified
from reader_rag.draft.step_table import StepTable
from reader_rag.draft.tree import DraftTree

DEPTH = 40
"""Most tokens that an oracle copies in a step."""
_MAX_NODES = 1024
_NO_TOKEN = -1


class PromptLookup:
    """Prompt lookup by transformers' own generator.

    Args:
        most: Longest n-gram that is looked up; its first occurrence with a continuation is copied.
        width: Tokens of a draft.
    """

    needs_hidden_states = False

    def __init__(self, most: int = 2, width: int = 10) -> None:
        import torch
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self._tensor = torch.tensor
        self._generator: Any = PromptLookupCandidateGenerator(num_output_tokens=width, max_matching_ngram_size=most)

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        """Propose what follows the first occurrence of the last tokens (`DraftSource.propose`)."""
        length = len(state.tokens)
        self._generator.max_length = length + budget.max_depth
        candidates, _ = self._generator.get_candidates(self._tensor(state.tokens[None].astype(np.int64)))
        return Proposal.chain(candidates[0, length:].tolist())

    def observe(self, verified: Verified) -> None:
        """Nothing is learned."""

    def forget(self) -> None:
        """Nothing is kept."""


class VllmNgram:
    """vLLM's n-gram rule, reimplemented: copy what follows the first occurrence of the longest n-gram at the end.

    Args:
        least: Shortest n-gram.
        most: Longest n-gram.
        width: Tokens of a draft.
    """

    needs_hidden_states = False

    def __init__(self, least: int = 2, most: int = 4, width: int = 10) -> None:
        self._least = least
        self._most = most
        self._width = width
        self._length = 0
        self._after: dict[tuple[int, ...], int] = {}  # by n-gram, where its first occurrence ends

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        """Propose what follows the first occurrence of the longest n-gram (`DraftSource.propose`)."""
        tokens = state.tokens.tolist()
        length = len(tokens)
        for end in range(self._length + 1, length + 1):
            for n in range(self._least, min(self._most, end) + 1):
                self._after.setdefault(tuple(tokens[end - n : end]), end)
        self._length = length
        for n in range(min(self._most, length), self._least - 1, -1):
            after = self._after[tuple(tokens[-n:])]
            if after < length:
                return Proposal.chain(tokens[after : after + min(self._width, budget.max_depth)])
        return Proposal.chain([])

    def observe(self, verified: Verified) -> None:
        """Nothing is learned: `propose` indexes what is new."""

    def forget(self) -> None:
        """Drop the request's n-grams."""
        self._length = 0
        self._after.clear()


class PromptLookupTree:
    """Prompt lookup with branches, reimplemented from the rule of dejavuu 0.2 (`pld` with `--tree`).

    The longest n-gram at the end of the text is looked up. Each of the tokens that followed it begins a chain, which
    copies what came after the last occurrence with that token; the latest occurrences come first.

    Args:
        most: Longest n-gram that is looked up; the shortest is a single token.
        width: Most chains, dejavuu's `width`.
        nodes: Most tokens of a draft, in all chains together, dejavuu's `budget`.
        depth: Most tokens of a chain; in dejavuu the first chain may have all of `nodes`.
    """

    needs_hidden_states = False

    def __init__(self, most: int = 4, width: int = 2, nodes: int = 8, depth: int = 8) -> None:
        self._most = most
        self._width = width
        self._nodes = nodes
        self._depth = depth
        self._length = 0
        self._after: dict[tuple[int, ...], list[int]] = defaultdict(list)  # by n-gram, where its occurrences end

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        """Propose what followed the last tokens wherever they occurred (`DraftSource.propose`)."""
        tokens = state.tokens.tolist()
        length = len(tokens)
        # An occurrence is known once a token follows it.
        for end in range(max(self._length, 1), length):
            for n in range(1, min(self._most, end) + 1):
                self._after[tuple(tokens[end - n : end])].append(end)
        self._length = length
        for n in range(min(self._most, length), 0, -1):
            found = self._after.get(tuple(tokens[-n:]))
            if found:
                return self._tree(tokens, found, budget)
        return Proposal.chain([])

    def _tree(self, tokens: list[int], ends: list[int], budget: Budget) -> Proposal:
        """Chains of the latest occurrences with different next tokens."""
        starts: dict[int, int] = {}
        for end in reversed(ends):
            starts.setdefault(tokens[end], end)
            if len(starts) == self._width:
                break
        drafted: list[int] = []
        parents: list[int] = []
        for start in starts.values():
            room = min(self._nodes - len(drafted), self._depth, budget.max_depth)
            for depth, token in enumerate(tokens[start : start + room]):
                parents.append(len(drafted) - 1 if depth else -1)
                drafted.append(token)
        return Proposal(drafted, parents, [0.0] * len(drafted))

    def observe(self, verified: Verified) -> None:
        """Nothing is learned: `propose` indexes what is new."""

    def forget(self) -> None:
        """Drop the request's n-grams."""
        self._length = 0
        self._after.clear()


@dataclass(frozen=True)
class SuffixSettings:
    """Settings of the SuffixDecoding library. `factor` and `min_probability` default to vLLM's values, `depth` to the
    library's.

    Attributes:
        depth: Most tokens that match and draft have together.
        factor: Most tokens of a draft for each that matched.
        min_probability: Least estimated probability of a drafted token.
        width: Most tokens of a draft.
        tree: Draft a tree, not a chain.
    """

    depth: int = 64
    factor: float = 1.0
    min_probability: float = 0.1
    width: int = 16
    tree: bool = False


VLLM_SUFFIX = SuffixSettings(depth=24, width=24)
"""The defaults of vLLM 0.32: a tree of 24 tokens at most, match and draft together."""
TUNED_TREE = SuffixSettings(factor=4.0, min_probability=0.02, width=64, tree=True)


class SuffixDecoding:
    """SuffixDecoding by its authors' library, `arctic-inference`.

    Args:
        settings: Settings of the library.
        warm: Whether earlier answers stay in the library's cache; otherwise that cache is off.

    Raises:
        ImportError: The library is not installed.
    """

    needs_hidden_states = False

    def __init__(self, settings: SuffixSettings, *, warm: bool = False) -> None:
        library = importlib.import_module("arctic_inference.suffix_decoding")
        self._settings = settings
        self._cache = library.SuffixDecodingCache(settings.depth, max_cached_requests=-1 if warm else 0)
        self._request, self._started = 0, False

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        """Propose the library's draft (`DraftSource.propose`)."""
        if not self._started:
            self._cache.start_request(self._request, state.tokens.tolist())
            self._started = True
        draft = self._cache.speculate(
            self._request,
            state.tokens[-self._settings.depth :].tolist(),
            max_spec_tokens=self._settings.width,
            max_spec_factor=self._settings.factor,
            min_token_prob=self._settings.min_probability,
            use_tree_spec=self._settings.tree,
        )
        return Proposal(draft.token_ids, draft.parents, np.log(np.maximum(draft.probs, 1e-12)))

    def observe(self, verified: Verified) -> None:
        """Append the emitted tokens (`DraftSource.observe`)."""
        self._cache.add_active_response(self._request, list(verified.tokens))

    def forget(self) -> None:
        """End the request; a warm cache keeps its answer."""
        self._cache.stop_request(self._request)
        self._request, self._started = self._request + 1, False


class ReaderChain:
    """This package's chains, without tokens learned from logits; every drafted token is verified.

    Args:
        width: Tokens of a draft.
        profile: The model's profile; None: there is none.
    """

    needs_hidden_states = False

    def __init__(self, width: int, profile: Profile | None = None) -> None:
        prior = profile.tokens if profile is not None else None
        self._drafter = ChainDrafter(1, width, _FREE, prior=prior, threads=1)
        self._row = np.zeros(1, np.int64)
        self._emitted = 0

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        """Propose the chain of a batch of one row (`DraftSource.propose`)."""
        lengths, emitted, limits = np.array([[len(state.tokens)], [self._emitted], [budget.max_depth]])
        chains, verified = self._drafter.draft(state.tokens[None], self._row, lengths, emitted, limits)
        return Proposal.chain(chains[0, : verified[0]].tolist())

    def observe(self, verified: Verified) -> None:
        """Record the number of emitted tokens (`DraftSource.observe`)."""
        self._emitted = len(verified.tokens)

    def forget(self) -> None:
        """Drop the request."""
        self._drafter.forget()
        self._emitted = 0


_FREE = StepTable((1,), (0, 1), ((1.0, 1.0),))
"""Step costs that do not depend on the number of drafted tokens."""
_CHAINS = (4, 8, 10, 16)

RULES: Mapping[str, SourceFactory] = {
    "prompt-lookup": PromptLookup,
    "prompt-lookup-tree (dejavuu)": PromptLookupTree,
    "prompt-lookup-tree of 64": partial(PromptLookupTree, width=4, nodes=64, depth=16),
    "vllm-ngram": VllmNgram,
}
SUFFIX_DECODING: Mapping[str, SourceFactory] = {
    "vllm-suffix": lambda: SuffixDecoding(VLLM_SUFFIX),
    "suffix-decoding": lambda: SuffixDecoding(SuffixSettings()),
    "suffix-decoding tuned tree": lambda: SuffixDecoding(TUNED_TREE),
    "suffix-decoding, warm": lambda: SuffixDecoding(SuffixSettings(), warm=True),
    "suffix-decoding tuned tree, warm": lambda: SuffixDecoding(TUNED_TREE, warm=True),
}
ORACLES: Mapping[str, bool] = {"oracle: best copy after a match": True, "oracle: best copy": False}
"""Whether the token before the copy must match."""


def replay_peers(
    traces: Sequence[Trace], progress: Callable[[str], None], profile: Profile | None = None
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Replay traces by every peer, by this package's chains, and by the oracles, which know the answer.

    Args:
        traces: The answers. A warm peer has seen the earlier ones of the same category.
        progress: Called with the name of what runs next.
        profile: The model's profile, for this package's chains; None: there is none.

    Returns:
        Mean tokens emitted per step, by peer and category; and lines that say which peers were left out.
    """
    categories: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        categories[trace.category].append(trace)
    peers: dict[str, SourceFactory] = {
        **RULES,
        **{f"reader chain of {width}": partial(ReaderChain, width, profile) for width in _CHAINS},
    }
    notes = []
    try:
        importlib.import_module("arctic_inference.suffix_decoding")
        peers |= SUFFIX_DECODING
    except ImportError as cause:
        notes.append(f"SuffixDecoding is left out ({cause}): pip install reader-rag[peers]")
    counts: dict[str, Callable[[Sequence[Trace]], int]] = {
        **{name: partial(_source_steps, make) for name, make in peers.items()},
        **{name: partial(_oracle_steps, matches) for name, matches in ORACLES.items()},
    }
    results: dict[str, dict[str, float]] = {}
    for name, count in counts.items():
        for category, members in categories.items():
            progress(f"{name}: {category}")
            results.setdefault(name, {})[category] = round(
                sum(len(trace.output) for trace in members) / count(members), 4
            )
    return results, notes


def best_copy_steps(trace: Trace, *, after_match: bool, known: Iterable[Sequence[int]] = ()) -> int:
    """The number of steps of an answer if each copies the longest span that agrees with the next `DEPTH` tokens.

    Args:
        trace: The answer.
        after_match: Copy only from positions after a token that equals the last token of the text.
        known: Other texts to copy from, as token ids.
    """
    text = [token for other in known for token in (*other, _NO_TOKEN)]
    text.extend(trace.prompt)
    occurrences: dict[int, list[int]] = defaultdict(list)
    for position, token in enumerate(text):
        occurrences[token].append(position)
    emitted = steps = 0
    while emitted < len(trace.output):
        ahead = trace.output[emitted : emitted + DEPTH]
        starts = (position + 1 for position in occurrences[text[-1]]) if after_match else occurrences[ahead[0]]
        tokens = trace.output[emitted : emitted + 1 + max((_agreeing(text, at, ahead) for at in starts), default=0)]
        for token in tokens:
            occurrences[token].append(len(text))
            text.append(token)
        emitted += len(tokens)
        steps += 1
    return steps


def _agreeing(text: Sequence[int], start: int, ahead: Sequence[int]) -> int:
    """The number of tokens of the text from `start` on that agree with the next tokens of the answer."""
    length = 0
    for token in ahead[: len(text) - start]:
        if text[start + length] != token:
            break
        length += 1
    return length


def _oracle_steps(after_match: bool, traces: Iterable[Trace]) -> int:
    return sum(best_copy_steps(trace, after_match=after_match) for trace in traces)


def _source_steps(make: SourceFactory, traces: Iterable[Trace]) -> int:
    source = make()
    return sum(_steps(source, trace) for trace in traces)


def _steps(source: DraftSource, trace: Trace) -> int:
    """The number of steps of an answer."""
    text = np.array([*trace.prompt, *trace.output], np.int32)
    emitted = steps = 0
    while emitted < len(trace.output):
        ahead = trace.output[emitted:]
        state = RequestState(text[: len(trace.prompt) + emitted], len(trace.prompt))
        accepted = _accepted(source.propose(state, Budget(_MAX_NODES, len(ahead))), ahead)
        tokens = tuple(ahead[: accepted + 1])
        source.observe(Verified(tokens, accepted))
        emitted += len(tokens)
        steps += 1
    source.forget()
    return steps


def _accepted(proposal: Proposal | DraftTree, ahead: Sequence[int]) -> int:
    """The number of next tokens that are on one path from the root."""
    nodes: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(proposal.parents, proposal.tokens, strict=True)):
        nodes.setdefault((int(parent), int(token)), node)
    at = -1
    for count, token in enumerate(ahead):
        found = nodes.get((at, token))
        if found is None:
            return count
        at = found
    return len(ahead)
