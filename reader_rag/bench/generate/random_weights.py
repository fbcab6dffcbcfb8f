"""A model of any shape with random weights, to measure speed without the real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from reader_rag.engine.engine import Engine
from reader_rag.errors import ModelError
from reader_rag.model.loading import resolve_device, resolve_dtype


class NoText:
    """Replaces a tokenizer where only token ids are used: every token decodes to the empty text."""

    is_fast = False
    eos_token_id = None

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """The empty text."""
        return ""


def engine_from_config(path: Path, dtype: str, device: str, settings: Mapping[str, Any]) -> Engine:
    """An engine over a model made from a configuration file alone.

    Args:
        path: A `config.json` of `transformers`.
        dtype: Type of the weights: "auto", "float32", "bfloat16" or "float16".
        device: "auto" or a PyTorch device.
        settings: Further arguments of `Engine`.

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
