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
from workflows.errors import WorkflowRuntimeError

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
MISTRAL_ARGS = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{% if m.role == "user" %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}{{ m.content }}
{%- for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}CALL_ID[ARGS]{{ c.function.arguments | tojson }}
{%- endfor %}{% elif m.role == "tool" %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
TEMPLATES = {
    "hermes": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS.replace("CALL_ID", ""),
    "mistral-args with ids": MISTRAL_ARGS.replace("CALL_ID", "[CALL_ID]{{ c.id }}"),
}


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def calls_of(llm: ReaderLLM, response: Any) -> list[tuple[str, dict[str, Any]]]:
    selected = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    return [(call.tool_name, call.tool_kwargs) for call in selected]


class TestPrompts:
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_the_template_describes_tools_calls_and_results(self, name: str) -> None:
        tokenizer = make_tokenizer(TEMPLATES[name])
        form = ToolFormat.of(tokenizer)
        assert form.name == name.partition(" ")[0]
        assert bool(form.id_mark) == name.endswith("ids")
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
        arguments = r'{"place": {"city": "Paris"}}'
        json_form = r'"name": "weather", "(arguments|parameters)": '
        separated = r"weather(\[CALL_ID\]abcdefghi)?\[ARGS\]"
        assert re.search(f"({json_form}|{separated}){arguments}", prompt)
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
        "args": ToolFormat("mistral-args", True, "[TOOL_CALLS]", 0, separator="[ARGS]", separator_id=1),
        "ids": ToolFormat(
            "mistral-args",
            True,
            "[TOOL_CALLS]",
            0,
            separator="[ARGS]",
            separator_id=1,
            id_mark="[CALL_ID]",
            id_mark_id=3,
        ),
        "text": ToolFormat("mistral-args", True, "[TOOL_CALLS]", separator="[ARGS]"),
    }
    SPECIAL = {"[TOOL_CALLS]": 0, "[ARGS]": 1, "[CALL_ID]": 3}  # 2 ends answers
    WRITTEN = {
        "hermes": "Well.\n<tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call>",
        "mistral": "Well. [{}, {}]",
        "llama": "{}; {}",
        "json": "{}\n{}",
        "args": "Well.weather{ARGS}now{}",
        "ids": "Well.weatherabcdefghi{ARGS}now123456789{}",
        "text": "Well.[TOOL_CALLS]weather[ARGS]{ARGS}[TOOL_CALLS]now[ARGS]{}",
    }
    SPECS = tuple(
        {"function": {"name": t.metadata.name, "parameters": t.metadata.get_parameters_dict()}} for t in TOOLS
    )

    @pytest.mark.parametrize("name", FORMATS)
    def test_text_and_calls_are_split_at_every_length(self, name: str) -> None:
        request = ToolRequest(self.FORMATS[name], self.SPECS, required=False, parallel=True)
        other = '{"name": "now", "arguments": {}}'
        text = self.WRITTEN[name]
        if self.FORMATS[name].separator:
            text = text.replace("{ARGS}", PARIS[PARIS.index('{"place"') : -1])
        else:
            text = text.replace("{}", PARIS, 1).replace("{}", other)
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
            assert "weat" not in content
            assert all(call.complete for call in calls[:-1])
            shown = content

    @pytest.mark.parametrize(
        "text", ['{"names": 1}', "a < b", "<tool>", "", '{"na', "weather", "now is now", "nowhere {}"]
    )
    @pytest.mark.parametrize("name", FORMATS)
    def test_text_that_is_no_call_stays_text(self, name: str, text: str) -> None:
        request = ToolRequest(self.FORMATS[name], self.SPECS, required=False, parallel=True)
        assert request.parse(text, whole=True) == (text, [])

    @pytest.mark.parametrize("parallel", [False, True])
    @pytest.mark.parametrize("required", [False, True])
    @pytest.mark.parametrize("name", FORMATS)
    def test_the_grammar_takes_text_and_valid_calls_only(
        self, name: str, required: bool, parallel: bool, tiny_engine: Engine
    ) -> None:
        form, tokenizer = self.FORMATS[name], tiny_engine.tokenizer
        request = ToolRequest(form, self.SPECS, required, parallel)
        compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])

        def accepts(text: str) -> bool:
            return self.accepts(compiler, tokenizer, request, text)

        def written(*calls: str) -> str:
            if form.separator:
                parts = [re.fullmatch(r'{"name": "(\w+)", "arguments": (.*)}', call) for call in calls]
                id_ = f"{form.id_mark}abc456789" if form.id_mark else ""
                return "".join(f"[TOOL_CALLS]{part[1]}{id_}[ARGS]{part[2]}" for part in parts if part)
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

    @pytest.mark.parametrize("name", FORMATS)
    def test_withheld_tools_leave_text_only(self, name: str, tiny_engine: Engine) -> None:
        form, tokenizer = self.FORMATS[name], tiny_engine.tokenizer
        request = ToolRequest(form, self.SPECS, required=False, parallel=True, withheld=True)
        compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
        assert self.accepts(compiler, tokenizer, request, "\nIt is {noon}; now.")
        assert not self.accepts(compiler, tokenizer, request, "")
        assert not self.accepts(compiler, tokenizer, request, " \n")
        call = '{"name": "now", "arguments": {}}' if not form.separator else "now[CALL_ID]abc456789[ARGS]{}"
        if form.separator and not form.id_mark:
            call = "now[ARGS]{}"
        assert not self.accepts(compiler, tokenizer, request, f"{form.marker}{form.before}{call}{form.after}")
        if not form.marker:
            assert not self.accepts(compiler, tokenizer, request, '{"names": 1}')

    def accepts(self, compiler: GrammarCompiler, tokenizer: Any, request: ToolRequest, text: str) -> bool:
        """Whether a grammar takes a text with special tokens to its end."""
        special = {token: id_ for token, id_ in self.SPECIAL.items() if request.format.marker_id is not None}
        if not request.format.separator:
            special = {"[TOOL_CALLS]": 0}
        pattern = "|".join(map(re.escape, special)) or "$^"
        ids: list[int] = []
        for piece in re.split(f"({pattern})", text):
            ids += [special[piece]] if piece in special else tokenizer.encode(piece, add_special_tokens=False)
        try:
            compiler.compile(request.grammar).follow([*ids, tokenizer.eos_token_id])
        except GrammarError:
            return False
        return True


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


def turns(*calls: tuple[str, dict[str, Any], str]) -> list[ChatMessage]:
    """A question, and answers with one call each and its result."""
    messages = [user("What time is it?")]
    for number, (name, arguments, result) in enumerate(calls):
        block = ToolCallBlock(tool_call_id=str(number), tool_name=name, tool_kwargs=arguments)
        messages.append(ChatMessage(role="assistant", blocks=[block]))
        messages.append(ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": str(number)}))
    return messages


class TestLimits:
    """Repeated calls, and rounds of calls, end in an answer of text."""

    NOON = ("now", {}, "noon")

    @pytest.mark.parametrize(
        ("calls", "limits", "withheld"),
        [
            ([NOON], {}, False),
            ([NOON, NOON], {}, True),
            ([NOON, ("now", {}, "one o'clock")], {}, False),
            ([NOON, ("now", {"zone": 1}, "noon")], {}, False),
            ([NOON, ("weather", {"city": "Rome", "unit": "C"}, "21"), NOON], {}, True),
            (
                [("weather", {"city": "Rome", "unit": "C"}, "21"), ("weather", {"unit": "C", "city": "Rome"}, "21")],
                {},
                True,
            ),
            ([NOON, NOON], {"max_repeated_tool_calls": 2}, False),
            ([NOON] * 3, {"max_repeated_tool_calls": 2}, True),
            ([NOON] * 7, {"max_repeated_tool_calls": None}, False),
            ([("now", {"zone": zone}, "noon") for zone in range(7)], {}, False),
            ([("now", {"zone": zone}, "noon") for zone in range(8)], {}, True),
            ([("now", {"zone": zone}, "noon") for zone in range(2)], {"max_tool_rounds": 2}, True),
            ([("now", {"zone": zone}, "noon") for zone in range(9)], {"max_tool_rounds": 10}, False),
        ],
    )
    def test_what_was_called_decides(self, calls: list[Any], limits: dict[str, Any], withheld: bool) -> None:
        engine = ScriptedEngine(script=["It is noon."])
        llm = ReaderLLM.from_engine(engine)  # type: ignore[arg-type]
        for name, value in limits.items():
            setattr(llm, name, value)
        response = llm.chat(turns(*calls), tools=TOOLS)
        assert response.additional_kwargs.get("tools_withheld", False) == withheld
        grammar = engine.calls[0].generation.grammar
        assert grammar is not None
        assert ("calls" in grammar.text) != withheld
        assert "The time." in engine.chats[0][0]["content"]  # the prompt does not change

    def test_a_model_that_was_trained_on_tools_has_no_limit_of_rounds(self) -> None:
        engine = ScriptedEngine(make_tokenizer(QWEN), script=["It is noon."], context_window=1 << 16)
        many = turns(*(("now", {"zone": zone}, "noon") for zone in range(30)))
        response = ReaderLLM.from_engine(engine).chat(many, tools=TOOLS)  # type: ignore[arg-type]
        assert "tools_withheld" not in response.additional_kwargs

    def test_only_calls_since_the_last_question_count(self) -> None:
        engine = ScriptedEngine(script=["It is noon."])
        messages = [*turns(self.NOON, self.NOON), ChatMessage(role="assistant", content="Noon."), user("And now?")]
        response = ReaderLLM.from_engine(engine).chat(messages, tools=TOOLS)  # type: ignore[arg-type]
        assert "tools_withheld" not in response.additional_kwargs

    def test_a_required_call_comes_all_the_same(self, tiny_engine: Engine) -> None:
        llm = ReaderLLM.from_engine(tiny_engine, max_tokens=200)
        response = llm.chat(turns(*[self.NOON] * 9), tools=[NOW], tool_choice="required")
        assert calls_of(llm, response) == [("now", {})]

    def test_limits_are_checked(self, tiny_engine: Engine) -> None:
        for wrong in ({"max_tool_rounds": 0}, {"max_repeated_tool_calls": 0}, {"max_tool_rounds": "3"}):
            with pytest.raises(ConfigError, match=next(iter(wrong))):
                ReaderLLM.from_engine(tiny_engine, **wrong)

    @pytest.mark.parametrize("streaming", [False, True])
    def test_drafted_and_plain_answers_are_the_same(self, streaming: bool, tiny_engine: Engine) -> None:
        llm = ReaderLLM.from_engine(tiny_engine, max_tokens=24, temperature=0.9, seed=5)

        def answer(of: ReaderLLM) -> Any:
            messages = turns(self.NOON, self.NOON)
            return list(of.stream_chat(messages, tools=TOOLS))[-1] if streaming else of.chat(messages, tools=TOOLS)

        assert answer(llm).message == answer(llm.plain()).message
        assert answer(llm).additional_kwargs["tools_withheld"]

    @pytest.mark.parametrize("streaming", [False, True])
    def test_an_agent_whose_model_repeats_itself_ends_with_an_answer(
        self, streaming: bool, tiny_engine: Engine
    ) -> None:
        call = '{"name": "now", "arguments": {}}'

        async def run(**settings: Any) -> Any:
            llm = saying(tiny_engine, call, max_tokens=40)
            for name, value in settings.items():
                setattr(llm, name, value)
            agent = FunctionAgent(tools=[NOW], llm=llm, streaming=streaming)
            return await AgentWorkflow(agents=[agent]).run(user_msg="What time is it?", max_iterations=5)

        output = asyncio.run(run())
        assert len(output.tool_calls) == 2
        assert (output.response.content or "").strip()
        with pytest.raises(WorkflowRuntimeError, match="Max iterations"):
            asyncio.run(run(max_repeated_tool_calls=None))


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

    @pytest.mark.parametrize("number", range(10))
    def test_ten_of_ten_agents_end_with_an_answer(self, number: int, real_engine: Engine) -> None:
        llm = ReaderLLM.from_engine(real_engine, max_tokens=64)

        async def run() -> Any:
            first = "now" if number % 2 else None
            agent = FunctionAgent(tools=TOOLS, llm=llm, system_prompt="Be brief.", initial_tool_choice=first)
            return await AgentWorkflow(agents=[agent]).run(user_msg=self.QUESTIONS[number % 5])

        output = asyncio.run(run())
        assert (output.response.content or "").strip()
        assert not [block for block in output.response.blocks if isinstance(block, ToolCallBlock)]
        assert len(output.tool_calls) >= number % 2


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (ToolFormat("json", native=False), '{"name": "now", "arguments": {"a": 1}}\n{"name": "now", "arguments": {}}'),
        (
            ToolFormat("mistral-args", True, "[TOOL_CALLS]", separator="[ARGS]"),
            '[TOOL_CALLS]now[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
        ),
    ],
)
def test_the_text_of_arguments_grows_up_to_the_whole(form: ToolFormat, answer: str) -> None:
    tools = ({"type": "function", "function": {"name": "now", "parameters": {}}},)
    request = ToolRequest(form, tools, required=False, parallel=True)
    written = ["", ""]
    for end in range(1, len(answer) + 1):
        for number, call in enumerate(request.parse(answer[:end], whole=end == len(answer))[1]):
            assert call.text.startswith(written[number])
            written[number] = call.text
    assert written == ['{"a": 1}', "{}"]
