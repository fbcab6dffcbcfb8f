"""Assistant models: smaller causal language models of the target's vocabulary."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.draft.source import Proposal, Verified
from reader_rag.draft.tree import DraftTree
from reader_rag.engine.draft_models.source import DraftModel, DraftRequest
from reader_rag.kv_cache.batch_cache import ROOM
from reader_rag.kv_cache.prefix_cache import PrefixCache
from reader_rag.kv_cache.tree_cache import TreeCache
from reader_rag.model.interface import Step
from reader_rag.model.target import Target

_FEW = 16
"""Tokens that are read in one verification pass; more of them are prefilled."""
_TAIL = 256
"""Tokens at the end of a sequence that may be other ones than before: those of a segment of `Alignment`."""


def embedded_tokens(model: Any) -> int:
    """Number of token ids that a model has an embedding of.

    Args:
        model: A model of `transformers`.
    """
    known = int(getattr(model.get_input_embeddings(), "num_embeddings", 0))
    return known or int(model.config.get_text_config(decoder=True).vocab_size)


class AssistantModel(DraftModel):
    """A causal language model that drafts.

    Args:
        target: The assistant as `select_target` made it.
        name: Its name in messages.
        prefixes: Keys and values of earlier sequences, in blocks; None: none are kept.

    Attributes:
        target: As given.
        window: Most positions that it reads.
        vocabulary: Number of token ids that it has an embedding of.
    """

    def __init__(self, target: Target, name: str, prefixes: PrefixCache | None = None) -> None:
        super().__init__(name, prefixes)
        self.target = target
        self.window = target.context_window or 1 << 30
        self.vocabulary = embedded_tokens(target.model)

    def open(self, request: DraftRequest) -> AssistantStream:
        """Begin a sequence; see `DraftModel.open`."""
        return AssistantStream(self, request)

    def bytes_of(self, streams: Sequence[AssistantStream]) -> int:
        """Most bytes of keys and values; in a padded batch all sequences take as many positions as the longest."""
        if not self.target.pads or len(streams) < 2:
            return super().bytes_of(streams)
        return len(streams) * self.target.cache_bytes(int(ROOM * max(one.positions for one in streams)) + 1, _FEW)

    def follow(
        self, streams: Sequence[AssistantStream], sequences: Sequence[NDArray[np.int32]]
    ) -> list[torch.Tensor | None]:
        """Read sequences in common passes; None for one that leaves no room in the window. See `DraftModel.follow`."""
        found: list[torch.Tensor | None] = [None] * len(streams)
        unread: dict[int, list[int]] = {}
        for place, (stream, tokens) in enumerate(zip(streams, sequences, strict=True)):
            begins = not stream.begun
            new = stream.unread(tokens)
            if len(new) > _FEW and stream.cache.batch is None:
                found[place] = deque(self.target.prefill_chunks(new, stream.cache), maxlen=1).pop().clone()
                if begins:
                    stream.keep_prefix()
            elif new:
                unread[place] = new
        while unread:
            for place, logits in self._passed({place: (streams[place], new[:_FEW]) for place, new in unread.items()}):
                found[place] = logits[-1:].clone()  # the next pass may write where these are
            unread = {place: new[_FEW:] for place, new in unread.items() if len(new) > _FEW}
        return found

    def advance(self, streams: Sequence[AssistantStream], tokens: Sequence[int]) -> list[torch.Tensor]:
        """Read a drafted token of each in one pass; see `DraftModel.advance`."""
        for stream, token in zip(streams, tokens, strict=True):
            stream.note_drafted(token)
        passed = self._passed({place: (stream, [tokens[place]]) for place, stream in enumerate(streams)})
        return [logits for _, logits in passed]

    def _passed(self, parts: Mapping[int, tuple[AssistantStream, list[int]]]) -> list[tuple[int, torch.Tensor]]:
        """Read tokens of several sequences in one pass, as far as the model shares passes, and commit them."""
        chains = [DraftTree.from_chain(new[1:]) for _, new in parts.values()]
        steps = [Step(new[0], chain, stream.cache) for (stream, new), chain in zip(parts.values(), chains, strict=True)]
        found = self.target.verify_batch(steps)
        for stream, new in parts.values():
            stream.cache.commit(list(range(len(new))))
        return list(zip(parts, found, strict=True))


class AssistantStream:
    """An assistant on one sequence; see `Stream`.

    Keys and values of drafted tokens stay until `unread` finds that the sequence has other ones, so tokens that were
    accepted are not read again.

    Args:
        model: The assistant.
        request: The request.

    Attributes:
        model: As given.
        request: As given.
        positions: Most positions that it reads.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: AssistantModel, request: DraftRequest) -> None:
        self.model = model
        self.request = request
        self.positions = min(request.positions + request.tokens, model.window)
        self.nbytes = model.target.cache_bytes(self.positions, _FEW)
        self._cache: TreeCache | None = None
        self._read = np.zeros(0, np.int32)
        self._agreed = 0

    @property
    def begun(self) -> bool:
        """Whether anything was read."""
        return self._cache is not None

    @property
    def cache(self) -> TreeCache:
        """Keys and values; they exist from the first `unread` that returns tokens to `release`."""
        assert self._cache is not None
        return self._cache

    def unread(self, tokens: NDArray[np.int32]) -> list[int]:
        """What is to be read of the sequence, its last token at least; what it does not have is rolled back.

        Args:
            tokens: int32 [length], all of its tokens.

        Returns:
            Its last tokens; none where it leaves no room in the assistant's window, or has a token that is not in the
            assistant's vocabulary.
        """
        if len(tokens) + self.request.tokens > self.positions or tokens.max() >= self.model.vocabulary:
            return []
        cache = self._cache
        if cache is None:
            cache = self._cache = self._begin(tokens)
        end = min(cache.length, len(tokens) - 1)  # the last token is read again: its logits are wanted
        first = max(min(self._agreed, end) - _TAIL, 0)
        same = self._read[first:end] == tokens[first:end]
        self._agreed = first + (len(same) if same.all() else int(same.argmin()))
        if self._agreed < cache.length:
            cache.roll_back(self._agreed)
        self._read[: len(tokens)] = tokens
        new: list[int] = tokens[self._agreed :].tolist()
        return new

    def note_drafted(self, token: int) -> None:
        """Note a drafted token that is read next.

        Args:
            token: The token.
        """
        self._read[self.cache.length] = token

    def translated(self, sequence: NDArray[np.int32], proposal: Proposal) -> Proposal:
        """The draft itself; see `Stream.translated`."""
        return proposal

    def observe(self, verified: Verified) -> None:
        """Nothing: `unread` has what was emitted."""

    def release(self) -> None:
        """Keep the prefix, and free keys and values."""
        self.keep_prefix()
        if self._cache is not None:
            self._cache.release()
            self._cache = None

    def keep_prefix(self) -> None:
        """Put what was read into the prefix cache."""
        cache = self._cache
        if cache is not None and self.model.prefixes is not None:
            self.model.prefixes.insert(self.request.tenant, self._read[: cache.length], cache)

    def _begin(self, tokens: NDArray[np.int32]) -> TreeCache:
        """A KV cache, filled with what another sequence left of the same prefix."""
        cache = self.model.target.new_cache(self.positions, _FEW)
        self._read = np.zeros(self.positions + 1, np.int32)
        if self.model.prefixes is not None:
            restored = self.model.prefixes.restore(self.request.tenant, tokens, cache)
            self._read[:restored] = tokens[:restored]
        return cache
