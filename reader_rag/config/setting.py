"""Settings: frozen dataclasses whose fields carry their range and their documentation.

Each setting is defined once, as a field of a `Settings` class. Constructor checks, the fields of `ReaderLLM`, the
arguments of its calls, and the help of command-line options are derived from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, Self

from reader_rag.errors import ConfigError
from reader_rag.util.encodable import is_encodable

_KEY = "setting"


@dataclass(frozen=True)
class Setting:
    """Range and documentation of a setting.

    Attributes:
        doc: Meaning and unit, in one or two sentences.
        ge: Least value.
        gt: The value lies above this.
        le: Greatest value.
        lt: The value lies below this.
        note: What a special value stands for, e.g. "0: off"; part of error messages.
        may_be_empty: Whether a string may be empty.
    """

    doc: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    note: str = ""
    may_be_empty: bool = False

    @property
    def range(self) -> str:
        """The range in words: "in 0..1024", "in (0, 1]", "at least 1"; empty if there is none."""
        low = self.ge if self.ge is not None else self.gt
        high = self.le if self.le is not None else self.lt
        if low is None:
            text = ""
        elif high is None:
            text = f"at least {low}" if self.gt is None else f"above {low}"
        elif isinstance(low, int) and isinstance(self.le, int) and self.gt is None:
            text = f"in {low}..{high}"
        else:
            text = f"in {'[' if self.gt is None else '('}{low}, {high}{']' if self.lt is None else ')'}"
        return f"{text} ({self.note})".lstrip() if self.note else text

    def holds(self, value: float) -> bool:
        """Whether a number is finite and lies in the range."""
        try:
            finite = math.isfinite(value)
        except OverflowError:  # an integer beyond all floats
            return False
        return (
            finite
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


def setting(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    note: str = "",
    may_be_empty: bool = False,
) -> Any:
    """A field of a `Settings` class.

    Args:
        default: Its default.
        doc: Meaning and unit.
        ge: Least value.
        gt: The value lies above this.
        le: Greatest value.
        lt: The value lies below this.
        note: What a special value stands for.
        may_be_empty: Whether a string may be empty.
    """
    return dataclasses.field(default=default, metadata={_KEY: Setting(doc, ge, gt, le, lt, note, may_be_empty)})


@dataclass(frozen=True)
class Settings:
    """Base of all settings: checks every field against its type and range when an object is made.

    Raises:
        ConfigError: A value has another type, or is out of its range.
    """

    def __post_init__(self) -> None:
        for name, (annotation, about) in _fields(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, (list, dict)):
                value = tuple(value) if isinstance(value, list) else dict(value)
                object.__setattr__(self, name, value)
            if not _fits(value, annotation, about):
                raise ConfigError(f"{name} must be {_expected(annotation, about)}, not {shown(value)}")
            if (plain := _plain(value)) is not value:
                object.__setattr__(self, name, plain)

    @classmethod
    def of(cls, values: Mapping[str, Any], base: Self | None = None) -> Self:
        """Settings from keyword arguments.

        Args:
            values: Values by name.
            base: Values of the other settings; None: their defaults.

        Raises:
            ConfigError: A name is unknown, or a value is out of its range.
        """
        known = _fields(cls)
        for name in values:
            if name not in known:
                raise ConfigError(unknown_argument(name, known))
        return cls(**values) if base is None else dataclasses.replace(base, **values)


def settings_of(cls: type[Settings]) -> dict[str, tuple[Any, Any, Setting]]:
    """The settings of a class: name to (type, default, range and documentation)."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    return {name: (annotation, defaults[name], about) for name, (annotation, about) in _fields(cls).items()}


def unknown_argument(name: str, known: typing.Iterable[str]) -> str:
    """The message about an argument that does not exist: the nearest name that does, or all of them."""
    names = list(known)
    near = get_close_matches(name, names, n=1)
    return f"unknown argument {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}")


def _read_fields(cls: type[Settings]) -> dict[str, tuple[Any, Setting]]:
    annotations = typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        assert _KEY in field.metadata, f"{cls.__name__}.{field.name} is not defined by setting()"
        found[field.name] = (annotations[field.name], field.metadata[_KEY])
    return found


_fields: Callable[[Any], dict[str, tuple[Any, Setting]]] = functools.cache(_read_fields)
"""A class's settings: name to (type, range and documentation)."""


def _fits(value: Any, annotation: Any, about: Setting) -> bool:
    """Whether a value is of a type and in its range. Any integer counts as `int`, numpy's too; no bool does."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one, about) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(each, arguments[0], about) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, arguments[0], _NOT_NEGATIVE) and _fits(each, arguments[1], about) for key, each in value.items()
        )
    if annotation is int:
        return isinstance(value, Integral) and not isinstance(value, bool) and about.holds(int(value))
    if annotation is float:
        return isinstance(value, Real) and not isinstance(value, bool) and about.holds(value)  # type: ignore[arg-type]
    if annotation is str:
        return isinstance(value, str) and (bool(value) or about.may_be_empty) and is_encodable(value)
    return isinstance(value, annotation)


def _plain(value: Any) -> Any:
    """A value with Python's own numbers: those of numpy overflow, and other libraries refuse them."""
    if isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    return value


def shown(value: Any) -> str:
    """A value in a message.

    Args:
        value: Anything. Python refuses to write integers of thousands of digits, and objects may fail at it.
    """
    try:
        text = repr(value)
    except Exception:
        return f"a very long {type(value).__name__}" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."


_NOT_NEGATIVE = Setting("A token id.", ge=0)
_LONGEST_VALUE = 200
_NAMES = {int: "an integer", float: "a number", str: "a string that is not empty", bool: "True or False"}


def _expected(annotation: Any, about: Setting) -> str:
    """A type and its range in words, for error messages."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_expected(one, about) for one in arguments)
    if origin is Literal:
        return " or ".join(repr(one) for one in arguments)
    if origin is tuple:
        strings = "a tuple of strings" if about.may_be_empty else "a tuple of strings that are not empty"
        return {int: "a tuple of token ids", str: strings}[arguments[0]]
    if origin is dict:
        return f"a dictionary of token ids and numbers {about.range}".rstrip()
    if annotation in (int, float) and about.range:
        return f"{_NAMES[annotation]} {about.range}" if about.range.startswith("(") else about.range
    return "None" if annotation is type(None) else _NAMES.get(annotation, f"a {annotation.__name__}")
