"""Arrays handed to the kernels by their addresses, as rows of one table: any number of them, of any size.

No list of arrays is as cheap to hand over. Whoever makes such a table keeps the arrays alive.
"""

from __future__ import annotations

import ctypes
from typing import Any

from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def _address(typing_context: Any, address: Any) -> Any:
    """An address as what `carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@njit
def _compiled() -> None:
    """Only there to tell whether numba compiles."""


pointer: Any = _address if hasattr(_compiled, "py_func") else (lambda address: ctypes.c_void_p(int(address)))
"""An int64 address as the first argument of `numba.carray`; without the compiler a pointer is what ctypes calls one."""
