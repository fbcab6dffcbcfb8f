"""Options in groups: a command takes a dataclass as one argument, and has an option for each of its fields.

A parameter of a command is a group if its type is a `Settings` class or an `OptionGroup`. The parameter's default has
the defaults of the options, and the values of fields without one:

    @with_option_groups
    def check(params: Annotated[SamplingParams, Only("temperature")] = SamplingParams(max_tokens=128)) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from reader_rag.bench import options
from reader_rag.config import LoadConfig, Settings

if TYPE_CHECKING:
    from reader_rag.bench.inputs import BenchPrompt


class OptionGroup:
    """Base of dataclasses whose fields are options: each has a type of the form `Annotated[..., typer.Option(...)]`."""


class Only:
    """In the type of a parameter: only these fields of the group are options.

    Args:
        names: Names of fields.
    """

    def __init__(self, *names: str) -> None:
        self.names = names


class Without:
    """In the type of a parameter: all fields of the group are options but these.

    Args:
        names: Names of fields.
    """

    def __init__(self, *names: str) -> None:
        self.names = names


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its groups, in the place of the group.

    Args:
        command: The command; each of its groups has a default.

    Returns:
        A function for Typer, with options in place of groups.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for each in inspect.signature(command, eval_str=True).parameters.values():
        group, *about = get_args(each.annotation) if get_origin(each.annotation) is Annotated else (each.annotation,)
        if not (is_dataclass(group) and isinstance(group, type) and issubclass(group, (Settings, OptionGroup))):
            parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        names = _offered(group, about)
        groups[each.name] = each.default, names
        parameters += [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(each.default, name),
                annotation=_option(group, name),
            )
            for name in names
        ]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        for parameter, (default, names) in groups.items():
            arguments[parameter] = replace(default, **{name: arguments.pop(name) for name in names})
        command(**arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _offered(group: Any, about: list[Any]) -> list[str]:
    """Names of the fields that are options, in the order of the group."""
    names = [field.name for field in fields(group)]
    for choice in about:
        assert set(choice.names) <= set(names), f"{group.__name__} lacks one of {choice.names}"
        names = [name for name in names if (name in choice.names) == isinstance(choice, Only)]
    return names


def _option(group: Any, name: str) -> Any:
    """The type and option of a field."""
    if issubclass(group, OptionGroup):
        return get_type_hints(group, include_extras=True)[name]
    return options.of_setting(group, name)


@dataclass(frozen=True)
class PromptOptions(OptionGroup):
    """Which prompts are run.

    Attributes:
        prompts: File of prompts; None: prompts made of texts of this machine.
        categories: Categories, comma-separated; "": all.
        limit: Most prompts of each category; None: all of a file.
    """

    prompts: options.Prompts = None
    categories: options.Categories = ""
    limit: options.Limit = None

    def read(self, each: int) -> list[BenchPrompt]:
        """The prompts.

        Args:
            each: Prompts of each category where neither a file nor a limit is given.

        Raises:
            ConfigError: The file cannot be read, or there is no such category.
        """
        from reader_rag.bench.local_prompts import prompts_or_local

        return prompts_or_local(self.prompts, options.names(self.categories), self.limit, each)


Loading = Annotated[LoadConfig, Without("trust_remote_code")]
"""How a benchmark loads its model."""
