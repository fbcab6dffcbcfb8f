"""What the engine asks of a model and of its caches, whatever way the model is decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from reader_rag.draft.tree import DraftTree
from reader_rag.kv_cache.hidden_states import HiddenStates
from reader_rag.kv_cache.layer_states import LayerOutputs
from reader_rag.model.compiled.forward import CpuForward
from reader_rag.model.fixed_shape import FixedShape
from reader_rag.sampling.noise import Draw
from reader_rag.sampling.topk import TopK


@dataclass(frozen=True)
class Step:
    """One sequence's part of a pass.

    Attributes:
        root: Its last accepted token, whose keys are not in the cache yet.
        tree: Candidate continuations.
        cache: The committed sequence.
        outputs: Receives the outputs of chosen layers at the root and at each node; None: they are dropped.
        draw: How tokens are drawn, where a pass may draw them; None: it draws none.
    """

    root: int
    tree: DraftTree
    cache: Any
    outputs: LayerOutputs | None = None
    draw: Draw | None = None


class Passed(NamedTuple):
    """What a pass computed for one sequence.

    Attributes:
        logits: [1 + nodes, vocabulary], after the root and after each node.
        top: Their best tokens; None: not computed yet.
        drawn: [1 + nodes], the token that `Step.draw` draws after each of them; None: the pass drew none.
    """

    logits: torch.Tensor
    top: TopK | None
    drawn: list[int] | None = None


class Asked(NamedTuple):
    """Positions of a prompt whose logits are wanted.

    Attributes:
        states: Hidden states of the prompt.
        positions: int32 [n], at most `ASKED`, positions that have a state.
    """

    states: HiddenStates
    positions: NDArray[np.int32]


class RankedStep(Protocol):
    """A decode step in fixed shapes that ranks its logits on the device: `FixedStep`.

    Attributes:
        verifies_branches: Whether drafts may have branches; under strict they are chains otherwise.
    """

    verifies_branches: bool

    def widest(self, sequences: int) -> int:
        """Most positions of each of so many sequences in one step, root included; 0: more sequences than it takes.

        Args:
            sequences: Sequences of the step.
        """

    def run(
        self, steps: Sequence[Step], asked: Sequence[Asked] = (), wanted: Sequence[bool] = ()
    ) -> list[Passed] | None:
        """Verify the drafts of several sequences: in one pass, in strict mode in one for each sequence.

        Args:
            steps: At least one, each with a cache of its own.
            asked: Positions of prompts whose logits are computed beside the pass.
            wanted: For each step, whether its logits are copied to the host too.

        Returns:
            For each step, then for each of `asked`, its logits and best tokens, which hold until the next pass; None:
            such a pass has no fixed shape. Then a dynamic step computes it, after `give_back`.
        """

    def give_back(self, steps: Sequence[Step]) -> None:
        """Move the keys and values of sequences to their own caches, for a dynamic step.

        Args:
            steps: Of the sequences; those whose keys and values are not in the fixed step's cache stay as they are.
        """

    def cache_bytes(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Bytes of the key/value cache of some sequences.

        Args:
            sizes: At least one: most committed positions, and most nodes of a draft.
        """


@dataclass(frozen=True)
class Reuse:
    """Which keys and values of a sequence another sequence with the same prefix may reuse.

    Attributes:
        block: Positions of a block; only whole blocks are reused.
        answers: Whether positions of the answer may be reused. False where a decode step rounds otherwise than prefill
            and the mode allows no other bits.
        before: Reuse is limited to positions below this one, and to prompts of at most so many tokens; None: no limit.
    """

    block: int
    answers: bool = True
    before: int | None = None

    def positions(self, prompt: int, committed: int) -> int:
        """Leading positions of a sequence that may be inserted into the prefix cache, or restored from it.

        Args:
            prompt: Tokens of its prompt.
            committed: Committed positions, those of the answer included.
        """
        if self.before is not None:
            committed = min(committed, self.before) if prompt <= self.before else 0
        return committed if self.answers else min(committed, prompt)


class TargetModel(Protocol):
    """A model as a function from tokens to logits: a `Target`, or a `PlainTarget` for models that verify no drafts.

    Attributes:
        model: The model of `transformers`.
        config: Its text configuration.
        cpu: The model in compiled loops, or None where its own `forward` is called.
        fixed: The shape of every pass in strict mode; None: any.
        pads: Whether a pass over several sequences computes as many positions for each as its largest tree has.
        shares: Whether several sequences share a pass at all.
        hidden_width: Numbers of a hidden state from which the head computes logits; 0: it computes none later on.
        head_share: Share of a pass over one position that the head's product takes: its part of the weights.
        fixed_step: The step in fixed shapes, tried before every dynamic one; None: there is none.
        layer_count: Decoder layers whose outputs passes hand to `LayerOutputs`; 0: they hand out none.
    """

    model: PreTrainedModel
    config: Any
    cpu: CpuForward | None
    fixed: FixedShape | None
    pads: bool
    shares: bool
    hidden_width: int
    head_share: float
    fixed_step: RankedStep | None
    layer_count: int

    @property
    def device(self) -> torch.device:
        """Where the model's inputs go."""

    @property
    def context_window(self) -> int | None:
        """Most positions the model was made for, or None if its configuration does not say."""

    @property
    def moved(self) -> tuple[int, int]:
        """How often the cache of a batch was rearranged so far, and the bytes moved in it for any reason."""

    def new_cache(self, positions: int, max_nodes: int) -> Any:
        """An empty cache of one sequence, for the other methods of this target.

        Args:
            positions: Most positions that are ever committed.
            max_nodes: Most nodes of a draft tree.
        """

    def cache_bytes(self, positions: int, max_nodes: int) -> int:
        """Bytes that a cache of `new_cache` takes once it is filled.

        Args:
            positions: Most positions that are ever committed.
            max_nodes: Most nodes of a draft tree.
        """

    def prefill_chunks(
        self,
        token_ids: Sequence[int],
        cache: Any,
        states: HiddenStates | None = None,
        outputs: LayerOutputs | None = None,
    ) -> Iterator[torch.Tensor]:
        """Commit a prompt chunk by chunk, one with each step of the iterator.

        Args:
            token_ids: [length], at least one token.
            cache: Extended by `length` positions.
            states: Extended by them too; None: their hidden states are dropped.
            outputs: Receives the outputs of chosen layers with each chunk; None: they are dropped.

        Yields:
            Logits after the last token of a chunk, [1, vocabulary].
        """

    def verify(self, root: int, tree: DraftTree, cache: Any) -> torch.Tensor:
        """One forward pass over the root and a draft tree; its positions are committed by `cache.commit`.

        Args:
            root: The last accepted token, whose keys are not in the cache yet.
            tree: Candidate continuations.
            cache: The committed sequence.

        Returns:
            Logits [1 + nodes, vocabulary], after the root and after each node.
        """

    def verify_batch(
        self, steps: Sequence[Step], asked: Sequence[torch.Tensor] = (), *, refused: bool = False
    ) -> list[torch.Tensor]:
        """Verify the drafts of several sequences, in one pass where the model can.

        Args:
            steps: At least one, each with a cache of its own.
            asked: Hidden states of prompts, [n, `hidden_width`] each. No other logits depend on them, to the last bit.
            refused: Whether the fixed step was tried and does not take these steps.

        Returns:
            For each step the logits that `verify` returns, then for each of `asked` its logits, [n, vocabulary]; these
            rank tokens as the model does (it may scale or cap them still).
        """

    def deepest(self, root: int) -> int | None:
        """Longest path that may be drafted behind a root at this position; None: any."""

    def reuse(self, *, strict: bool) -> Reuse | None:
        """What sequences with the same prefix may reuse of each other; None: nothing.

        Args:
            strict: Whether no bit may differ.
        """


class SequenceCache(Protocol):
    """Keys and values, or other state, of one sequence."""

    @property
    def length(self) -> int:
        """Committed positions."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    def commit(self, rows: list[int]) -> None:
        """Commit these rows of the last forward pass, in this order; its other rows are dropped."""

    def release(self) -> None:
        """Free the memory at once; the sequence is decoded no further."""


def prefill(target: TargetModel, token_ids: Sequence[int], cache: Any) -> torch.Tensor:
    """Commit a whole prompt.

    Args:
        target: The model.
        token_ids: [length], at least one token.
        cache: Extended by `length` positions.

    Returns:
        Logits after the last token, [1, vocabulary].
    """
    return deque(target.prefill_chunks(token_ids, cache), maxlen=1).pop()
