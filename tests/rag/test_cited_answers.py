"""Citations in the responses of stock and own engines: each is in the answer and in its document, verbatim."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core import Document, SummaryIndex, VectorStoreIndex, get_response_synthesizer
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import TextNode
from saying import saying
from word_embedding import WordEmbedding

from reader_rag import FaissStore, ReaderLLM, cite, make_chat_engine, make_query_engine
from reader_rag.errors import ConfigError
from reader_rag.llm.citations import Citation

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

SENTENCES = [
    "The heron stands still in shallow water.",
    "It spears fish with a sharp bill, and swallows them whole.",
    "An owl hunts at night; it finds mice by their sound alone.",
    "Swifts sleep on the wing, at heights of two thousand metres.",
    "Der Eisvogel taucht kopfüber, bis zu einem Meter tief.",
    "カワセミは水に飛び込みます。",
    "A wren weighs 9 g & sings at 90 dB.",
    "Ravens hide food, and watch whether they are watched.",
]
QUESTIONS = ["How does a heron catch fish?", "When do owls hunt?", "Where do swifts sleep?", "What do ravens hide?"]


def documents(seed: int) -> dict[str, str]:
    """Three documents of sentences in a random order; some sentences are in several of them."""
    draw = random.Random(seed)
    return {f"/docs/{name}.txt": " ".join(draw.sample(SENTENCES, 5)) + "\n" for name in ("one", "two", "three")}


def answers(texts: dict[str, str], seed: int, count: int) -> list[str]:
    """Answers that copy stretches of the documents between words of their own."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, 3)):
            text = draw.choice(list(texts.values()))
            start = draw.randrange(len(text) - 12)
            parts += [draw.choice(["I read: ", "so ", "", "Well, "]), text[start : start + draw.randint(6, 90)]]
        made.append("".join(parts))
    return made


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return documents(1)


@pytest.fixture(scope="module")
def embedding() -> WordEmbedding:
    return WordEmbedding(model_name="words", embedded=[])


@pytest.fixture(scope="module")
def nodes(texts: dict[str, str]) -> list[Any]:
    splitter = SentenceSplitter(chunk_size=60, chunk_overlap=8, tokenizer=str.split)
    return list(splitter([Document(text=text, metadata={"file_path": path}) for path, text in texts.items()]))


@pytest.fixture(scope="module")
def store(nodes: list[Any], embedding: WordEmbedding) -> FaissStore:
    store = FaissStore(embed_model=embedding)
    copies = [node.model_copy(deep=True) for node in nodes]
    for node in copies:
        node.embedding = embedding.get_text_embedding(node.text)
    store.add(copies)
    return store


def assert_true(citations: Sequence[Citation], answer: str, texts: dict[str, str]) -> None:
    for citation in citations:
        assert answer[citation.text_start : citation.text_end] == citation.text
        assert texts[str(citation.file_path)][citation.document_start : citation.document_end] == citation.text


def stock(nodes: list[Any], embedding: WordEmbedding, llm: ReaderLLM, *, streaming: bool = False) -> Any:
    return VectorStoreIndex(nodes, embed_model=embedding).as_query_engine(llm=llm, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["stock", "own"])
def test_every_citation_is_in_its_document(
    kind: str,
    streaming: bool,
    tiny_engine: Engine,
    texts: dict[str, str],
    nodes: list[Any],
    store: FaissStore,
    embedding: WordEmbedding,
) -> None:
    found = 0
    for number, answer in enumerate(answers(texts, seed=3, count=8)):
        llm = saying(tiny_engine, answer)
        engine = (
            stock(nodes, embedding, llm, streaming=streaming)
            if kind == "stock"
            else make_query_engine(store, llm, embedding, streaming=streaming)
        )
        response = engine.query(QUESTIONS[number % len(QUESTIONS)])
        assert str(response) == answer
        citations = response.metadata["citations"]
        assert_true(citations, answer, texts)
        assert cite(response) == citations
        if kind == "own":
            assert {citation.kind for citation in citations} <= {"copied"}
        found += len(citations)
    assert found >= 6


def test_questions_of_a_batch_have_each_their_own_citations(
    tiny_engine: Engine, texts: dict[str, str], nodes: list[Any], store: FaissStore, embedding: WordEmbedding
) -> None:
    said = answers(texts, seed=5, count=8)

    async def ask(answer: str, streaming: bool) -> Any:
        llm = saying(tiny_engine, answer)
        own = make_query_engine(store, llm, embedding, streaming=streaming)
        engine = own if streaming else stock(nodes, embedding, llm)
        response = await engine.aquery(QUESTIONS[0])
        return await response.get_response() if streaming else response

    async def batch() -> list[Any]:
        return await asyncio.gather(*(ask(answer, i % 2 == 0) for i, answer in enumerate(said)))

    def in_thread(answer: str) -> Any:
        return stock(nodes, embedding, saying(tiny_engine, answer)).query(QUESTIONS[0])

    with ThreadPoolExecutor(8) as pool:
        responses = [*asyncio.run(batch()), *pool.map(in_thread, said)]
    for response, answer in zip(responses, [*said, *said], strict=True):
        assert str(response) == answer
        assert_true(response.metadata["citations"], answer, texts)
    assert sum(len(response.metadata["citations"]) for response in responses) >= 8


def test_the_chat_engine_cites_streamed_or_not(
    tiny_engine: Engine, texts: dict[str, str], store: FaissStore, embedding: WordEmbedding
) -> None:
    answer = "I read that the bird hides: Ravens hide food, and watch whether they are watched."
    llm = saying(tiny_engine, answer)

    def check(response: Any) -> None:
        citations = response.metadata["citations"]
        assert_true(citations, answer, texts)
        assert any("Ravens hide food" in citation.text for citation in citations)
        assert cite(response) == citations

    async def asynchronous() -> None:
        check(await make_chat_engine(store, llm, embedding).achat("What do ravens hide?"))
        streamed = await make_chat_engine(store, llm, embedding).astream_chat("What do ravens hide?")
        assert "".join([piece async for piece in streamed.async_response_gen()]) == answer
        check(streamed)

    check(make_chat_engine(store, llm, embedding).chat("What do ravens hide?"))
    streamed = make_chat_engine(store, llm, embedding).stream_chat("What do ravens hide?")
    with pytest.raises(ConfigError, match="not read yet"):
        cite(streamed)
    assert "".join(streamed.response_gen) == answer
    check(streamed)
    asyncio.run(asynchronous())


@pytest.mark.parametrize("mode", [ResponseMode.REFINE, ResponseMode.TREE_SUMMARIZE, ResponseMode.ACCUMULATE])
def test_every_way_to_synthesize_is_cited(
    mode: ResponseMode, tiny_engine: Engine, texts: dict[str, str], nodes: list[Any]
) -> None:
    sentence = "Swifts sleep on the wing, at heights of two thousand metres."
    llm = saying(tiny_engine, sentence)
    synthesizer = get_response_synthesizer(llm, response_mode=mode)
    response = RetrieverQueryEngine(SummaryIndex(nodes[:2]).as_retriever(), synthesizer).query("Where do swifts sleep?")
    assert response.metadata is not None
    assert_true(response.metadata["citations"], str(response), texts)


def test_an_answer_without_passages_has_no_citations(tiny_engine: Engine, embedding: WordEmbedding) -> None:
    engine = make_query_engine(FaissStore(embed_model=embedding), saying(tiny_engine, "x"), embedding)
    response = engine.query("Anything?")
    assert response.metadata == {"citations": []}


def test_a_passage_reaches_the_engine_once(
    tiny_engine: Engine, store: FaissStore, embedding: WordEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    submit = tiny_engine.submit

    def recorded(prompt: Any, params: Any = None, passages: Any = (), **options: Any) -> Any:
        given.append(passages)
        return submit(prompt, params, passages, **options)

    monkeypatch.setattr(tiny_engine, "submit", recorded)
    plain = [TextNode(text="An owl hunts at night.", id_="owl"), TextNode(text="A heron fishes.", id_="heron")]
    llm = ReaderLLM.from_engine(tiny_engine, max_tokens=4)
    SummaryIndex(plain).as_query_engine(llm=llm.with_sources(plain)).query("When?")
    SummaryIndex(plain).as_query_engine(llm=llm.with_sources(plain[:1])).query("When?")
    assert [[passage.id for passage in passages] for passages in given] == [["owl", "heron"], ["owl", "context"]]


class TestStockChatEngines:
    """LlamaIndex's own chat engines; they hand the text of a synthesis on, not its metadata."""

    ANSWER = "I read that the bird hides: Ravens hide food, and watch whether they are watched."
    MODES = ["context", "condense_plus_context", "condense_question"]

    @staticmethod
    def made(mode: str, nodes: list[Any], embedding: WordEmbedding, llm: ReaderLLM, *, streaming: bool = False) -> Any:
        """A chat engine; "condense_question" streams what its query engine streams."""
        return VectorStoreIndex(nodes, embed_model=embedding).as_chat_engine(
            chat_mode=mode, llm=llm, streaming=streaming, memory=ChatMemoryBuffer.from_defaults(token_limit=400)
        )

    @pytest.fixture
    def llm(self, tiny_engine: Engine) -> ReaderLLM:
        """Says the answer with white space around it, which streamed chats leave out."""
        return saying(tiny_engine, f"\n {self.ANSWER}")

    def check(self, response: Any, texts: dict[str, str]) -> None:
        citations = response.metadata["citations"]
        assert_true(citations, str(response), texts)
        assert any("Ravens hide food" in citation.text for citation in citations)
        assert cite(response) == citations

    @pytest.mark.parametrize("mode", MODES)
    def test_answers_and_streams(
        self, mode: str, llm: ReaderLLM, texts: dict[str, str], nodes: list[Any], embedding: WordEmbedding
    ) -> None:
        response = self.made(mode, nodes, embedding, llm).chat("What do ravens hide?")
        assert str(response).strip() == self.ANSWER
        self.check(response, texts)
        streamed = self.made(mode, nodes, embedding, llm, streaming=True).stream_chat("What do ravens hide?")
        assert "".join(streamed.response_gen).strip() == self.ANSWER
        assert str(streamed) == self.ANSWER
        self.check(streamed, texts)

    @pytest.mark.parametrize("mode", MODES)
    async def test_asynchronous_ones(
        self, mode: str, llm: ReaderLLM, texts: dict[str, str], nodes: list[Any], embedding: WordEmbedding
    ) -> None:
        self.check(await self.made(mode, nodes, embedding, llm).achat("What do ravens hide?"), texts)
        if mode == "condense_question":
            return  # LlamaIndex's asynchronous stream of this mode takes a synchronous one
        streamed = await self.made(mode, nodes, embedding, llm).astream_chat("What do ravens hide?")
        assert "".join([piece async for piece in streamed.async_response_gen()]).strip() == self.ANSWER
        assert str(streamed) == self.ANSWER
        self.check(streamed, texts)

    async def test_chats_at_the_same_time_have_each_their_own(
        self, tiny_engine: Engine, texts: dict[str, str], nodes: list[Any], embedding: WordEmbedding
    ) -> None:
        said = answers(texts, seed=9, count=8)

        async def ask(answer: str, streaming: bool) -> Any:
            engine = self.made("context", nodes, embedding, saying(tiny_engine, answer))
            if not streaming:
                return await engine.achat("What?")
            streamed = await engine.astream_chat("What?")
            assert "".join([piece async for piece in streamed.async_response_gen()]) == answer
            return streamed

        responses = await asyncio.gather(*(ask(answer, i % 2 == 0) for i, answer in enumerate(said)))
        for response, answer in zip(responses, said, strict=True):
            assert str(response).strip() == answer.strip()
            assert_true(response.metadata["citations"], str(response), texts)
        assert sum(len(response.metadata["citations"]) for response in responses) >= 5

    def test_a_chat_without_passages_has_none(self, llm: ReaderLLM) -> None:
        response = SimpleChatEngine.from_defaults(llm=llm).chat("Hi")
        assert response.metadata is None
        assert cite(response) == []

    def test_a_failed_chat_leaves_nothing_behind(
        self, tiny_engine: Engine, texts: dict[str, str], nodes: list[Any], embedding: WordEmbedding, llm: ReaderLLM
    ) -> None:
        engine = self.made("context", nodes, embedding, llm)
        before = engine._retriever
        engine._retriever = None
        with pytest.raises(AttributeError):
            engine.chat("What do ravens hide?")
        engine._retriever = before
        self.check(engine.chat("What do ravens hide?"), texts)
        query = stock(nodes, embedding, llm).query("What do ravens hide?")  # outside of chats, white space stays
        assert_true(query.metadata["citations"], str(query), texts)


class TestCite:
    def test_an_answer_of_the_llm_itself(self, tiny_engine: Engine) -> None:
        sentence = "An owl hunts at night; it finds mice by their sound alone."
        node = TextNode(text=sentence, id_="owls", metadata={"file_path": "/owls.txt"}, start_char_idx=7)
        response = saying(tiny_engine, sentence).with_sources([node]).complete(f"Repeat: {sentence}")
        (located,) = cite(response, [node])
        assert (located.file_path, located.kind, located.text) == ("/owls.txt", "copied", located.text)
        assert located.document_start == 7 + located.node_start
        assert sentence[located.node_start : located.node_end] == located.text
        for bare in cite(response):
            assert (bare.node_id, bare.file_path) == ("owls", None)
            assert (
                sentence[bare.node_start : bare.node_end] == bare.text == response.text[bare.text_start : bare.text_end]
            )

    def test_an_answer_of_another_llm_is_matched(self) -> None:
        from llama_index.core.base.response.schema import Response
        from llama_index.core.schema import NodeWithScore

        owls = TextNode(text="An owl hunts at night; it finds mice by their sound alone.", id_="owls")
        same = TextNode(text="Also: it finds mice by their sound alone.", id_="same")
        answer = "Books say that an owl hunts at night; it finds mice by their sound"
        response = Response(answer, [NodeWithScore(node=node) for node in (owls, same)])
        (citation,) = cite(response)
        assert (citation.kind, citation.node_id) == ("matched", "owls")
        assert citation.text == "owl hunts at night; it finds mice by their sound"
        assert owls.text[citation.node_start : citation.node_end] == citation.text
        in_both = Response("Now it finds mice by their sound alone.", response.source_nodes)
        assert cite(in_both) == []
        assert cite(Response("it finds mice", response.source_nodes)) == []

    def test_what_cannot_be_cited_says_why(self) -> None:
        from llama_index.core.base.llms.types import CompletionResponse

        with pytest.raises(ConfigError, match="pass the passages"):
            cite(CompletionResponse(text="x"))
        with pytest.raises(ConfigError, match="not a str"):
            cite("answer")  # type: ignore[arg-type]
