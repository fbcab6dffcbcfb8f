"""Groups of options: a command takes a dataclass, and has an option for each of its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from reader_rag.bench.option_groups import Only, OptionGroup, Without, with_option_groups
from reader_rag.config import SamplingParams


@dataclass(frozen=True)
class Place(OptionGroup):
    name: Annotated[str, typer.Option("--name", help="Its name.")] = "here"
    floor: Annotated[int, typer.Option("--floor", min=0)] = 0
    hidden: Annotated[bool, typer.Option("--hidden")] = False


def called(command: Any, *arguments: str) -> Any:
    """The result of a command line."""
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_a_command_gets_its_groups_and_its_own_options() -> None:
    got: list[Any] = []

    @with_option_groups
    def go(
        count: Annotated[int, typer.Option("--count")] = 1,
        place: Place = Place(floor=3),
        params: Annotated[SamplingParams, Only("temperature", "top_k")] = SamplingParams(max_tokens=7),
    ) -> None:
        """Go."""
        got.extend((count, place, params))

    result = called(go, "--floor", "4", "--top-k", "5", "--count", "2")
    assert result.exit_code == 0, result.output
    assert got == [2, Place("here", 4), SamplingParams(max_tokens=7, top_k=5)]


def test_a_field_that_is_left_out_keeps_the_value_of_the_default() -> None:
    got: list[Place] = []

    @with_option_groups
    def go(place: Annotated[Place, Without("hidden", "floor")] = Place(floor=9, hidden=True)) -> None:
        """Go."""
        got.append(place)

    assert called(go, "--name", "there").exit_code == 0
    assert got == [Place("there", 9, True)]
    assert "No such option" in called(go, "--floor", "1").output


def test_ranges_and_help_are_those_of_the_fields() -> None:
    @with_option_groups
    def go(place: Place = Place(), params: Annotated[SamplingParams, Only("top_k")] = SamplingParams()) -> None:
        """Go."""

    assert called(go, "--floor", "-1").exit_code == 2
    assert called(go, "--top-k", "-1").exit_code == 2
    shown = called(go, "--help").output
    assert "Its name." in shown
    assert "Sample among" in shown


def test_a_name_that_is_no_field_is_an_error_of_the_program() -> None:
    def go(place: Annotated[Place, Without("roof")] = Place()) -> None:
        """Go."""

    with pytest.raises(AssertionError, match="Place lacks one of"):
        with_option_groups(go)
