"""Behaviours that llama-index-core documents: those that no other test has, and the list of all of them in the docs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pytest
from llama_index.core import Document, PromptTemplate, StorageContext, SummaryIndex, VectorStoreIndex
from llama_index.core.agent.workflow import AgentOutput, AgentStream, AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool
from llama_index.core.types import BaseOutputParser
from pydantic import BaseModel, Field
from saying import saying
from word_embedding import WordEmbedding

from reader_rag import FaissStore
from reader_rag.errors import ToolCallError

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
CALL = '{"name": "NAME", "arguments": {}}'
NOW = CALL.replace("NAME", "now")


def now() -> str:
    """The time."""
    return "noon"


def broken() -> str:
    """Fails."""
    raise ValueError("out of order")


class Bird(BaseModel):
    """A bird."""

    name: Annotated[str, Field(max_length=8)]
    eggs: int = Field(ge=0, le=9)


class Upper(BaseOutputParser):
    """Asks for capitals, and makes them."""

    def parse(self, output: str) -> str:
        return output.upper()

    def format(self, query: str) -> str:
        return f"{query} In capitals!"


class TestLLM:
    def test_an_output_parser_formats_the_prompt_and_parses_the_answer(self, tiny_engine: Engine) -> None:
        llm = saying(tiny_engine, "a heron")
        llm.output_parser = Upper()
        assert llm.predict(PromptTemplate("Name {what}."), what="a bird") == "A HERON"
        assert "In capitals!" in str(llm._get_messages(PromptTemplate("Name {what}."), what="a bird"))

    def test_a_payload_of_traces_has_no_tenant_and_no_texts(self, tiny_engine: Engine) -> None:
        llm = saying(tiny_engine, "x").for_tenant("ann").with_sources(["secret text"])
        assert "ann" not in str(llm.to_payload())
        assert "secret" not in str(llm.to_payload())


class TestFunctionCalling:
    def test_an_error_of_a_tool_is_raised_or_told(self, tiny_engine: Engine) -> None:
        llm, tools = saying(tiny_engine, CALL.replace("NAME", "broken")), [FunctionTool.from_defaults(broken)]
        with pytest.raises(ValueError, match="out of order"):
            llm.predict_and_call(tools, user_msg="Go.", error_on_tool_error=True)
        response = llm.predict_and_call(tools, user_msg="Go.")
        assert response.sources[0].is_error
        assert "out of order" in response.response

    def test_no_call_is_an_error_or_the_text(self, tiny_engine: Engine) -> None:
        llm, tools = saying(tiny_engine, "It is noon."), [FunctionTool.from_defaults(now)]
        with pytest.raises(ToolCallError, match="no tool call"):
            llm.predict_and_call(tools, user_msg="Time?")
        assert str(llm.predict_and_call(tools, user_msg="Time?", error_on_no_tool_call=False)) == "It is noon."

    def test_several_calls_give_several_outputs(self, tiny_engine: Engine) -> None:
        llm = saying(tiny_engine, f"{NOW}\n{NOW}")
        response = llm.predict_and_call(
            [FunctionTool.from_defaults(now)], user_msg="Time?", allow_parallel_tool_calls=True
        )
        assert [output.content for output in response.sources] == ["noon", "noon"]


class TestPrograms:
    BIRD = '{"name": "Bird", "arguments": {"name": "wren", "eggs": 6}}'

    def test_a_program_with_parallel_calls_gives_a_list(self, tiny_engine: Engine) -> None:
        llm = saying(tiny_engine, f"{self.BIRD}\n{self.BIRD.replace('wren', 'owl')}")
        program = FunctionCallingProgram.from_defaults(
            Bird, "Birds of {where}?", llm=llm, allow_parallel_tool_calls=True
        )
        found = program(where="Kent")
        assert [bird.name for bird in found] == ["wren", "owl"]  # type: ignore[attr-defined]

    def test_a_streamed_program_fills_its_object(self, tiny_engine: Engine) -> None:
        program = FunctionCallingProgram.from_defaults(Bird, "Birds of {where}?", llm=saying(tiny_engine, self.BIRD))
        *_, last = program.stream_call(where="Kent")
        assert last == Bird(name="wren", eggs=6)

    def test_a_structured_llm_in_a_query_engine(self, tiny_engine: Engine) -> None:
        llm = saying(tiny_engine, '{"name": "wren", "eggs": 6}')
        index = SummaryIndex([TextNode(text="The wren lays six eggs.")])
        response = index.as_query_engine(llm=llm.as_structured_llm(Bird)).query("Which bird?")
        assert response.response == Bird(name="wren", eggs=6)  # type: ignore[union-attr]


class TestAgents:
    TOOL = FunctionTool.from_defaults(now)

    async def test_events_of_a_stream_join_to_the_answer(self, tiny_engine: Engine) -> None:
        agent = FunctionAgent(tools=[self.TOOL], llm=saying(tiny_engine, NOW, "It is noon."))
        handler = AgentWorkflow(agents=[agent]).run(user_msg="Time?")
        events = [event async for event in handler.stream_events()]
        assert "".join(event.delta for event in events if isinstance(event, AgentStream)) == "It is noon."
        outputs = [event for event in events if isinstance(event, AgentOutput)]
        assert [call.tool_name for call in outputs[0].tool_calls] == ["now"]
        assert outputs[-1].response.content == "It is noon."
        assert str(await handler) == "It is noon."

    async def test_an_agent_hands_over_to_another(self, tiny_engine: Engine) -> None:
        hand = '{"name": "handoff", "arguments": {"to_agent": "second", "reason": "it knows"}}'
        first = FunctionAgent(
            name="first",
            description="Asks.",
            tools=[self.TOOL],
            llm=saying(tiny_engine, hand),
            can_handoff_to=["second"],
        )
        second = FunctionAgent(
            name="second", description="Knows.", tools=[self.TOOL], llm=saying(tiny_engine, NOW, "It is noon.")
        )
        output = await AgentWorkflow(agents=[first, second], root_agent="first").run(user_msg="Time?")
        assert (output.current_agent_name, str(output)) == ("second", "It is noon.")

    async def test_an_error_of_a_tool_goes_back_to_the_model(self, tiny_engine: Engine) -> None:
        said = (CALL.replace("NAME", "broken"), "It is broken.")
        agent = FunctionAgent(tools=[FunctionTool.from_defaults(broken)], llm=saying(tiny_engine, *said))
        output = await AgentWorkflow(agents=[agent]).run(user_msg="Go.")
        assert str(output) == "It is broken."
        assert output.tool_calls[0].tool_output.is_error

    async def test_a_tool_may_give_the_answer_itself(self, tiny_engine: Engine) -> None:
        tool = FunctionTool.from_defaults(now, return_direct=True)
        agent = FunctionAgent(tools=[tool], llm=saying(tiny_engine, NOW))
        assert str(await AgentWorkflow(agents=[agent]).run(user_msg="Time?")) == "noon"

    async def test_a_memory_keeps_the_conversation(self, tiny_engine: Engine) -> None:
        agent = FunctionAgent(tools=[self.TOOL], llm=saying(tiny_engine, NOW, "It is noon.", "Noon, I said."))
        workflow, memory = AgentWorkflow(agents=[agent]), ChatMemoryBuffer.from_defaults(token_limit=400)
        await workflow.run(user_msg="Time?", memory=memory)
        assert str(await workflow.run(user_msg="Again?", memory=memory)) == "Noon, I said."
        roles = [message.role.value for message in await memory.aget_all()]
        assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]

    async def test_an_answer_as_an_object(self, tiny_engine: Engine) -> None:
        llm = saying(tiny_engine, "A wren lays six eggs.", '{"name": "wren", "eggs": 6}')
        agent = FunctionAgent(tools=[self.TOOL], llm=llm, output_cls=Bird)
        output = await agent.run(user_msg="Which bird?")
        assert output.get_pydantic_model(Bird) == Bird(name="wren", eggs=6)

    async def test_early_stopping_asks_for_a_last_answer(self, tiny_engine: Engine) -> None:
        llm = saying(tiny_engine, NOW, NOW, "It is noon.")
        llm.max_repeated_tool_calls = None
        agent = FunctionAgent(tools=[self.TOOL], llm=llm, early_stopping_method="generate")
        output = await agent.run(user_msg="Time?", max_iterations=2, early_stopping_method="generate")
        assert str(output) == "It is noon."

    async def test_a_react_agent(self, tiny_engine: Engine) -> None:
        steps = (
            "Thought: I need the time.\nAction: now\nAction Input: {}",
            "Thought: I can answer without using any more tools.\nAnswer: It is noon.",
        )
        agent = ReActAgent(tools=[self.TOOL], llm=saying(tiny_engine, *steps))
        assert str(await agent.run(user_msg="Time?")) == "It is noon."


class TestIndexes:
    def test_documents_are_inserted_refreshed_and_deleted(self) -> None:
        embedding, store = WordEmbedding(model_name="words", embedded=[]), FaissStore()
        context = StorageContext.from_defaults(vector_store=store)
        owl, wren = Document(text="owls hunt", id_="owl"), Document(text="wrens sing", id_="wren")
        index = VectorStoreIndex.from_documents([owl], storage_context=context, embed_model=embedding)
        index.insert(wren)
        assert store.num_nodes == 2
        index.update_ref_doc(Document(text="owls sleep", id_="owl"))
        assert sorted(node.get_content() for node in store.get_nodes()) == ["owls sleep", "wrens sing"]
        index.delete_ref_doc("wren")
        index.delete_nodes([node.node_id for node in store.get_nodes()])
        assert store.get_nodes() == []


PAGE = ROOT / "docs" / "llamaindex-behaviours.md"
ROW = re.compile(r"^\| (?P<what>[^|]+) \| `(?P<file>[^`]+)` \| (?P<tests>[^|]+) \|$", flags=re.MULTILINE)


@cache
def functions_of(file: str) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {function.name for function in functions if function.name.startswith("test_")}


@pytest.mark.parametrize("row", ROW.findall(PAGE.read_text(encoding="utf-8")), ids=lambda row: row[0])
def test_every_behaviour_of_the_list_has_its_tests(row: tuple[str, str, str]) -> None:
    names = re.findall(r"`(test_\w+)`", row[2])
    assert names
    assert set(names) <= functions_of(row[1])


def test_the_list_has_every_public_method_of_the_base_classes() -> None:
    from llama_index.core.base.llms.base import BaseLLM
    from llama_index.core.llms.function_calling import FunctionCallingLLM
    from llama_index.core.llms.llm import LLM
    from llama_index.core.vector_stores.types import BasePydanticVectorStore

    text = PAGE.read_text(encoding="utf-8")
    for owner in (BaseLLM, LLM, FunctionCallingLLM, BasePydanticVectorStore):
        for name, value in vars(owner).items():
            documented = (getattr(value, "__doc__", None) or "").strip()
            public = not name.startswith("_") and name not in ("model_config", "model_fields", "model_computed_fields")
            if public and (callable(value) or isinstance(value, property)) and documented:
                assert f"`{name}`" in text, f"{owner.__name__}.{name}"
