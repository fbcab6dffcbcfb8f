"""Recorded passes: one for each shape, at most so many, each compared with the pass that it repeats."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from reader_rag.errors import ReaderWarning
from reader_rag.kv_cache.fixed_cache import FixedCache
from reader_rag.model.fixed_step.forward import StepForward, StepOutputs
from reader_rag.model.fixed_step.inputs import InputBuffer
from reader_rag.model.fixed_step.shapes import MOST_POSITIONS, StepShape
from reader_rag.model.fixed_step.transfers import Transfers
from reader_rag.util.one_line import first_line

MOST_GRAPHS = 48
"""Most recorded passes; the least recently used is dropped."""
COMPARED = 3
"""First replays of a recorded pass that are compared with a call."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_ELSEWHERE = 0.1
"""Relative difference of logits that rounding explains: a replay may choose other kernels than a call."""


class Graph(Protocol):
    """A recorded pass."""

    def replay(self) -> None:
        """Compute it again, from what is now in the buffers that it was recorded with."""


class GraphRecorder(Protocol):
    """Records what a function has the device compute."""

    def record(self, function: Callable[[], None]) -> Graph:
        """Call a function that has been called before, and record it.

        Args:
            function: Reads and writes buffers that stay where they are.
        """


class CudaRecorder:
    """CUDA graphs that share one pool of memory; they are replayed one after the other."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Graph:
        """Capture a function on a stream of its own.

        Args:
            function: Reads and writes buffers that stay where they are.
        """
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            function()
        return graph


@dataclass
class _Recorded:
    """A recorded pass, and how many of its replays were compared so far."""

    graph: Graph
    compared: int = 0


class GraphCache:
    """Passes by shape: called at first, recorded at the second use, replayed from then on.

    The inputs are those in `inputs`. Outputs of replayed passes are in buffers that all of them share, so they hold
    until the next pass.

    Args:
        forward: A pass.
        cache: Its keys and values.
        inputs: Its inputs.
        transfers: Copies to the host.
        recorder: Records passes; None: every pass is called.
        most: Most recorded passes.

    Attributes:
        recorder: As given.
        most: As given.
        replays: Passes that were replayed so far.
        recorded: Passes that were recorded so far.
        refused: Shapes that are called always: recording failed, or a replay gave something else.
    """

    def __init__(
        self,
        forward: StepForward,
        cache: FixedCache,
        inputs: InputBuffer,
        transfers: Transfers,
        recorder: GraphRecorder | None,
        most: int = MOST_GRAPHS,
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._inputs = inputs
        self._transfers = transfers
        self.recorder = recorder
        self.most = most
        self._graphs: OrderedDict[StepShape, _Recorded] = OrderedDict()
        self._seen: set[StepShape] = set()
        self._buffers: StepOutputs | None = None
        self._hidden: dict[int, torch.Tensor] = {}
        self.replays = self.recorded = 0
        self.refused: set[StepShape] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def shapes(self) -> list[StepShape]:
        """Of the recorded passes, the least recently used first."""
        return list(self._graphs)

    @torch.inference_mode()
    def run(self, shape: StepShape) -> StepOutputs:
        """The outputs of a pass.

        Args:
            shape: Of the pass whose inputs are in the buffer.
        """
        self._forget_old(shape.generation)
        if self.recorder is None or shape in self.refused:
            return self._forward(shape)
        found = self._graphs.get(shape)
        if found is not None:
            self._graphs.move_to_end(shape)
            if found.compared < COMPARED:
                return self._compared(shape, found)
            return self._replayed(shape, found)
        outputs = self._forward(shape)  # the first use loads kernels and chooses algorithms, which no graph may hold
        if shape in self._seen:
            self._record(shape, outputs, self.recorder)
        self._seen.add(shape)
        return outputs

    def _forget_old(self, generation: int) -> None:
        """Drop passes over buffers that were given back."""
        for shape in [shape for shape in self._graphs if shape.generation != generation]:
            del self._graphs[shape]
        for kept in (self._seen, self.refused):
            kept -= {shape for shape in kept if shape.generation != generation}

    def _record(self, shape: StepShape, outputs: StepOutputs, recorder: GraphRecorder) -> None:
        """Record a pass whose outputs are known; what recording itself writes to the cache is what is there."""
        self.allocated(outputs)
        # The call has made the moves; recorded again, they would move what was written since.
        saved = self._save(shape)
        try:
            graph = recorder.record(lambda: self._into_buffers(shape))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what a model does that no graph may hold
            self._refuse(shape, f"it cannot be recorded: {first_line(error)}")
            return
        finally:
            self._restore(saved)
        while len(self._graphs) >= self.most:
            self._graphs.popitem(last=False)
        self._graphs[shape] = _Recorded(graph)
        self.recorded += 1

    def allocated(self, outputs: StepOutputs) -> StepOutputs:
        """The buffers of outputs, allocated when the first pass is recorded.

        Args:
            outputs: Of any pass.
        """
        if self._buffers is None:
            self._buffers = _buffers_like(outputs)
        hidden = outputs.hidden
        if len(hidden) not in self._hidden:
            states = hidden.new_empty(len(hidden), MOST_POSITIONS, hidden.shape[-1]) if hidden.numel() else hidden
            self._hidden[len(hidden)] = states
        return self._buffers._replace(hidden=self._hidden[len(hidden)])

    def _into_buffers(self, shape: StepShape) -> None:
        outputs, views = self._forward(shape), self._views(shape)
        for output, view in zip(outputs, views, strict=True):
            view.copy_(output)

    def _views(self, shape: StepShape) -> StepOutputs:
        """The output buffers in the shape of a pass."""
        assert self._buffers is not None
        count = shape.positions
        logits, ranked, _ = self._buffers
        hidden = self._hidden[len(shape.layers)]
        places = (shape.rows, shape.width, -1)
        states = hidden[:, :count].view(len(hidden), *places) if hidden.numel() else hidden
        return StepOutputs(logits[:count].view(places), ranked[:count].view(places), states)

    def _replayed(self, shape: StepShape, found: _Recorded) -> StepOutputs:
        found.graph.replay()
        self.replays += 1
        return self._views(shape)

    def _compared(self, shape: StepShape, found: _Recorded) -> StepOutputs:
        """A call and a replay of the same pass; the outputs of the call, and of the replay from the next use on."""
        saved = self._save(shape)
        outputs = self._forward(shape)
        called = self._save(shape)
        self._restore(saved)
        replayed = self._replayed(shape, found)
        difference = (replayed.logits.float() - outputs.logits.float()).norm() / outputs.logits.float().norm()
        error = float(self._transfers.to_host(difference))
        found.compared += 1
        if not error <= _TOLERANCE.get(outputs.logits.dtype, _TOLERANCE_ELSEWHERE):
            self._restore(called)
            del self._graphs[shape]
            self._refuse(shape, f"its replay differs from a call by {error:.2g} of the logits")
        return outputs

    def _save(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """All that the pass in the input buffer writes to the cache: rows, columns, what is there."""
        inputs = self._inputs.views(shape)
        rows = torch.arange(shape.first, shape.first + shape.rows, device=inputs.tokens.device)[:, None]
        columns = torch.cat([inputs.targets, inputs.columns], dim=1)
        return rows, columns, self._cache.read(rows, columns)

    def _restore(self, saved: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]) -> None:
        self._cache.write(*saved)

    def _refuse(self, shape: StepShape, why: str) -> None:
        self.refused.add(shape)
        warnings.warn(
            f"a decode step over {shape.rows} x {shape.width} positions behind {shape.shown} runs without a CUDA graph "
            f"({why}); answers are the same, slower",
            ReaderWarning,
            stacklevel=2,
        )


@torch.inference_mode()
def _buffers_like(outputs: StepOutputs) -> StepOutputs:
    """Buffers for logits and ranked tokens of every shape, by those of one: see `shapes.step_bytes`."""
    logits, ranked, hidden = outputs
    return StepOutputs(
        logits.new_empty(MOST_POSITIONS, logits.shape[-1]),
        ranked.new_empty(MOST_POSITIONS, ranked.shape[-1]),
        hidden.new_empty(0),
    )
