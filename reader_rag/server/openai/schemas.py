"""The requests of the OpenAI-compatible API. Sampling fields take ranges and documentation from `SamplingParams`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reader_rag.config import SamplingParams
from reader_rag.config.setting import settings_of

MOST_CHOICES = 16
"""Most answers of one request (`n`)."""
MOST_TOP_LOGPROBS = 20
_SETTINGS = settings_of(SamplingParams)
_LEAST_SEED, _MOST_SEED = -(2**63), 2**64 - 1


def _setting(name: str, **changed: Any) -> Any:
    """An optional field with the range and documentation of a sampling parameter."""
    about = _SETTINGS[name][2]
    limits = {"ge": about.ge, "gt": about.gt, "le": about.le, "lt": about.lt} | changed
    return _about(about.doc, **{key: value for key, value in limits.items() if value is not None})


def _about(description: str, **limits: Any) -> Any:
    """An optional field."""
    return Field(default=None, description=description, **limits)


class Strict(BaseModel):
    """A part of a request: unknown fields are refused, as OpenAI does, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Lenient(BaseModel):
    """A part of a request whose unknown fields are ignored: clients send back what answers had."""

    model_config = ConfigDict(extra="ignore", strict=True)


Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class ContentPart(Lenient):
    """A part of a message's content."""

    type: str = Field(description='"text"; images, sound and files are refused.')
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Lenient):
    """The function of a tool call."""

    name: Text
    arguments: str = Field(description="The arguments as JSON.")


class ToolCallPart(Lenient):
    """A tool call of an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Lenient):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = _about("Whether a chunk with the usage comes before the end.")
    include_obfuscation: bool | None = _about("Has no effect.")


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = _about("JSON schema of the arguments.")
    strict: bool | None = _about("Has no effect: a grammar always makes arguments match the schema.")


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """The name of a function."""

    name: Text


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class NamedSchema(Strict):
    """A JSON schema of the answer."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = _about("Has no effect: a grammar always makes the answer match the schema.")


class ResponseFormat(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError('json_schema must have a name and a schema where the type is "json_schema"')
        return self


class Prediction(Strict):
    """A text that the answer will mostly repeat: it is drafted from."""

    type: Literal["content"]
    content: str | list[ContentPart]


FilterValue = str | int | float | list[str] | list[int] | list[float]


class ReaderOptions(Strict):
    """Options of answers from documents: the field `reader`, which OpenAI does not have."""

    top_k: int | None = _about("Most passages.", ge=1, le=64)
    filters: dict[str, FilterValue] | None = _about("Metadata that passages must have; of a list, one of its values.")
    documents: list[Text] | None = _about("Ids of the documents to search.", min_length=1)
    condense: bool | None = Field(
        default=None,
        description="Whether the model rewrites the question with what was said before, to search for; true.",
    )
    footer: bool | None = Field(
        default=None,
        description="Whether the sources are also written under the answer, in Markdown; the service's setting.",
    )


class Sampling(Strict):
    """Fields that chats and completions share."""

    model: Text
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = _about("Number of answers.", ge=1, le=MOST_CHOICES)
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = _about(_SETTINGS["stop"][2].doc)
    logit_bias: dict[TokenKey, Bias] | None = _about(_SETTINGS["logit_bias"][2].doc)
    max_tokens: int | None = _setting("max_tokens")
    temperature: float | None = _setting("temperature")
    top_p: float | None = _setting("top_p")
    seed: int | None = _setting("seed", ge=_LEAST_SEED, le=_MOST_SEED)
    presence_penalty: float | None = _setting("presence_penalty")
    frequency_penalty: float | None = _setting("frequency_penalty")
    # Not OpenAI's; vLLM has most of them too.
    top_k: int | None = _setting("top_k")
    min_p: float | None = _setting("min_p")
    typical_p: float | None = _setting("typical_p")
    repetition_penalty: float | None = _setting("repetition_penalty")
    no_repeat_ngram: int | None = _setting("no_repeat_ngram")
    min_tokens: int | None = _setting("min_tokens")
    bad_words: list[Text] | None = _setting("bad_words")
    suppress_tokens: list[TokenId] | None = _about(_SETTINGS["suppress_tokens"][2].doc)
    include_stop: bool | None = _setting("include_stop")
    speculate: bool | None = _setting("speculate")
    # Without effect here.
    user: str | None = _about("Has no effect: a tenant belongs to a key.")

    @property
    def wants_usage(self) -> bool:
        """Whether the stream has a chunk with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _options_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are allowed with stream=true only")
        return self


class ChatRequest(Sampling):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = _setting("max_tokens")
    logprobs: bool | None = _about("Whether to report the log-probability of every token.")
    top_logprobs: int | None = _about("How many of the most probable tokens to report.", ge=0, le=MOST_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = _about("Whether an answer may have several tool calls; true.")
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    reader: ReaderOptions | None = None
    # OpenAI's fields that have no effect here; what they are for cannot be asked of this service.
    metadata: dict[str, str] | None = _about("Has no effect.")
    store: bool | None = _about("Has no effect: nothing is stored.")
    service_tier: str | None = _about("Has no effect.")
    safety_identifier: str | None = _about("Has no effect.")
    prompt_cache_key: str | None = _about("Has no effect: prompts share prefixes within a tenant.")
    prompt_cache_retention: str | None = _about("Has no effect.")
    reasoning_effort: str | None = _about("Has no effect.")
    verbosity: str | None = _about("Has no effect.")
    modalities: list[Literal["text"]] | None = _about('["text"].')

    @model_validator(mode="after")
    def _logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs are allowed with logprobs=true only")
        if self.tool_choice is not None and not self.tools and self.tool_choice != "none":
            raise ValueError("tool_choice is allowed where tools are given only")
        return self


class CompletionRequest(Sampling):
    """The body of `POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    logprobs: int | None = _about("How many of the most probable tokens to report.", ge=0, le=MOST_TOP_LOGPROBS)
    best_of: int | None = _about("1: no other number is offered.", ge=1, le=1)
    echo: Literal[False] | None = _about("Not offered: answers do not repeat their prompt.")
    suffix: Literal[""] | None = _about("Not offered: text is continued, not inserted.")
