"""Function calling: prompts, grammars and answers of each format, and LlamaIndex's agents and programs on them."""

import asyncio
import json
import re
import warnings
from typing import Annotated, Any, Literal

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.schema import QueryBundle
from llama_index.core.selectors import PydanticSingleSelector
from llama_index.core.tools import FunctionTool, ToolMetadata
from pydantic import BaseModel, Field, field_validator
from saying import Saying, saying
from scripted_engine import ScriptedEngine, make_tokenizer

from reader_rag import Grammar, ReaderLLM
from reader_rag.engine.engine import Engine
from reader_rag.errors import ConfigError, GrammarError, IncompleteAnswerError, ReaderWarning, ToolCallError
from reader_rag.llm.messages import as_text
from reader_rag.llm.tool_formats import ToolFormat, ToolRequest
from reader_rag.sampling.constrained import GrammarCompiler

Short = Annotated[str, Field(max_length=6)]


class Place(BaseModel):
    """Where."""

    city: Short
    country: Short | None = None


def weather(place: Place, unit: Literal["C", "F"] = "C") -> str:
    """The weather at a place."""
    return f"21 {unit} in {place}"


def now() -> str:
    """The time."""
    return "noon"


WEATHER, NOW = FunctionTool.from_defaults(weather), FunctionTool.from_defaults(now)
TOOLS = [WEATHER, NOW]
PARIS = '{"name": "weather", "arguments": {"place": {"city": "Paris"}, "unit": "C"}}'

# As the models' own templates write tools, calls and results, without their prose.
QWEN = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}In <tool_call></tool_call> tags.<|im_end|>
{% endif %}
{%- for m in messages %}{% if m.role == "tool" %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{{ bos_token }}{% if tools %}<|start_header_id|>user<|end_header_id|>
Environment: ipython. Respond with {"name": function name, "parameters": dictionary of arguments}.
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|eot_id|>{% endif %}{% for m in messages %}{% if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}
{{ raise_exception("This model only supports single tool-calls at once!") }}{% endif %}
{%- set c = m.tool_calls[0].function %}
{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>
{%- elif m.role == "tool" or m.role == "ipython" %}<|start_header_id|>ipython<|end_header_id|>
{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>
{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"""
MISTRAL = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{% if m.role == "user" %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] [
{%- for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception("ids have length 9") }}{% endif %}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% endfor %}]
{%- elif m.role == "tool" %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}
{%- raw %}[/TOOL_RESULTS]{% endraw %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
TEMPLATES = {"hermes": QWEN, "llama": LLAMA, "mistral": MISTRAL}


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def calls_of(llm: ReaderLLM, response: Any) -> list[tuple[str, dict[str, Any]]]:
    selected = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    return [(call.tool_name, call.tool_kwargs) for call in selected]


class TestPrompts:
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_the_template_describes_tools_calls_and_results(self, name: str) -> None:
        tokenizer = make_tokenizer(TEMPLATES[name])
        assert ToolFormat.of(tokenizer).name == name
        engine = ScriptedEngine(tokenizer, script=["ok"])
        call = ToolCallBlock(tool_call_id="abcdefghi", tool_name="weather", tool_kwargs={"place": {"city": "Paris"}})
        history = [
            user("Weather?"),
            ChatMessage(role="assistant", blocks=[call]),
            ChatMessage(role="tool", content="21", additional_kwargs={"tool_call_id": "abcdefghi"}),
        ]
        ReaderLLM.from_engine(engine).chat_with_tools(TOOLS, chat_history=history)  # type: ignore[arg-type]
        prompt = engine.calls[0].prompt.text
        assert "The weather at a place." in prompt
        assert re.search(r'"name": "weather", "(arguments|parameters)": {"place": {"city": "Paris"}}', prompt)
        assert "21" in prompt[prompt.index("Paris") :]

    def test_a_template_without_tools_gets_them_in_a_system_message(self) -> None:
        engine = ScriptedEngine(script=["ok"])
        call = ToolCallBlock(tool_call_id="1", tool_name="now", tool_kwargs={})
        history = [
            user("What time is it?"),
            ChatMessage(role="assistant", blocks=[call]),
            ChatMessage(role="tool", content="noon", additional_kwargs={"tool_call_id": "1"}),
            ChatMessage(role="tool", content="late", additional_kwargs={"tool_call_id": "2"}),
        ]
        ReaderLLM.from_engine(engine, system_prompt="Be brief.").chat_with_tools(TOOLS, chat_history=history)  # type: ignore[arg-type]
        system, question, called, result = engine.chats[0]
        assert system["role"] == "system"
        assert '{"name": "TOOL", "arguments": {...}}' in system["content"]
        assert "The weather at a place." in system["content"]
        assert system["content"].endswith("Be brief.")
        assert question == {"role": "user", "content": "What time is it?"}
        assert called == {"role": "assistant", "content": '{"name": "now", "arguments": {}}'}
        assert result["content"] == "The tool now returned:\nnoon\nThe tool tool returned:\nlate"

    def test_none_is_a_chat_without_tools(self) -> None:
        engine = ScriptedEngine(script=["ok"])
        ReaderLLM.from_engine(engine).chat([user("Hi")], tools=TOOLS, tool_choice="none")
        assert engine.chats == [[{"role": "user", "content": "Hi"}]]
        assert engine.calls[0].generation.grammar is None


class TestFormats:
    FORMATS = {
        "hermes": ToolFormat(
            "hermes", True, "<tool_call>", None, "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"
        ),
        "mistral": ToolFormat("mistral", True, "[TOOL_CALLS]", 0, " [", ", ", "]"),
        "llama": ToolFormat("llama", True, between="; ", arguments="parameters"),
        "json": ToolFormat("json", False),
    }
    WRITTEN = {
        "hermes": "Well.\n<tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call>",
        "mistral": "Well. [{}, {}]",
        "llama": "{}; {}",
        "json": "{}\n{}",
    }

    @pytest.mark.parametrize("name", FORMATS)
    def test_text_and_calls_are_split_at_every_length(self, name: str) -> None:
        request = ToolRequest(self.FORMATS[name], (), required=False, parallel=True)
        other = '{"name": "now", "arguments": {}}'
        text = self.WRITTEN[name].replace("{}", PARIS, 1).replace("{}", other)
        if name == "mistral":
            text = text.replace("Well.  [", "Well. [")
        content, calls = request.parse(text, whole=True)
        assert content == ("Well." if self.FORMATS[name].marker else "")
        assert [(call.name, call.complete) for call in calls] == [("weather", True), ("now", True)]
        assert calls[0].arguments == {"place": {"city": "Paris"}, "unit": "C"}
        shown = ""
        for end in range(len(text)):
            content, calls = request.parse(text[:end], whole=False)
            assert content.startswith(shown.rstrip())  # what was shown stays
            assert "{" not in content
            assert "<tool" not in content
            assert all(call.complete for call in calls[:-1])
            shown = content

    @pytest.mark.parametrize("text", ['{"names": 1}', "a < b", "<tool>", "", '{"na'])
    @pytest.mark.parametrize("name", FORMATS)
    def test_text_that_is_no_call_stays_text(self, name: str, text: str) -> None:
        request = ToolRequest(self.FORMATS[name], (), required=False, parallel=True)
        assert request.parse(text, whole=True) == (text, [])

    @pytest.mark.parametrize("parallel", [False, True])
    @pytest.mark.parametrize("required", [False, True])
    @pytest.mark.parametrize("name", FORMATS)
    def test_the_grammar_takes_text_and_valid_calls_only(
        self, name: str, required: bool, parallel: bool, tiny_engine: Engine
    ) -> None:
        form, tokenizer = self.FORMATS[name], tiny_engine.tokenizer
        specs = [{"function": {"name": t.metadata.name, "parameters": t.metadata.get_parameters_dict()}} for t in TOOLS]
        request = ToolRequest(form, tuple(specs), required, parallel)
        compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])

        def accepts(text: str) -> bool:
            ids = [part for piece in text.split("[TOOL_CALLS]") for part in (0, *tokenizer.encode(piece))][1:]
            try:
                compiler.compile(request.grammar).follow([*ids, tokenizer.eos_token_id])
            except GrammarError:
                return False
            return True

        def written(*calls: str) -> str:
            joined = form.between.join(call.replace("arguments", form.arguments) for call in calls)
            return f"{form.marker}{form.before}{joined}{form.after}"

        now_call = '{"name": "now", "arguments": {}}'
        assert accepts(written(PARIS))
        assert accepts(written(now_call))
        assert accepts(written(PARIS, now_call)) == parallel
        assert accepts("Nice day.") == (not required)
        assert accepts("I look. " + written(PARIS)) == (not required)  # without a marker it is text
        assert not accepts(written(PARIS) + " x")
        assert not accepts(written(PARIS.replace("weather", "whether")))
        assert not accepts(written(PARIS.replace('"C"', '"K"')))
        assert not accepts(written(PARIS.replace('"city"', '"town"')))
        assert not accepts(written(PARIS.replace("Paris", "Constantinople")))


class TestAnswers:
    def test_fifty_of_fifty_required_calls_are_valid(self, tiny_engine: Engine) -> None:
        llm = ReaderLLM.from_engine(tiny_engine, max_tokens=200, temperature=1.0)
        for seed in range(50):
            answer = llm.chat_with_tools(TOOLS, user_msg=f"Question {seed}", tool_required=True, seed=seed)
            ((name, arguments),) = calls_of(llm, answer)
            schema = {tool.metadata.name: tool.metadata.fn_schema for tool in TOOLS}[name]
            assert schema is not None
            schema.model_validate(arguments)
            assert answer.message.content is None

    @pytest.mark.parametrize("required", [False, True])
    def test_drafted_and_plain_answers_are_the_same(self, required: bool, tiny_engine: Engine) -> None:
        llm = ReaderLLM.from_engine(tiny_engine, max_tokens=200 if required else 40)
        options: dict[str, Any] = {"user_msg": f"Call: {PARIS}", "tool_required": required, "temperature": 0.7}
        for seed in range(2):
            drafted = llm.chat_with_tools(TOOLS, **options, seed=seed)
            assert drafted.message == llm.plain().chat_with_tools(TOOLS, **options, seed=seed).message

    def test_text_without_a_call_is_the_answer_without_tools(self, tiny_engine: Engine) -> None:
        answer = 'A heron says {"name" and <b>, and " ü 雨 \\ too.\n\nYes.'
        response = saying(tiny_engine, answer).chat_with_tools(TOOLS, user_msg="Hi")
        assert response.message.content == answer
        assert "tool_calls" not in response.message.additional_kwargs

    def test_auto_calls_are_held_to_the_schema_behind_their_mark(self, tiny_engine: Engine) -> None:
        wrong = PARIS.replace('"C"', '"Kelvin"').replace("}}", '}, "mood": "good"}')
        llm = saying(tiny_engine, wrong)
        response = llm.chat_with_tools(TOOLS, user_msg="Hi")
        ((name, arguments),) = calls_of(llm, response)
        assert name == "weather"
        assert WEATHER.metadata.fn_schema is not None
        WEATHER.metadata.fn_schema.model_validate(arguments)
        assert set(arguments) <= {"place", "unit"}

    def test_several_calls_and_a_tool_without_arguments(self, tiny_engine: Engine) -> None:
        both = PARIS + '\n{"name": "now", "arguments": {}}'
        llm = saying(tiny_engine, both)
        response = llm.chat_with_tools(TOOLS, user_msg="Hi", allow_parallel_tool_calls=True)
        assert calls_of(llm, response) == [("weather", {"place": {"city": "Paris"}, "unit": "C"}), ("now", {})]
        ids = [call["id"] for call in response.message.additional_kwargs["tool_calls"]]
        assert len(set(ids)) == 2
        assert all(re.fullmatch(r"[0-9a-f]{9}", id_) for id_ in ids)
        assert len(calls_of(llm, saying(tiny_engine, both).chat_with_tools(TOOLS, user_msg="Hi"))) == 1

    @pytest.mark.parametrize("choice", ["now", {"type": "function", "function": {"name": "now"}}])
    def test_a_named_tool_is_called(self, tiny_engine: Engine, choice: Any) -> None:
        llm = saying(tiny_engine, PARIS)
        assert calls_of(llm, llm.chat_with_tools(TOOLS, user_msg="Hi", tool_choice=choice)) == [("now", {})]

    def test_streams_show_calls_as_they_grow(self, tiny_engine: Engine) -> None:
        llm = saying(tiny_engine, PARIS)
        parts = list(llm.stream_chat_with_tools(TOOLS, user_msg="Hi"))
        assert "".join(part.delta or "" for part in parts) == ""
        assert calls_of(llm, parts[-1]) == [("weather", {"place": {"city": "Paris"}, "unit": "C"})]
        assert [calls_of(llm, part) for part in parts[:1]] == [[]]

        async def streamed() -> list[Any]:
            stream = await saying(tiny_engine, PARIS).astream_chat_with_tools(TOOLS, user_msg="Hi")
            return [part async for part in stream]

        assert asyncio.run(streamed())[-1].message == parts[-1].message

    def test_streamed_text_comes_whole(self, tiny_engine: Engine) -> None:
        text = 'Look: {"name": it.'
        parts = list(saying(tiny_engine, text).stream_chat_with_tools(TOOLS, user_msg="Hi"))
        assert "".join(part.delta or "" for part in parts) == text == parts[-1].message.content

    def test_a_call_that_is_cut_says_so(self, tiny_engine: Engine) -> None:
        with pytest.raises(IncompleteAnswerError, match="raise max_tokens"):
            saying(tiny_engine, PARIS, max_tokens=20).chat_with_tools(TOOLS, user_msg="Hi")

    def test_what_the_grammar_does_not_know_is_checked_afterwards(self, tiny_engine: Engine) -> None:
        class Bag(BaseModel):
            number: Annotated[int, Field(ge=0, le=9, json_schema_extra={"not": {"const": 3}})]

            @field_validator("number")
            @classmethod
            def not_three(cls, number: int) -> int:
                assert number != 3, "not three"
                return number

        tool = FunctionTool.from_defaults(lambda **_: "x", name="bag", description="Bag.", fn_schema=Bag)
        llm = saying(tiny_engine, *(f'{{"name": "bag", "arguments": {{"number": {n}}}}}' for n in (4, 5, 3)))
        with pytest.warns(ReaderWarning, match="tool 'bag' is checked after the answer .*not"):
            assert calls_of(llm, llm.chat_with_tools([tool], user_msg="Hi")) == [("bag", {"number": 4})]
        with warnings.catch_warnings():
            warnings.simplefilter("error", ReaderWarning)  # the warning came once
            llm.chat_with_tools([tool], user_msg="Hi")
        with pytest.raises(ToolCallError, match="arguments of bag are not valid: number: .*not three"):
            llm.chat_with_tools([tool], user_msg="Hi")

    def test_refs_unions_enums_and_optional_fields(self, tiny_engine: Engine) -> None:
        class Node(BaseModel):
            kind: Literal["leaf", "branch"]
            value: int | Short | None = None
            children: list["Node"] = Field(default=[], max_length=2)

        tool = FunctionTool.from_defaults(lambda **_: "x", name="tree", description="Tree.", fn_schema=Node)
        said = {"kind": "branch", "children": [{"kind": "leaf", "value": 3}, {"kind": "leaf", "value": "x"}]}
        llm = saying(tiny_engine, json.dumps({"name": "tree", "arguments": said}))
        assert calls_of(llm, llm.chat_with_tools([tool], user_msg="Hi", tool_required=True)) == [("tree", said)]

    def test_errors_say_what_to_do(self, tiny_engine: Engine) -> None:
        llm = saying(tiny_engine, "No.")
        with pytest.raises(ConfigError, match="tool_choice is 'later'; known: auto, required, none, weather, now"):
            llm.chat_with_tools(TOOLS, user_msg="Hi", tool_choice="later")
        with pytest.raises(ConfigError, match="two tools have one name"):
            llm.chat_with_tools([NOW, NOW], user_msg="Hi")
        with pytest.raises(ToolCallError, match="tool_required=True"):
            llm.predict_and_call(TOOLS, user_msg="Hi")
        with pytest.raises(ConfigError, match="leave grammar or tools out"):
            llm.chat([user("Hi")], tools=TOOLS, grammar=Grammar.regex("a"))


class TestLlamaIndex:
    """Agents, programs and selectors of llama-index-core, unchanged."""

    def test_it_is_a_function_calling_llm(self, tiny_engine: Engine) -> None:
        llm = ReaderLLM.from_engine(tiny_engine)
        assert isinstance(llm, FunctionCallingLLM)
        assert llm.metadata.is_function_calling_model

    def test_predict_and_call(self, tiny_engine: Engine) -> None:
        assert saying(tiny_engine, PARIS).predict_and_call(TOOLS, user_msg="Hi").response.startswith("21 C in")
        assert asyncio.run(saying(tiny_engine, PARIS).apredict_and_call(TOOLS, user_msg="Hi")).response[:2] == "21"

    def test_programs_and_selectors(self, tiny_engine: Engine) -> None:
        llm = ReaderLLM.from_engine(tiny_engine, max_tokens=200)
        program = FunctionCallingProgram.from_defaults(Place, "Where is {what}?", llm=llm)
        assert isinstance(program(what="Paris"), Place)
        assert isinstance(asyncio.run(program.acall(what="Paris")), Place)
        said = saying(tiny_engine, '{"name": "SingleSelection", "arguments": {"index": 2, "reason": "it is"}}')
        choices = [ToolMetadata("Birds", "birds"), ToolMetadata("Fish", "fish")]
        (selection,) = PydanticSingleSelector.from_defaults(llm=said).select(choices, QueryBundle("Trout?")).selections
        assert (selection.index, selection.reason) == (1, "it is")

    @pytest.mark.parametrize("streaming", [False, True])
    def test_an_agent_calls_its_tool_and_answers(self, streaming: bool, tiny_engine: Engine) -> None:
        asked: list[Any] = []

        def look(place: Place) -> str:
            """Look at a place."""
            asked.append(place)
            return "It rains."

        call = '{"name": "look", "arguments": {"place": {"city": "Rome"}}}'
        answers = [call, "It rains in Rome."] * 2

        async def run(llm: Saying) -> Any:
            agent = FunctionAgent(tools=[look], llm=llm, system_prompt="Be brief.", streaming=streaming)
            return await AgentWorkflow(agents=[agent]).run(user_msg="Weather in Rome?")

        output = asyncio.run(run(saying(tiny_engine, *answers)))
        assert str(output) == "It rains in Rome."
        assert [call.tool_name for call in output.tool_calls] == ["look"]
        assert len(asked) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestRealModel:
    """The default model, which was not trained on tools: what a grammar alone gives."""

    QUESTIONS = [
        "What is the weather in Paris?",
        "What time is it?",
        "Is it warm in Rome?",
        "Say hello.",
        "Who are you?",
    ]

    def test_fifty_of_fifty_calls_are_valid(self, real_engine: Engine) -> None:
        llm = ReaderLLM.from_engine(real_engine, max_tokens=96, temperature=0.8)
        schemas = {tool.metadata.name: tool.metadata.fn_schema for tool in TOOLS}
        for seed in range(50):
            options: dict[str, Any] = {"user_msg": self.QUESTIONS[seed % 5], "seed": seed, "tool_required": True}
            if seed % 2:
                *_, answer = llm.stream_chat_with_tools(TOOLS, **options)
            else:
                answer = llm.chat_with_tools(TOOLS, **options)
            ((name, arguments),) = calls_of(llm, answer)
            schema = schemas[name]
            assert schema is not None
            schema.model_validate(arguments)

    def test_text_is_what_the_model_says_without_the_grammar(self, real_engine: Engine) -> None:
        llm = ReaderLLM.from_engine(real_engine, max_tokens=32)
        specs = [{"type": "function", "function": {"name": t.metadata.name, "description": t.metadata.description,
                  "parameters": t.metadata.get_parameters_dict()}} for t in TOOLS]  # fmt: skip
        for question in self.QUESTIONS:
            answer = llm.chat_with_tools(TOOLS, user_msg=question)
            if not calls_of(llm, answer):
                free = llm.chat(as_text([user(question)], specs))
                assert answer.message.content == free.message.content
