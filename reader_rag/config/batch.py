"""Settings of the scheduler: batch size, KV cache memory and queue."""

from __future__ import annotations

from dataclasses import dataclass

from reader_rag.config.setting import Settings, setting


@dataclass(frozen=True)
class BatchConfig(Settings):
    """Settings of the scheduler: batch size, KV cache memory and queue."""

    max_rows: int | None = setting(
        None, "Most sequences that are decoded at once; None: 8 on the CPU, 32 elsewhere.", ge=1
    )
    max_cache_bytes: int | None = setting(
        None,
        "Most bytes of their KV caches and of hidden states of prompts, reserved for each one's longest answer; None: "
        "half of the memory that is free when the first request comes, less prefix_bytes.",
        ge=1,
    )
    max_waiting: int = setting(1024, "Most requests in the queue; a further one is refused with a BusyError.", ge=1)
    max_wait_s: float | None = setting(
        600.0,
        "Seconds after which a request that is still in the queue ends with a BusyError; None: it waits without limit.",
        gt=0.0,
    )
