"""Settings: each field is checked against its type and range when an object is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest

from reader_rag.config import BatchConfig, DatastoreConfig, DraftConfig, EngineConfig, LoadConfig, SamplingParams
from reader_rag.config.setting import Setting, Settings, setting, settings_of
from reader_rag.errors import ConfigError

ALL = [BatchConfig, DatastoreConfig, DraftConfig, EngineConfig, LoadConfig, SamplingParams]


@dataclass(frozen=True)
class Example(Settings):
    count: int = setting(3, "How many.", ge=1, le=5)
    share: float = setting(0.5, "Of all.", gt=0.0, le=1.0)
    age_s: float | None = setting(None, "In seconds.", gt=0.0)
    mode: Literal["fast", "slow"] = setting("fast", "Which way.")
    words: tuple[str, ...] = setting((), "Words.")
    ids: tuple[int, ...] = setting((), "Token ids.", ge=0)
    names: tuple[str, ...] = setting((), "Names.", may_be_empty=True)
    on: bool = setting(True, "Whether.")
    bias: dict[int, float] | None = setting(None, "By token id.", ge=-1.0, le=1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count must be in 1..5, not 0"),
        ({"count": 6}, "count must be in 1..5, not 6"),
        ({"count": 2.0}, "count must be in 1..5, not 2.0"),
        ({"count": True}, "count must be in 1..5, not True"),
        ({"share": 0}, r"share must be in \(0.0, 1.0\], not 0"),
        ({"share": float("nan")}, r"share must be in \(0.0, 1.0\], not nan"),
        ({"share": "1"}, r"share must be in \(0.0, 1.0\], not '1'"),
        ({"age_s": -1}, "age_s must be above 0.0 or None, not -1"),
        ({"age_s": float("inf")}, "age_s must be above 0.0 or None, not inf"),
        ({"mode": "other"}, "mode must be 'fast' or 'slow', not 'other'"),
        ({"words": "one"}, "words must be a tuple of strings that are not empty, not 'one'"),
        ({"words": ("",)}, "words must be a tuple of strings that are not empty, not"),
        ({"names": (1,)}, r"names must be a tuple of strings, not \(1,\)"),
        ({"ids": (1, -1)}, "ids must be a tuple of token ids, not"),
        ({"on": "false"}, "on must be True or False, not 'false'"),
        (
            {"bias": {1: 2.0}},
            r"bias must be a dictionary of token ids and numbers in \[-1.0, 1.0\] or None, not {1: 2.0}",
        ),
        ({"bias": {"1": 0.5}}, "bias must be a dictionary of token ids"),
        ({"bias": {-1: 0.5}}, "bias must be a dictionary of token ids"),
        ({"bias": [1]}, "bias must be a dictionary of token ids"),
        ({"on": 1}, "on must be True or False, not 1"),
    ],
)
def test_a_value_of_another_type_or_out_of_its_range_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Example(**values)


def test_numbers_of_numpy_integers_for_floats_and_lists_for_tuples_are_taken() -> None:
    made = Example(count=np.int64(4), share=1, words=["a"], ids=[0, np.int32(7)])  # type: ignore[arg-type]
    assert (made.count, made.share, made.words, made.ids) == (4, 1, ("a",), (0, 7))


def test_numbers_of_other_types_become_pythons_own() -> None:
    """Those of numpy overflow: `np.uint8(3) << 8` is 0, and other libraries refuse them."""
    made = Example(count=np.uint8(3), share=np.float32(0.5), ids=(np.int64(7),), bias={np.int16(4): np.float64(0.5)})  # type: ignore[arg-type, dict-item]
    kinds = [type(made.count), type(made.share), type(made.ids[0]), *map(type, next(iter((made.bias or {}).items())))]
    assert kinds == [int, float, int, int, float]


def test_a_value_that_cannot_be_written_is_refused_by_its_type() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(ConfigError, match=r"count must be in 1\.\.5, not a Mute"):
        Example(count=Mute())  # type: ignore[arg-type]


def test_a_dictionary_is_copied() -> None:
    bias = {5: 0.5}
    made = Example(bias=bias)
    bias[6] = 1.0
    assert made.bias == {5: 0.5}


def test_strings_are_empty_only_where_they_may_be() -> None:
    assert Example(names=("", "a")).names == ("", "a")


def test_settings_are_made_from_keyword_arguments_over_a_base() -> None:
    assert Example.of({"count": 2}) == Example(count=2)
    assert Example.of({"count": 2}, Example(share=0.25)) == Example(count=2, share=0.25)
    with pytest.raises(ConfigError, match="unknown argument 'coutn'; did you mean 'count'?"):
        Example.of({"coutn": 2})
    with pytest.raises(
        ConfigError, match="unknown argument 'x'; known: count, share, age_s, mode, words, ids, names, on, bias"
    ):
        Example.of({"x": 2})


@pytest.mark.parametrize(
    ("about", "words"),
    [
        (Setting("", ge=1), "at least 1"),
        (Setting("", gt=0.0), "above 0.0"),
        (Setting("", ge=0, le=3), "in 0..3"),
        (Setting("", ge=0.0, lt=1.0), "in [0.0, 1.0)"),
        (Setting("", ge=0.0, le=1.0, note="0: off"), "in [0.0, 1.0] (0: off)"),
        (Setting(""), ""),
    ],
)
def test_a_range_is_put_in_words(about: Setting, words: str) -> None:
    assert about.range == words


@pytest.mark.parametrize("cls", ALL)
def test_every_setting_has_a_default_in_its_range_and_documentation(cls: type[Settings]) -> None:
    cls()
    for name, (_, _, about) in settings_of(cls).items():
        assert about.doc.endswith("."), name
        assert about.doc[0].isupper() or about.doc[0] in '"0', name


def test_a_field_that_is_no_setting_is_refused() -> None:
    @dataclass(frozen=True)
    class Wrong(Settings):
        count: int = 3

    with pytest.raises(AssertionError, match=r"Wrong\.count is not defined by setting\(\)"):
        Wrong()


def test_the_least_probability_of_a_node_is_below_one() -> None:
    assert DraftConfig(min_probability=0.99999).min_probability == 0.99999
    with pytest.raises(ConfigError, match=r"min_probability must be in \[0.0, 1.0\), not 1.0"):
        DraftConfig(min_probability=1.0)


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["large", "negative", "not printable"])
@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_p", "seed", "suppress_tokens", "logprobs"])
def test_numbers_beyond_all_floats_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        SamplingParams(**{name: (value,) if name == "suppress_tokens" else value})  # type: ignore[arg-type]
