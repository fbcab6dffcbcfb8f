"""Keeps the quantised weights of models between two starts, as plain int8: they are packed for the CPU when loaded.

An entry is a folder named by the model's fingerprint, with `weights.safetensors` and `entry.json`. It is written whole
or not at all, checked whenever it is read, and made again where the check fails.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from reader_rag.errors import ReaderError
from reader_rag.model.fingerprint import FORMAT_VERSION
from reader_rag.model.weights_cache import Progress, cache_folder, is_disk_full, locked
from reader_rag.util.files import atomic_path, open_regular, partial_paths, read_regular
from reader_rag.util.one_line import first_line

_WEIGHTS, _ABOUT = "weights.safetensors", "entry.json"
_TYPES = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_CHUNK_BYTES = 1 << 26
_log = logging.getLogger(__name__)

Named = Iterable[tuple[str, torch.Tensor]]
"""Names and tensors."""


@dataclass(frozen=True)
class About:
    """What an entry says of itself.

    Attributes:
        is_tied: Whether the output head has the embedding's weight.
        source: Folder of the model that was quantised, for people.
    """

    is_tied: bool
    source: str


@dataclass(frozen=True)
class Entry:
    """Quantised weights.

    Attributes:
        about: What is known of them.
        tensors: By name; of an entry on disk they are mapped from the file.
    """

    about: About
    tensors: dict[str, torch.Tensor]


class Work(NamedTuple):
    """How the weights of a model are quantised.

    Attributes:
        about: What to say of the entry.
        shapes: All tensors, without content: on the meta device.
        compute: Computes the tensors, one after the other.
    """

    about: About
    shapes: Named
    compute: Callable[[], Named]


def entry_folder(fingerprint: str) -> Path:
    """Where the entry of a model is kept."""
    return cache_folder() / "quantized" / fingerprint


def read_or_make(fingerprint: str, begin: Callable[[], Work], progress: Progress | None = None) -> Entry:
    """The quantised weights of a model: kept by an earlier start, or made now and kept.

    Several processes may ask at once: one makes the entry, the others wait for it. Where it cannot be kept (disk full,
    a cache folder that cannot be written), it is made in memory, and the log says so.

    Args:
        fingerprint: Of the model in its scheme.
        begin: Opens the model; called when there is no entry.
        progress: Called with a line before a long step.
    """
    folder = entry_folder(fingerprint)
    entry = _read(folder, fingerprint)
    if entry is not None:
        return entry
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, progress):
            entry = _read(folder, fingerprint)  # another process may have made it while this one waited
            if entry is None:
                if progress:
                    progress("quantising the weights, once")
                _remove(folder)
                _write(folder, fingerprint, begin())
                entry = _read(folder, fingerprint)
        if entry is not None:
            return entry
        reason = "what was written could not be read"
    except ReaderError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        reason = first_line(error)
    _log.warning("quantised weights are not kept in %s (%s): the next start quantises again", folder.parent, reason)
    work = begin()
    return Entry(work.about, dict(work.compute()))


def _read(folder: Path, fingerprint: str) -> Entry | None:
    """The entry in a folder; None: there is none, or it is damaged, of another model, or of another version."""
    try:
        kept: dict[str, Any] = json.loads(read_regular(folder / _ABOUT))
        if (kept["version"], kept["fingerprint"]) != (FORMAT_VERSION, fingerprint):
            return None
        about = About(**kept["about"])
        if _hash(folder / _WEIGHTS) != kept["weights"]:
            _log.warning("%s is damaged; the weights are quantised again", folder / _WEIGHTS)
            return None
        with safe_open(folder / _WEIGHTS, "pt") as file:
            return Entry(about, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  no mapping
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        _log.warning("%s cannot be read (%s); the weights are quantised again", folder, first_line(error))
        return None


def _write(folder: Path, fingerprint: str, work: Work) -> None:
    """Write an entry, each tensor as soon as it is computed."""
    with atomic_path(folder) as partial:
        partial.mkdir()
        weights = partial / _WEIGHTS
        _write_tensors(weights, dict(work.shapes), work.compute())
        kept = {
            "version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "about": asdict(work.about),
            "weights": _hash(weights),
        }
        (partial / _ABOUT).write_text(json.dumps(kept, indent=1))
        for path in (partial, weights, partial / _ABOUT):  # one cache may serve several users
            path.chmod(0o755 if path.is_dir() else 0o644)


def _write_tensors(path: Path, shapes: dict[str, torch.Tensor], tensors: Named) -> None:
    """Write a safetensors file whose tensors are computed one after the other; their places are known before.

    Args:
        path: The file.
        shapes: Tensors of the same types and shapes, without content.
        tensors: The tensors.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, like in sorted(shapes.items(), key=lambda item: -item[1].itemsize):  # so that all are aligned
        begin, end = end, end + like.numel() * like.itemsize
        header[name] = {"dtype": _TYPES[like.dtype], "shape": list(like.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    if shutil.disk_usage(path.parent).free < start + end:  # found out before the work
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    written = set()
    with path.open("wb", buffering=0) as file:
        _write_whole(file, struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors:
            like = shapes[name]
            if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                raise AssertionError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {like.dtype} {like.shape}")
            file.seek(start + header[name]["data_offsets"][0])
            _write_whole(file, tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            written.add(name)
    if written != shapes.keys():
        raise AssertionError(f"not computed: {', '.join(sorted(shapes.keys() - written))}")


def _write_whole(file: FileIO, data: Any) -> None:
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[file.write(rest[:_CHUNK_BYTES]) :]


def _hash(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _remove(folder: Path) -> None:
    """Remove an entry that cannot be used, what killed writers left, and entries of older versions.

    Only the holder of the lock of an entry makes folders of its name. A mapped file stays readable when it is removed.
    """
    for leftover in partial_paths(folder):
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder)
    for other in _outdated(folder.parent):
        shutil.rmtree(other, ignore_errors=True)


def _outdated(folder: Path) -> Iterator[Path]:
    for about in folder.glob(f"*/{_ABOUT}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            if json.loads(read_regular(about))["version"] < FORMAT_VERSION:
                yield about.parent
