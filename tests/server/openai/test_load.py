"""Many clients at once: each gets its own answer, and nothing is left of those that went away or asked wrongly."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import openai
import psutil
import pytest
from llama_index.core.base.llms.types import ChatMessage
from served import TEXTS, Serve, Served
from waiting import wait_until

from reader_rag.engine.engine import Engine
from reader_rag.engine.sequence import DecodeSequence
from reader_rag.llm import ReaderLLM

STREAMS = 200
WORDS = ["the", "man", "inn", "and", "of", "to", "in", "he", "is", "on"]
BAD: list[dict[str, Any]] = [
    {"model": "other"},
    {"temperature": -1.0},
    {"messages": [{"role": "user", "content": "a b " * 3000}]},
    {"logit_bias": {"99999999": 1}},
    {"extra_body": {"colour": "red"}},
]


def request(number: int) -> dict[str, Any]:
    """A request; some sample, some are predicted, some ask for log-probabilities."""
    text = " ".join(WORDS[(number * k + k) % len(WORDS)] for k in range(1, 6 + number % 5))
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 12}
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": number},
        {"prediction": {"type": "content", "content": text}},
        {"logprobs": True, "top_logprobs": 2},
        {"presence_penalty": 1.0},
    ]
    return asked | kinds[number % len(kinds)]


def expected(llm: ReaderLLM, asked: dict[str, Any]) -> str:
    """What `ReaderLLM` says, drafting nothing."""
    given = {name: asked[name] for name in ("max_tokens", "temperature", "seed", "presence_penalty") if name in asked}
    messages = [ChatMessage(role="user", content=asked["messages"][0]["content"])]
    return str(llm.plain().chat(messages, **given).message.content)


async def stream(client: openai.AsyncOpenAI, number: int) -> str | None:
    """The answer; None of a client that goes away after its second chunk, "refused" of a bad request."""
    asked = request(number)
    if number % 20 == 7:
        try:
            await client.chat.completions.create(**asked | BAD[(number // 20) % len(BAD)], stream=True)
        except (openai.BadRequestError, openai.NotFoundError):
            return "refused"
        return "answered"
    leaves = number % 10 == 3
    chunks = await client.chat.completions.create(**asked | ({"max_tokens": 400} if leaves else {}), stream=True)
    text, count = "", 0
    async for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
        count += 1
        if leaves and count == 2:
            await chunks.close()
            return None
    return text


async def all_at_once(served: Served) -> list[str | None]:
    async with served.async_client(timeout=240) as client:
        return await asyncio.gather(*(stream(client, number) for number in range(STREAMS)))


def held() -> weakref.WeakSet[DecodeSequence]:
    """All sequences that something holds, the errors of other tests included."""
    gc.collect()
    return weakref.WeakSet(each for each in gc.get_objects() if type(each) is DecodeSequence)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_streams_with_some_that_leave_and_some_that_are_bad(serve: Serve, tiny_engine: Engine) -> None:
    served = serve(TEXTS)
    llm = ReaderLLM.from_engine(tiny_engine, max_tokens=32)
    wanted: list[str | None] = []
    for number in range(STREAMS):
        leaves, bad = number % 10 == 3, number % 20 == 7
        wanted.append(None if leaves else "refused" if bad else expected(llm, request(number)))
    assert (wanted.count(None), wanted.count("refused")) == (20, 10)
    memory, process, of_others = [], psutil.Process(), held()
    for _ in range(4):
        assert asyncio.run(all_at_once(served)) == wanted
        wait_until(lambda: tiny_engine.busy.running == tiny_engine.busy.waiting == 0, "the end of all requests")
        assert tiny_engine.busy.cache_bytes == 0
        wait_until(lambda: not held() - of_others, "the release of all sequences")
        memory.append(process.memory_info().rss)
    assert memory[-1] - memory[1] < 32 << 20
