"""The processor: its name, and the instruction sets that compiled loops may use."""

from __future__ import annotations

import platform
from pathlib import Path

from llvmlite.binding import get_host_cpu_features, get_host_cpu_name  # type: ignore[import-untyped]
from numba.core import config

_PROC = Path("/proc/cpuinfo")
_NEEDS = (("avx", "avx"), ("avx512", "avx2"), ("avx512", "avx512f"), ("avxvnni", "avx2"))
"""Prefix of instruction sets, and the set without which LLVM has none of them."""


def cpu_name() -> str:
    """The name of the processor: the vendor's where the system tells it, else LLVM's."""
    try:
        lines = _PROC.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    name = str(get_host_cpu_name())
    return name if name != "generic" else platform.processor() or platform.machine()


def cpu_features() -> frozenset[str]:
    """The instruction sets that numba compiles for and this processor has, by LLVM's names, e.g. "avx512vnni".

    `NUMBA_CPU_NAME`, `NUMBA_CPU_FEATURES` and `NUMBA_ENABLE_AVX` hold here as they hold in numba. Where they name
    another processor, only the instruction sets count that they name too.
    """
    try:
        host = {name for name, there in get_host_cpu_features().items() if there}
    except RuntimeError:  # LLVM does not know the processor
        return frozenset()
    target, changes, avx = (getattr(config, name) for name in ("CPU_NAME", "CPU_FEATURES", "ENABLE_AVX"))
    if changes is None:
        found = set(host) if avx else {name for name in host if not name.startswith("avx")}
    else:
        found = set(host) if target in (None, get_host_cpu_name()) else set()
        for change in changes.split(","):
            sign, name = change.strip()[:1], change.strip()[1:]
            if sign == "+":
                found.add(name)
            elif sign == "-":
                found.discard(name)
    for prefix, needed in _NEEDS:
        if needed not in found:
            found = {name for name in found if not name.startswith(prefix)}
    return frozenset(found & host)


def has_avx512_vnni() -> bool:
    """Whether loops may multiply 64 pairs of 8-bit integers by one instruction (`vpdpbusd` on 512 bits)."""
    return {"avx512f", "avx512bw", "avx512vnni"} <= cpu_features()


def has_avx_vnni() -> bool:
    """Whether loops may multiply 32 pairs of 8-bit integers by one instruction (`vpdpbusd` on 256 bits)."""
    features = cpu_features()
    return "avxvnni" in features or {"avx512vl", "avx512vnni"} <= features
