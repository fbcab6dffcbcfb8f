"""Assistant models of another vocabulary, which draft by text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.draft.source import Proposal, Verified
from reader_rag.engine.draft_models.alignment import Alignment, TextTokenizer
from reader_rag.engine.draft_models.assistant import AssistantModel, AssistantStream
from reader_rag.engine.draft_models.source import DraftModel, DraftRequest

_POSITIONS = 1.5
"""Positions of the assistant for each token of the target; a text that needs more is drafted as far as they reach."""


class TextAssistantModel(DraftModel):
    """A causal language model of another vocabulary, which drafts the text that the target may continue with.

    It drafts its best tokens, also where the answer is drawn: the target's noise belongs to the target's tokens.

    Args:
        assistant: The model.
        target: The target's tokenizer.
        own: The assistant's.
        start: Token ids that the assistant's tokenizer puts before every text.

    Attributes:
        assistant: As given.
    """

    def __init__(
        self, assistant: AssistantModel, target: TextTokenizer, own: TextTokenizer, start: Sequence[int]
    ) -> None:
        super().__init__(assistant.name, assistant.prefixes)
        self.assistant = assistant
        self._target = target
        self._own = own
        self._start = tuple(start)

    def open(self, request: DraftRequest) -> TextStream:
        """Begin a sequence; see `DraftModel.open`."""
        vocabulary = self.assistant.vocabulary
        own = replace(
            request,
            positions=int(_POSITIONS * request.positions) + len(self._start),
            vocabulary=vocabulary,
            width=vocabulary,
            branches=1,
            sampler=None,
        )
        return TextStream(self, self.assistant.open(own), Alignment(self._target, self._own, self._start))

    def bytes_of(self, streams: Sequence[TextStream]) -> int:
        """Most bytes of keys and values; see `DraftModel.bytes_of`."""
        return self.assistant.bytes_of([stream.own for stream in streams])

    def follow(
        self, streams: Sequence[TextStream], sequences: Sequence[NDArray[np.int32]]
    ) -> list[torch.Tensor | None]:
        """Read sequences in the assistant's tokens; None for one whose last character is not complete."""
        found: list[torch.Tensor | None] = [None] * len(streams)
        complete = [
            place
            for place, (stream, sequence) in enumerate(zip(streams, sequences, strict=True))
            if stream.alignment.follow(sequence) and stream.alignment.tokens
        ]
        own = [np.array(streams[place].alignment.tokens, np.int32) for place in complete]
        if complete:
            read = self.assistant.follow([streams[place].own for place in complete], own)
            for place, logits in zip(complete, read, strict=True):
                found[place] = logits
        return found

    def advance(self, streams: Sequence[TextStream], tokens: Sequence[int]) -> list[torch.Tensor]:
        """Read a drafted token of each; see `DraftModel.advance`."""
        return self.assistant.advance([stream.own for stream in streams], tokens)


class TextStream:
    """An assistant of another vocabulary on one sequence; see `Stream`.

    Args:
        model: The model.
        own: The assistant on the sequence in its own tokens.
        alignment: The sequence in its own tokens.

    Attributes:
        model: As given.
        own: As given.
        alignment: As given.
        request: What is drafted for, in the assistant's vocabulary.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: TextAssistantModel, own: AssistantStream, alignment: Alignment) -> None:
        self.model = model
        self.own = own
        self.alignment = alignment
        self.request = own.request
        self.nbytes = own.nbytes

    def translated(self, sequence: NDArray[np.int32], proposal: Proposal) -> Proposal:
        """A chain in the target's vocabulary; see `Stream.translated`."""
        drafted, logprobs = list(map(int, proposal.tokens)), list(map(float, proposal.logprobs))
        tokens, chances = self.alignment.translated(sequence, drafted, logprobs)
        return Proposal(tokens, range(-1, len(tokens) - 1), chances)

    def observe(self, verified: Verified) -> None:
        """Nothing: `follow` reads what was emitted."""

    def release(self) -> None:
        """Keep the prefix, and free keys and values."""
        self.own.release()
