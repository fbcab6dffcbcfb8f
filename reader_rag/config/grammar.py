"""Grammars of answers: a JSON schema, a regular expression or a context-free grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

from reader_rag.errors import ConfigError
from reader_rag.util.encodable import is_encodable

if TYPE_CHECKING:
    from pydantic import BaseModel

GrammarKind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """A grammar that constrains an answer; made by `json_schema`, `regex` or `lark`.

    Grammars compare and hash by value. Whether a grammar can be followed is checked when it is compiled for a model,
    before any token is generated.

    Attributes:
        kind: The language of `text`.
        text: The schema as JSON, the pattern, or the rules.

    Example:
        >>> llm.complete("Is water wet?", grammar=Grammar.regex("Yes|No"))

    Raises:
        ConfigError: The kind is unknown, or the text empty.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ConfigError(f"kind must be one of {', '.join(get_args(GrammarKind))}, not {self.kind!r}")
        if not isinstance(self.text, str) or not self.text.strip() or not is_encodable(self.text):
            raise ConfigError(
                f"the text of a {self.kind} grammar must be a string that is not empty, without lone surrogates, not "
                f"{self.text!r:.80}"
            )

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any] | type[BaseModel]) -> Grammar:
        """Answers that are JSON and match a schema.

        The JSON is written as `json.dumps` does, in one line with a space after `,` and `:`, and properties come in the
        schema's order. A schema can set another style (`docs/grammar.md`).

        Args:
            schema: A JSON schema as text or mapping, or a Pydantic class. Objects of a class have its fields only,
                unless it says `extra="allow"`; items of its sets may repeat.

        Raises:
            ConfigError: This is not a JSON schema.
        """
        if isinstance(schema, type):
            schema = _schema_of(schema)
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
            text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as cause:
            raise ConfigError(f"the schema is not JSON: {cause}") from cause
        except RecursionError as cause:
            raise ConfigError("the schema is nested too deep; make it flatter, with $ref") from cause
        if not isinstance(parsed, dict):
            raise ConfigError(f"a JSON schema is an object, not {text[:40]}")
        return cls("json_schema", text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Answers that match a regular expression as a whole.

        Args:
            pattern: In Rust's syntax: Python's without look-around and back references. No anchors.

        Raises:
            ConfigError: The pattern is empty.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Answers of a context-free grammar.

        Args:
            text: Rules in Lark's syntax, the first of them called `start`.

        Raises:
            ConfigError: The text is empty.
        """
        return cls("lark", text)


def _schema_of(model: type) -> dict[str, Any]:
    """The schema of a Pydantic class with `additionalProperties` false, so that field names can be forced."""
    from pydantic import BaseModel
    from pydantic.errors import PydanticInvalidForJsonSchema
    from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
    from pydantic_core import core_schema

    class Closed(GenerateJsonSchema):
        def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
            return _closed(super().model_schema(schema))

        def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
            return _closed(super().dataclass_schema(schema))

        def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
            return _closed(super().typed_dict_schema(schema))

        def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
            # The tag says which one it is: no value matches two, which "oneOf" would have to prove.
            union = super().tagged_union_schema(schema)
            return {"anyOf": union["oneOf"]} if "oneOf" in union else union

        def set_schema(self, schema: core_schema.SetSchema) -> JsonSchemaValue:
            return _without_unique_items(super().set_schema(schema))

        def frozenset_schema(self, schema: core_schema.FrozenSetSchema) -> JsonSchemaValue:
            return _without_unique_items(super().frozenset_schema(schema))

        def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
            # A number or its text, which is exact. Pydantic's pattern of the text has look-around, or there is none.
            decimal = super().decimal_schema(schema)
            text = {
                "type": "string",
                "pattern": _decimal_pattern(schema.get("max_digits"), schema.get("decimal_places")),
            }
            return {**decimal, "anyOf": [text if way.get("type") == "string" else way for way in decimal["anyOf"]]}

    if not issubclass(model, BaseModel):
        raise ConfigError(f"{model.__name__} is not a Pydantic class; derive it from pydantic.BaseModel")
    try:
        return model.model_json_schema(schema_generator=Closed)
    except PydanticInvalidForJsonSchema as cause:
        raise ConfigError(f"{model.__name__} has no JSON schema: {cause.message}") from cause


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def _without_unique_items(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a set without what no grammar can count; the class makes a set of the items."""
    return {key: value for key, value in schema.items() if key != "uniqueItems"}


def _decimal_pattern(max_digits: int | None, decimal_places: int | None) -> str:
    """The text of a decimal number, as a regular expression.

    Args:
        max_digits: Most digits; None: any.
        decimal_places: Most digits behind the point; None: any.
    """
    places = max_digits if decimal_places is None else decimal_places
    whole = "+" if max_digits is None else f"{{1,{max(max_digits - (decimal_places or 0), 1)}}}"
    fraction = "" if places == 0 else rf"(\.[0-9]{'+' if places is None else f'{{1,{places}}}'})?"
    return f"^-?[0-9]{whole}{fraction}$"


def grammars_available() -> bool:
    """Whether llguidance is installed, which follows grammars; nothing is imported."""
    return find_spec("llguidance") is not None
