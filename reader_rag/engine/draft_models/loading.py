"""Loads draft models, and refuses those that do not fit the target."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reader_rag.config import Quantization
from reader_rag.engine.draft_models.alignment import Encode, TextTokenizer
from reader_rag.engine.draft_models.assistant import AssistantModel, embedded_tokens
from reader_rag.engine.draft_models.eagle3 import Eagle3Model
from reader_rag.engine.draft_models.eagle3_config import Eagle3Config, is_head
from reader_rag.engine.draft_models.eagle3_head import Eagle3Head
from reader_rag.engine.draft_models.source import DraftModel
from reader_rag.engine.draft_models.text_assistant import TextAssistantModel
from reader_rag.errors import ConfigError, ReaderError, ReaderWarning
from reader_rag.kv_cache.prefix_cache import PrefixCache
from reader_rag.model.interface import TargetModel
from reader_rag.model.registry import load_error, resolve_model
from reader_rag.model.select_target import select_reuse, select_target
from reader_rag.model.target import Target

_TRIED = 1000
"""Positions for which the bytes of two caches are compared."""
_MARKED = "a b"
"""A text before which the token ids are found that a tokenizer puts before every text."""


class TargetParts:
    """What a draft model is fitted to.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        name: Its name in messages.
        vocabulary: Number of its token ids.
        encode: Text to its token ids, without special ones.

    Attributes:
        used: Number of token ids that its tokenizer has; those above are padding.
    """

    def __init__(
        self,
        target: TargetModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        vocabulary: int,
        encode: Encode,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.name = name
        self.vocabulary = vocabulary
        self.encode = encode
        known = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        self.used = min(1 + max(known.values(), default=vocabulary - 1), vocabulary)


def load_draft_model(
    given: str | Path | PreTrainedModel,
    parts: TargetParts,
    *,
    quantization: Quantization = "none",
    prefix_bytes: int = 0,
) -> DraftModel:
    """Load a draft model.

    Args:
        given: Alias, local folder or hub id of an assistant model or of an EAGLE-3 head; or a loaded assistant, which
            has the target's tokenizer.
        parts: What it is fitted to.
        quantization: Of an assistant that is loaded here.
        prefix_bytes: Most bytes of the prefix caches of target and draft model together; its own takes a part.

    Raises:
        ConfigError: Its vocabulary or its hidden states are not the target's, or the target cannot verify drafts.
        ModelError: It cannot be found or loaded.
    """
    if parts.target.layer_count == 0 and parts.target.deepest(0) == 0:
        raise ConfigError(f"{parts.name} is decoded without drafts, so it cannot have a draft model: leave it out")
    if isinstance(given, PreTrainedModel):
        name = str(getattr(given.config, "_name_or_path", "")) or type(given).__name__
        if embedded_tokens(given) < parts.used:
            raise ConfigError(
                f"{name} has {embedded_tokens(given)} token ids and {parts.name} has {parts.used}: an assistant that "
                "is loaded already needs the same vocabulary; give its name or folder as draft_model, and it drafts by "
                "text"
            )
        return _assistant(given, name, parts, prefix_bytes)
    source = resolve_model(given)
    try:
        config = json.loads(_file_of(source, "config.json").read_text(encoding="utf-8"))
        if is_head(config):
            if quantization != "none":
                raise ConfigError(f"{given} is an EAGLE-3 head, which is not quantised: leave draft_quantization out")
            return _head(config, source, str(given), parts, prefix_bytes)
    except ReaderError:
        raise
    except Exception as error:  # the hub's client, json and safetensors have no common error
        raise load_error(given, source, error) from error
    from reader_rag.model.fingerprint import dtype_name
    from reader_rag.model.loading import load_model

    model = parts.target.model
    dtype = dtype_name(model) if quantization == "none" else "auto"
    loaded, tokenizer = load_model(given, dtype=dtype, device=str(model.device), quantization=quantization)
    same = _same_vocabulary(tokenizer, parts) and embedded_tokens(loaded) >= parts.used
    texts = None if same else _texts(tokenizer, str(given), parts)
    assistant = _assistant(loaded, str(given), parts, prefix_bytes)
    return assistant if texts is None else TextAssistantModel(assistant, *texts)


def _texts(
    tokenizer: PreTrainedTokenizerBase, name: str, parts: TargetParts
) -> tuple[TextTokenizer, TextTokenizer, list[int]]:
    """The tokenizers of target and assistant, and the token ids that the latter puts before every text."""

    callable_tokenizer: Any = tokenizer
    read = partial(callable_tokenizer, verbose=False, truncation=False)

    def encode(text: str) -> list[int]:
        return list(read(text, add_special_tokens=False)["input_ids"])

    own = TextTokenizer(tokenizer, encode, name)
    target = TextTokenizer(parts.tokenizer, parts.encode, parts.name)
    whole, text = list(read(_MARKED)["input_ids"]), encode(_MARKED)
    start = next((whole[:n] for n in range(len(whole)) if whole[n : n + len(text)] == text), [])
    return target, own, start


def _assistant(model: PreTrainedModel, name: str, parts: TargetParts, prefix_bytes: int) -> AssistantModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReaderWarning)  # about how it is decoded: what it drafts is verified
        target, drafting = select_target(model, name=name)
    if drafting == "none" or not isinstance(target, Target):
        raise ConfigError(f"{name} keeps a state that cannot be rolled back, so it cannot draft: choose another model")
    return AssistantModel(target, name, _prefixes(prefix_bytes, target, target.cache_bytes(_TRIED, 0), parts))


def _prefixes(most: int, read: TargetModel, own: int, parts: TargetParts) -> PrefixCache | None:
    """A prefix cache for a draft model: its part of all bytes, in proportion to what a token takes.

    Args:
        most: Most bytes for target and draft model together.
        read: The model whose positions are restored.
        own: Bytes of `_TRIED` positions of the draft model.
        parts: The target.
    """
    share = most * own // (own + parts.target.cache_bytes(_TRIED, 0))
    reuse = select_reuse(read, "fast") if share else None
    return None if reuse is None else PrefixCache(share, reuse.block)


def _head(config: dict[str, Any], source: Path | str, name: str, parts: TargetParts, prefix_bytes: int) -> Eagle3Model:
    from safetensors.torch import load_file

    target: Any = parts.target.model
    layers, width = parts.target.layer_count, int(parts.target.config.hidden_size)
    parsed = Eagle3Config.of(config, name, layers, int(parts.target.config.vocab_size))
    if parsed.target_width != width:
        raise ConfigError(
            f"{name} is a head for a model with hidden states of {parsed.target_width} numbers, and {parts.name} has "
            f"{width}: choose the head that was trained for this model"
        )
    if layers == 0 or not all(0 <= layer <= layers for layer in parsed.hidden_layers):
        raise ConfigError(
            f"{name} takes the outputs of the layers {parsed.hidden_layers}, and {parts.name} hands out those of "
            f"{layers}: choose the head that was trained for this model"
        )
    if parsed.layer.vocab_size < parts.vocabulary:
        raise ConfigError(
            f"{name} reads {parsed.layer.vocab_size} token ids and {parts.name} has {parts.vocabulary}: choose the "
            "head that was trained for this model"
        )
    head = Eagle3Head(parsed, target.get_input_embeddings(), target.get_output_embeddings())
    dtype = getattr(target, "cache_dtype", target.dtype)
    head.load(load_file(_file_of(source, "model.safetensors")), name, target.device, dtype)
    head.eval()
    highest = parsed.draft_vocabulary - 1 if head.targets is None else int(head.targets.max())
    lowest = 0 if head.targets is None else int(head.targets.min())
    if lowest < 0 or highest >= int(parts.target.config.vocab_size):
        raise ConfigError(
            f"{name} drafts the token ids {lowest}..{highest}, and {parts.name} has 0..{parts.vocabulary - 1}: choose "
            "the head that was trained for this model"
        )
    return Eagle3Model(head, name, _prefixes(prefix_bytes, parts.target, _TRIED * head.row_bytes, parts))


def _file_of(source: Path | str, name: str) -> Path:
    """A file of a model's folder, or of the hub."""
    if isinstance(source, Path):
        return source / name
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(source, name))


def _same_vocabulary(tokenizer: PreTrainedTokenizerBase, parts: TargetParts) -> bool:
    """Whether all token ids of the target mean the same to an assistant."""
    if not hasattr(parts.tokenizer, "get_vocab"):
        return True
    theirs = tokenizer.get_vocab()
    return all(theirs.get(token) == number for token, number in parts.tokenizer.get_vocab().items())
