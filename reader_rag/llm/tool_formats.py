"""How models write tool calls: formats by chat template, their grammars, and the calls in an answer's text.

A call is `{"name": NAME, "arguments": {...}}` in one line, with what a format puts around it; newer models of
Mistral have name and arguments apart:

| format | an answer with two calls | recognised by, in the chat template |
|---|---|---|
| mistral-args | `[TOOL_CALLS]NAME[ARGS]{...}[TOOL_CALLS]NAME[ARGS]{...}` | `[TOOL_CALLS]` and `[ARGS]` |
| hermes | `<tool_call>\\n CALL \\n</tool_call>\\n<tool_call>\\n CALL \\n</tool_call>` | `<tool_call>` |
| mistral | `[TOOL_CALLS] [CALL, CALL]` | `[TOOL_CALLS]` |
| llama | `CALL`, with `parameters` in place of `arguments` | `ipython` and `parameters` |
| json | `CALL\\nCALL` | every other template: a system message describes tools and form |

Where the template has `[CALL_ID]` too, an id of nine letters and digits stands between it and `[ARGS]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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
_ID = "[a-zA-Z0-9]{9}"


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
        separator: What stands between name and arguments of a call, and each call has the marker; "": a call is an
            object with both.
        separator_id: Token id of a separator that is a special token; None: it is text.
        id_mark: What precedes an id behind the name; "": calls have none.
        id_mark_id: Token id of an id's mark that is a special token; None: it is text.
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
    separator: str = ""
    separator_id: int | None = None
    id_mark: str = ""
    id_mark_id: int | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Self:
        """The format that a model was trained on, by its chat template; "json" where the template names none.

        Args:
            tokenizer: The model's.
        """
        template = _template(tokenizer)
        if "tools" in template:
            if "[TOOL_CALLS]" in template and "[ARGS]" in template:
                special, separator = (_special_id(tokenizer, token) for token in ("[TOOL_CALLS]", "[ARGS]"))
                own = cls("mistral-args", True, "[TOOL_CALLS]", special, separator="[ARGS]", separator_id=separator)
                if "[CALL_ID]" in template:
                    return replace(own, id_mark="[CALL_ID]", id_mark_id=_special_id(tokenizer, "[CALL_ID]"))
                return own
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
        """What an answer's text has where its calls begin; "": the name of a tool, and what follows names."""
        if not self.marker:
            return _NAME
        if self.marker_id is None:
            return self.marker
        return "" if self.separator else self.before + _NAME

    def head(self, names: Iterable[str]) -> str:
        """A regular expression of what precedes the arguments of a call; for formats with a separator.

        Args:
            names: Names of tools; the expression's first group is the name.
        """
        marker = self.marker if self.marker_id is None else ""
        id_ = (_pattern(self.id_mark if self.id_mark_id is None else "") + _ID) if self.id_mark else ""
        separator = self.separator if self.separator_id is None else ""
        longest_first = sorted(names, key=len, reverse=True)
        return f"{_pattern(marker)}({'|'.join(map(_pattern, longest_first))}){id_}{_pattern(separator)}"


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
        text: The JSON of the arguments, as far as it was written.
    """

    name: str
    arguments: dict[str, Any]
    complete: bool
    text: str


@dataclass(frozen=True)
class ToolRequest:
    """The tools of one request.

    Attributes:
        format: The model's format.
        tools: The tools in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}.
        required: Whether the answer must be calls, without text.
        parallel: Whether it may have several.
        shown: The tools that the prompt describes; a named tool is called with all of them in sight.
        withheld: Whether the answer must be text, because calls have reached a limit of `ToolConfig`.
    """

    format: ToolFormat
    tools: tuple[Mapping[str, Any], ...]
    required: bool
    parallel: bool
    shown: tuple[Mapping[str, Any], ...] = field(default=())
    withheld: bool = False

    @property
    def grammar(self) -> Grammar:
        """The grammar of answers: text without a mark that calls begin, then calls; or calls only; or text only."""
        if self.withheld:
            return Grammar.lark(_text_only(self.format, tuple(self._names)))
        schemas = [(tool["function"]["name"], tool["function"].get("parameters") or {}) for tool in self.tools]
        return Grammar.lark(_lark(self.format, self.required, self.parallel, json.dumps(schemas, ensure_ascii=False)))

    def parse(self, text: str, *, whole: bool) -> tuple[str, list[ToolCall]]:
        """Split an answer into text and calls.

        Args:
            text: The answer so far.
            whole: Whether it is complete; else what may be the start of a call is held back.

        Returns:
            The text before the calls, and the calls, the last one incomplete where the answer is.
        """
        start = self._start(text)
        if start >= 0:
            return text[:start].rstrip(), self._calls(text, start)
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
        if not self.format.mark:
            found = re.search(rf"{self.format.head(self._names)}\{{", text)
            return -1 if found is None else found.start()
        if self.format.marker:
            return text.find(self.format.mark)
        return len(text) - len(text.lstrip()) if text.lstrip().startswith(_NAME) else -1

    def _safe(self, text: str) -> int:
        """The characters that are no part of a call, whatever follows."""
        mark = self.format.mark
        if not mark:
            # A call may start at a name, or at a prefix of one, that only an id or a separator follow.
            more = len(self.format.separator) + 9 if self.format.id_mark else len(self.format.separator)
            starts = (
                start
                for start in range(max(0, len(text) - max(map(len, self._names), default=0) - more), len(text))
                if any(self._may_begin(text[start:], name) for name in self._names)
            )
            return next(starts, len(text))
        if not self.format.marker:
            return 0 if mark.startswith(text.lstrip()) else len(text)
        longest = min(len(text), len(mark) - 1)
        return len(text) - next(size for size in range(longest, -1, -1) if mark.startswith(text[len(text) - size :]))

    @property
    def _names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    def _may_begin(self, text: str, name: str) -> bool:
        """Whether a text may be the start of a call of a tool, up to its arguments."""
        if len(text) <= len(name):
            return name.startswith(text)
        rest = text[len(name) :]
        if self.format.id_mark:
            rest = rest[9:] if re.fullmatch(_ID, rest[:9]) else "" if re.fullmatch("[a-zA-Z0-9]*", rest) else "?"
        separator = self.format.separator if self.format.separator_id is None else ""
        return text.startswith(name) and separator.startswith(rest)

    def _calls(self, text: str, start: int) -> list[ToolCall]:
        """The calls in an answer from `start` on, the last one incomplete where the answer is."""
        separated = bool(self.format.separator)
        next_head = re.compile(rf"\s*{self.format.head(self._names)}").match if separated else _HEAD.search
        decoder, calls = json.JSONDecoder(), []
        head = next_head(text, start)
        while head is not None:
            name = head.group(1) if separated else json.loads(head.group(1))
            try:
                arguments, end = decoder.raw_decode(text, head.end())
            except json.JSONDecodeError:
                calls.append(ToolCall(name, _partial(text[head.end() :]), complete=False, text=text[head.end() :]))
                break
            calls.append(ToolCall(name, arguments, complete=True, text=text[head.end() : end]))
            head = next_head(text, end)
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
    marker = _token(form.marker, form.marker_id)
    named = json.loads(schemas)
    rules, heads = [], []
    for number, (name, schema) in enumerate(named):
        if form.separator:
            id_ = f"{_token(form.id_mark, form.id_mark_id)} /{_ID}/ " if form.id_mark else ""
            heads.append(f"{_quoted(name)} {id_}{_token(form.separator, form.separator_id)} arguments_{number}")
        else:
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments}": '
            heads.append(f'{_quoted(head)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps(_arguments(name, schema), ensure_ascii=False)}")
    rules.append(f"call: {' | '.join(heads)}")
    between = marker if form.separator else _quoted(form.between)
    more = f"({between} call){{0,{MOST_CALLS - 1}}}" if parallel and form.parallel else ""
    rules.append("calls: " + " ".join(filter(None, [_quoted(form.before), "call", more, _quoted(form.after)])))
    mark = _pattern(form.mark) if form.mark else form.head(name for name, _ in named) + r"\{"
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


def _token(text: str, id_: int | None) -> str:
    """A special token, or the text of one that is none, in a grammar."""
    return _quoted(text) if id_ is None else f"<[{id_}]>"


def _text_only(form: ToolFormat, names: tuple[str, ...]) -> str:
    """The grammar of text, at least a word, in which no call begins."""
    if not form.marker:
        return "start: TEXT\nTEXT: /\\s*[^\\s{](.|\\n)*/\n"
    mark = _pattern(form.mark) if form.mark else form.head(names) + r"\{"
    return f"start: TEXT\nTEXT: /\\s*\\S(.|\\n)*/ & ~/(.|\\n)*{mark}(.|\\n)*/\n"


def _pattern(text: str) -> str:
    """A text inside a regular expression of a grammar."""
    return re.escape(text).replace("/", r"\/").replace('"', r"\x22")


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
