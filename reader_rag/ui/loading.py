"""Which models a program uses, and loading them with a word about what takes so long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reader_rag.config import RecallConfig
from reader_rag.models import DEFAULT_EMBED_MODEL, DEFAULT_MODEL
from reader_rag.ui.terminal import status

if TYPE_CHECKING:
    from reader_rag.llm import ReaderLLM
    from reader_rag.rag.embedding import LocalEmbedding


@dataclass(frozen=True)
class ModelOptions:
    """The models of a program and how they run.

    Attributes:
        model: The LLM: an alias, a hub id or a local folder.
        embed_model: The embedding model, likewise.
        device: "auto" or a PyTorch device.
        dtype: "auto", "float32", "bfloat16" or "float16"; of the LLM.
        exactness: "fast" or "strict".
        trust_remote_code: Run code that comes with the models.
        datastore: Folder of texts and earlier answers that drafts are searched in, or None.
        keeps_answers: Keep answers there.
    """

    model: str = DEFAULT_MODEL
    embed_model: str = DEFAULT_EMBED_MODEL
    device: str = "auto"
    dtype: str = "auto"
    exactness: str = "fast"
    trust_remote_code: bool = False
    datastore: Path | None = None
    keeps_answers: bool = False

    def load_embedding(self) -> LocalEmbedding:
        """The embedding model.

        Raises:
            ConfigError: There is no such device.
            ModelError: The model cannot be found or used.
        """
        with status(f"loading {self.embed_model}") as say:
            from reader_rag.models import resolve_device, resolve_embed_model
            from reader_rag.rag.embedding import LocalEmbedding

            device = None if self.device == "auto" else str(resolve_device(self.device))
            resolve_embed_model(self.embed_model, say)
            return LocalEmbedding(self.embed_model, device, trust_remote_code=self.trust_remote_code)

    def load_llm(self, max_tokens: int) -> ReaderLLM:
        """The LLM.

        Args:
            max_tokens: Most tokens of an answer.

        Raises:
            ConfigError: A setting is unknown or out of its range.
            ModelError: The model cannot be found or used.
            DatastoreError: The datastore cannot be used.
        """
        with status(f"loading {self.model}") as say:
            from reader_rag.llm import ReaderLLM
            from reader_rag.models import resolve_model

            resolve_model(self.model, say)
            say(f"loading {self.model}")
            return ReaderLLM(
                self.model,
                device=self.device,
                dtype=self.dtype,
                exactness=self.exactness,
                max_tokens=max_tokens,
                trust_remote_code=self.trust_remote_code,
                datastore=self.datastore,
                recall=RecallConfig(keeps_answers=self.keeps_answers),
            )
