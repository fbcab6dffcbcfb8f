"""Plain decoding of models on which nothing can be verified, as `transformers`' `generate` does it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from reader_rag.draft.tree import DraftTree
from reader_rag.kv_cache.hidden_states import HiddenStates
from reader_rag.kv_cache.layer_states import LayerOutputs
from reader_rag.model.compiled.forward import CpuForward
from reader_rag.model.fixed_shape import FixedShape
from reader_rag.model.interface import RankedStep, Reuse, Step
from reader_rag.model.target import context_window

_STATES = ("past_key_values", "cache_params", "state")
"""What models call that which they keep of a text: an output of one pass and an input of the next."""


class PlainCache:
    """What a model keeps of a text, in a form of its own; nothing of it can be taken back.

    Args:
        state: An empty one, where the model makes none by itself.

    Attributes:
        length: Committed positions.
        state: The model's own, by the name of the input that takes it; empty where the model keeps nothing.
        tokens: All tokens of the text, committed or just read.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.length = 0
        self.state: dict[str, Any] = state or {}
        self.tokens: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum({id(tensor): tensor.nbytes for tensor in _tensors(self.state, set())}.values())

    def commit(self, rows: list[int]) -> None:
        """Commit what was read.

        Args:
            rows: All positions of the last forward pass.

        Raises:
            ValueError: Not all of them.
        """
        read = len(self.tokens) - self.length
        if rows != list(range(read)):
            raise ValueError(f"a state cannot be rolled back: {rows} of {read} positions")
        self.length += read

    def release(self) -> None:
        """Give back the state."""
        self.state = {}
        self.tokens = []
        self.length = 0


class PlainTarget:
    """A model decoded one token at a time with what it keeps of the text itself; see `Target` for the interface.

    A prompt is read at once, as `generate` does: few such models can go on with several tokens.

    Args:
        model: A causal language model of `transformers`, in eval mode.

    Attributes:
        cpu: None.
        fixed: None.
        fixed_step: None.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config: Any = model.config.get_text_config(decoder=True)
        self.cpu: CpuForward | None = None
        self.fixed: FixedShape | None = None
        self.fixed_step: RankedStep | None = None
        self.pads = self.shares = False
        self.hidden_width, self.head_share, self.layer_count = 0, 1.0, 0
        self._parameters = frozenset(inspect.signature(model.forward).parameters)

    @property
    def device(self) -> torch.device:
        """Where the model's inputs go."""
        return self.model.device

    @property
    def context_window(self) -> int | None:
        """Most positions the model was made for, or None if its configuration does not say."""
        return context_window(self.config)

    @property
    def moved(self) -> tuple[int, int]:
        """(0, 0): there is no cache of a batch."""
        return 0, 0

    def deepest(self, root: int) -> int | None:
        """0: nothing can be drafted."""
        return 0

    def reuse(self, *, strict: bool) -> Reuse | None:
        """None: what is kept of a text has no positions to be taken from it."""
        return None

    def new_cache(self, positions: int, max_nodes: int) -> PlainCache:
        """An empty cache; it grows by itself."""
        made: Any = self.model
        name = next((name for name in _STATES[:2] if name in self._parameters), None)
        if name is None or not made._supports_default_dynamic_cache():
            return PlainCache()
        return PlainCache({name: DynamicCache(config=self.config)})  # some fill it and do not hand it back

    def cache_bytes(self, positions: int, max_nodes: int) -> int:
        """0: what such a model keeps of a text does not grow with it, or not in a way that is known here."""
        return 0

    def prefill_chunks(
        self,
        token_ids: Sequence[int],
        cache: PlainCache,
        states: HiddenStates | None = None,
        outputs: LayerOutputs | None = None,
    ) -> Iterator[torch.Tensor]:
        """Commit a prompt, at once.

        Args:
            token_ids: [length], at least one token.
            cache: An empty one.
            states: None: such a model has no drafts that ask for them.
            outputs: None, likewise.

        Yields:
            Logits after the last token, [1, vocabulary].
        """
        with torch.inference_mode():
            logits = self._read(token_ids, cache)
            cache.commit(list(range(len(token_ids))))
        yield logits

    @torch.inference_mode()
    def verify(self, root: int, tree: DraftTree, cache: PlainCache) -> torch.Tensor:
        """One step over the root; committed by `cache.commit([0])`.

        Args:
            root: The last emitted token.
            tree: An empty one.
            cache: The committed text.

        Returns:
            Logits [1, vocabulary].

        Raises:
            ValueError: Something was drafted.
        """
        if len(tree):
            raise ValueError(f"{len(tree)} drafted tokens for a model that cannot verify any")
        return self._read([root], cache)

    def verify_batch(
        self, steps: Sequence[Step], asked: Sequence[torch.Tensor] = (), *, refused: bool = False
    ) -> list[torch.Tensor]:
        """Decode one token of each sequence, one after the other.

        Args:
            steps: Root, empty tree and cache of each sequence.
            asked: None: there are no hidden states.
            refused: Without effect: there is no fixed step.

        Returns:
            For each sequence, its logits [1, vocabulary].
        """
        return [self.verify(step.root, step.tree, step.cache) for step in steps]

    def _read(self, token_ids: Sequence[int], cache: PlainCache) -> torch.Tensor:
        """Read tokens behind the committed ones; logits [1, vocabulary] of the last."""
        cache.tokens.extend(int(token) for token in token_ids)
        # A model that keeps nothing reads the whole text again.
        start = cache.length if cache.state else 0
        inputs: dict[str, Any] = {
            "position_ids": torch.arange(start, len(cache.tokens), device=self.device)[None],
            "use_cache": True,
            "logits_to_keep": 1,
        }
        inputs = {name: value for name, value in inputs.items() if name in self._parameters}
        output = self.model(torch.tensor([cache.tokens[start:]], device=self.device), **cache.state, **inputs)
        for name in _STATES:
            if name in self._parameters and output.get(name) is not None:
                cache.state[name] = output[name]
        logits: torch.Tensor = output.logits[0]
        return logits[-1:]


def _tensors(value: Any, visited: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in a model's own state, however it is made."""
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in parts:
        yield from _tensors(part, visited)
