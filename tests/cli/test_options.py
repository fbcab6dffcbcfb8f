"""Command-line options: those of settings agree with the schema."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
from typer.models import ArgumentInfo, OptionInfo, TyperInfo

from reader_rag.bench import options
from reader_rag.cli.main import app
from reader_rag.config import DatastoreConfig, DraftConfig, EngineConfig, LoadConfig, SamplingParams, settings_of
from reader_rag.errors import ConfigError

SCHEMA = {
    name: about
    for settings in (DraftConfig, DatastoreConfig, EngineConfig, LoadConfig, SamplingParams)
    for name, about in settings_of(settings).items()
    if name not in ("batch", "datastore")  # elsewhere words for other things: sizes of a batch, the datastore itself
} | {"keep_answers": settings_of(DatastoreConfig)["keeps_answers"]}

NOT_SETTINGS = {
    ("ask", "top_k"): "passages, not tokens",
    ("chat", "top_k"): "passages, not tokens",
    ("vllm-args", "keep_answers"): "read by vLLM, for all users",
    ("bench replay", "profile"): "a file",
    ("bench recall", "profile"): "a file",
    ("bench drafting", "profile"): "a file",
    ("bench calibrate", "profile"): "a file",
    ("bench cache", "device"): "without a model, so there is no auto",
    ("bench cache", "dtype"): "of keys and values",
}
OWN_HELP = {
    "draft_model": "the schema's takes three lines",
    "draft_quantization": "the schema's takes two lines",
    "exactness": "the schema's takes five lines",
    "forward": "the schema's takes four lines",
    "profile": "the schema's takes four lines",
    "quantization": "the schema's takes four lines",
    "trust_remote_code": "a flag: a request, not a question",
    "keep_answers": "a flag: a request, not a question",
}
OWN_DEFAULT = {
    ("verify", "max_tokens"): "many prompts",
    ("bench generate", "max_nodes"): "None: the schema's",
    ("bench generate", "seed"): "runs must be repeatable",
    ("bench load", "dtype"): "every answer must be plain decoding's",
    ("bench load", "max_tokens"): "many requests",
    ("bench record", "dtype"): "traces are of float32",
    ("bench record", "max_tokens"): "traces are of 200 tokens",
    ("bench record", "seed"): "runs must be repeatable",
    ("bench report", "max_tokens"): "many prompts",
    ("bench speed-bench", "seed"): "runs must be repeatable",
    ("bench vllm", "dtype"): "as it is served",
    ("bench vllm", "max_tokens"): "many prompts",
    ("bench vllm", "seed"): "runs must be repeatable",
    ("bench vllm-costs", "dtype"): "as it is served",
    ("bench vllm-stress", "dtype"): "every answer must be plain decoding's",
    ("bench vllm-stress", "max_tokens"): "many requests",
    ("bench vllm-stress", "seed"): "runs must be repeatable",
}
OWN_RANGE = {"max_tokens": "one token has no speed", "seed": "also decides what is run", "max_nodes": "a bench's None"}


def commands(of: Any = app, prefix: str = "") -> Iterator[tuple[str, Callable[..., None]]]:
    """Every command, as (words behind `reader-rag`, function)."""
    for command in of.registered_commands:
        assert command.callback is not None
        yield prefix + (command.name or command.callback.__name__.replace("_", "-")), command.callback
    for group in of.registered_groups:
        assert isinstance(group, TyperInfo)
        yield from commands(group.typer_instance, f"{prefix}{group.name} ")


def parameters() -> Iterator[tuple[str, str, Any, Any, OptionInfo]]:
    """Every option, as (command, parameter, type, default, option)."""
    for command, function in commands():
        hints = typing.get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            assert typing.get_origin(hints[name]) is Annotated, (command, name)
            annotation, about = typing.get_args(hints[name])
            if not isinstance(about, ArgumentInfo):
                yield command, name, annotation, parameter.default, about


OF_SETTINGS = [row for row in parameters() if row[1] in SCHEMA and (row[0], row[1]) not in NOT_SETTINGS]


@pytest.mark.parametrize("row", OF_SETTINGS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_an_option_of_a_setting_has_the_type_default_and_help_of_the_schema(row: Any) -> None:
    command, name, annotation, default, option = row
    type_, schema_default, about = SCHEMA[name]
    if name not in OWN_RANGE:
        assert option.min == about.ge
        assert annotation == type_
    if (command, name) not in OWN_DEFAULT:
        assert default == schema_default
    if name not in OWN_HELP and name not in OWN_RANGE:
        assert option.help.startswith(about.doc)


def test_no_exception_is_stated_for_an_option_that_does_not_exist() -> None:
    found = {(command, name) for command, name, *_ in parameters()}
    assert set(NOT_SETTINGS) | set(OWN_DEFAULT) <= found
    assert set(OWN_HELP) | set(OWN_RANGE) <= {name for _, name in found}


@pytest.mark.parametrize(("text", "found"), [("1", [1]), ("1,2,4", [1, 2, 4]), ("1e3, 2000", [1000, 2000])])
def test_a_list_of_numbers_is_read(text: str, found: list[int]) -> None:
    assert options.numbers("--batch", text) == found


@pytest.mark.parametrize("text", ["", "a", "1,", "0", "1.5", "-2", "nan", "1e999"])
def test_anything_else_is_refused_with_the_name_of_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--batch .*whole numbers of at least 1"):
        options.numbers("--batch", text, least=1)
