"""Profiles: a model's likely next tokens after each single token of its vocabulary, the prior of the successor table.

Each token is evaluated once, with no text before it. The profile of the default model comes with the package. Any
other model computes its own while its engine is idle (`model.profile.task`), or `reader-rag models profile` computes
it at once; it is kept in the cache folder. Without a profile the table starts empty and learns from the request's
prompt.

A profile fits a vocabulary: one that names no model is used for every model of its vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.kernels import successors as kernels
from reader_rag.errors import ConfigError
from reader_rag.util.files import atomic_path, open_regular

SHIPPED = Path(__file__).with_name("profiles")
_AGAIN = "delete it and make it again: reader-rag models profile MODEL"
_FITS = 0.25
"""Least share of a text's tokens that a profile of its vocabulary lists after the token before."""
_LEAST_TOKENS = 200
_VERSION = 2
"""Version of files. Version 1 had only complete profiles, which named no model; it is still read."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Likely next tokens after each token of a vocabulary.

    Attributes:
        name: The model that it was made from.
        vocabulary: `fingerprint` of its vocabulary.
        tokens: int32 [vocabulary, 8], the likeliest first, -1: no more.
        model: `model_fingerprint` of the model that alone uses it; "": every model of the vocabulary does.
        done: Leading tokens that were computed, where the profile is not complete; None: all.
        cpu_s: Seconds of processor time that it took so far, where an engine computes it while it is idle.
    """

    name: str
    vocabulary: str
    tokens: NDArray[np.int32]
    model: str = ""
    done: int | None = None
    cpu_s: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether all tokens were computed."""
        return self.done is None or self.done >= len(self.tokens)

    def save(self, path: Path) -> None:
        """Write the file that `load` reads, atomically.

        Args:
            path: The file, `.npz`.

        Raises:
            OSError: It cannot be written.
        """
        wide = np.uint16 if len(self.tokens) < 1 << 16 else np.uint32
        with atomic_path(path) as partial, partial.open("wb") as file:
            np.savez_compressed(
                file,
                name=np.array(self.name),
                vocabulary=np.array(self.vocabulary),
                tokens=(self.tokens + 1).astype(wide),
                version=np.array(_VERSION),
                model=np.array(self.model),
                done=np.array(len(self.tokens) if self.done is None else self.done),
                cpu_s=np.array(self.cpu_s),
            )

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile.

        Args:
            path: A file of `save`.

        Raises:
            ConfigError: The file cannot be read or is no profile.
        """
        try:
            with (
                open_regular(path) as opened,
                np.load(opened, allow_pickle=False) as file,
            ):  # reading checks the checksums of the zip file
                version = int(file["version"]) if "version" in file else 1
                tokens = file["tokens"].astype(np.int32) - 1
                profile = cls(str(file["name"]), str(file["vocabulary"]), tokens)
                if version == _VERSION:
                    model, done, cpu_s = str(file["model"]), int(file["done"]), float(file["cpu_s"])
                    profile = replace(profile, model=model, done=done, cpu_s=cpu_s)
        except Exception as cause:  # a damaged zip file raises a dozen kinds
            raise ConfigError(f"{path} is not a readable profile ({cause}); {_AGAIN}") from cause
        fits = tokens.ndim == 2 and tokens.shape[1] == kernels.BEST and int(tokens.max(initial=-1)) < len(tokens)
        if version > _VERSION or not fits or not 0 <= (profile.done or 0) <= len(tokens) or not profile.cpu_s >= 0.0:
            raise ConfigError(f"{path} is not a profile of this version; {_AGAIN}")
        return profile

    def fits(self, texts: Iterable[Sequence[int]]) -> bool:
        """Whether token sequences are of this vocabulary, by how often the profile lists the next token.

        Args:
            texts: Token ids of each text; 200 tokens or more in all, or the result is False.
        """
        right = judged = 0
        for text in texts:
            ids = np.asarray(text, np.int64)
            if len(ids) and int(ids.max()) >= len(self.tokens):
                return False
            right += int((self.tokens[ids[:-1]] == ids[1:, None]).any(axis=1).sum())
            judged += max(len(ids) - 1, 0)
        return judged >= _LEAST_TOKENS and right >= _FITS * judged


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """A hash of a vocabulary: where it is equal, equal token ids mean equal tokens.

    Args:
        vocabulary: Ids by token, as `tokenizer.get_vocab()`.
    """
    lines = sorted((number, token) for token, number in vocabulary.items())
    return hashlib.sha256(
        "\0".join(f"{number} {token}" for number, token in lines).encode("utf-8", "replace")
    ).hexdigest()


def profile_path(folder: Path, model: str) -> Path:
    """The file of a model's own profile.

    Args:
        folder: The folder of profiles.
        model: `model_fingerprint` of the model.
    """
    return folder / f"{model[:16]}.npz"


def profiles(*folders: Path) -> list[Profile]:
    """Read complete profiles: those in some folders that name no model, the shipped ones, then those of one model.

    Args:
        folders: Folders of `.npz` files; those that do not exist are skipped.

    Raises:
        ConfigError: A file cannot be read or is no profile.
    """
    paths = [path for folder in (*folders, SHIPPED) if folder.is_dir() for path in sorted(folder.glob("*.npz"))]
    return sorted((one for one in map(Profile.load, paths) if one.complete), key=lambda one: bool(one.model))
