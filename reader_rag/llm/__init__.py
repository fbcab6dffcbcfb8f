"""The engine as a LlamaIndex LLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reader_rag.llm.reader_llm import ReaderLLM

__all__ = ["ReaderLLM"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reader_rag.llm import reader_llm

    return getattr(reader_llm, name)
