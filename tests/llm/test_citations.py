"""Citations of copied spans: nodes, files, pages and characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.schema import NodeWithScore, TextNode

from reader_rag.engine.outputs import CopiedSpan
from reader_rag.llm.citations import Citation, cite_spans, context_of

CATS = "Cats purr when they are content."
DOGS = "  Dogs bark at strangers, mostly.\n"


def source(id_: str, text: str, start: int | None = None, **metadata: str) -> NodeWithScore:
    node = TextNode(id_=id_, text=text, start_char_idx=start, metadata=metadata)
    node.excluded_llm_metadata_keys = list(metadata)
    return NodeWithScore(node=node, score=0.5)


NODES = [
    source("cats", CATS, 100, file_path="/docs/cats.txt"),
    source("dogs", DOGS, 7, file_path="/docs/dogs.pdf", page_label="3"),
]
CONTEXT = "Cats purr when they are content.\n\nDogs bark at strangers, mostly."


def span(passage_id: str, passage: str, answer: str, text: str) -> CopiedSpan:
    """The first place of `text` in both."""
    p, a = passage.index(text), answer.index(text)
    return CopiedSpan(passage_id, p, p + len(text), a, a + len(text))


def test_the_context_is_joined_as_llama_index_joins_it() -> None:
    assert context_of(NODES) == CONTEXT


def test_a_span_of_a_node_is_found_in_its_file() -> None:
    answer = "I read that cats... purr when they are happy."
    (citation,) = cite_spans([span("cats", CATS, answer, "purr when they are")], answer, CONTEXT, NODES)
    assert citation == Citation(
        text="purr when they are",
        text_start=20,
        text_end=38,
        node_id="cats",
        node_start=5,
        node_end=23,
        file_path="/docs/cats.txt",
        page=None,
        document_start=105,
        document_end=123,
        title="cats.txt",
    )


def test_a_span_of_the_context_is_found_in_its_node_and_page() -> None:
    answer = "Well: Dogs bark at strangers."
    (citation,) = cite_spans([span("context", CONTEXT, answer, "Dogs bark at strangers")], answer, None, NODES)
    assert (citation.node_id, citation.file_path, citation.page) == ("dogs", "/docs/dogs.pdf", "3")
    assert citation.title == "dogs.pdf, page 3"
    assert DOGS[citation.node_start : citation.node_end] == "Dogs bark at strangers"
    assert (citation.document_start, citation.document_end) == (9, 31)


def test_a_span_across_two_nodes_is_split() -> None:
    answer = "they are content.\n\nDogs bark at strangers"
    citations = cite_spans([span("context", CONTEXT, answer, answer)], answer, CONTEXT, NODES)
    assert [(c.node_id, c.text, c.text_start) for c in citations] == [
        ("cats", "they are content.", 0),
        ("dogs", "Dogs bark at strangers", 19),
    ]


def test_short_spans_are_left_out() -> None:
    answer = "Cats purr and Dogs bark at strangers"
    copied = [span("cats", CATS, answer, "Cats purr"), span("dogs", DOGS, answer, "Dogs bark at strangers")]
    assert [c.node_id for c in cite_spans(copied, answer, CONTEXT, NODES)] == ["dogs"]
    assert [c.node_id for c in cite_spans(copied, answer, CONTEXT, NODES, min_words=2)] == ["cats", "dogs"]


def test_spans_separated_by_the_passages_own_text_are_joined() -> None:
    answer = "Cats purr when they are content, I think"
    parts = [span("cats", CATS, answer, "Cats purr"), span("cats", CATS, answer, " they are content")]
    assert [c.text for c in cite_spans(parts, answer, CONTEXT, NODES)] == ["Cats purr when they are content"]
    other = answer.replace("when", "then")
    assert [c.text for c in cite_spans(parts, other, CONTEXT, NODES)] == ["they are content"]


def test_a_span_that_differs_from_its_passage_is_left_out() -> None:
    assert cite_spans([CopiedSpan("cats", 0, 20, 0, 20)], "something else entirely, really", CONTEXT, NODES) == []


def test_a_node_without_file_and_offset_is_cited_by_its_own_text() -> None:
    nodes = [source("n", CATS)]
    (citation,) = cite_spans([span("n", CATS, CATS, CATS)], CATS, None, nodes)
    assert (citation.text, citation.file_path, citation.document_start) == (CATS, None, None)


def test_no_sources_no_citations() -> None:
    assert cite_spans([CopiedSpan("context", 0, 10, 0, 10)], "some answer", "some answer", []) == []


@given(st.data())
def test_every_citation_is_equal_in_answer_and_node(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text("ab c\n", min_size=1, max_size=20), min_size=1, max_size=3))
    nodes = [source(f"n{i}", text, start=i) for i, text in enumerate(texts)]
    context = context_of(nodes)
    start = data.draw(st.integers(0, len(context)))
    end = data.draw(st.integers(start, len(context)))
    answer = "xy" + context[start:end] + "z"
    copied = [CopiedSpan("context", start, end, 2, 2 + end - start)]
    for citation in cite_spans(copied, answer, context, nodes, min_words=1):
        number = int(citation.node_id[1:])
        assert answer[citation.text_start : citation.text_end] == citation.text
        assert texts[number][citation.node_start : citation.node_end] == citation.text
        assert citation.document_start == citation.node_start + number
