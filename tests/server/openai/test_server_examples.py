"""The examples that use the service run unchanged."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from saying import saying
from served import TEXTS, Serve

from reader_rag.engine.engine import Engine

EXAMPLES = Path(__file__).parents[3] / "examples"
CALL = json.dumps({"name": "area", "arguments": {"width": 3, "height": 4}})
ANSWER = "I read: The heron stands still in shallow water."


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_client_with_the_openai_package(
    serve: Serve, tiny_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("openai_client")
    edited = module.CODE.replace("area", "size")
    served = serve(TEXTS, llm=saying(tiny_engine, ANSWER, edited, CALL, "It is 12."))
    capsys.readouterr()  # LlamaIndex prints how large the chunks are
    module.main(f"{served.url}/v1", "Where does the heron stand?")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5, printed
    answer, cited, predicted, tool, last = printed
    assert answer == ANSWER
    assert cited.startswith(f"  «The heron stands still in shallow water.» heron.txt {served.url}/#/documents/")
    accepted, tokens = (int(word) for word in predicted.split() if word.isdigit())
    assert 0 < accepted < tokens == len(tiny_engine.context.tokenize(module.CODE).token_ids)
    assert tool == "tool: area({'width': 3, 'height': 4})"
    assert last == "It is 12."


async def test_a_web_app_of_thirty_lines(serve: Serve, tiny_engine: Engine) -> None:
    assert len((EXAMPLES / "web_app.py").read_text().splitlines()) <= 32
    served = serve({"/docs/<b>.txt": TEXTS["/docs/heron.txt"]}, llm=saying(tiny_engine, f"<i>{ANSWER}"))
    module = example("web_app")
    module.client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(module.app), base_url="http://app") as client:
        empty = (await client.get("/")).text
        page = (await client.get("/", params={"q": 'Where does "the heron" stand?'})).text
    await module.client.close()
    assert "<form>" in empty
    assert 'value="Where does &quot;the heron&quot; stand?"' in page
    assert "&lt;i&gt;I read: <a href=" in page
    assert 'title="&lt;b&gt;.txt">The heron stands still in shallow water.</a>' in page
