"""Finds calls of a model that no recorded pass can hold: those whose outcome depends on the contents of tensors."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TO_HOST = {"_local_scalar_dense", "is_nonzero", "equal"}
"""Calls that copy a value to the host: `item`, `tolist`, `bool` of a tensor."""
_OF_ANY_SIZE = {"nonzero", "nonzero_numpy", "masked_select", "unique_dim", "_unique", "_unique2", "unique_consecutive"}
"""Calls whose result has a size that depends on contents."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class _Watch(TorchDispatchMode):
    """Notes the first data-dependent call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.found is None and _depends_on_contents(func, args, kwargs or {}):
            self.found = f"{func.overloadpacket.__name__} in {_line_of_model()}"
        return func(*args, **(kwargs or {}))


def data_dependent_call(function: Callable[[], Any]) -> str | None:
    """The first call of a function whose outcome depends on the contents of tensors, and its line; None: there is none.

    A GPU can record a function without such calls, and replay it over other contents.

    Args:
        function: Is called.
    """
    watch = _Watch()
    with watch:
        function()
    return watch.found


def _depends_on_contents(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    name: str = func.overloadpacket.__name__
    if name in _TO_HOST or name in _OF_ANY_SIZE:
        return True
    if name == "_grouped_mm":  # in other types its groups are multiplied one by one, which the host must know
        return bool(args[0].dtype != torch.bfloat16)
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and "Tensor" in func._overloadname
    if name == "_to_copy":
        target = kwargs.get("device")
        return target is not None and torch.device(target).type == "cpu" and args[0].device.type != "cpu"
    if name in _INDEXING and len(args) > 1:
        return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1])
    return False


def _line_of_model() -> str:
    """The innermost line that is neither PyTorch's nor this module's."""
    here = Path(__file__).name
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "torch" not in path.parts and path.name != here:
            return f"{path.name}:{frame.lineno}"
    return "an unknown line"
