"""The fields of `ReaderLLM` and the arguments of its calls, derived from the settings in `reader_rag.config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import Field, create_model
from llama_index.core.llms.function_calling import FunctionCallingLLM
from pydantic import SkipValidation

from reader_rag.config import DraftConfig, EngineConfig, LoadConfig, SamplingParams, ToolConfig
from reader_rag.config.setting import Setting, settings_of
from reader_rag.errors import ConfigError
from reader_rag.model.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

_WITHOUT_DRAFT = {name: about for name, about in settings_of(EngineConfig).items() if name != "draft"}
ENGINE_SETTINGS = settings_of(LoadConfig) | _WITHOUT_DRAFT
"""What an engine is loaded with; of `DraftConfig` an LLM has `max_nodes` alone."""
SAMPLING_SETTINGS = {
    name: about for name, about in settings_of(SamplingParams).items() if name not in ("ignore_eos", "record_margins")
}
"""Sampling parameters, but those of benchmarks."""
_DRAFT_SETTINGS = {"max_nodes": settings_of(DraftConfig)["max_nodes"]}
TOOL_SETTINGS = settings_of(ToolConfig)
CALL_ARGUMENTS = (
    *SAMPLING_SETTINGS,
    *_DRAFT_SETTINGS,
    "logits_processor",
    "stopping_criteria",
    "tenant",
    "recall",
    "prediction",
)
"""Arguments of one call; each takes the place of the LLM's own setting."""
IGNORED_ARGUMENTS = frozenset({"extra_headers"})
"""What LlamaIndex passes to any LLM and what means nothing to a local one: HTTP headers (DocumentContextExtractor)."""


def _pydantic_fields(settings: Mapping[str, tuple[Any, Any, Setting]], *, frozen: bool) -> dict[str, Any]:
    """Fields of a Pydantic class; values are checked by the `Settings` classes."""
    unchecked: Any = SkipValidation  # for type checkers no generic class
    return {
        name: (unchecked[annotation], Field(default=default, description=about.doc, frozen=frozen))
        for name, (annotation, default, about) in settings.items()
    }


if TYPE_CHECKING:

    class LLMSettings(FunctionCallingLLM):
        """The base of `ReaderLLM` as type checkers see it."""

        def __getattr__(self, name: str) -> Any: ...

else:
    LLMSettings = create_model(
        "LLMSettings",
        __base__=FunctionCallingLLM,
        __doc__="A LlamaIndex LLM with a field for every setting.",
        model=(
            SkipValidation[str],
            Field(default=DEFAULT_MODEL, description="Alias, hub id or local folder.", frozen=True),
        ),
        context_window=(
            SkipValidation[int | None],
            Field(
                default=None,
                description="Most tokens of prompt and answer together; None: the model's own.",
                frozen=True,
            ),
        ),
        **_pydantic_fields(ENGINE_SETTINGS, frozen=True),
        **_pydantic_fields(_DRAFT_SETTINGS, frozen=False),
        **_pydantic_fields(SAMPLING_SETTINGS, frozen=False),
        **_pydantic_fields(TOOL_SETTINGS, frozen=False),
    )


def settings_of_engine(engine: Engine, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an LLM over an engine that exists.

    Args:
        engine: The engine.
        settings: What the caller gives.

    Raises:
        ConfigError: A setting of the engine is given again.
    """
    clash = sorted({"model", *ENGINE_SETTINGS} & settings.keys())
    if clash:
        raise ConfigError(f"{', '.join(clash)}: set when the engine was loaded; leave them out, or pass no engine")
    from reader_rag.model.fingerprint import dtype_name, quantization_name  # loads torch

    loaded = {name: getattr(engine.config, name) for name in _WITHOUT_DRAFT}
    loaded |= {
        "model": engine.name,
        "dtype": dtype_name(engine.model),
        "quantization": quantization_name(engine.model),
        "device": str(engine.model.device),
        "prefix_bytes": engine.prefix_bytes,
    }
    return {"max_nodes": engine.config.draft.max_nodes, **settings, **loaded}
