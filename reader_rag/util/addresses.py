"""Passes arrays to compiled loops by address, because numba copies a list of arrays at every call."""

from __future__ import annotations

import ctypes
from typing import Any

from numba import types
from numba.core import config
from numba.extending import intrinsic


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """Turn an address, an int64, into the pointer that `numba.carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


# Without the compiler `carray` takes a pointer of ctypes.
pointer: Any = (lambda address: ctypes.c_void_p(int(address))) if config.DISABLE_JIT else _pointer  # type: ignore[attr-defined]
