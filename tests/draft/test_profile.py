"""A profile of a model is kept in a file, and only used for text of its vocabulary."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reader_rag.draft.profile import SHIPPED, Profile, fingerprint, profiles
from reader_rag.errors import ConfigError


def make_profile(size: int, name: str = "some/model") -> Profile:
    """After token t come t + 1, ..., t + 3, round about; no more."""
    tokens = np.full((size, 8), -1, np.int32)
    for rank in range(3):
        tokens[:, rank] = (np.arange(size) + 1 + rank) % size
    return Profile(name, fingerprint({str(k): k for k in range(size)}), tokens)


def packed(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


# Files


@pytest.mark.parametrize("size", [1, 50, (1 << 16) - 1, 1 << 16])
def test_a_saved_profile_is_loaded_as_it_was(size: int, tmp_path: Path) -> None:
    saved = make_profile(size, "a model: ü/2")
    saved.tokens[-1] = [size - 1, *[-1] * 7]
    saved.save(tmp_path / "p.npz")
    loaded = Profile.load(tmp_path / "p.npz")
    assert (loaded.name, loaded.vocabulary) == (saved.name, saved.vocabulary)
    assert loaded.tokens.dtype == np.int32
    assert np.array_equal(loaded.tokens, saved.tokens)
    assert [path.name for path in tmp_path.iterdir()] == ["p.npz"]


def test_saving_again_takes_the_place_of_the_old_file(tmp_path: Path) -> None:
    make_profile(5, "old").save(tmp_path / "p.npz")
    make_profile(6, "new").save(tmp_path / "p.npz")
    assert Profile.load(tmp_path / "p.npz").name == "new"


def test_when_saving_fails_the_old_file_is_whole_and_no_new_one_looks_like_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(file: Any, **_: NDArray[Any]) -> None:
        file.write(b"PK half")
        raise OSError("no space left")

    make_profile(5, "old").save(tmp_path / "p.npz")
    monkeypatch.setattr(np, "savez_compressed", half)
    for name in ("p.npz", "q.npz"):
        with pytest.raises(OSError, match="no space left"):
            make_profile(6, "new").save(tmp_path / name)
    assert [path.name for path in tmp_path.glob("*.npz")] == ["p.npz"]
    assert Profile.load(tmp_path / "p.npz").name == "old"


def whole() -> bytes:
    profile = make_profile(300)
    return packed(name=profile.name, vocabulary=profile.vocabulary, tokens=(profile.tokens + 1).astype(np.uint16))


def bare_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros((3, 8), np.uint16))
    return file.getvalue()


def flipped(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 255]) + raw[middle + 1 :]


TOKENS = np.ones((3, 8), np.uint16)
WRONG = {
    "empty": b"",
    "other text": b"<html>not found</html>",
    "cut off": whole()[: len(whole()) // 2],
    "cut off early": whole()[:10],
    "flipped": flipped(whole()),
    "array file": bare_array(),
    "foreign arrays": packed(hits=np.zeros(3), expected=np.ones(3)),
    "no name": packed(vocabulary="v", tokens=TOKENS),
    "no vocabulary": packed(name="n", tokens=TOKENS),
    "fewer columns": packed(name="n", vocabulary="v", tokens=TOKENS[:, :4]),
    "flat": packed(name="n", vocabulary="v", tokens=TOKENS.ravel()),
    "objects": packed(name="n", vocabulary="v", tokens=np.full((3, 8), None)),
    "words": packed(name="n", vocabulary="v", tokens=np.full((3, 8), "x")),
}


@pytest.mark.parametrize("raw", WRONG.values(), ids=WRONG)
def test_a_damaged_or_foreign_file_is_refused_and_the_command_that_makes_it_again_is_named(
    raw: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "p.npz"
    path.write_bytes(raw)
    with pytest.raises(
        ConfigError, match="p.npz is not a .*profile.*; delete it .*reader-rag models profile"
    ) as raised:
        Profile.load(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reader-rag models profile"):
        Profile.load(tmp_path / "p.npz")


def test_a_whole_file_made_by_hand_is_read(tmp_path: Path) -> None:
    # So that the refusals above are for what is wrong with those files.
    (tmp_path / "p.npz").write_bytes(whole())
    assert np.array_equal(Profile.load(tmp_path / "p.npz").tokens, make_profile(300).tokens)


# Does it fit?


def test_a_profile_fits_text_whose_next_tokens_it_lists() -> None:
    profile = make_profile(500)
    assert profile.fits([list(range(100, 400))])
    assert profile.fits([list(range(100)), [], [7], list(range(0, 300, 3)), range(50)])


def test_a_profile_does_not_fit_text_of_another_vocabulary() -> None:
    profile = make_profile(500)
    assert not profile.fits([np.random.default_rng(0).integers(0, 500, 1000).tolist()])
    # One token that it does not have is enough.
    assert not profile.fits([list(range(400)), [500]])
    assert profile.fits([list(range(400)), [499]])


def test_a_quarter_of_the_next_tokens_is_enough_and_less_is_not() -> None:
    profile = make_profile(500)
    jump, step = [0, 250], [0, 1]
    assert profile.fits([jump] * 300 + [step] * 100)
    assert not profile.fits([jump] * 301 + [step] * 100)


def test_a_few_tokens_are_not_enough_to_tell() -> None:
    profile = make_profile(500)
    assert not profile.fits([])
    assert not profile.fits([list(range(200))])  # 199 next tokens
    assert profile.fits([list(range(201))])


# Vocabularies


def test_the_fingerprint_depends_on_ids_and_tokens_and_not_on_their_order() -> None:
    print_of = fingerprint({"a": 0, "b": 1})
    assert len(print_of) == 64
    assert fingerprint({"b": 1, "a": 0}) == print_of
    others = [{"a": 1, "b": 0}, {"a": 0, "c": 1}, {"a": 0}, {"a": 0, "b": 2}, {"a": 0, "b": 1, "c": 2}, {}]
    assert len({print_of, *map(fingerprint, others)}) == 1 + len(others)


def test_tokens_that_no_file_could_hold_have_a_fingerprint() -> None:
    assert len(fingerprint({"\udc80": 0, "ü\n": 1})) == 64


# What is shipped


def test_the_shipped_profiles_list_tokens_of_their_own_vocabulary() -> None:
    shipped = profiles()
    assert shipped
    for profile in shipped:
        assert profile.name
        assert len(profile.vocabulary) == 64
        size, columns = profile.tokens.shape
        assert columns == 8
        assert profile.tokens.dtype == np.int32
        assert profile.tokens.min() >= -1
        assert profile.tokens.max() < size
        # Nothing behind "no more", and nothing twice.
        assert not ((profile.tokens[:, :-1] < 0) & (profile.tokens[:, 1:] >= 0)).any()
        ordered = np.sort(profile.tokens, axis=1)
        assert not ((ordered[:, :-1] == ordered[:, 1:]) & (ordered[:, 1:] >= 0)).any()


def test_profiles_of_other_folders_come_before_the_shipped_ones(tmp_path: Path) -> None:
    make_profile(5, "second").save(tmp_path / "b.npz")
    make_profile(5, "first").save(tmp_path / "a.npz")
    (tmp_path / "notes.txt").write_text("no profile")
    found = [profile.name for profile in profiles(tmp_path / "missing", tmp_path)]
    assert found[:2] == ["first", "second"]
    assert found[2:] == [Profile.load(path).name for path in sorted(SHIPPED.glob("*.npz"))]
