"""The models of a program, and loading them with a status line."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from reader_rag.bench.option_groups import OptionGroup
from reader_rag.bench.options import (
    Device,
    DraftModel,
    DraftQuantization,
    Dtype,
    Exactness,
    Quantization,
    TrustRemoteCode,
    require_datastore,
)
from reader_rag.cli.display.terminal import status
from reader_rag.cli.options import (
    AnsweringModel,
    DatastoreFolder,
    EmbedModel,
    EngineTimeout,
    EngineUrl,
    KeepAnswers,
    Profile,
)
from reader_rag.config import DatastoreConfig, EngineConfig, LoadConfig
from reader_rag.errors import ConfigError, StoreNotFoundError
from reader_rag.model.registry import DEFAULT_EMBED_MODEL, DEFAULT_MODEL

if TYPE_CHECKING:
    from reader_rag.connectors.openai import ServerLLM
    from reader_rag.llm import ReaderLLM
    from reader_rag.rag.embedding import LocalEmbedding

ENGINE_KEY = "READER_RAG_ENGINE_KEY"
"""The environment variable with the API key of `ModelOptions.engine`; other users could see a command's arguments."""


def require_store(place: str | Path) -> None:
    """Check that there is a document store, before models are loaded for it.

    Args:
        place: Folder or URL of the store.

    Raises:
        StoreError: There is none, or its database cannot be reached.
    """
    from reader_rag.rag.stores.location import database_url, require_store

    try:
        require_store(place)
    except StoreNotFoundError as error:
        option = "--store" if database_url(place) is None else "--vector-store"
        command = shlex.join(["reader-rag", "ingest", "PATH", option, str(place)])
        raise StoreNotFoundError(f"{error} ({command})") from error


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """The models of a program and how they run.

    Attributes:
        model: The LLM: an alias, a hub id or a local folder; with `engine` its name on the server. None: the default
            model, or the only one of the server.
        embed_model: The embedding model: an alias, a hub id or a local folder.
        device: "auto" or a PyTorch device.
        dtype: Type of the LLM's weights: "auto", "float32", "bfloat16" or "float16".
        quantization: "none" or "int8".
        exactness: "fast" or "strict".
        draft_model: A model that drafts besides the search: an alias, a hub id or a local folder; None: there is none.
        draft_quantization: "none" or "int8".
        datastore: Folder of texts and earlier answers to draft from, or None.
        keep_answers: Whether answers are kept in `datastore`.
        profile: "auto": the LLM's profile is computed while it is idle; "off": not, for programs that end after an
            answer or compare times.
        engine: URL of an OpenAI-compatible server that answers in the LLM's place, or None.
        engine_timeout: Seconds without data from it after which a call fails.
        trust_remote_code: Whether code that comes with the models may run.

    Raises:
        ConfigError: Two options contradict each other.
    """

    model: AnsweringModel = None
    embed_model: EmbedModel = DEFAULT_EMBED_MODEL
    device: Device = LoadConfig.device
    dtype: Dtype = LoadConfig.dtype
    quantization: Quantization = LoadConfig.quantization
    exactness: Exactness = EngineConfig.exactness
    draft_model: DraftModel = None
    draft_quantization: DraftQuantization = EngineConfig.draft_quantization
    datastore: DatastoreFolder = None
    keep_answers: KeepAnswers = False
    profile: Profile = EngineConfig.profile
    engine: EngineUrl = None
    engine_timeout: EngineTimeout = 120.0
    trust_remote_code: TrustRemoteCode = LoadConfig.trust_remote_code

    def __post_init__(self) -> None:
        if self.keep_answers and self.datastore is None:
            raise ConfigError("--keep-answers keeps answers in a datastore: name its folder (--datastore)")
        if self.engine is None:
            return
        of_a_local_llm = {
            "--datastore": self.datastore is not None,
            "--keep-answers": self.keep_answers,
            "--dtype": self.dtype != "auto",
            "--quantization": self.quantization != "none",
            "--exactness": self.exactness != "fast",
            "--draft-model": self.draft_model is not None,
            "--draft-quantization": self.draft_quantization != "none",
        }
        given = [name for name, is_given in of_a_local_llm.items() if is_given]
        if given:
            raise ConfigError(f"with --engine the server decides how it decodes: leave out {' and '.join(given)}")

    def require_datastore(self) -> None:
        """Check that there is a datastore to draft from, before models are loaded; one that keeps answers is made.

        Raises:
            DatastoreError: There is none, or its manifest cannot be read.
        """
        if not self.keep_answers:
            require_datastore(self.datastore)

    @property
    def named_model(self) -> str | None:
        """The LLM's name, as far as it is known before it is loaded; None: the only one of the server."""
        return self.model or (DEFAULT_MODEL if self.engine is None else None)

    def exact(self) -> Self:
        """For comparisons: float32 in place of the `dtype` "auto", unless the model is quantised."""
        return replace(self, dtype="float32") if (self.dtype, self.quantization) == ("auto", "none") else self

    def load_embedding(self) -> LocalEmbedding:
        """The embedding model.

        Raises:
            ConfigError: There is no such device.
            ModelError: The model cannot be found or used.
        """
        with status(f"loading {self.embed_model}") as say:
            from reader_rag.model.loading import resolve_device
            from reader_rag.model.registry import resolve_embed_model
            from reader_rag.rag.embedding import LocalEmbedding

            device = None if self.device == "auto" else str(resolve_device(self.device))
            resolve_embed_model(self.embed_model, say)
            return LocalEmbedding(self.embed_model, device, trust_remote_code=self.trust_remote_code)

    def load_llm(self, max_tokens: int) -> ReaderLLM | ServerLLM:
        """The LLM, or the server that answers in its place.

        Args:
            max_tokens: Most tokens of an answer.

        Raises:
            ConfigError: A setting is unknown or out of its range.
            ModelError: The model cannot be found or used.
            DatastoreError: The datastore cannot be used.
            ServerError: The server cannot be reached or used.
            MissingDependencyError: The package for servers is not installed.
        """
        return self._load(max_tokens) if self.engine is None else self._connect(self.engine, max_tokens)

    def _connect(self, url: str, max_tokens: int) -> ServerLLM:
        with status(f"asking {url} for its models"):
            from reader_rag.connectors.openai import ServerLLM

            return ServerLLM.connect(
                url,
                self.model,
                key=os.environ.get(ENGINE_KEY),
                max_tokens=max_tokens,
                timeout_s=self.engine_timeout,
            )

    def _load(self, max_tokens: int) -> ReaderLLM:
        model = self.model or DEFAULT_MODEL
        with status(f"loading {model}") as say:
            from reader_rag.llm import ReaderLLM
            from reader_rag.model.registry import resolve_model

            resolve_model(model, say)
            say(f"loading {model}")
            return ReaderLLM(
                model,
                device=self.device,
                dtype=self.dtype,
                quantization=self.quantization,
                exactness=self.exactness,
                max_tokens=max_tokens,
                trust_remote_code=self.trust_remote_code,
                datastore=self.datastore,
                profile=self.profile,
                draft_model=self.draft_model,
                draft_quantization=self.draft_quantization,
                recall=DatastoreConfig(keeps_answers=self.keep_answers),
            )
