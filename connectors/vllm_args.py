"""`reader-rag vllm-args`: how vLLM is told to draft with reader_rag."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reader_rag.errors import ConfigError

PROPOSER = "reader_rag.connectors.vllm.ReaderProposer"
"""The class that vLLM imports."""
DEFAULT_DRAFT_TOKENS = 16
"""Most tokens drafted for one request in a step, unless told otherwise."""


def speculative_config(drafted: int = DEFAULT_DRAFT_TOKENS) -> dict[str, Any]:
    """vLLM's `speculative_config`.

    Args:
        drafted: Most tokens drafted for one request in a step.

    Raises:
        ConfigError: Fewer than one.
    """
    if drafted < 1:
        raise ConfigError(f"{drafted} drafted tokens: give at least 1, or leave speculation out to decode plainly")
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": drafted}


def additional_config(
    datastore: Path | str | None = None,
    costs: Path | str | None = None,
    namespaces: Sequence[str] = (),
    keep_answers: bool = False,
) -> dict[str, Any]:
    """vLLM's `additional_config`: what the drafter is told; empty where it needs nothing.

    Args:
        datastore: Folder of texts to draft from too.
        costs: Cost table, as `reader-rag bench vllm-costs` writes it.
        namespaces: Namespaces of the datastore that are searched besides the shared ones.
        keep_answers: Whether requests are drafted from each other's answers.
    """
    held = {"datastore": datastore, "costs": costs}
    # Absolute: the server may be started elsewhere, and its workers on other machines.
    ours: dict[str, Any] = {name: str(Path(place).resolve()) for name, place in held.items() if place is not None}
    if namespaces:
        ours["namespaces"] = list(namespaces)
    if keep_answers:
        ours["keep_answers"] = True
    return {"reader_rag": ours} if ours else {}


def serve_command(
    model: str,
    drafted: int = DEFAULT_DRAFT_TOKENS,
    datastore: Path | None = None,
    costs: Path | None = None,
    namespaces: Sequence[str] = (),
    keep_answers: bool = False,
) -> str:
    """The command that starts a server, quoted for a shell.

    Args:
        model: Alias, local folder or hub id.
        drafted: Most tokens drafted for one request in a step.
        datastore: Folder of texts to draft from too; it must be of the model's tokenizer.
        costs: Cost table, as `reader-rag bench vllm-costs` writes it.
        namespaces: Namespaces of the datastore that are searched besides the shared ones.
        keep_answers: Whether requests are drafted from each other's answers.

    Raises:
        ConfigError: The cost table cannot be read, or a setting is wrong.
        ModelNotFoundError: The model is neither on this machine nor a hub id.
        DatastoreError: The datastore is not there, or of another tokenizer.
    """
    from reader_rag.draft.step_table import StepTable
    from reader_rag.model.registry import resolve_model

    source = str(resolve_model(model))
    if costs is not None:
        StepTable.read(costs)
    if datastore is not None:
        _check_datastore(datastore, namespaces, source)
    elif namespaces:
        raise ConfigError("--namespace is of a datastore: name its folder with --datastore")
    words = ["vllm", "serve", source, "--speculative-config", json.dumps(speculative_config(drafted))]
    if ours := additional_config(datastore, costs, namespaces, keep_answers):
        words += ["--additional-config", json.dumps(ours)]
    return shlex.join(words)


def _check_datastore(folder: Path, namespaces: Sequence[str], model: str) -> None:
    """Open it as the server will, so that what is wrong with it is said now."""
    from reader_rag.engine.datastore_lookup import open_datastore
    from reader_rag.model.registry import load_tokenizer

    tokenizer, vocabulary = load_tokenizer(model)
    with open_datastore(folder, tokenizer, vocabulary, read_only=True) as store:
        missing = sorted(set(namespaces) - set(store.namespaces()))
    if missing:
        raise ConfigError(
            f"the datastore {folder} has no namespace {', '.join(missing)}: reader-rag datastore stats lists them"
        )
