"""Settings of the vLLM engines that are measured, as options of the commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Self

import typer

from reader_rag.bench import options
from reader_rag.bench.option_groups import OptionGroup
from reader_rag.connectors.vllm_args import DEFAULT_DRAFT_TOKENS
from reader_rag.model.registry import DEFAULT_MODEL


@dataclass(frozen=True)
class Options(OptionGroup):
    """Settings of a vLLM engine.

    Attributes:
        model: Local folder or hub id.
        dtype: Type of weights and activations.
        at_once: Most requests of a step.
        max_model_len: Most tokens of a prompt with its answer.
        drafted: Most tokens that `reader` drafts for one request.
        datastore: Folder of a datastore for `reader`, or None.
        costs: File of step costs for `reader`, or None.
        eager: Whether vLLM compiles nothing.
        cache_tokens: Positions of the KV cache; None: vLLM decides.
        gpu_memory: Share of a GPU's memory for vLLM.
    """

    model: options.Model = DEFAULT_MODEL
    dtype: options.Dtype = "bfloat16"
    at_once: Annotated[int, typer.Option("--batch", min=1, help="Most requests of a step.")] = 1
    max_model_len: Annotated[int, typer.Option(min=16, help="Most tokens of a prompt with its answer.")] = 4096
    drafted: options.MaxDrafted = DEFAULT_DRAFT_TOKENS
    datastore: options.DatastoreToDraftFrom = None
    costs: options.StepCosts = None
    eager: Annotated[bool, typer.Option(help="Let vLLM compile nothing: starts sooner, runs slower.")] = False
    cache_tokens: Annotated[int | None, typer.Option(min=32, help="Positions of the KV cache.")] = None
    gpu_memory: Annotated[float, typer.Option(min=0, max=1, help="Share of a GPU's memory for each engine.")] = 0.2

    def resolved(self) -> Self:
        """With the folder or hub id of the model in place of an alias.

        Raises:
            ModelNotFoundError: There is no such model.
        """
        from reader_rag.model.registry import resolve_model

        return replace(self, model=str(resolve_model(self.model)))
