"""Verifies draft trees in one forward pass of the target, on unpatched `transformers` models.

On the CPU, models of known classes are computed by `CpuForward` instead of their own `forward`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from reader_rag.config import Forward
from reader_rag.draft.prompt_successors import ASKED
from reader_rag.draft.tree import DraftTree
from reader_rag.errors import UnsupportedModelError
from reader_rag.kv_cache.batch_cache import BatchCache
from reader_rag.kv_cache.hidden_states import HiddenStates
from reader_rag.kv_cache.layer_states import LayerOutputs, commit_all
from reader_rag.kv_cache.masks import attention_kinds, attention_masks
from reader_rag.kv_cache.tree_cache import TreeCache
from reader_rag.model.compiled.forward import CpuForward, Rows, head_width
from reader_rag.model.fixed_shape import FixedShape, chunk_size
from reader_rag.model.interface import RankedStep, Reuse, Step
from reader_rag.model.layer_hooks import collecting, decoder_layers, recording
from reader_rag.model.step_costs import head_share_of

_LONG_CHUNK_S, _SHORT_CHUNK_S = 0.3, 0.1
"""Seconds of a chunk in the compiled loops from which on, and up to which, the next one is shorter, and longer."""
_LEAST_ROWS = 8
"""Fewest tokens of such a chunk."""

_REUSED = 64
"""Positions of a block of the prefix cache where rounding sets no other size."""

_MASKED_BACKENDS = {"sdpa": torch.bool, "eager": None}
"""Attention backends that take a 4-D mask, and its dtype; None: the model's, added to the scores."""


class Target:
    """The target model as a function from tokens to logits.

    Args:
        model: A causal language model of `transformers`, in eval mode.
        fixed: Shapes to keep to; None lets every pass have the shape it needs.
        forward: "auto" computes models that `CpuForward` knows with it; "torch" always calls the model itself.
        branches: False verifies chains alone, under the model's own causal mask.

    Attributes:
        cpu: The model in compiled loops, or None where its own `forward` is called.
        fixed: As given; None with `cpu`, whose rows are independent of each other in any shape.
        chunk: Prompt tokens of a pass of the model's own forward; rounding depends on it.
        kinds: Attention kinds and their spans (`attention_kinds`); empty without branches.
        layers: Its decoder layers; empty where they are not found.
        switch: Position from which the rotation uses other angles; None: none.
        fixed_step: The step in fixed shapes (`add_fixed_step`), tried before every dynamic one; None: there is none.

    Raises:
        UnsupportedModelError: The model keeps state that cannot be rolled back, or its attention takes no tree mask.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        fixed: FixedShape | None = None,
        forward: Forward = "auto",
        *,
        branches: bool = True,
    ) -> None:
        self.model = model
        self.cpu = CpuForward.of(model) if forward == "auto" else None
        self.fixed = None if self.cpu is not None else fixed
        self.config: Any = model.config.get_text_config(decoder=True)
        kind = getattr(self.config, "model_type", type(model).__name__)
        if keeps_state(model):
            raise UnsupportedModelError(f"{kind} models keep a state that cannot be rolled back")
        self._branches = branches
        self.pads = self.cpu is None and branches and self.fixed is None
        self.shares = self.pads or self.cpu is not None
        self.kinds: dict[str, int] = {}
        if branches:
            if not takes_masks(model):
                raise UnsupportedModelError(f"the attention backend {attention_of(model)!r} takes no tree mask")
            self._mask_dtype = _MASKED_BACKENDS[attention_of(model)] or model.dtype
            self.kinds = attention_kinds(self.config)
            self._narrowest = min((span for span in self.kinds.values() if span), default=None)
        parameters = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        # What computes the states of all tokens, and what makes logits of them; some models do not name the first.
        inner = (model.get_decoder(), model.base_model, getattr(model, "model", None))
        self._decoder = next((part for part in inner if part is not None and part is not model), None)
        self.layers = decoder_layers(self._decoder, self.config.num_hidden_layers)
        self.layer_count = len(self.layers)
        self._head: Any = model.get_output_embeddings()
        known = self.cpu is not None or self._decoder is not None
        self.hidden_width = int(getattr(self._head, "in_features", 0)) if known else 0
        self.head_share = head_share_of(model)
        self._takes_positions = "position_ids" in parameters or branches
        self.switch = _switch_of_rotation(self.config)
        self._position_bytes = _position_bytes(self.config, model.dtype)
        self._batch = BatchCache(self.config.num_hidden_layers)
        self.chunk = chunk_size(model)
        self.fixed_step: RankedStep | None = None
        self._rows_at_once = 0 if self.cpu is None else self.cpu.chunk

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
        """How often the cache of a batch was rearranged so far, and the bytes moved in it for any reason."""
        return self._batch.rearrangements, self._batch.bytes_moved

    def deepest(self, root: int) -> int | None:
        """Longest path that may be drafted when the root stands at `root`; None: any.

        Some rotary encodings use other angles from a position on, in all rows of a pass that reaches it. In fixed
        shapes, plain decoding must attend to all of a chain's positions in the same shape.
        """
        if self.fixed is not None:
            return self.fixed.longest_chain(root)
        if self.switch is not None and root < self.switch:
            return self.switch - root - 1
        return None

    def reuse(self, *, strict: bool) -> Reuse | None:
        """What sequences with the same prefix may reuse of each other; None: nothing.

        In the compiled loops a row has the same bits in any prefill chunk and in any draft. PyTorch's rounding depends
        on the shape of a pass, so there only whole chunks of a prompt keep the bits: the rest is then computed in the
        same chunks as without reuse. Reuse is limited to them in strict mode, and in 16 bits wherever the compiled
        loops decode, because there drafted and plain answers are the same in fast mode too.

        Args:
            strict: Whether no bit may differ.
        """
        if any(hasattr(module, "merged_adapters") for module in self.model.modules()):
            return None  # an adapter may be exchanged at any time, which invalidates keys and values
        if self.cpu is not None and self.cpu.prefills_faster:
            return Reuse(_REUSED, before=self.switch)
        if strict or (self.cpu is not None and self.cpu.dtype != torch.float32):
            return Reuse(self.chunk, answers=False, before=self.switch)
        return Reuse(_REUSED, before=self.switch)

    def new_cache(self, positions: int, max_nodes: int) -> TreeCache:
        """A cache for `positions` committed positions and a tree of `max_nodes` behind them."""
        capacity = self.capacity(positions, max_nodes)
        if self.cpu is not None:
            return TreeCache.in_one_piece(self.cpu.layers, capacity, self.cpu.heads, self.cpu.width, self.cpu.dtype)
        return TreeCache(self.config.num_hidden_layers, capacity)

    def cache_bytes(self, positions: int, max_nodes: int) -> int:
        """Bytes that a cache of `new_cache` takes; computed from the configuration until a first prefill."""
        return self.position_bytes(self.capacity(positions, max_nodes))

    def position_bytes(self, positions: int) -> int:
        """Bytes of the keys and values of so many positions; by the configuration until a first prefill."""
        return positions * self._position_bytes

    def capacity(self, positions: int, max_nodes: int) -> int:
        """Positions of such a cache."""
        return positions + max_nodes + 1 if self.fixed is None else self.fixed.shown(positions)

    def prefill_chunks(
        self,
        token_ids: Sequence[int],
        cache: TreeCache,
        states: HiddenStates | None = None,
        outputs: LayerOutputs | None = None,
    ) -> Iterator[torch.Tensor]:
        """Commit a prompt chunk by chunk, one with each step of the iterator.

        Args:
            token_ids: [length], at least one token.
            cache: Extended by `length` positions; of a sequence that is not in a batch yet.
            states: Extended by them too, for `verify_batch`; None: their hidden states are dropped. The logits are the
                same, to the last bit.
            outputs: Receives the outputs of chosen layers with each chunk; None: they are dropped.

        Yields:
            Logits after the last token of a chunk, [1, vocabulary].

        Raises:
            ValueError: The sequence is in a batch.
        """
        if cache.batch is not None:
            raise ValueError("no prefill is possible for a sequence in a batch")
        tokens = np.array(token_ids, np.int64)
        # One pass over a prompt that reaches the switch uses the angles behind it for all rows; chunks would not.
        crosses = self.switch is not None and cache.length < self.switch < cache.length + len(tokens)
        if self.cpu is not None and self.cpu.prefills_faster and not crosses:
            yield from self._prefill_compiled(tokens, cache, states, outputs)
            return
        size = len(tokens) if crosses else self.chunk
        for start in range(0, len(tokens), size):
            yield self._prefill_chunk(tokens[start : start + size], cache, states, outputs)

    def _prefill_compiled(
        self, tokens: NDArray[np.int64], cache: TreeCache, states: HiddenStates | None, outputs: LayerOutputs | None
    ) -> Iterator[torch.Tensor]:
        """`prefill_chunks` in the compiled loops, in chunks as long as a measured time allows: no bit depends on it."""
        assert self.cpu is not None
        start = 0
        while start < len(tokens):
            chunk = tokens[start : start + self._rows_at_once]
            began = time.perf_counter()
            with torch.inference_mode():
                (logits,) = self.cpu([Rows.of_text(chunk, cache, len(chunk) - 1, states, outputs)])
            seconds = time.perf_counter() - began
            commit_all(cache, len(chunk), outputs)
            start += len(chunk)
            if seconds > _LONG_CHUNK_S:
                self._rows_at_once = max(self._rows_at_once // 2, _LEAST_ROWS)
            elif seconds < _SHORT_CHUNK_S and len(chunk) == self._rows_at_once:
                self._rows_at_once = min(2 * self._rows_at_once, self.cpu.chunk)
            yield logits

    @torch.inference_mode()
    def _prefill_chunk(
        self, tokens: NDArray[np.int64], cache: TreeCache, states: HiddenStates | None, outputs: LayerOutputs | None
    ) -> torch.Tensor:
        count = len(tokens)
        cache.show(None)
        positions = np.arange(cache.length, cache.length + count)
        # The compiled loops normalise the states when logits are wanted.
        part = self._decoder if self.cpu is None else self.cpu.last_norm
        collected = collecting(None if states is None else part, inputs=self.cpu is not None)
        with collected as found, recording(self.layers, [(outputs, count)]):
            logits = self._forward(tokens[None], positions[None], cache, **self._last_only)
        commit_all(cache, count, outputs)
        self._position_bytes = cache.nbytes // cache.capacity
        if states is not None:
            fits = bool(found) and found[0].shape[1:] == (count, self.hidden_width)
            states.append(found[0][0] if fits else None, count)
        return logits[0, -1:]

    @torch.inference_mode()
    def verify(self, root: int, tree: DraftTree, cache: TreeCache, outputs: LayerOutputs | None = None) -> torch.Tensor:
        """One forward pass over the root and a draft tree. What it wrote is committed by `cache.commit`.

        Args:
            root: The last accepted token; its keys are not in the cache yet.
            tree: Candidate continuations, no deeper than `deepest`; a chain where shapes are fixed or the model takes
                no tree mask.
            cache: The committed text.
            outputs: Receives the outputs of chosen layers; None: they are dropped.

        Returns:
            Logits [1 + nodes, vocabulary], after the root and after each node.
        """
        return self.verify_batch([Step(root, tree, cache, outputs)])[0]

    def _verify_alone(self, step: Step) -> torch.Tensor:
        """`verify` in the model's own forward pass, over the positions of one sequence."""
        root, tree, cache, outputs = step.root, step.tree, step.cache, step.outputs
        if cache.batch is not None:
            return self._verify_together([step])[0]
        rows = len(tree) + 1
        shown, width = cache.length + rows, rows
        if self.fixed is not None:
            shown, width = self.fixed.shown(cache.length), self.fixed.width
            cache.show(shown)
        tokens, depths, visible = _padded(root, tree, width)
        positions = depths + cache.length
        mask = None
        if self._branches and (rows > 1 or self.fixed is not None or self._is_windowed(cache.length)):
            keys = np.arange(shown, dtype=np.int32)
            keys[cache.length :] = -1
            mask = self._masks(visible[None], positions[None], keys[None], np.array([cache.length]))
        with recording(self.layers, [(outputs, rows)]):
            return self._forward(tokens[None], positions[None], cache, attention_mask=mask)[0, :rows]

    @torch.inference_mode()
    def verify_batch(
        self, steps: Sequence[Step], asked: Sequence[torch.Tensor] = (), *, refused: bool = False
    ) -> list[torch.Tensor]:
        """Verify the drafts of several sequences, in one pass where the model can.

        Args:
            steps: At least one, each with a cache of its own.
            asked: Hidden states that a prefill kept, [n, `hidden_width`] each. No other logits depend on them: in the
                compiled loops they are further rows of the head's product, elsewhere a product of their own.
            refused: Whether `fixed_step` was tried and does not take these steps; it is not tried again.

        Returns:
            For each step the logits that `verify` returns, then for each of `asked` its logits, [n, vocabulary]; these
            rank tokens as the model does (it may scale or cap them still).
        """
        if self.cpu is not None:
            rows = [Rows.of_tree(step.root, step.tree, step.cache, step.outputs) for step in steps]
            return self.cpu(rows, asked)
        passed = None if self.fixed_step is None or refused else self.fixed_step.run(steps)
        found = self._verified(steps) if passed is None else [each.logits.clone() for each in passed]
        return [*found, *self.logits_of(asked)]

    def logits_of(self, asked: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The logits of hidden states in one product, of so many rows that few shapes occur.

        Args:
            asked: [n, `hidden_width`] each.
        """
        if not asked:
            return ()
        rows = torch.cat(list(asked)).to(self.model.dtype)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % ASKED))
        logits: torch.Tensor = self._head(padded)
        parts: Sequence[torch.Tensor] = logits[: len(rows)].split([len(states) for states in asked])
        return parts

    def _verified(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """`verify_batch` of the steps alone, in passes of the shapes that they need."""
        if self.fixed_step is not None:
            self.fixed_step.give_back(steps)
        if not self.pads or len(steps) == 1:
            return [self._verify_alone(step) for step in steps]
        if self.switch is None:
            return self._verify_together(steps)
        # A sequence behind the switch would make the others use its angles.
        logits: dict[int, torch.Tensor] = {}
        for behind in (False, True):
            group = [n for n, step in enumerate(steps) if (step.cache.length >= self.switch) == behind]
            if group:
                logits |= zip(group, self._verify_together([steps[n] for n in group]), strict=True)
        return [logits[n] for n in range(len(steps))]

    def _verify_together(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """`verify_batch` in one padded pass; the sequences join the batch and stay in it until they are released."""
        widths = [len(step.tree) + 1 for step in steps]
        with self._batch.pass_over([step.cache for step in steps], widths) as now:
            ordered = [steps[n] for n in now.order]
            parts = zip(*(_padded(step.root, step.tree, now.width) for step in ordered), strict=True)
            tokens, depths, visible = (np.stack(part) for part in parts)
            positions = depths + np.array([[step.cache.length] for step in ordered])
            mask = self._masks(visible, positions, now.keys, now.starts)
            with recording(self.layers, [(step.outputs, len(step.tree) + 1) for step in ordered]):
                logits = self._forward(tokens, positions, self._batch, attention_mask=mask)
        return [logits[row, : widths[n]] for n, row in enumerate(np.argsort(now.order))]

    def _is_windowed(self, root: int) -> bool:
        """Whether the window of some layer excludes a part of the sequence for a root at this position.

        Some models leave that to their own cache, which forgets, and have no such mask of their own.
        """
        return self._narrowest is not None and root >= self._narrowest

    def _forward(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        cache: TreeCache | BatchCache,
        **inputs: Any,
    ) -> torch.Tensor:
        """The model's own pass over [sequences, rows] tokens: logits [sequences, rows or fewer, vocabulary]."""
        if self._takes_positions:
            inputs["position_ids"] = torch.from_numpy(positions).to(self.device)
        ids = torch.from_numpy(tokens).to(self.device)
        logits: torch.Tensor = self.model(ids, past_key_values=cache, use_cache=True, **inputs).logits
        return logits

    def _masks(
        self,
        visible: NDArray[np.bool_],
        queries: NDArray[np.int64],
        keys: NDArray[np.int32],
        starts: NDArray[np.int64],
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The masks of `attention_masks` as the attention backend takes them; one mask if there is only one kind."""
        allowed = attention_masks(self.kinds, visible, queries, keys, starts, self.device)
        masks = {kind: self.to_backend(mask) for kind, mask in allowed.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def to_backend(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask of bool as the model's attention backend takes it.

        Args:
            mask: Bool of any shape, True where a row attends to a column.
        """
        if self._mask_dtype == torch.bool:
            return mask
        least = torch.finfo(self._mask_dtype).min
        return torch.zeros(mask.shape, dtype=self._mask_dtype, device=self.device).masked_fill(~mask, least)


def _padded(root: int, tree: DraftTree, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Tokens [width], depths [width] and who sees whom [width, width] of a root and a tree, padded.

    A padding row repeats the root's token, attends to itself, and no other row attends to it.
    """
    rows = len(tree) + 1
    tokens, depths = np.full(width, root, np.int64), np.zeros(width, np.int64)
    tokens[1:rows], depths[1:rows] = tree.tokens, tree.depths
    visible = np.eye(width, dtype=np.bool_)
    visible[:rows, :rows] = tree.ancestor_mask
    return tokens, depths, visible


def keeps_state(model: PreTrainedModel) -> bool:
    """Whether the model says of itself that it keeps a state which cannot be rolled back."""
    config: Any = model.config.get_text_config(decoder=True)
    return bool(getattr(model, "_is_stateful", False)) or not hasattr(config, "num_hidden_layers")


def attention_of(model: PreTrainedModel) -> str:
    """The name of the model's attention backend."""
    return str(getattr(model.config, "_attn_implementation", "eager"))


def takes_masks(model: PreTrainedModel) -> bool:
    """Whether the model's attention backend takes a 4-D mask."""
    return attention_of(model) in _MASKED_BACKENDS


def context_window(config: Any) -> int | None:
    """Most positions that a configuration names, or None."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _position_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one position in all layers, by what configurations usually say of them."""
    key_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    return int(2 * config.num_hidden_layers * key_heads * head_width(config) * dtype.itemsize)


def _switch_of_rotation(config: Any) -> int | None:
    """The position from which "longrope" uses other angles; None for other encodings."""
    rotation: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [rotation] if "rope_type" in rotation else [kind for kind in rotation.values() if isinstance(kind, dict)]
    switches = [int(kind["original_max_position_embeddings"]) for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(switches, default=None)
