"""Arguments that make vLLM draft with `ReaderProposer`, for `reader-rag vllm-args` and `reader-rag bench vllm`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reader_rag.errors import ConfigError

PROPOSER = "reader_rag.connectors.vllm.ReaderProposer"
"""Import path of the proposer, for vLLM."""
DEFAULT_DRAFT_TOKENS = 16
"""Most tokens that are drafted for one request in a step, by default."""


def speculative_config(num_speculative_tokens: int = DEFAULT_DRAFT_TOKENS) -> dict[str, Any]:
    """vLLM's `speculative_config`.

    Args:
        num_speculative_tokens: Most tokens that are drafted for one request in a step, at least 1.

    Raises:
        ConfigError: `num_speculative_tokens` is below 1.
    """
    if num_speculative_tokens < 1:
        raise ConfigError(f"the number of drafted tokens must be at least 1, not {num_speculative_tokens}")
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": num_speculative_tokens}


def additional_config(
    datastore: Path | str | None = None,
    costs: Path | str | None = None,
    namespaces: Sequence[str] = (),
    keep_answers: bool = False,
) -> dict[str, Any]:
    """vLLM's `additional_config`, with the settings of the proposer that differ from its defaults.

    Args:
        datastore: Folder of the datastore to search; None: none.
        costs: File of step costs from `reader-rag bench vllm-costs`; None: assumed costs.
        namespaces: Namespaces of the datastore that are searched besides the shared ones.
        keep_answers: Whether requests are drafted from ended answers to other requests.

    Returns:
        The configuration, with absolute paths: the server may be started in another folder. Empty without settings.
    """
    paths = {"datastore": datastore, "costs": costs}
    settings: dict[str, Any] = {name: str(Path(path).resolve()) for name, path in paths.items() if path is not None}
    if namespaces:
        settings["namespaces"] = list(namespaces)
    if keep_answers:
        settings["keep_answers"] = True
    return {"reader_rag": settings} if settings else {}


def serve_command(
    model: str,
    num_speculative_tokens: int = DEFAULT_DRAFT_TOKENS,
    datastore: Path | None = None,
    costs: Path | None = None,
    namespaces: Sequence[str] = (),
    keep_answers: bool = False,
) -> str:
    """The command that starts a vLLM server, quoted for a shell.

    Args:
        model: Alias, local folder or hub id.
        num_speculative_tokens: Most tokens that are drafted for one request in a step.
        datastore: Folder of the datastore to search, made with the model's tokenizer; None: none.
        costs: File of step costs from `reader-rag bench vllm-costs`; None: assumed costs.
        namespaces: Namespaces of the datastore that are searched besides the shared ones.
        keep_answers: Whether requests are drafted from ended answers to other requests.

    Raises:
        ConfigError: The cost table cannot be read, or a setting is invalid.
        ModelNotFoundError: The model is neither on this machine nor a hub id.
        DatastoreError: The datastore does not exist, or was made with another tokenizer.
    """
    from reader_rag.draft.step_table import StepTable
    from reader_rag.model.registry import resolve_model

    source = str(resolve_model(model))
    if costs is not None:
        StepTable.read(costs)
    if datastore is not None:
        _check_datastore(datastore, namespaces, source)
    elif namespaces:
        raise ConfigError("--namespace names a part of a datastore: name its folder with --datastore")
    words = ["vllm", "serve", source, "--speculative-config", json.dumps(speculative_config(num_speculative_tokens))]
    if settings := additional_config(datastore, costs, namespaces, keep_answers):
        words += ["--additional-config", json.dumps(settings)]
    return shlex.join(words)


def _check_datastore(folder: Path, namespaces: Sequence[str], model: str) -> None:
    """Open the datastore as the server will, so that errors are reported before the server starts."""
    from reader_rag.engine.datastore_lookup import open_datastore
    from reader_rag.model.loading import load_tokenizer

    tokenizer, vocabulary = load_tokenizer(model)
    with open_datastore(folder, tokenizer, vocabulary, read_only=True) as store:
        missing = sorted(set(namespaces) - set(store.namespaces()))
    if missing:
        raise ConfigError(
            f"the datastore {folder} has no namespace {', '.join(missing)}: reader-rag datastore stats lists them"
        )
