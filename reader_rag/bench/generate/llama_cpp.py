"""llama.cpp as a method of `bench generate`: the same model in its own quantisation, plain and with n-gram drafts.

It runs in this process, by the package `xllamacpp`. Each prompt gets a new server, which is loaded and warmed up before
the time is taken: some of llama.cpp's drafters keep n-grams of the prompts before, and this package's engine starts
every prompt with the draft state of a new process too.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from reader_rag.bench.generate.methods import Task
from reader_rag.bench.generate.runs import Run
from reader_rag.errors import MissingDependencyError, ModelError

_ROOM = 64
"""Positions beyond the longest answer, for drafted tokens."""


@dataclass(frozen=True)
class NgramDrafts:
    """One of llama.cpp's drafters that copy from the context.

    Attributes:
        type: Name of its `common_speculative_type`, in lower case.
        sizes: Values of its settings in `CommonParams.speculative`, by the setting's name; others keep llama.cpp's
            defaults.
    """

    type: str
    sizes: Mapping[str, int] = field(default_factory=dict)


_SHORT = {"size_n": 2, "size_m": 4}
"""Four tokens are drafted after two that occurred before. llama.cpp's defaults, 48 after 12, hardly ever draft."""

VARIANTS: dict[str, NgramDrafts | None] = {
    "llama-cpp": None,
    "llama-cpp ngram-simple": NgramDrafts("ngram_simple"),
    "llama-cpp ngram-map-k": NgramDrafts("ngram_map_k", _SHORT),
    "llama-cpp ngram-map-k4v": NgramDrafts("ngram_map_k4v", _SHORT),
    "llama-cpp ngram-cache": NgramDrafts("ngram_cache"),
}
"""Its ways to decode, by name."""


def import_xllamacpp() -> ModuleType:
    """The package `xllamacpp`.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        return importlib.import_module("xllamacpp")
    except ImportError as cause:
        raise MissingDependencyError(
            "the method llama-cpp needs xllamacpp: pip install xllamacpp (or 'reader-rag[peers]')"
        ) from cause


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp over one GGUF file.

    Args:
        gguf: The file.
        positions: Most tokens of a prompt and its answer.
        threads: Threads for prompts and for decoding.
    """

    gguf: Path
    positions: int
    threads: int

    def about(self) -> dict[str, Any]:
        """For the report: version of the package, and the instruction sets that it was built for."""
        library = import_xllamacpp()
        parts = [part.partition("=") for part in library.get_system_info().split("|")]
        used = " ".join(name.split(":")[-1].strip() for name, _, value in parts if value.strip() == "1")
        return {"version": library.__version__, "system": used}

    def run(self, task: Task, drafts: NgramDrafts | None) -> Run:
        """Decode one prompt greedily, with a server of its own.

        Args:
            task: The prompt.
            drafts: The drafter; None: plain decoding.

        Returns:
            The run; how many tokens it emitted, not which.

        Raises:
            ModelError: llama.cpp cannot load the file, or refuses the prompt.
        """
        server = self._server(drafts)
        replies: list[tuple[float, dict[str, Any]]] = []
        prompt = list(task.prompt.token_ids)
        request = {
            "prompt": prompt,
            "max_tokens": task.generation.max_tokens,
            "temperature": 0.0,
            "ignore_eos": task.generation.ignore_eos,
            "cache_prompt": False,
            "stream": True,
        }
        started = time.perf_counter()
        server.handle_completions(request, lambda reply: replies.append((time.perf_counter(), reply)))
        ended = time.perf_counter()
        errors = [reply["error"] for _, reply in replies if "error" in reply]
        if errors or not replies:
            reason = errors[0].get("message", errors[0]) if errors else "it sent nothing"
            raise ModelError(f"llama.cpp does not answer a prompt of {len(prompt)} tokens: {reason}")
        first, last = replies[0][0], replies[-1][1]
        length, timings = last["usage"]["completion_tokens"], last["timings"]
        if (timings["prompt_n"], timings["cache_n"]) != (len(prompt), 0):
            raise ModelError(
                f"llama.cpp read {timings['prompt_n']} and reused {timings['cache_n']} tokens of a prompt of "
                f"{len(prompt)}: what it measured cannot be compared"
            )
        steps = length - 1 - timings.get("draft_n_accepted", 0)
        return Run.of_one(len(prompt), length, first - started, ended - first, steps, None)

    def _server(self, drafts: NgramDrafts | None) -> Any:
        """A new server: loaded, its weights read once, no prompt cached."""
        library = import_xllamacpp()
        params = library.CommonParams()
        params.model.path = str(self.gguf)
        params.verbosity = -1
        params.n_gpu_layers = 0
        params.n_ctx = self.positions + _ROOM
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.threads
        params.warmup = True
        params.fit_params = False
        params.cache_prompt = params.cache_idle_slots = params.ui = False
        params.cache_ram_mib = 0
        if drafts is not None:
            kinds = library.common_speculative_type
            params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{drafts.type.upper()}")]
            for name, size in drafts.sizes.items():
                setattr(getattr(params.speculative, drafts.type), name, size)
        try:
            return library.Server(params)
        except RuntimeError as cause:
            raise ModelError(f"llama.cpp cannot load {self.gguf}: {cause}") from cause

    def variants(self) -> dict[str, Callable[[Any, Task], Run]]:
        """The methods, as `METHODS` has them."""
        return {
            name: lambda _, task, drafts=drafts: self.run(task, drafts)  # type: ignore[misc]
            for name, drafts in VARIANTS.items()
        }
