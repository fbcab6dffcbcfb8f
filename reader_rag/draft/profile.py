"""Profiles: a model's likely next tokens after each single token of its vocabulary, the prior of the successor table.

Each token is evaluated once, with no text before it. The profile of the default model comes with the package;
`reader-rag models profile` computes that of any other model and keeps it in the cache folder. Without a profile the
table starts empty and learns from the request's prompt.

A profile belongs to a vocabulary: a larger model of the same family can use it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.kernels import successors as kernels
from reader_rag.errors import ConfigError
from reader_rag.util.files import atomic_path

SHIPPED = Path(__file__).with_name("profiles")
_AGAIN = "delete it and make it again: reader-rag models profile MODEL"
_FITS = 0.25
"""Least share of a text's tokens that a profile of its vocabulary lists after the token before."""
_LEAST_TOKENS = 200


@dataclass(frozen=True, eq=False)
class Profile:
    """Likely next tokens after each token of a vocabulary.

    Attributes:
        name: The model that it was made from.
        vocabulary: `fingerprint` of its vocabulary.
        tokens: int32 [vocabulary, 8], the likeliest first, -1: no more.
    """

    name: str
    vocabulary: str
    tokens: NDArray[np.int32]

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
            with np.load(path, allow_pickle=False) as file:
                tokens = file["tokens"].astype(np.int32) - 1
                profile = cls(str(file["name"]), str(file["vocabulary"]), tokens)
        except Exception as cause:  # a damaged zip file raises a dozen kinds
            raise ConfigError(f"{path} is not a readable profile ({cause}); {_AGAIN}") from cause
        if tokens.ndim != 2 or tokens.shape[1] != kernels.BEST or int(tokens.max(initial=-1)) >= len(tokens):
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


def profiles(*folders: Path) -> list[Profile]:
    """Read the profiles in some folders, then the shipped ones.

    Args:
        folders: Folders of `.npz` files; those that do not exist are skipped.
    """
    return [
        Profile.load(path) for folder in (*folders, SHIPPED) if folder.is_dir() for path in sorted(folder.glob("*.npz"))
    ]
