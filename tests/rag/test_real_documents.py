"""Citations of the default model over real documents, the pages of docs/: each is in its page, letter by letter."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from word_embedding import WordEmbedding

from reader_rag import FaissStore, ReaderLLM, cite, ingest, make_query_engine

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {str(path): path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
# Sentences by their first five words: a small model repeats what it is asked to, and explains little.
QUESTIONS = [
    f'Repeat the sentence of the text that begins with "{beginning}", word by word.'
    for text in PAGES.values()
    for beginning in re.findall(r"^([A-Z][\w-]*(?: [\w-]+){4}),? ", text, flags=re.MULTILINE)
]
COUNT, BATCH = 50, 8
EMBEDDING = WordEmbedding(model_name="words", embedded=[], buckets=512, limit=96)


@pytest.fixture(scope="module")
def engines(real_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a query engine: "stock" or "own", streaming or not."""
    llm = ReaderLLM.from_engine(real_engine, max_tokens=40)
    folder = tmp_path_factory.mktemp("store")
    ingest([Path(path) for path in PAGES], folder, embed_model=EMBEDDING)
    splitter = SentenceSplitter(chunk_size=120, chunk_overlap=12, tokenizer=str.split)
    documents = [Document(text=text, metadata={"file_path": path}) for path, text in PAGES.items()]
    for document in documents:
        document.excluded_llm_metadata_keys = ["file_path"]
    index = VectorStoreIndex(splitter(documents), embed_model=EMBEDDING)
    with FaissStore.open(folder, embed_model=EMBEDDING) as store:

        def make(kind: str, streaming: bool) -> Any:
            if kind == "stock":
                return index.as_query_engine(llm=llm, streaming=streaming, similarity_top_k=2)
            return make_query_engine(store, llm, EMBEDDING, streaming=streaming, top_k=2)

        yield make


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["stock", "own"])
def test_no_citation_of_fifty_questions_is_wrong(kind: str, streaming: bool, engines: Any) -> None:
    questions = [QUESTIONS[number * len(QUESTIONS) // COUNT] for number in range(COUNT)]
    assert len(set(questions)) == COUNT
    engine = engines(kind, streaming)

    def ask(question: str) -> Any:
        response = engine.query(question)
        return response.get_response() if streaming else response

    async def ask_batch(batch: list[str]) -> list[Any]:
        responses = await asyncio.gather(*(engine.aquery(question) for question in batch))
        if not streaming:
            return responses
        return await asyncio.gather(*(response.get_response() for response in responses))

    responses: list[Any] = []
    for start in range(0, COUNT, BATCH):
        batch = questions[start : start + BATCH]
        if start % (2 * BATCH):
            with ThreadPoolExecutor(BATCH) as pool:
                responses += pool.map(ask, batch)
        else:
            responses += asyncio.run(ask_batch(batch))
    wrong, found = [], 0
    for response in responses:
        answer = str(response)
        assert cite(response) == response.metadata["citations"]
        for citation in response.metadata["citations"]:
            found += 1
            page = PAGES[str(citation.file_path)]
            in_page = page[citation.document_start : citation.document_end]
            if not (answer[citation.text_start : citation.text_end] == citation.text == in_page):
                wrong.append((citation, in_page))
    print(f"{kind}, {'streamed' if streaming else 'whole'}: {found} citations in {COUNT} answers, {len(wrong)} wrong")
    assert wrong == []
    assert found
