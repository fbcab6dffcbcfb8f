"""Command-line options that several commands share, each with its flag, type, range and help.

Options of settings take their help and range from `reader_rag.config`. `bench` is the lowest layer with commands, so
options of all programs are here; `reader_rag.cli.options` adds those of documents and answers.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from reader_rag.config import EngineConfig, LoadConfig, SamplingParams, Settings, settings_of
from reader_rag.config import Exactness as ExactnessName
from reader_rag.config import Forward as ForwardName
from reader_rag.config import Quantization as QuantizationName
from reader_rag.errors import ConfigError, DatastoreNotFoundError

UNSHARED = EngineConfig(prefix_bytes=0, profile="off")
"""An engine whose answers are not made faster by those before them, for comparisons."""
PROMPTS_FORM = 'Prompts, a line each: {"id", "category", "turns": [text, ...]}.'
LOCAL_PROMPTS = "questions about Python's documentation and installed packages"


def setting_option(settings: type[Settings], name: str, more: str = "", *, text: str = "", flag: str = "") -> Any:
    """The option of a setting, with its documentation and least value.

    Args:
        settings: The class that defines the setting.
        name: Name of the setting.
        more: Text added to the documentation.
        text: Help instead of the documentation, where that is too long.
        flag: Name of the option; "": the name of the setting with hyphens.
    """
    _, _, about = settings_of(settings)[name]
    flag = flag or f"--{name.replace('_', '-')}"
    return typer.Option(flag, min=about.ge, help=text or f"{about.doc} {more}".strip())


# Models

Model = Annotated[str, typer.Option("--model", help="LLM: alias, local folder or hub id.")]
Dtype = Annotated[str, setting_option(LoadConfig, "dtype", "auto: 16 bits on a GPU, else float32.")]
Quantization = Annotated[
    QuantizationName,
    setting_option(
        LoadConfig,
        "quantization",
        text="int8: linear layers in 8-bit integers, in a quarter of float32's memory, with rounding.",
    ),
]
Device = Annotated[str, setting_option(LoadConfig, "device")]
TrustRemoteCode = Annotated[
    bool,
    setting_option(
        LoadConfig, "trust_remote_code", text="Run code that comes with the model. Only for sources that you trust."
    ),
]
Exactness = Annotated[
    ExactnessName,
    setting_option(
        EngineConfig, "exactness", text="strict: in 16-bit types too, exactly the tokens of plain decoding."
    ),
]
Forward = Annotated[
    ForwardName,
    setting_option(EngineConfig, "forward", text="torch: run the model's own forward, never the compiled loops."),
]
DraftModel = Annotated[
    str | None,
    setting_option(
        EngineConfig,
        "draft_model",
        text="A model that drafts too: a smaller LLM, best of the same vocabulary, or an EAGLE-3 head.",
    ),
]
DraftQuantization = Annotated[
    QuantizationName, setting_option(EngineConfig, "draft_quantization", text="int8: load the draft model in int8.")
]
# Sampling

MaxTokens = Annotated[int, setting_option(SamplingParams, "max_tokens")]
Temperature = Annotated[float, setting_option(SamplingParams, "temperature")]
AnswerTokens = Annotated[int, typer.Option("--max-tokens", min=2, help="Most tokens of an answer.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the random numbers.")]

_OF_SETTINGS = {
    "dtype": Dtype,
    "quantization": Quantization,
    "device": Device,
    "trust_remote_code": TrustRemoteCode,
    "exactness": Exactness,
    "forward": Forward,
    "draft_model": DraftModel,
    "draft_quantization": DraftQuantization,
    "seed": Seed,
}
"""Options of settings whose help is not the setting's documentation alone, by name."""


def of_setting(settings: type[Settings], name: str) -> Any:
    """The type of a command's parameter that is a setting, with its option.

    Args:
        settings: The class that defines the setting.
        name: Name of the setting.
    """
    annotation, _, _ = settings_of(settings)[name]
    return _OF_SETTINGS.get(name) or Annotated[annotation, setting_option(settings, name)]


# What is run, and what is printed

PromptsFile = Annotated[Path, typer.Option("--prompts", help=PROMPTS_FORM)]
Prompts = Annotated[Path | None, typer.Option("--prompts", help=PROMPTS_FORM, show_default=LOCAL_PROMPTS)]
Categories = Annotated[str, typer.Option("--categories", help="Categories, comma-separated; if empty, all.")]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Most prompts or answers of each category.", show_default="all")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]

# Drafts


def require_datastore(folder: Path | None) -> Path | None:
    """Check that there is a datastore, before models are loaded for it.

    Args:
        folder: Its folder; None: none is named.

    Returns:
        The folder.

    Raises:
        DatastoreError: There is none, or its manifest cannot be read.
    """
    if folder is not None:
        from reader_rag.datastore.catalog import read_manifest

        try:
            read_manifest(folder)
        except DatastoreNotFoundError as error:
            command = shlex.join(["reader-rag", "datastore", "build", "PATH", "--datastore", str(folder)])
            raise DatastoreNotFoundError(f"{error} ({command})") from error
    return folder


DatastoreToDraftFrom = Annotated[
    Path | None,
    typer.Option(
        "--datastore",
        callback=require_datastore,
        help="Folder of a datastore to draft from too.",
        show_default="none",
    ),
]
MaxDrafted = Annotated[
    int, typer.Option("-k", "--drafted", min=1, help="Most tokens drafted for one request in a step.")
]
StepCosts = Annotated[
    Path | None,
    typer.Option("--costs", help="Table of step costs, from bench vllm-costs.", show_default="assumed costs"),
]


def names(text: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [part for part in text.split(",") if part]


def numbers(option: str, text: str, least: int = 0) -> list[int]:
    """The numbers of a comma-separated list.

    Args:
        option: Name of the option, for the message.
        text: The list; numbers may be written like 1e6.
        least: The smallest that is allowed.

    Raises:
        ConfigError: A part is not a whole number, or is too small.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(value.is_integer() and value >= least for value in values):
        raise ConfigError(f"{option} {text}: give whole numbers of at least {least}, separated by commas")
    return [int(value) for value in values]
