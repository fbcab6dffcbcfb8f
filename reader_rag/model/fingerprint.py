"""A name for what a model computes: the key of all that is kept of it between two starts.

Quantised weights, step costs, profiles and results of self-tests belong to one model in one type and one scheme. Their
key is `model_fingerprint`: content of the weights, revision, type, and how they are quantised.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from reader_rag.model.weights_cache import cache_folder
from reader_rag.util.files import atomic_path, read_regular

_VERSION = 1
"""Version of fingerprints; raise it when they are computed otherwise."""
_BYTES = 16
"""Bytes of a hash."""
_SETTLED_NS = 2_000_000_000
"""A file that changed less than two seconds ago may change again within the resolution of its time stamp."""
_SAMPLED = 256
"""Numbers of each tensor that are read where there are no files; of a smaller tensor all are."""
_OF_A_COPY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
"""Fields of a configuration that do not change what the model computes, or are in the fingerprint by themselves."""
FORMAT_VERSION = 2
"""Raise it when quantised weights are computed, stored or multiplied otherwise than before."""


@dataclass(frozen=True)
class QuantizationScheme:
    """How a model is quantised. Models of different schemes share neither files nor measurements.

    Attributes:
        name: The value of the setting `quantization`, "int8".
        bits: Of a weight of a linear layer.
        head: How the output head is stored: "int8", and a tied embedding is looked up in the same values; "half": in 16
            bits.
        folding: The scales of activations that were folded into the weights; "": none.
        rounding: How weights are rounded to integers; "": to nearest.
        version: `FORMAT_VERSION` of the code that quantised.
    """

    name: str = "int8"
    bits: int = 8
    head: str = "int8"
    folding: str = ""
    rounding: str = ""
    version: int = FORMAT_VERSION

    def to_dict(self) -> dict[str, Any]:
        """The attributes, as JSON takes them."""
        return asdict(self)


@dataclass(frozen=True)
class WeightsRecord:
    """What is known of the weights of a model that this package loaded; an attribute of the model, `weights_record`.

    Attributes:
        content: `folder_content` of the folder that it was loaded from.
        revision: The hub's commit, or "".
        dtype: Type of its weights when it was loaded, or of those that are not quantised, e.g. "bfloat16".
        scheme: How it is quantised; None: it is not.
    """

    content: str
    revision: str
    dtype: str
    scheme: QuantizationScheme | None = None


def model_fingerprint(model: PreTrainedModel) -> str:
    """The key of what is kept of a model: 32 hexadecimal digits.

    A model that `load_model` loaded is known by the content of its files. Configuration, names, shapes and types of all
    parameters are hashed as well, with 256 numbers of each, which shows what was changed after loading (a merged
    adapter); of a model object that comes from elsewhere nothing else is known, so two such models that differ in a few
    numbers may have the same fingerprint. The tensors of a quantised model are not read: they are packed and released.

    Args:
        model: A causal language model of `transformers`, or a PEFT model around one.
    """
    record = weights_record(model)
    if record is None:
        return weights_fingerprint(_sample(model), "", name_of_dtype(model.dtype))
    if record.scheme is None:
        return weights_fingerprint(f"{record.content} {_sample(model)}", record.revision, name_of_dtype(model.dtype))
    return weights_fingerprint(record.content, record.revision, record.dtype, record.scheme)


def weights_fingerprint(content: str, revision: str, dtype: str, scheme: QuantizationScheme | None = None) -> str:
    """The fingerprint of a model that need not be in memory.

    Args:
        content: `folder_content` of its folder.
        revision: `revision_of` its folder.
        dtype: Type of its weights, or of those that are not quantised, e.g. "bfloat16".
        scheme: How it is quantised; None: it is not.
    """
    parts = [_VERSION, content, revision, dtype, None if scheme is None else scheme.to_dict()]
    return _digest(json.dumps(parts, sort_keys=True).encode())


def weights_record(model: PreTrainedModel) -> WeightsRecord | None:
    """What `record_weights` noted of a model; None: this package did not load it."""
    record = getattr(model, "weights_record", None)
    return record if isinstance(record, WeightsRecord) else None


def quantization_scheme(model: PreTrainedModel) -> QuantizationScheme | None:
    """How this package quantised a model; None: it did not."""
    record = weights_record(model)
    return None if record is None else record.scheme


def quantization_name(model: PreTrainedModel) -> str:
    """The value of the setting `quantization` that a model has."""
    scheme = quantization_scheme(model)
    return "none" if scheme is None else scheme.name


def dtype_name(model: PreTrainedModel) -> str:
    """The type of a model's weights, or of those that are not quantised, e.g. "bfloat16"."""
    record = weights_record(model)
    return name_of_dtype(model.dtype) if record is None or record.scheme is None else record.dtype


def record_weights(
    model: PreTrainedModel,
    folder: Path,
    scheme: QuantizationScheme | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Note on a model what it was loaded from.

    Args:
        model: The loaded model.
        folder: Folder of its configuration and weights.
        scheme: How it is quantised; None: it is not.
        dtype: Type of what is not quantised; None: the model's.
    """
    record = WeightsRecord(folder_content(folder), revision_of(folder), name_of_dtype(dtype or model.dtype), scheme)
    model.weights_record = record  # type: ignore[assignment]  # a module takes any attribute


def revision_of(folder: Path) -> str:
    """The hub's commit of a folder in the hub client's cache; "": it is another folder."""
    folder = folder.absolute()
    return folder.name if folder.parent.name == "snapshots" else ""


def folder_content(folder: Path) -> str:
    """A hash of a model folder: configuration, weights, and code that comes with them.

    Files are read once; the hash of each is kept in the cache folder until size, time stamps or inode of the file
    change.

    Args:
        folder: Folder of `config.json` and the weights.

    Raises:
        OSError: A file cannot be read.
    """
    kept_at = cache_folder() / "hashes" / f"{_digest(os.fsencode(folder.resolve()))}.json"
    known = _read_known(kept_at)
    files = list(_files_of(folder))
    stats = {path.name: _stat_of(path) for path in files}
    hashes = {name: found[1] for name, found in known.items() if found[0] == stats.get(name)}
    unread = [path for path in files if path.name not in hashes]
    if unread:
        with ThreadPoolExecutor(min(len(unread), os.cpu_count() or 1)) as pool:
            hashes |= zip((path.name for path in unread), pool.map(_file_hash, unread), strict=True)
        _keep(kept_at, {name: (stats[name], hashes[name]) for name in stats})
    return _digest(json.dumps(sorted((name, hashes[name]) for name in stats)).encode())


def _files_of(folder: Path) -> Iterator[Path]:
    """The files that decide what the model computes. `.bin` weights are not read where there are safetensors."""
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    yield from (path for path in (folder / "config.json", *weights, *sorted(folder.glob("*.py"))) if path.is_file())
    yield from sorted(folder.glob("*.index.json"))


def _stat_of(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_BYTES)).hexdigest()


def _read_known(path: Path) -> dict[str, tuple[list[int], str]]:
    """Stat and hash of files by name; empty if nothing readable is kept."""
    try:
        kept = json.loads(read_regular(path))
        return {str(name): (list(stat), str(found)) for name, (stat, found) in kept[str(_VERSION)].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _keep(path: Path, known: dict[str, tuple[list[int], str]]) -> None:
    """Write what `_read_known` reads, but files that may still be changing. A cache that cannot be written is none."""
    latest = time.time_ns() - _SETTLED_NS
    settled = {name: found for name, found in known.items() if max(found[0][1], found[0][2]) < latest}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as partial:
            partial.write_text(json.dumps({str(_VERSION): settled}))


def _sample(model: PreTrainedModel) -> str:
    """A hash of a model in memory: class, configuration, and names, shapes, types and some numbers of its tensors."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _OF_A_COPY}
    lines = [type(model).__name__, json.dumps(config, sort_keys=True, default=str)]
    chosen: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in model.named_parameters():
        lines.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
        data: Any = tensor.data
        if type(data) is torch.Tensor and data.device.type != "meta" and data.numel():
            chosen.setdefault(data.device, []).append(_numbers_of(data))
    numbers = [torch.cat(parts).cpu().numpy().tobytes() for parts in chosen.values()]  # one transfer for each device
    return _digest(b"\0".join(["\n".join(lines).encode(), *numbers]))


def _numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """Some of a tensor's numbers, the same places every time, as bytes."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # not every type can be indexed
    count = tensor.numel()
    places = np.random.default_rng(count).integers(0, count, _SAMPLED) if count > _SAMPLED else np.arange(count)
    indices = [torch.from_numpy(axis).to(tensor.device) for axis in np.unravel_index(places, tuple(tensor.shape) or 1)]
    chosen = tensor[tuple(indices)] if tensor.dim() else tensor.reshape(1)
    return chosen.contiguous().view(torch.uint8)


def name_of_dtype(dtype: torch.dtype) -> str:
    """The name of a type of weights, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_BYTES).hexdigest()
