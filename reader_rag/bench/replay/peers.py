"""Drafters without training, replayed on the same recorded answers, and what copying could reach at best.

Other people's, and our own chains, as engines verify them that take no tree.
"""

from __future__ import annotations

import importlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from reader_rag.bench.inputs import Trace
from reader_rag.draft.chains import ChainDrafter
from reader_rag.draft.profile import Profile
from reader_rag.draft.step_table import StepTable

Candidates = tuple[Sequence[int], Sequence[int]]
"""Drafted tokens and the index of each one's parent; -1: it follows the text. A parent comes before its children."""

DEPTH = 40
"""Most tokens that an oracle copies in a step."""
_NO_TOKEN = -1


class Peer(Protocol):
    """A drafter; serves one answer after the other: `start`, then `draft` and `extend` in turn, then `finish`."""

    def start(self, prompt: Sequence[int]) -> None:
        """Begin an answer.

        Args:
            prompt: Its tokens.
        """

    def draft(self, remaining: int) -> Candidates:
        """What may come next.

        Args:
            remaining: Most tokens that the answer can still take; to draft more is useless, not wrong.

        Returns:
            Tokens and parents.
        """

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text.

        Args:
            tokens: What the last step emitted.
        """

    def finish(self) -> None:
        """End the answer; what is kept of it is the peer's affair."""


class PromptLookup:
    """Prompt lookup by transformers' own generator.

    Args:
        most: Longest n-gram that is looked up; its first place with a continuation is copied.
        width: Tokens of a draft.
    """

    def __init__(self, most: int = 2, width: int = 10) -> None:
        import torch
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self._torch = torch
        self._generator: Any = PromptLookupCandidateGenerator(num_output_tokens=width, max_matching_ngram_size=most)

    def start(self, prompt: Sequence[int]) -> None:
        """See `Peer`."""
        self._text = self._torch.tensor([list(prompt)])

    def draft(self, remaining: int) -> Candidates:
        """See `Peer`."""
        length = self._text.shape[1]
        self._generator.max_length = length + remaining
        candidates, _ = self._generator.get_candidates(self._text)
        return _chain(candidates[0, length:].tolist())

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Peer`."""
        self._text = self._torch.cat([self._text, self._torch.tensor([list(tokens)])], dim=1)

    def finish(self) -> None:
        """See `Peer`."""


class VllmNgram:
    """vLLM's n-gram rule, restated: of the longest n-gram at the end that occurred before, copy after its first place.

    Args:
        least: Shortest n-gram.
        most: Longest n-gram.
        width: Tokens of a draft.
    """

    def __init__(self, least: int = 2, most: int = 4, width: int = 10) -> None:
        self._least = least
        self._most = most
        self._width = width

    def start(self, prompt: Sequence[int]) -> None:
        """See `Peer`."""
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # by n-gram, where its first place ends
        self.extend(prompt)

    def draft(self, remaining: int) -> Candidates:
        """See `Peer`."""
        length = len(self._text)
        for n in range(min(self._most, length), self._least - 1, -1):
            after = self._after[tuple(self._text[-n:])]
            if after < length:
                return _chain(self._text[after : after + min(self._width, remaining)])
        return _chain([])

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Peer`."""
        for token in tokens:
            self._text.append(token)
            length = len(self._text)
            for n in range(self._least, min(self._most, length) + 1):
                self._after.setdefault(tuple(self._text[-n:]), length)

    def finish(self) -> None:
        """See `Peer`."""


@dataclass(frozen=True)
class SuffixSettings:
    """Of the SuffixDecoding library. Factor and least probability default to vLLM's values, the depth to the library's.

    vLLM's own depth is 24, and so is its width unless told: 2.50 tokens a step (rag, cold) where these emit 2.54.

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


TUNED_TREE = SuffixSettings(factor=4.0, min_probability=0.02, width=64, tree=True)


class SuffixDecoding:
    """SuffixDecoding by its authors' library, `arctic-inference`.

    Args:
        settings: Of the library.
        warm: Keep the earlier answers in the library's cache; otherwise that cache is off.

    Raises:
        ImportError: The library is not installed.
    """

    def __init__(self, settings: SuffixSettings, *, warm: bool = False) -> None:
        library = importlib.import_module("arctic_inference.suffix_decoding")
        self._settings = settings
        self._cache = library.SuffixDecodingCache(settings.depth, max_cached_requests=-1 if warm else 0)
        self._requests = itertools.count()

    def start(self, prompt: Sequence[int]) -> None:
        """See `Peer`."""
        self._request = next(self._requests)
        self._cache.start_request(self._request, list(prompt))
        self._end = list(prompt[-self._settings.depth :])

    def draft(self, remaining: int) -> Candidates:
        """See `Peer`."""
        draft = self._cache.speculate(
            self._request,
            self._end,
            max_spec_tokens=self._settings.width,
            max_spec_factor=self._settings.factor,
            min_token_prob=self._settings.min_probability,
            use_tree_spec=self._settings.tree,
        )
        return draft.token_ids, draft.parents

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Peer`."""
        self._cache.add_active_response(self._request, list(tokens))
        self._end = [*self._end, *tokens][-self._settings.depth :]

    def finish(self) -> None:
        """See `Peer`."""
        self._cache.stop_request(self._request)


class ReaderChain:
    """Our own chains, without anything learned from logits; all that is drafted is verified.

    Args:
        width: Tokens of a draft.
        profile: What is known of the model beforehand.
    """

    def __init__(self, width: int, profile: Profile | None = None) -> None:
        prior = profile.tokens if profile is not None else None
        self._drafter = ChainDrafter(1, width, _FREE, prior=prior, threads=1)
        self._row = np.zeros(1, np.int64)

    def start(self, prompt: Sequence[int]) -> None:
        """See `Peer`."""
        self._drafter.forget()
        self._text = np.array([prompt], np.int32)
        self._came = 0

    def draft(self, remaining: int) -> Candidates:
        """See `Peer`."""
        lengths, came, limits = np.array([[self._text.shape[1]], [self._came], [remaining]])
        chains, verified = self._drafter.draft(self._text, self._row, lengths, came, limits)
        return _chain(chains[0, : verified[0]].tolist())

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Peer`."""
        self._text = np.append(self._text, np.array([tokens], np.int32), axis=1)
        self._came = len(tokens)

    def finish(self) -> None:
        """See `Peer`."""


_FREE = StepTable((1,), (0, 1), ((1.0, 1.0),))
"""Steps that take the same however much is drafted."""
_CHAINS = (4, 8, 10, 16)

RULES: Mapping[str, Callable[[], Peer]] = {"prompt-lookup": PromptLookup, "vllm-ngram": VllmNgram}
SUFFIX_DECODING: Mapping[str, Callable[[], Peer]] = {
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
    """Replay traces by every peer, by our own chains, and by the oracles, which see the future.

    Args:
        traces: The answers. A warm peer has seen the earlier ones of the same category.
        progress: Told what is about to run.
        profile: What is known of the model beforehand, for our own chains.

    Returns:
        Mean tokens emitted per step, by peer and category; and lines that say which peers were left out.
    """
    categories: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        categories[trace.category].append(trace)
    peers: dict[str, Callable[[], Peer]] = {
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
        **{name: partial(_peer_steps, make) for name, make in peers.items()},
        **{name: partial(_oracle_steps, matches) for name, matches in ORACLES.items()},
    }
    results: dict[str, dict[str, float]] = {}
    for name, count in counts.items():
        for category, held in categories.items():
            progress(f"{name}: {category}")
            results.setdefault(name, {})[category] = round(sum(len(trace.output) for trace in held) / count(held), 4)
    return results, notes


def best_copy_steps(trace: Trace, *, after_match: bool, known: Iterable[Sequence[int]] = ()) -> int:
    """The steps of an answer if each copied what agrees longest with the tokens to come, at most `DEPTH` of them.

    Args:
        trace: The answer.
        after_match: Copy only from places after a token equal to the text's last.
        known: Other texts to copy from.

    Returns:
        How many steps.
    """
    text = [token for other in known for token in (*other, _NO_TOKEN)]
    text.extend(trace.prompt)
    places: dict[int, list[int]] = defaultdict(list)
    for place, token in enumerate(text):
        places[token].append(place)
    emitted = steps = 0
    while emitted < len(trace.output):
        ahead = trace.output[emitted : emitted + DEPTH]
        starts = (place + 1 for place in places[text[-1]]) if after_match else places[ahead[0]]
        tokens = trace.output[emitted : emitted + 1 + max((_agreeing(text, at, ahead) for at in starts), default=0)]
        for token in tokens:
            places[token].append(len(text))
            text.append(token)
        emitted += len(tokens)
        steps += 1
    return steps


def _agreeing(text: Sequence[int], start: int, ahead: Sequence[int]) -> int:
    """How many tokens of the text from `start` on agree with those to come."""
    length = 0
    for token in ahead[: len(text) - start]:
        if text[start + length] != token:
            break
        length += 1
    return length


def _oracle_steps(after_match: bool, traces: Iterable[Trace]) -> int:
    return sum(best_copy_steps(trace, after_match=after_match) for trace in traces)


def _peer_steps(make: Callable[[], Peer], traces: Iterable[Trace]) -> int:
    peer = make()
    return sum(_steps(peer, trace) for trace in traces)


def _steps(peer: Peer, trace: Trace) -> int:
    """The steps of an answer; the first drafts from the prompt's end."""
    peer.start(trace.prompt)
    emitted = steps = 0
    while emitted < len(trace.output):
        ahead = trace.output[emitted:]
        tokens = ahead[: _accepted(peer.draft(len(ahead)), ahead) + 1]
        peer.extend(tokens)
        emitted += len(tokens)
        steps += 1
    peer.finish()
    return steps


def _accepted(candidates: Candidates, ahead: Sequence[int]) -> int:
    """How many tokens to come are on a path from the root."""
    nodes: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(*candidates, strict=True)):
        nodes.setdefault((parent, token), node)
    at = -1
    for count, token in enumerate(ahead):
        found = nodes.get((at, token))
        if found is None:
            return count
        at = found
    return len(ahead)


def _chain(tokens: Sequence[int]) -> Candidates:
    return tokens, range(-1, len(tokens) - 1)
