"""Sets OpenMP's wait policy, which decides how fast a model runs beside other computing threads.

Every computing thread of a process has a team of OpenMP threads, e.g. an engine's thread and a thread that embeds a
question. If there are more of them than cores, GNU OpenMP puts them to sleep between any two loops, and waking them
takes longer than the loops of a small model. With `OMP_WAIT_POLICY=active` they spin for a moment first. OpenMP reads
these variables when PyTorch is imported.
"""

from __future__ import annotations

import os
import sys

from reader_rag.errors import ConfigError

_VARIABLES = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}
"""The two spin limits are the defaults; without them "active" would mean to spin without limit."""


def threads_configured() -> bool:
    """Whether this process sets how OpenMP waits, or runs on a system where that changes nothing."""
    return sys.platform != "linux" or bool(_VARIABLES.keys() & os.environ.keys())


def configure_threads() -> None:
    """Set how OpenMP's threads wait in this process and its children. Call it before anything imports torch.

    The programs of this package call it; a process that uses the package as a library decides whether to call it.
    Variables that are set already are not changed.

    Raises:
        ConfigError: torch is imported already, so that the variables would have no effect.
    """
    if threads_configured():
        return
    if "torch" in sys.modules:
        names = " ".join(f"{name}={value}" for name, value in _VARIABLES.items())
        raise ConfigError(
            f"configure_threads() has no effect after torch is imported: call it first, or set {names} before starting"
        )
    os.environ |= _VARIABLES
