"""Loads language models and tokenizers with `transformers`, and turns its errors into ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from reader_rag.config import Quantization
from reader_rag.errors import ConfigError, ModelError, ReaderError
from reader_rag.model.registry import load_error, model_not_found, resolve_model
from reader_rag.model.weights_cache import Progress
from reader_rag.util.quiet import quiet_loading

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = ("float32", "bfloat16", "float16")


def load_model(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantization: Quantization = "none",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load an LLM and its tokenizer, ready for inference.

    Attention is PyTorch's `scaled_dot_product_attention` wherever the model has it.

    Args:
        name: An alias, a local folder, or a hub id (downloaded at need by `transformers`).
        dtype: "float32", "bfloat16", "float16", or "auto": see `resolve_dtype`.
        device: "cpu", "cuda", "cuda:1", ..., or "auto": CUDA where there is one, else the CPU.
        quantization: "int8" makes the linear layers int8 (see docs/int8.md); `dtype` is then that of the rest.
        trust_remote_code: Run model code that comes with the weights. Only for sources you trust.
        progress: Called with a line before each long step.

    Returns:
        The model in evaluation mode on `device`, and its tokenizer.

    Raises:
        ConfigError: `dtype` or `device` is unknown or not on this machine, or no layer of the model can be quantised.
        ModelNotFoundError: There is no such model, or it cannot be reached.
        UnsupportedModelError: It is not a causal language model.
        ModelError: Its files are incomplete or damaged, or it does not fit in memory.
    """
    target_device = resolve_device(device)
    target_dtype = resolve_dtype(dtype, target_device, quantization)
    source = resolve_model(name, progress)
    if progress:
        progress(f"loading {name}")
    try:
        with quiet_loading():
            tokenizer = _tokenizer(source, trust_remote_code)
            if quantization == "int8":
                from reader_rag.model.quantization.loader import load_int8

                options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "progress": progress}
                return load_int8(source, target_dtype, target_device, tokenizer=tokenizer, **options), tokenizer
            return _load(source, target_dtype, target_device, trust_remote_code), tokenizer
    except ReaderError:
        raise
    except Exception as error:  # transformers, its hub client and torch have no common error
        raise load_error(name, source, error) from error


def load_tokenizer(
    name: str | Path, *, trust_remote_code: bool = False, progress: Progress | None = None
) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer of an LLM, and how many token ids the LLM has; its weights are not loaded.

    Args:
        name: An alias, a local folder or a hub id.
        trust_remote_code: Whether code that comes with the model may run.
        progress: Called with a line before each long step; None: it is not called.

    Raises:
        ModelNotFoundError: There is no such model.
        ModelError: It cannot be read.
    """
    from transformers import AutoConfig

    source = resolve_model(name, progress)
    try:
        with quiet_loading():
            tokenizer = _tokenizer(source, trust_remote_code)
            config: Any = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except ReaderError:
        raise
    except Exception as error:  # as in `load_model`
        raise load_error(name, source, error) from error
    return tokenizer, int(config.get_text_config(decoder=True).vocab_size)


def resolve_device(device: str) -> torch.device:
    """The PyTorch device that `device` names.

    Args:
        device: "auto" (CUDA where there is one, else the CPU) or a PyTorch device string.

    Raises:
        ConfigError: There is no such device on this machine.
    """
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ConfigError(
            f"no device {device!r} on this machine: use auto, cpu"
            + "".join(f", cuda:{index}" for index in range(torch.cuda.device_count()))
        ) from error
    if resolved.type == "meta":
        raise ConfigError("the device 'meta' holds no weights: use auto, cpu or cuda")
    return resolved


def resolve_dtype(dtype: str, device: torch.device, quantization: Quantization = "none") -> torch.dtype:
    """The PyTorch type that `dtype` names.

    "auto" is bfloat16 on CUDA (float16 where the card has no bfloat16) and float32 elsewhere: a CPU without matrix
    units is slower in 16 bits, and in float32 drafted and plain decoding give the same tokens. What a quantised model
    does not quantise is in 16 bits on the CPU too.

    Args:
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: Where the model will run.
        quantization: How its linear layers are quantised.

    Raises:
        ConfigError: Another name was given.
    """
    import torch

    if dtype == "auto":
        if device.type != "cuda":
            return torch.float32 if quantization == "none" else torch.bfloat16
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}: use auto, {', '.join(_DTYPES)}")
    resolved: torch.dtype = getattr(torch, dtype)
    return resolved


def _load(source: Path | str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    from transformers import AutoConfig

    from reader_rag.model.fingerprint import record_weights
    from reader_rag.model.quantization.checkpoints import check_loadable, open_float

    check_loadable(source, AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code))
    model = open_float(source, dtype, trust_remote_code=trust_remote_code)
    model.to(device).eval()  # type: ignore[arg-type]
    folder = source if isinstance(source, Path) else _snapshot(source, model.config)
    if folder is not None:
        record_weights(model, folder)
    return model


def _snapshot(hub_id: str, config: Any) -> Path | None:
    """The folder of the hub client's cache that a model was loaded from."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json", revision=getattr(config, "_commit_hash", None))
    return Path(found).parent if isinstance(found, str) else None


def _tokenizer(source: Path | str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if isinstance(source, Path) and not (source / "config.json").is_file():
        raise model_not_found(source, "the folder has no config.json")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if len(tokenizer) == 0:
        raise ModelError(f"{source} has no tokenizer: put its tokenizer.json beside the weights")
    return tokenizer
