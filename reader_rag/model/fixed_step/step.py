"""One decode step of fixed shapes: beside the dynamic step of `Target`, which every refusal falls back to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from reader_rag.kv_cache.fixed_cache import FixedCache, power_of_two
from reader_rag.kv_cache.layer_states import wanted_layers
from reader_rag.kv_cache.tree_cache import TreeCache
from reader_rag.model.fixed_shape import FixedShape
from reader_rag.model.fixed_step.forward import StepForward, StepOutputs
from reader_rag.model.fixed_step.graphs import GraphCache, GraphRecorder
from reader_rag.model.fixed_step.inputs import InputBuffer, RowInput
from reader_rag.model.fixed_step.long_context import Columns, LongContexts
from reader_rag.model.fixed_step.shapes import WIDTHS, StepShape, shown_for, widest, width_for
from reader_rag.model.fixed_step.transfers import Transfers
from reader_rag.model.interface import Asked, Passed, Step
from reader_rag.sampling.topk import ranked_tokens, top_k_of


class FixedStep:
    """Verifies draft trees of one or several sequences in passes of few shapes, over buffers that never move.

    A pass has `rows` x `width` positions, padded, and attends to `shown` columns of the cache, all powers of two. Trees
    are contents of tensors. What a step accepted is moved into place by the next one, on the device. One copy goes to
    the device and one comes back, whatever the batch.

    Args:
        model: The model; its own `forward` is called.
        kinds: Its attention kinds and their spans (`attention_kinds`).
        to_backend: A mask [rows, 1, width, columns] of bool as the model's attention takes it.
        recorder: Records passes and replays them; None: every pass is called.
        fixed: Strict mode: one sequence a pass, of this width; None: any shape.
        layers: The model's decoder layers; without, steps whose `outputs` want some have no fixed shape.
        max_bytes: Most bytes of the key/value cache; None: as many as the sequences need.
        position_bytes: Bytes of the keys and values of so many positions.
        capacity: Capacity of a sequence's cache, by its committed positions and the nodes of a draft.
        head: Logits of hidden states of prompts.

    Attributes:
        cache: Keys and values of the sequences that are decoded here.
        transfers: Copies between host and device.
        graphs: Recorded passes.
        passes: Passes so far.
        forward: The device's part of a pass.
        inputs: Its inputs.
        long_contexts: Chooses which passes attend to their past in a call of its own; None: none does.
        verifies_branches: Whether drafts may have branches; in strict mode attention is along paths then.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kinds: Mapping[str, int],
        to_backend: Callable[[torch.Tensor], torch.Tensor],
        *,
        recorder: GraphRecorder | None = None,
        fixed: FixedShape | None = None,
        layers: Sequence[nn.Module] = (),
        max_bytes: int | None = None,
        position_bytes: Callable[[int], int],
        capacity: Callable[[int, int], int],
        head: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> None:
        layers_of_model: int = model.config.get_text_config(decoder=True).num_hidden_layers
        self.cache = FixedCache(layers_of_model, max_bytes)
        self.transfers = Transfers()
        self.passes = 0
        self.long_contexts: LongContexts | None = None
        self.verifies_branches = fixed is None
        self._fixed = fixed
        self._layers = layers
        self._head = head
        self._position_bytes, self._capacity = position_bytes, capacity
        self.inputs = InputBuffer(model.device)
        self.forward = StepForward(model, kinds, to_backend, self.cache, self.inputs, layers)
        self.graphs = GraphCache(self.forward, self.cache, self.inputs, self.transfers, recorder)

    def widest(self, sequences: int) -> int:
        """Most positions of each of so many sequences in one step, root included; 0: more sequences than it takes.

        Args:
            sequences: Sequences of the step.
        """
        return widest(sequences) if self._fixed is None else self._fixed.width

    def cache_bytes(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Bytes of the key/value cache of some sequences.

        Args:
            sizes: At least one: most committed positions, and most nodes of a draft.
        """
        width = WIDTHS[-1] if self._fixed is None else self._fixed.width
        capacity = max(self._capacity(positions, nodes) for positions, nodes in sizes)
        return power_of_two(len(sizes)) * self._position_bytes(power_of_two(capacity + width) + 1)

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

        Raises:
            IndexError: A sequence exceeds the capacity of its `TreeCache`.
        """
        if self._fixed is None or len(steps) == 1:
            return self._run(steps, asked, wanted)
        with self.cache.lock:
            if not self._takes(steps) or self._joined(steps) is None:
                return None  # before the first pass: from here on, none is refused
            passed: list[Passed] = []
            for n, step in enumerate(steps):
                for before in passed[-1:]:  # the next pass writes where its logits are
                    passed[-1] = before._replace(logits=before.logits.clone())
                last = n == len(steps) - 1
                found = self._run([step], asked if last else (), wanted[n : n + 1])
                assert found is not None
                passed += found
            return passed

    def give_back(self, steps: Sequence[Step]) -> None:
        """Move the keys and values of sequences to their own caches, for a dynamic step.

        Args:
            steps: Of the sequences; those whose keys and values are not in the fixed step's cache stay as they are.
        """
        for step in steps:
            if step.cache.batch is self.cache:
                self.cache.give_back(step.cache)

    def _run(self, steps: Sequence[Step], asked: Sequence[Asked], wanted: Sequence[bool]) -> list[Passed] | None:
        """`run` in one pass."""
        with self.cache.lock:
            shape, rows, places_asked = self.prepare(steps, [one.positions for one in asked])
            if shape is None:
                return None
            self.forward.has_moved = False
            try:
                outputs = self.graphs.run(shape)
            except BaseException:
                if self.forward.has_moved:  # a pass that fails has made its moves, or none
                    self.cache.moved(rows)
                raise
            self.cache.moved(rows)
            self.passes += 1
        places = [(row - shape.first, len(step.tree) + 1) for row, step in zip(rows, steps, strict=True)]
        for (row, count), step in zip(places, steps, strict=True):
            if step.outputs is not None:
                indexes = [shape.layers.index(layer) for layer in step.outputs.layers]
                step.outputs.receive(torch.stack([outputs.hidden[n, row, :count] for n in indexes], dim=1))
        states = [one.states.take(indexes) for one, indexes in zip(asked, places_asked, strict=True)]
        return self._passed(steps, outputs, places, self._head(states), wanted)

    def prepare(
        self, steps: Sequence[Step], asked: Sequence[NDArray[np.integer]] = ()
    ) -> tuple[StepShape | None, list[int], list[torch.Tensor]]:
        """Copy the inputs of a pass to the device; its sequences join the cache.

        Args:
            steps: At least one, each with a cache of its own.
            asked: Positions of prompts.

        Returns:
            The shape of the pass, the row of each sequence, and `asked` on the device; None and nothing else: there is
            no such shape.

        Raises:
            IndexError: A sequence exceeds the capacity of its `TreeCache`.
        """
        shape, rows = self._placed(steps)
        if shape is None:
            return None, [], []
        parts = {
            row: RowInput(step.root, step.tree, step.cache.length, self.cache.moves_of(row), step.draw)
            for row, step in zip(rows, steps, strict=True)
        }
        return shape, rows, self.inputs.fill(shape, parts, self.cache.columns, self.transfers, asked)

    def _placed(self, steps: Sequence[Step]) -> tuple[StepShape | None, list[int]]:
        """The shape of a pass and the row of each sequence; None: there is no such shape."""
        rows = self._joined(steps) if self._takes(steps) else None
        if rows is None:
            return None, []
        layers, draws = wanted_layers([step.outputs for step in steps]), any(step.draw is not None for step in steps)
        longest = max(step.cache.length for step in steps)
        if self._fixed is not None:
            shown = self._fixed.shown(longest)
            generation = self.cache.generation
            shape = StepShape(rows[0], 1, self._fixed.width, shown, generation, layers=layers, draws=draws)
            if self.verifies_branches:
                moved = len(self.cache.moves_of(rows[0])) > 0
                shape = shape._replace(moves=moved, past=self._fixed.past(shown), paths=True)
            return shape, rows
        count = power_of_two(max(rows) + 1)
        moves = max(len(self.cache.moves_of(row)) for row in rows)
        width = width_for(max(moves, *(len(step.tree) + 1 for step in steps)))
        if width > widest(count):
            return None, []
        columns = Columns(0, shown_for(longest + width))
        if self.long_contexts is not None:
            shortest = min(step.cache.length for step in steps)
            columns = self.long_contexts.columns(shortest, longest, count, width)
        past, shown = columns
        return StepShape(0, count, width, shown, self.cache.generation, moves > 0, layers, draws, past), rows

    def _takes(self, steps: Sequence[Step]) -> bool:
        """Whether there is a shape for steps, if their sequences fit the cache."""
        if wanted_layers([step.outputs for step in steps]) and not self._layers:
            return False
        limit = self.widest(len(steps))
        return all(len(step.tree) < limit for step in steps)

    def _joined(self, steps: Sequence[Step]) -> list[int] | None:
        """The row of each sequence in the cache; None: they do not fit.

        Raises:
            IndexError: A sequence exceeds the capacity of its `TreeCache`.
        """
        caches: list[TreeCache] = [step.cache for step in steps]
        for step, cache in zip(steps, caches, strict=True):
            needed = cache.length + len(step.tree) + 1
            if needed > cache.capacity:
                raise IndexError(f"{needed} positions do not fit a cache of {cache.capacity}")
        return self.cache.join(caches, WIDTHS[-1] if self._fixed is None else self._fixed.width)

    def _passed(
        self,
        steps: Sequence[Step],
        outputs: StepOutputs,
        places: Sequence[tuple[int, int]],
        asked: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> list[Passed]:
        """The outputs of each sequence: (row of the pass, positions)."""
        # Behind the ranked tokens, one column for what was drawn.
        of_asked = (functional.pad(ranked_tokens(logits).to(torch.int32), (0, 1)) for logits in asked)
        ranked = [outputs.ranked.flatten(0, 1), *of_asked]
        tokens = self.transfers.to_host(ranked[0] if len(ranked) == 1 else torch.cat(ranked))
        logits = [outputs.logits[row, :count] for row, count in places]
        chosen = [n for n, needed in enumerate(wanted) if needed]
        if chosen:
            for n, part in zip(chosen, self.transfers.rows_to_host([logits[n] for n in chosen]), strict=True):
                logits[n] = part
        passed = []
        width = outputs.ranked.shape[1]
        for (row, count), scores, step in zip(places, logits, steps, strict=True):
            found = tokens[row * width : row * width + count]
            drawn = None if step.draw is None else [int(token) for token in found[:, -1]]
            passed.append(Passed(scores, top_k_of(found[:, :-1]), drawn))
        start = len(ranked[0])
        for scores in asked:
            passed.append(Passed(scores, top_k_of(tokens[start : start + len(scores), :-1])))
            start += len(scores)
        return passed
