"""Selectors, programs and output parsers under a grammar, on a model with random weights: they always parse."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import pytest
from llama_index.core import ChatPromptTemplate, PromptTemplate, SummaryIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.query_engine import RouterQueryEngine
from llama_index.core.schema import QueryBundle, TextNode
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from pydantic import BaseModel, Field, ValidationError
from saying import saying

from reader_rag import GrammarOutputParser, GrammarProgram, GrammarSelector, ReaderLLM
from reader_rag.errors import ConfigError

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

CHOICES = [ToolMetadata("About\nbirds.", "birds"), ToolMetadata("About fish.", "fish")]


class Bird(BaseModel):
    """A bird."""

    name: Annotated[str, Field(max_length=8)]
    swims: bool


@pytest.fixture
def llm(tiny_engine: Engine) -> ReaderLLM:
    return ReaderLLM.from_engine(tiny_engine, max_tokens=300)


class TestSelector:
    @pytest.mark.parametrize("multiple", [False, True])
    def test_it_selects_among_what_there_is(self, multiple: bool, llm: ReaderLLM) -> None:
        selector = GrammarSelector(llm.model_copy(update={"temperature": 2.0}), multiple=multiple)
        for seed in range(2):
            question = QueryBundle(f"Question {seed}?")
            for result in (selector.select(CHOICES, question), asyncio.run(selector.aselect(CHOICES, question))):
                indexes = [selection.index for selection in result.selections]
                assert 1 <= len(indexes) <= (2 if multiple else 1)
                assert set(indexes) <= {0, 1}
                assert len(set(indexes)) == len(indexes)

    def test_the_answer_decides(self, tiny_engine: Engine) -> None:
        llm = saying(tiny_engine, '{"choices": [2], "reason": "trout are fish"}')
        ((selection,)) = GrammarSelector(llm).select(CHOICES, "Trout?").selections
        assert (selection.index, selection.reason) == (1, "trout are fish")

    def test_nothing_to_select_from_is_an_error(self, llm: ReaderLLM) -> None:
        with pytest.raises(ConfigError, match="nothing to select from"):
            GrammarSelector(llm).select([], "Trout?")

    def test_a_router_answers(self, llm: ReaderLLM) -> None:
        index = SummaryIndex([TextNode(text="Owls hunt at night.")])
        tool = QueryEngineTool.from_defaults(index.as_query_engine(llm=llm), description="About owls.")
        router = RouterQueryEngine(GrammarSelector(llm), [tool, tool], llm=llm)
        response = router.query("What do owls do?")
        assert response.metadata is not None
        assert response.metadata["selector_result"].ind in (0, 1)

    def test_its_prompt_can_be_replaced(self, llm: ReaderLLM) -> None:
        selector = GrammarSelector(llm)
        selector.update_prompts({"prompt": PromptTemplate("{num_choices} {context_list} {query_str}?")})
        assert selector.get_prompts()["prompt"].get_template() == "{num_choices} {context_list} {query_str}?"
        assert selector.select(CHOICES, "Trout?").selections


class TestProgram:
    def test_every_way_to_call_it_gives_an_object(self, llm: ReaderLLM) -> None:
        program = GrammarProgram.from_defaults(Bird, "About {what}.", llm=llm)

        async def last() -> object:
            return [bird async for bird in await program.astream_call(what="owls")][-1]

        birds = [program(what="owls"), asyncio.run(program.acall(what="owls")), asyncio.run(last())]
        birds.append(list(program.stream_call(what="owls"))[-1])
        assert all(isinstance(bird, Bird) for bird in birds)
        assert birds[1:] == birds[:1] * 3
        assert program.output_cls is Bird

    def test_a_template_or_its_text(self, llm: ReaderLLM) -> None:
        assert isinstance(GrammarProgram(Bird, PromptTemplate("A bird."), llm)(), Bird)
        with pytest.raises(ConfigError, match="prompt_template_str or prompt"):
            GrammarProgram.from_defaults(Bird, llm=llm)


class TestOutputParser:
    def test_a_system_message_may_have_the_description(self, llm: ReaderLLM) -> None:
        messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="{what}?")]
        prompt = ChatPromptTemplate(messages, output_parser=GrammarOutputParser(Bird))
        assert Bird.model_validate_json(llm.predict(prompt, what="Owls"))

    def test_a_text_program_parses(self, llm: ReaderLLM) -> None:
        program = LLMTextCompletionProgram.from_defaults(
            output_parser=GrammarOutputParser(Bird), prompt_template_str="About {what}, in {{braces}}.", llm=llm
        )
        assert isinstance(program(what="owls"), Bird)
        assert isinstance(asyncio.run(program.acall(what="owls")), Bird)

    def test_predict_follows_the_grammar_of_a_prompt(self, llm: ReaderLLM) -> None:
        parser = GrammarOutputParser(Bird)
        prompt = PromptTemplate("About {what}.", output_parser=parser)
        assert isinstance(parser.parse(llm.predict(prompt, what="owls")), Bird)
        with pytest.raises(ValidationError):
            parser.parse(llm.predict(PromptTemplate("About {what}."), what="owls"))
