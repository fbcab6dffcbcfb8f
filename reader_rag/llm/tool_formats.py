"""How models write tool calls: formats by chat template, their grammars, and the calls in an answer's text.

A call is `{"name": NAME, "arguments": {...}}` in one line, with what a format puts around it:

| format | an answer with two calls | recognised by, in the chat template |
|---|---|---|
| hermes | `<tool_call>\\n CALL \\n</tool_call>\\n<tool_call>\\n CALL \\n</tool_call>` | `<tool_call>` |
| mistral | `[TOOL_CALLS] [CALL, CALL]` | `[TOOL_CALLS]` |
| llama | `CALL`, with `parameters` in place of `arguments` | `ipython` and `parameters` |
| json | `CALL\\nCALL` | every other template: a system message describes tools and form |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.llms.utils import parse_partial_json

from reader_rag.config.grammar import Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CALLS = 8
"""Most calls of one answer where several are allowed."""

_HEAD = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "(?:arguments|parameters)": ')
_NAME = '{"name"'


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        name: Its name in the table above.
        native: Whether the chat template describes the tools; else a system message does.
        marker: What precedes the first call; "": a call is the whole answer.
        marker_id: Token id of a marker that is a special token, and so not in the answer's text; None: it is text.
        before: Text between the marker and the first call.
        between: Text between two calls.
        after: Text after the last call.
        arguments: Key of the arguments.
        parallel: Whether an answer may have several calls.
    """

    name: str
    native: bool
    marker: str = ""
    marker_id: int | None = None
    before: str = ""
    between: str = "\n"
    after: str = ""
    arguments: str = "arguments"
    parallel: bool = True

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Self:
        """The format that a model was trained on, by its chat template; "json" where the template names none.

        Args:
            tokenizer: The model's.
        """
        template = _template(tokenizer)
        if "tools" in template:
            if "[TOOL_CALLS]" in template:
                before = " [" if "[TOOL_CALLS] [" in template else "["
                special = _special_id(tokenizer, "[TOOL_CALLS]")
                return cls("mistral", True, "[TOOL_CALLS]", special, before, ", ", "]")
            if "<tool_call>" in template:
                special = _special_id(tokenizer, "<tool_call>")
                between = "\n</tool_call>\n<tool_call>\n"
                return cls("hermes", True, "<tool_call>", special, "\n", between, "\n</tool_call>")
            if "ipython" in template and "parameters" in template:
                single = "single tool-calls" in template  # its template refuses a message with several
                return cls("llama", True, between="; ", arguments="parameters", parallel=not single)
        return cls("json", native=False)

    @property
    def mark(self) -> str:
        """What an answer's text has where its calls begin."""
        if not self.marker:
            return _NAME
        return self.marker if self.marker_id is None else self.before + _NAME


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return ""
    return str(tokenizer.get_chat_template(tools=[{}]))  # a tokenizer may have one for tools among several


def _special_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The id of a token that is left out of decoded text; None if this text is not one."""
    return tokenizer.get_vocab()[text] if text in tokenizer.all_special_tokens else None


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer.

    Attributes:
        name: Name of the tool.
        arguments: The arguments; of an incomplete call those so far.
        complete: Whether the call is complete.
    """

    name: str
    arguments: dict[str, Any]
    complete: bool


@dataclass(frozen=True)
class ToolRequest:
    """The tools of one request.

    Attributes:
        format: The model's format.
        tools: The tools in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}.
        required: Whether the answer must be calls, without text.
        parallel: Whether it may have several.
        shown: The tools that the prompt describes; a named tool is called with all of them in sight.
    """

    format: ToolFormat
    tools: tuple[Mapping[str, Any], ...]
    required: bool
    parallel: bool
    shown: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def grammar(self) -> Grammar:
        """The grammar of answers: text without a mark that calls begin, then calls; or calls only."""
        schemas = [(tool["function"]["name"], tool["function"].get("parameters") or {}) for tool in self.tools]
        return Grammar.lark(_lark(self.format, self.required, self.parallel, json.dumps(schemas, ensure_ascii=False)))

    def parse(self, text: str, *, whole: bool) -> tuple[str, list[ToolCall]]:
        """Split an answer into text and calls.

        Args:
            text: The answer so far.
            whole: Whether it is complete; else what may be the beginning of a call is held back.

        Returns:
            The text before the calls, and the calls, the last one incomplete where the answer is.
        """
        start = self._start(text)
        if start >= 0:
            return text[:start].rstrip(), _calls(text, start)
        return (text if whole else text[: self._safe(text)]), []

    def begun(self, text: str) -> bool:
        """Whether calls begin in an answer.

        Args:
            text: The answer.
        """
        return self._start(text) >= 0

    def _start(self, text: str) -> int:
        if self.required:
            return 0
        if self.format.marker:
            return text.find(self.format.mark)
        return len(text) - len(text.lstrip()) if text.lstrip().startswith(_NAME) else -1

    def _safe(self, text: str) -> int:
        """The characters that are no part of a call, whatever follows."""
        mark = self.format.mark
        if not self.format.marker:
            return 0 if mark.startswith(text.lstrip()) else len(text)
        longest = min(len(text), len(mark) - 1)
        return len(text) - next(size for size in range(longest, -1, -1) if mark.startswith(text[len(text) - size :]))


def _calls(text: str, start: int) -> list[ToolCall]:
    decoder, calls = json.JSONDecoder(), []
    head = _HEAD.search(text, start)
    while head is not None:
        name = json.loads(head.group(1))
        try:
            arguments, end = decoder.raw_decode(text, head.end())
        except json.JSONDecodeError:
            calls.append(ToolCall(name, _partial(text[head.end() :]), complete=False))
            break
        calls.append(ToolCall(name, arguments, complete=True))
        head = _HEAD.search(text, end)
    return calls


def _partial(text: str) -> dict[str, Any]:
    try:
        arguments = parse_partial_json(text) if text.strip() else {}
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


@lru_cache(maxsize=64)
def _lark(form: ToolFormat, required: bool, parallel: bool, schemas: str) -> str:
    """The grammar of a request in Lark's syntax, as llguidance reads it.

    Args:
        form: The format.
        required: Whether the answer must be calls.
        parallel: Whether it may have several.
        schemas: As JSON, name and schema of each tool.
    """
    rules, heads = [], []
    for number, (name, schema) in enumerate(json.loads(schemas)):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments}": '
        heads.append(f'{_quoted(head)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps(_arguments(name, schema), ensure_ascii=False)}")
    rules.append(f"call: {' | '.join(heads)}")
    more = f"({_quoted(form.between)} call){{0,{MOST_CALLS - 1}}}" if parallel and form.parallel else ""
    rules.append("calls: " + " ".join(filter(None, [_quoted(form.before), "call", more, _quoted(form.after)])))
    marker = _quoted(form.marker) if form.marker_id is None else f"<[{form.marker_id}]>"
    mark = re.escape(form.mark).replace("/", r"\/").replace('"', r"\x22")
    if required:
        start = f"start: {marker} calls"
    elif not form.marker:
        start = f"start: TEXT | calls\nTEXT: /(.|\\n)*/ & ~/\\s*{mark}(.|\\n)*/"
    elif form.marker_id is None:
        start = (
            f"start: TEXT | until calls\nTEXT: /(.|\\n)*/ & ~/(.|\\n)*{mark}(.|\\n)*/\nuntil[lazy]: /(.|\\n)*{mark}/"
        )
    else:
        start = f"start: | TEXT | {marker} calls | TEXT {marker} calls\nTEXT: /(.|\\n)+/ & ~/(.|\\n)*{mark}(.|\\n)*/"
    return "\n".join([start, *rules, ""])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _arguments(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, with the properties that it names only unless it says otherwise."""
    from reader_rag.sampling.constrained import enforceable_schema  # it imports torch, before which threads are set

    schema = {"type": "object", "properties": {}, **schema} if "$ref" not in schema else dict(schema)
    return enforceable_schema(_closed(schema), f"tool {name!r}")


def _closed(schema: Any) -> Any:
    """A schema whose objects have no other properties than those that are named."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: {name: _closed(part) for name, part in value.items()}
        if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, dict)
        else value
        if key in ("const", "enum", "default", "examples")
        else _closed(value)
        for key, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed
