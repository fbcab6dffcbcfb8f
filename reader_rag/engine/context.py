"""What sequences and steps use of an engine: the model, its tokenizer, and what is kept from request to request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from reader_rag.engine.datastore_lookup import DatastoreLookup
from reader_rag.engine.draft_state import DraftStates
from reader_rag.engine.observer import Observers
from reader_rag.engine.outputs import Prompt
from reader_rag.kv_cache.prefix_cache import PrefixCache
from reader_rag.model.interface import Reuse, TargetModel
from reader_rag.model.select_target import Drafting
from reader_rag.model.step_costs import StepCosts, load_costs


class Costs:
    """The step costs of a target, measured when the first draft is made or read from the cache folder.

    Args:
        target: The model.
        folder: Where measured costs are kept.

    Attributes:
        current: The costs; None before they are measured, and where shapes are fixed (strict mode).
    """

    def __init__(self, target: TargetModel, folder: Path) -> None:
        self._target = target
        self._folder = folder
        self.current: StepCosts | None = None

    def measure(self, max_nodes: int) -> None:
        """Measure, or read from the cache folder, unless costs up to this size are known.

        Args:
            max_nodes: Most nodes of a draft tree.
        """
        if self._target.fixed is None and (self.current is None or self.current.max_nodes < max_nodes):
            self.current = load_costs(self._target, max_nodes, self._folder)


class Callbacks:
    """Since when the decoding thread runs code of a caller: logits processors and stopping criteria.

    Attributes:
        since: `time.monotonic()` of when the running callback began; None while none runs.
    """

    def __init__(self) -> None:
        self.since: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around code that calls them."""
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = None


@dataclass(frozen=True)
class DecodeContext:
    """What sequences and steps use of an engine. All of it belongs to the thread that decodes, but the tokenizer.

    Attributes:
        target: Computes forward passes.
        drafting: What the target can verify.
        tokenizer: The model's tokenizer.
        tokenize: Text without special tokens to token ids with their characters; from any thread.
        eos_ids: Tokens that end an answer.
        context_window: Most tokens of prompt and answer.
        vocabulary: Number of token ids of the model.
        draft_states: What drafting learned, by tenant.
        prefix_cache: Keys and values of earlier prompts; None where none are kept.
        reuse: Which prefixes of a prompt may be taken from the prefix cache; None where none may.
        lookup: The datastore that drafts are searched in; None where there is none.
        costs: What steps cost.
        observers: Receive what the engine does.
        callbacks: Whether code of a caller runs.
    """

    target: TargetModel
    drafting: Drafting
    tokenizer: PreTrainedTokenizerBase
    tokenize: Callable[[str], Prompt]
    eos_ids: frozenset[int]
    context_window: int
    vocabulary: int
    draft_states: DraftStates
    prefix_cache: PrefixCache | None
    reuse: Reuse | None
    lookup: DatastoreLookup | None
    costs: Costs
    observers: Observers = field(default_factory=Observers)
    callbacks: Callbacks = field(default_factory=Callbacks)

    @property
    def verifies_branches(self) -> bool:
        """Whether drafts may have branches: in fixed shapes of strict mode only where their step keeps the bits."""
        step = self.target.fixed_step
        keeps_bits = self.target.fixed is None or (step is not None and step.verifies_branches)
        return keeps_bits and self.drafting != "chain"
