"""Options of the benchmark commands, each with its flag, type, range and help.

Options that the other programs share with them are here too, as `bench` is the lowest floor that has commands;
`reader_rag.cli.options` adds those of documents and answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reader_rag.config import Exactness as ExactnessName
from reader_rag.config import Forward as ForwardName
from reader_rag.errors import ConfigError

PROMPTS_FORM = 'Prompts, a line each: {"id", "category", "turns": [text, ...]}.'
LOCAL_PROMPTS = "questions about Python's documentation and installed packages"

# Models

Model = Annotated[str, typer.Option("--model", help="LLM: alias, local folder or hub id.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16. auto: 16 bits on a GPU, else float32.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
Exactness = Annotated[
    ExactnessName, typer.Option("--exactness", help="strict: the same tokens as plain decoding in 16 bits too.")
]
Forward = Annotated[
    ForwardName, typer.Option("--forward", help="torch: run the model's own forward, never the compiled loops.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with a model. Only for sources you trust."),
]

# Sampling

MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0: greedy.")]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Sample among the k most probable tokens; 0: all.")]
TopP = Annotated[
    float, typer.Option("--top-p", help="Sample among the fewest tokens whose probabilities sum to at least this.")
]
MinP = Annotated[
    float,
    typer.Option("--min-p", help="Sample among tokens at least this times as probable as the most probable one."),
]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Divide the logits of tokens that are in the text; 1: off.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the random numbers.")]

# What is run, and what is printed

PromptsFile = Annotated[Path, typer.Option("--prompts", help=PROMPTS_FORM)]
Prompts = Annotated[Path | None, typer.Option("--prompts", help=PROMPTS_FORM, show_default=LOCAL_PROMPTS)]
Categories = Annotated[str, typer.Option("--categories", help="Comma-separated categories.", show_default="all")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Most of each category.", show_default="all")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]

# Drafts

DatastoreToDraftFrom = Annotated[
    Path | None, typer.Option("--datastore", help="Folder of a datastore to draft from too.", show_default="none")
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
        option: The option that has it, for the message.
        text: The list; numbers may be written like 1e6.
        least: The smallest that is allowed.

    Raises:
        ConfigError: One of them is no whole number, or too small.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(value.is_integer() and value >= least for value in values):
        raise ConfigError(f"{option} {text}: give whole numbers of at least {least}, separated by commas")
    return [int(value) for value in values]
