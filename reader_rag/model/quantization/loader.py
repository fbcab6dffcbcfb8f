"""Loads a model in int8, within the memory that it takes when it is loaded and two of its matrices in float32.

Tensors are mapped from the files of the model, quantised one after the other, and written to the cache. The model is
then made of the cached tensors, which are mapped too; what remains in memory is what the layers pack.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from reader_rag.errors import ConfigError, ReaderWarning
from reader_rag.model.fingerprint import (
    QuantizationScheme,
    WeightsRecord,
    folder_content,
    model_fingerprint,
    name_of_dtype,
    record_weights,
    revision_of,
    weights_fingerprint,
)
from reader_rag.model.quantization.cache import About, Entry, Work, read_or_make
from reader_rag.model.quantization.calibration import Calibration, can_fold
from reader_rag.model.quantization.checkpoints import (
    W8A8Checkpoint,
    open_float,
    quantization_of,
    require_w8a8,
    stored_dtype,
)
from reader_rag.model.quantization.factors import FOLDING
from reader_rag.model.quantization.gptq import ROUNDING
from reader_rag.model.quantization.parts import Layout, assemble, is_linear, is_tied, layout_of, quantised_share
from reader_rag.model.quantization.parts import tensors_of as tensors_of_parts
from reader_rag.model.registry import get_model
from reader_rag.model.weights_cache import Progress

SCHEME = QuantizationScheme()
"""How models are quantised that this package quantises."""
_OF_CHECKPOINTS = QuantizationScheme(head="half")
"""How checkpoints are loaded that are int8 already."""


def load_int8(
    source: Path | str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Load a model with int8 linear layers.

    Args:
        source: A local folder, or a hub id (downloaded at need).
        dtype: Type of embedding and of all that stays in 16 bits.
        device: Where the model is computed.
        tokenizer: Reads the text for whose activations weights are rounded, and scales of which are folded into them;
            None: weights are rounded to nearest, and none are folded.
        trust_remote_code: Run model code that comes with the weights.
        progress: Called with a line before each long step.

    Returns:
        The model in eval mode; its activations are float32.

    Raises:
        ConfigError: No linear layer of the model can be quantised.
        ModelError: Weights are missing or damaged.
        UnsupportedModelError: The checkpoint is quantised in another way.
    """
    folder = source if isinstance(source, Path) else get_model(source, progress)
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    quantization = quantization_of(config)
    if quantization is None:
        skeleton = _skeleton(config, trust_remote_code)
        is_calibrated = tokenizer is not None and can_fold(skeleton)
        scheme = replace(SCHEME, folding=FOLDING, rounding=ROUNDING) if is_calibrated else SCHEME
        key = weights_fingerprint(folder_content(folder), revision_of(folder), name_of_dtype(dtype), scheme)
        reads = tokenizer if is_calibrated else None
        work = partial(_work, folder, skeleton, dtype, reads, trust_remote_code=trust_remote_code)
        entry = read_or_make(key, work, progress)
        layout = layout_of(skeleton, scheme, dtype, is_tied=entry.about.is_tied)
    else:
        require_w8a8(source, quantization)
        del config.quantization_config
        scheme = _OF_CHECKPOINTS
        skeleton = _skeleton(config, trust_remote_code)
        layout, entry = _opened(folder, skeleton, dtype)
    _require_int8(source, skeleton, layout)
    assemble(skeleton, layout, lambda name: entry.tensors.pop(name).to(device))
    _move_buffers(skeleton, device)
    skeleton.eval()
    skeleton.cache_dtype = dtype  # type: ignore[assignment]  # of keys and values in the compiled loops
    _add_generation_config(skeleton, folder)
    record_weights(skeleton, folder, scheme, dtype)
    return skeleton


def quantise_in_memory(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Quantise a model that has no folder, e.g. one with random weights; nothing is folded and nothing is cached.

    Args:
        model: The model, in a floating-point type.
        dtype: Type of all that stays in 16 bits.

    Returns:
        Another model, in eval mode, on the same device; its activations are float32.

    Raises:
        ConfigError: No linear layer of the model can be quantised.
    """
    scheme = SCHEME
    skeleton = _skeleton(model.config, trust_remote_code=False)
    layout = layout_of(skeleton, scheme, dtype, is_tied=is_tied(model))
    _require_int8(type(model).__name__, skeleton, layout)
    tensors = dict(tensors_of_parts(model, layout))
    assemble(skeleton, layout, tensors.pop)
    _move_buffers(skeleton, model.device)
    skeleton.eval()
    skeleton.cache_dtype = dtype  # type: ignore[assignment]  # of keys and values in the compiled loops
    record = WeightsRecord(model_fingerprint(model), "", name_of_dtype(dtype), scheme)
    skeleton.weights_record = record  # type: ignore[assignment]  # a module takes any attribute
    return skeleton


def _skeleton(config: Any, trust_remote_code: bool) -> PreTrainedModel:
    """The model without weights: its parameters are on the meta device, its buffers are computed."""
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    return model


def _work(
    folder: Path,
    skeleton: PreTrainedModel,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    trust_remote_code: bool,
) -> Work:
    """How a float checkpoint is quantised; with a tokenizer, for activations of the text."""
    model = open_float(folder, stored_dtype(folder), trust_remote_code=trust_remote_code)
    about = About(is_tied=is_tied(model), source=str(folder))
    layout = layout_of(skeleton, SCHEME, dtype, is_tied=about.is_tied)
    shapes = list(tensors_of_parts(skeleton, layout))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        if tokenizer is None:
            return tensors_of_parts(model, layout)
        calibration = Calibration(model, tokenizer)
        return tensors_of_parts(model, layout, read=calibration.folded, quantise=calibration.quantised)

    return Work(about, shapes, tensors)


def _opened(folder: Path, skeleton: PreTrainedModel, dtype: torch.dtype) -> tuple[Layout, Entry]:
    """The tensors of a W8A8 checkpoint, and which layers they quantise."""
    checkpoint = W8A8Checkpoint(folder)
    head = skeleton.get_output_embeddings()
    linears = {name: module for name, module in skeleton.named_modules() if is_linear(module)}
    tied = any(module is head and f"{name}.weight" not in checkpoint for name, module in linears.items())
    unquantised = [name for name in linears if not checkpoint.is_quantised(name)]
    layout = layout_of(skeleton, _OF_CHECKPOINTS, dtype, is_tied=tied, unquantised=unquantised)
    shapes = dict(tensors_of_parts(skeleton, layout))
    return layout, Entry(About(tied, str(folder)), dict(checkpoint.tensors(shapes)))


def _require_int8(source: Path | str, skeleton: PreTrainedModel, layout: Layout) -> None:
    """Refuse a model that has no int8 layer, and warn of one that has large parts of other kinds."""
    head = skeleton.get_output_embeddings()
    if not any(form == "int8" and skeleton.get_submodule(name) is not head for name, form in layout.forms.items()):
        raise ConfigError(
            f"{source}: {type(skeleton).__name__} has no linear layers that can be quantised: leave out quantization"
        )
    share = quantised_share(skeleton, layout)
    if "island" in layout.forms.values():
        warnings.warn(
            f"{source}: {share:.0%} of the parameters are int8; experts that are one tensor, and other parts that are "
            "no linear layers, stay in 16 bits",
            ReaderWarning,
            stacklevel=2,
        )


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Move what the model computed itself; stored tensors are on the device, and packed layers need not move."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _add_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Tokens that end an answer, which some models name in a file of their own."""
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
