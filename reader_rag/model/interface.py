"""What the engine asks of a model and of its caches, whatever way the model is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from reader_rag.draft.tree import DraftTree
from reader_rag.model.cpu.forward import CpuForward
from reader_rag.model.fixed_shape import FixedShape

SeenLogits = Callable[[int, torch.Tensor], None]
"""Takes the position of a chunk's first token, and logits [chunk, vocabulary]."""


@dataclass(frozen=True)
class Step:
    """One text's part of a pass.

    Attributes:
        root: Its last accepted token; its keys are not in the cache yet.
        tree: Candidate continuations.
        cache: The committed text.
    """

    root: int
    tree: DraftTree
    cache: Any


@dataclass(frozen=True)
class Reuse:
    """What of a text's keys and values may stand for those of another text that begins the same.

    Attributes:
        block: Positions that are reused together, from a multiple of that on.
        answers: Whether an answer's are, as closely as is asked, those that reading it in a prompt gives.
        before: Only those of texts whose prompt is no longer than that, and of positions before it; None: all.
    """

    block: int
    answers: bool = True
    before: int | None = None

    def positions(self, prompt: int, committed: int) -> int:
        """How many positions of a text, from its first on, other texts may have, or it may have from others.

        Args:
            prompt: Tokens of its prompt.
            committed: Tokens of it that were read, those of the answer included.
        """
        if self.before is not None:
            committed = min(committed, self.before) if prompt <= self.before else 0
        return committed if self.answers else min(committed, prompt)


class AnyTarget(Protocol):
    """A model as a function from tokens to logits: a `Target`, or a `PlainTarget` where nothing can be verified.

    Caches are those of its own `new_cache`.
    """

    model: PreTrainedModel
    config: Any
    cpu: CpuForward | None
    fixed: FixedShape | None
    pads: bool
    """Whether a pass over several texts costs as many positions for each as its largest tree."""
    shares: bool
    """Whether several texts share a pass at all."""

    @property
    def device(self) -> torch.device:
        """Where the model's inputs go."""

    @property
    def context_window(self) -> int | None:
        """Most positions the model was made for, or None if its configuration does not say."""

    @property
    def moved(self) -> tuple[int, int]:
        """See `Target.moved`."""

    def new_cache(self, positions: int, max_nodes: int) -> Any:
        """See `Target.new_cache`."""

    def cache_bytes(self, positions: int, max_nodes: int) -> int:
        """See `Target.cache_bytes`."""

    def prefill(self, token_ids: Sequence[int], cache: Any, seen: SeenLogits | None = None) -> torch.Tensor:
        """See `Target.prefill`."""

    def read(self, token_ids: Sequence[int], cache: Any, seen: SeenLogits | None = None) -> Iterator[torch.Tensor]:
        """See `Target.read`."""

    def verify(self, root: int, tree: DraftTree, cache: Any) -> torch.Tensor:
        """See `Target.verify`."""

    def verify_batch(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """See `Target.verify_batch`."""

    def deepest(self, root: int) -> int | None:
        """See `Target.deepest`."""

    def reuse(self, *, strict: bool) -> Reuse | None:
        """See `Target.reuse`."""


class AnyCache(Protocol):
    """What a target keeps of a text."""

    @property
    def length(self) -> int:
        """Committed positions."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def keep(self, rows: list[int]) -> None:
        """Commit those positions of the last forward pass."""

    def release(self) -> None:
        """Give back all that is held, at once; the text is not decoded any further."""


def last_of(logits: Iterator[torch.Tensor]) -> torch.Tensor:
    """The last logits of a prompt that is read to its end."""
    last = torch.empty(0)
    for last in logits:  # noqa: B007
        pass
    return last
