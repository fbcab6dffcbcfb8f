"""Opens checkpoints without copying them: tensors are mapped from the files and read when they are used.

Float checkpoints are opened by `transformers`, whose parameters are then parts of the mapped files, under its names and
with its conversions. W8A8 checkpoints of the compressed-tensors format are read by their tensors' names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from reader_rag.errors import ConfigError, ModelError, UnsupportedModelError

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FORMATS = ("int-quantized", "naive-quantized")
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
"""What a field of the format means that is left out."""


def open_float(source: Path | str, dtype: torch.dtype | str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Open a float checkpoint with `transformers`, on the CPU.

    Args:
        source: A local folder or a hub id.
        dtype: Type of the parameters. Where the files have the same, parameters are mapped from them.
        trust_remote_code: Run model code that comes with the weights.

    Raises:
        ModelError: Weights are missing.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:  # transformers would go on with random numbers in their place
        raise incomplete(source, missing)
    return model


def incomplete(source: Path | str, missing: list[str]) -> ModelError:
    """An error about weights that a checkpoint lacks.

    Args:
        source: Its folder or hub id.
        missing: Names of the weights, at least one.
    """
    return ModelError(
        f"{source} lacks {len(missing)} of the model's weights ({missing[0]}, ...): it is incomplete, or not a "
        "language model"
    )


def stored_dtype(folder: Path) -> torch.dtype | str:
    """The floating point type that most weights of a checkpoint are stored in; "auto": its configuration says it."""
    sizes: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, about in header.items():
            if name != "__metadata__" and about["dtype"] in _FLOATS:
                sizes[about["dtype"]] += about["data_offsets"][1] - about["data_offsets"][0]
    return _FLOATS[sizes.most_common(1)[0][0]] if sizes else "auto"


def quantization_of(config: Any) -> dict[str, Any] | None:
    """What a model's configuration says of its quantisation; None: the checkpoint is not quantised.

    Args:
        config: A configuration of `transformers`.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())


def require_w8a8(source: Path | str, quantization: Mapping[str, Any]) -> None:
    """Check that a quantised checkpoint has the int8 scheme of this package.

    Args:
        source: Its folder or hub id, for messages.
        quantization: What `quantization_of` found.

    Raises:
        UnsupportedModelError: It has another scheme.
    """
    reason = _not_w8a8(quantization)
    if reason:
        raise UnsupportedModelError(
            f"{source} is quantised already ({reason}): quantization='int8' takes float checkpoints, and "
            "compressed-tensors ones with symmetric int8 weights per channel and dynamic int8 activations per token"
        )


def check_loadable(source: Path | str, config: Any) -> None:
    """Check that `transformers` can load a checkpoint as it is, where only a package is missing.

    Args:
        source: Its folder or hub id, for messages.
        config: Its configuration.

    Raises:
        ConfigError: It is a W8A8 checkpoint, and compressed-tensors is not installed.
    """
    quantization = quantization_of(config)
    if quantization is None or find_spec("compressed_tensors") is not None:
        return
    if not _not_w8a8(quantization):
        raise ConfigError(f"{source} has int8 weights (compressed-tensors): load it with quantization='int8'")


def _not_w8a8(quantization: Mapping[str, Any]) -> str:
    """Why a checkpoint cannot be loaded as int8; "": it can."""
    method, form = quantization.get("quant_method"), quantization.get("format")
    if method != "compressed-tensors":
        return str(method)
    if form not in _FORMATS:
        return f"compressed-tensors, format {form}"
    if quantization.get("transform_config"):
        return "compressed-tensors with transforms"
    groups: Mapping[str, Any] = quantization.get("config_groups") or {}
    for group in groups.values():
        for what, wanted in (("weights", _WEIGHTS), ("input_activations", _INPUTS)):
            given = group.get(what)
            if given is None:
                return f"compressed-tensors without quantised {what.replace('_', ' ')}"
            for field, value in wanted.items():
                if given.get(field, _DEFAULTS.get(field)) != value:
                    return f"compressed-tensors with {field} {given.get(field)} of {what.replace('_', ' ')}"
    return "" if groups else "compressed-tensors without groups"


class W8A8Checkpoint:
    """The tensors of a compressed-tensors checkpoint with int8 weights, mapped from its files.

    Args:
        folder: Folder of its safetensors files.

    Raises:
        ModelError: There are none, or one is not readable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self._tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
        if not self._tensors:
            raise ModelError(f"{folder} holds no safetensors files: it is not a W8A8 checkpoint")

    def is_quantised(self, layer: str) -> bool:
        """Whether a linear layer has int8 weights.

        Args:
            layer: Its name.
        """
        return f"{layer}.weight_scale" in self._tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensors(self, shapes: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a model, of the type and shape in which they are used.

        Args:
            shapes: What the model needs: tensors on the meta device by name; of an int8 layer `values` and `scales`.

        Raises:
            ModelError: One is missing or has another shape or type.
        """
        stored = {name: self._name_of(name) for name in shapes}
        missing = [name for name in stored.values() if name not in self._tensors]
        if missing:
            raise incomplete(self._folder, missing)
        for name, like in shapes.items():
            found = self._tensors[stored[name]]
            if name.endswith(".scales"):
                found = found.reshape(-1)
            is_int8 = like.dtype == torch.int8
            if found.shape != like.shape or is_int8 != (found.dtype == torch.int8):
                raise ModelError(
                    f"{self._folder}: {stored[name]} is {found.dtype} {tuple(found.shape)}, which does not fit the "
                    f"model's {tuple(like.shape)}: the files do not belong to this config.json"
                )
            yield name, found.to(like.dtype)

    @staticmethod
    def _name_of(name: str) -> str:
        base, _, own = name.rpartition(".")
        return f"{base}.{ {'values': 'weight', 'scales': 'weight_scale'}.get(own, own) }"
