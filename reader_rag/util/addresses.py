"""Arrays by their addresses, for compiled loops: lists of arrays that come and go are not as cheap to hand over."""

from __future__ import annotations

import ctypes
from typing import Any

from numba import types
from numba.core import config
from numba.extending import intrinsic


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address as what `carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


# Without the compiler a pointer is what ctypes calls one.
pointer: Any = (lambda address: ctypes.c_void_p(int(address))) if config.DISABLE_JIT else _pointer  # type: ignore[attr-defined]
