"""A model of any shape with random weights, to measure speed without the real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from reader_rag.config import LoadConfig
from reader_rag.engine.engine import Engine
from reader_rag.errors import ModelError
from reader_rag.model.loading import resolve_device, resolve_dtype
from reader_rag.model.quantization.loader import quantise_in_memory


class NoText:
    """Replaces a tokenizer where only token ids are used: every token decodes to the empty text."""

    is_fast = False
    eos_token_id = None

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """The empty text."""
        return ""


def engine_from_config(path: Path, load: LoadConfig, settings: Mapping[str, Any]) -> Engine:
    """An engine over a model made from a configuration file alone.

    Args:
        path: A `config.json` of `transformers`.
        load: Type, quantization and device of the model.
        settings: Further arguments of `Engine`.

    Raises:
        ModelError: The file is not a configuration of a causal language model.
    """
    where = resolve_device(load.device)
    dtype = resolve_dtype(load.dtype, where, load.quantization)
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device(where):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except (OSError, ValueError, KeyError) as cause:
        raise ModelError(f"{path} is not the configuration of a causal language model: {cause}") from cause
    if load.quantization == "int8":
        model = quantise_in_memory(model, dtype)
    tokenizer = cast(PreTrainedTokenizerBase, NoText())
    unshared = {"prefix_bytes": 0, "profile": "off"}
    return Engine(model, tokenizer, **{**unshared, **settings}, name=path.parent.name or str(path))
