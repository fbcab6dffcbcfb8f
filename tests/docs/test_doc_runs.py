"""The blocks of README and docs that are tagged `run`, executed in the order of their page.

A model of random weights answers, and an embedding counts words. Commands that do not end by themselves, or need
a real model or a network, are only parsed: `test_doc_shell.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from doc_blocks import ROOT, all_blocks, free_names
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.schema import TextNode
from serving import serving
from shell_blocks import Noted, noted, parsed
from typer.testing import CliRunner
from word_embedding import WordEmbedding

from reader_rag import FaissStore, ReaderLLM, ingest
from reader_rag.cli.loading import ModelOptions
from reader_rag.cli.main import app
from reader_rag.server.app import create_app
from reader_rag.server.running import open_service

if TYPE_CHECKING:
    import torch

    from reader_rag.engine.engine import Engine

EXECUTED = ("ingest", "ask", "keys")
"""Commands of `reader-rag` that are executed."""
DOCUMENTS = {
    "docs/heron.txt": "The heron is a wading bird. It stands still in shallow water and waits for fish to come near.\n",
    "docs/owl.md": "# Owls\n\nAn owl hunts at night and finds mice by their sound alone.\n",
    "papers/heron.txt": "A heron spears fish with its sharp bill.\n",
    "manuals/owl.txt": "An owl hunts at night.\n",
}
"""Files that pages name without making them."""
SAYS: dict[str, list[str]] = {
    "docs/agents.md": [
        '{"name": "weather", "arguments": {"city": "Paris", "unit": "C"}}',
        '{"name": "weather", "arguments": {"city": "Rome", "unit": "C"}}',
        '{"name": "weather", "arguments": {"city": "Oslo", "unit": "F"}}',
        "It is sunny.",
    ],
    "docs/tutorials/agent.md": [
        '{"name": "search", "arguments": {"words": "flat tyre"}}',
        "Call the workshop.",
    ],
    "docs/tutorials/structured-answers.md": [
        '{"phone": "555 0134", "opens_at": "8:00", "closes_at": "18:00"}',
    ],
    "docs/grammar.md": [
        "Yes",
        '{"city": "Oslo"}',
        "2 + 3 = 5",
        '{"name": "Paris", "country": "France", "is_capital": true, "landmarks": ["the tower"]}',
        '[{"choice": 2, "reason": "herons"}]',
        "Fish.",
        '{"name": "Rome", "country": "Italy", "is_capital": true, "landmarks": []}',
        '{"name": "Oslo", "country": "Norway", "is_capital": true, "landmarks": []}',
    ],
}
"""What the model is made to prefer, answer by answer; elsewhere it answers what it will."""
PRINTS = {
    "README.md": ["heron.txt"],
    "docs/agents.md": ["weather {'city': 'Paris', 'unit': 'C'}", "It is sunny."],
    "docs/grammar.md": ["France", "Rome", "Oslo"],
    "docs/tutorials/agent.md": ["searching: flat tyre", "Call the workshop."],
    "docs/tutorials/own-model.md": ["tree"],
    "docs/tutorials/structured-answers.md": ['"closes_at":"18:00"'],
    "docs/tutorials/tenants.md": ["ann ['repairs.md', 'stations.md']", "bob ['workshop.txt']"],
    "docs/ingestion.md": ["Ann An owl hunts at night."],
}
"""What a page's blocks must print, beside ending without an error."""
FIRST = "docs/tutorials/first-app.md"
GO_ON = [f"docs/tutorials/{name}.md" for name in ("own-model", "agent", "tenants")]
"""Pages that go on with the folders of the first."""
ELSEWHERE = {"docs/metrics.md": "tests/llm/test_instrumentation.py"}
"""Pages that another test executes, because their programs change the process: handlers of OpenTelemetry."""
PAGES = list(dict.fromkeys(block.page for block in all_blocks() if block.tag == "run"))


@pytest.fixture
def folder(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder and home, with documents in it."""
    for name, text in DOCUMENTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "my-model").symlink_to(tiny_model_folder, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def _stand_ins(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs get the tiny model and the embedding that counts words; handlers are left as they were."""

    def load_llm(self: ModelOptions, max_tokens: int) -> ReaderLLM:
        return ReaderLLM.from_engine(tiny_engine, max_tokens=max_tokens)

    monkeypatch.setattr("reader_rag.configure_threads", lambda: None)  # torch is imported already
    monkeypatch.setattr("reader_rag.LocalEmbedding", lambda name: WordEmbedding(model_name="words"))
    monkeypatch.setattr(ReaderLLM, "_load", lambda self, draft_sources: tiny_engine)
    monkeypatch.setattr(ModelOptions, "load_llm", load_llm)
    monkeypatch.setattr(ModelOptions, "load_embedding", lambda self: WordEmbedding(model_name="words"))
    monkeypatch.setattr(get_dispatcher(), "event_handlers", list(get_dispatcher().event_handlers))


@pytest.fixture
def says(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Makes every `ReaderLLM` prefer the tokens of these answers, one a call; its drafts and grammars stay."""

    def prefer(answers: list[str]) -> None:
        encode, end = tiny_engine.tokenizer.encode, tiny_engine.tokenizer.eos_token_id
        said = iter([[*encode(answer, add_special_tokens=False), end] for answer in answers])
        call = ReaderLLM._call

        def scripted(self: ReaderLLM, kwargs: dict[str, Any], respond: Any) -> Any:
            tokens, starts = next(said), list[int]()

            def lift(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                starts.append(input_ids.shape[1])
                scores[0, tokens[min(input_ids.shape[1] - starts[0], len(tokens) - 1)]] += 1000.0
                return scores

            return call(self, {**kwargs, "logits_processor": (lift,)}, respond)

        monkeypatch.setattr(ReaderLLM, "_call", scripted)

    return prefer


class Givens:
    """What pages take as given: `llm`, `store`, a service at port 8000 and so on, made when a block first uses it."""

    def __init__(self, engine: Engine, model_folder: Path, folder: Path, stack: ExitStack) -> None:
        self._engine, self._model_folder, self._folder, self._stack = engine, model_folder, folder, stack
        self.real_client = openai.OpenAI

    def llm(self) -> ReaderLLM:
        return ReaderLLM.from_engine(self._engine, max_tokens=48)

    def embed_model(self) -> WordEmbedding:
        return WordEmbedding(model_name="words")

    def engine(self) -> Engine:
        return self._engine

    def name(self) -> str:
        return str(self._model_folder)

    def code(self) -> str:
        return "class Dog:\n    legs = 4\n"

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "properties": {"city": {"type": "string"}}}

    def nodes(self) -> list[TextNode]:
        return [TextNode(text=text) for text in DOCUMENTS.values()]

    def client(self, **settings: Any) -> openai.OpenAI:
        """OpenAI's client of a service over the documents, wherever the page says that the service is."""
        embedding, store_folder = self.embed_model(), self._folder / "served-store"
        ingest([self._folder / "docs"], store_folder, embed_model=embedding)
        store = self._stack.enter_context(FaissStore.open(store_folder, embed_model=embedding))
        service = open_service(self.llm(), "smollm2-135m", store=store, embedding=embedding, folder=store_folder)
        self._stack.callback(service.close)
        url = self._stack.enter_context(serving(create_app(service)))
        return self.real_client(**{"api_key": "none"} | settings | {"base_url": f"{url}v1"})


@pytest.fixture
def givens(
    tiny_engine: Engine, tiny_model_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Givens]:
    with ExitStack() as stack:
        made = Givens(tiny_engine, tiny_model_folder, folder, stack)
        monkeypatch.setattr("openai.OpenAI", made.client)
        yield made


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_the_blocks_of_a_page_run(
    page: str, folder: Path, givens: Givens, says: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    if page in GO_ON:
        _run(FIRST, {}, folder, givens)
    if page in SAYS:
        says(SAYS[page])
    _run(page, {}, folder, givens)
    printed = capsys.readouterr().out
    for expected in PRINTS.get(page, []):
        assert expected in printed


@pytest.mark.parametrize("page", ELSEWHERE)
def test_another_test_executes_the_other_pages(page: str) -> None:
    assert page.rpartition("/")[2] in (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")


def _run(page: str, names: dict[str, Any], folder: Path, givens: Givens) -> None:
    """Run the blocks of a page.

    Args:
        page: The page.
        names: The globals of its Python blocks.
        folder: The working folder.
        givens: What it takes as given.
    """
    names["__name__"] = "__main__"
    for block in all_blocks():
        if block.page != page or block.tag != "run":
            continue
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            names |= {name: getattr(givens, name)() for name in sorted(free_names(block.text) - set(names))}
            exec(compile("\n" * block.line + block.text, page, "exec", dont_inherit=True), names)
        elif block.language == "bash":
            for call in noted(block.text, folder):
                _execute(call, block.place)


def _execute(call: Noted, place: str) -> None:
    """Run a command of `reader-rag` that ends by itself; others are left to the parser's test."""
    if call.program == "reader-rag" and parsed(call.arguments).split()[0] in EXECUTED:
        done = CliRunner().invoke(app, list(call.arguments), env=dict(os.environ))
        assert done.exit_code == 0, f"{place}: {done.output}"
        print(done.output)
