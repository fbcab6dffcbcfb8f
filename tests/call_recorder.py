"""A recorder of passes for tests without a GPU: it records PyTorch's calls, and replays them on the same tensors.

As in a CUDA graph, every number of Python is what it was when the pass was recorded, every tensor stays where it was,
and no line of the model runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _storages(value: Any) -> Iterator[int]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage().data_ptr()


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        views = set(_storages(output)) & set(_storages((args, kwargs)))
        if func._schema.is_mutable or not views:  # a view of what is computed again needs nothing
            self.calls.append((func, args, kwargs or {}, output))
        return output


class RecordedCalls:
    """The calls of a pass."""

    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        self._calls = calls
        self.replays = 0

    @torch.inference_mode()
    def replay(self) -> None:
        """Make all calls again; what they return goes to where it was."""
        self.replays += 1
        for func, args, kwargs, output in self._calls:
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


class CallRecorder:
    """Records passes.

    Attributes:
        graphs: What was recorded.
    """

    def __init__(self) -> None:
        self.graphs: list[RecordedCalls] = []

    def record(self, function: Callable[[], None]) -> RecordedCalls:
        """Call a function and record what it calls."""
        with _Recording() as recording:
            function()
        self.graphs.append(RecordedCalls(recording.calls))
        return self.graphs[-1]
