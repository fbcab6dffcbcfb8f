"""Hostile requests, and hostile servers."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import pytest

from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Passage, Prompt
from reader_rag.errors import ReaderError
from reader_rag.llm import ReaderLLM

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**64, 10**400, 0.0, -0.0, 1e-300, 1e308, float("nan"), float("inf"), "", "x",
    "false", "\ud800", b"x", [], [None], ["\ud800"], [1.5], {}, {"a": 1}, (), object(),
]  # fmt: skip
PARAMS = ["max_tokens", "stop", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "repetition_penalty",
          "presence_penalty", "frequency_penalty", "no_repeat_ngram", "min_tokens", "bad_words", "suppress_tokens",
          "logit_bias", "grammar", "speculate", "logprobs", "include_stop"]  # fmt: skip


def test_engine_settings_are_refused_or_work(attack, tiny_engine: Engine) -> None:  # type: ignore[no-untyped-def]
    vocabulary = tiny_engine.requests.vocabulary

    def one(rng: random.Random) -> None:
        settings = {name: rng.choice(ODD) for name in rng.sample(PARAMS, rng.randrange(1, 4))}
        options: dict[str, Any] = {}
        for name in rng.sample(
            ["tenant", "draft", "recall", "logits_processor", "stopping_criteria", "sampler"], rng.randrange(3)
        ):
            options[name] = rng.choice(ODD)
        ids: Any = rng.choice([[rng.randrange(-2, vocabulary + 2) for _ in range(rng.randrange(6))], rng.choice(ODD)])
        passages: Any = rng.choice([(), [Passage("p", "the tree")], rng.choice(ODD)])
        try:
            params = SamplingParams(**({"max_tokens": 4} | settings))
            if params.max_tokens > 8:
                params = SamplingParams(max_tokens=4)
            tiny_engine.generate(Prompt(ids), params, passages, **options)
        except ReaderError as error:
            assert str(error).isprintable()

    attack(one)


def test_every_text_is_refused_or_answered(attack, tiny_engine: Engine) -> None:  # type: ignore[no-untyped-def]
    llm = ReaderLLM.from_engine(tiny_engine, max_tokens=3)
    ranges = [(0, 0x20), (0x20, 0x7F), (0x80, 0x250), (0x300, 0x370), (0x590, 0x700), (0x2000, 0x2070),
              (0xD800, 0xE000), (0xE000, 0xE010), (0xFE00, 0xFF00), (0xFFF0, 0x10000), (0x1F300, 0x1F700),
              (0xE0000, 0xE0080), (0x10FFF0, 0x110000)]  # fmt: skip

    def text(rng: random.Random) -> str:
        return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.choice((0, 1, 2, 5, 40))))

    def one(rng: random.Random) -> None:
        for call in (
            lambda: llm.complete(text(rng), formatted=True),
            lambda: llm.complete(text(rng), formatted=True, stop=[text(rng), text(rng)]),
            lambda: llm.complete(text(rng), formatted=True, bad_words=[text(rng)]),
            lambda: llm.with_sources([text(rng), text(rng)]).complete(text(rng), formatted=True),
            lambda: llm.for_tenant(text(rng)).complete("a", formatted=True),
        ):
            try:
                answer = call().text
            except ReaderError as error:
                assert str(error).isprintable()
            else:
                answer.encode()

    attack(one)


def test_server_answers_raise_server_errors_only(attack) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("llama_index.llms.openai_like", reason="needs the extra 'openai'")
    from llama_index.core.llms import ChatMessage
    from reader_rag.connectors.openai import ServerLLM
    from scripted_server import CHAT, Handler, Script, serving

    whole = {
        "id": "c",
        "object": "x",
        "created": 1,
        "model": "m",
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    said = {"role": "assistant", "content": "x"}
    whole["choices"] = [{"index": 0, "finish_reason": "stop", "logprobs": None, "message": said, "delta": said}]
    values = [None, 5, -1, 1.5, "", "x", "\ud800", [], {}, [None], True, 10**30]

    def mutated(value: Any, rng: random.Random) -> Any:
        if not rng.randrange(6):
            return rng.choice(values)
        if isinstance(value, dict):
            return {k: mutated(v, rng) for k, v in value.items() if rng.randrange(12)}
        if isinstance(value, list):
            return [mutated(v, rng) for v in value]
        return value

    def one(rng: random.Random) -> None:
        script = Script()

        def reply(handler: Handler) -> None:
            data = json.dumps(mutated(whole, rng)).encode()
            if rng.randrange(2):
                data = b"data: " + data + rng.choice([b"\n\n", b"\n", b"\n\ndata: [DONE]\n\n", b""])
            if not rng.randrange(3) and data:
                at = rng.randrange(len(data))
                data = data[:at] + rng.randbytes(rng.randrange(4)) + data[at + rng.randrange(4) :]
            handler.send_response(rng.choice([200] * 12 + [204, 302, 400, 404]))
            if not rng.randrange(8):
                handler.send_header("content-encoding", rng.choice(["gzip", "br", "identity", ""]))
            handler.send_header("content-type", rng.choice(["application/json", "text/event-stream", "text/html"]))
            handler.send_header("content-length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)

        with serving(script) as url, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            llm = ServerLLM.connect(url, timeout_s=5, total_timeout_s=10)
            script.replies[CHAT] = reply
            messages = [ChatMessage(role="user", content="Hello?")]
            for call in (lambda: str(llm.chat(messages)), lambda: [str(p.delta) for p in llm.stream_chat(messages)]):
                try:
                    json.dumps(call(), ensure_ascii=False).encode()
                except ReaderError as error:
                    assert str(error).isprintable()

    attack(one)
