"""A model of any shape with random weights, to measure speed where no weights are at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from reader_rag.engine.engine import Engine
from reader_rag.errors import ModelError
from reader_rag.model.registry import resolve_device, resolve_dtype


class NoText:
    """Stands in for a tokenizer where only token ids matter: every token decodes to nothing."""

    is_fast = False
    eos_token_id = None

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """The empty text."""
        return ""


def engine_from_config(path: Path, dtype: str, device: str, settings: Mapping[str, Any]) -> Engine:
    """An engine over a model made from a configuration file alone.

    Args:
        path: A `config.json` of `transformers`.
        dtype: As in `Engine.load`.
        device: As in `Engine.load`.
        settings: What else `Engine` takes.

    Raises:
        ModelError: The file is not a configuration of a causal language model.
    """
    where = resolve_device(device)
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device(where):
            model = AutoModelForCausalLM.from_config(config, dtype=resolve_dtype(dtype, where)).eval()
    except (OSError, ValueError, KeyError) as cause:
        raise ModelError(f"{path} is not the configuration of a causal language model: {cause}") from cause
    tokenizer = cast(PreTrainedTokenizerBase, NoText())
    return Engine(model, tokenizer, prefix_bytes=0, **settings, name=path.parent.name or str(path))
