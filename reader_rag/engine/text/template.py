"""Renders chat templates, which are programs that come with a model: their time, memory and output are bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import Environment, TemplateError

from reader_rag.errors import ConfigError
from reader_rag.util.bounded_call import BoundExceeded, bounded_call
from reader_rag.util.one_line import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ResultT = TypeVar("ResultT")

_SECONDS = 10.0
_MEMORY_BYTES = 1 << 30
_MOST_CHARACTERS = 1 << 26
"""More than any model's context holds; tokenizing them would take minutes."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Format messages by a tokenizer's chat template, with its generation prompt.

    Args:
        tokenizer: The tokenizer.
        name: Name of the model in error messages.
        messages: Mappings with "role" and "content".
        tools: Tools for a chat template that describes them, in OpenAI's form.

    Raises:
        ConfigError: The tokenizer has no chat template, or the template refuses these messages, or does not end.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"{name} has no chat template; pass a formatted prompt to complete() instead")
    apply = tokenizer.apply_chat_template
    if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
        raise ConfigError('messages must be a list of mappings with "role" and "content"')
    copies = [dict(message) for message in messages]
    try:
        text = bounded_template(
            tokenizer,
            lambda: str(
                apply(
                    copies,
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            ),
            name,
        )
    except ConfigError:
        raise
    except Exception as cause:
        raise ConfigError(
            f"the chat template of {name} refuses the messages ({first_line(cause)}); change their roles"
        ) from cause
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"the chat template of {name} makes {len(text)} characters of the messages; use another")
    return text


def bounded_template(tokenizer: Any, call: Callable[[], ResultT], name: str = "the model") -> ResultT:
    """Call what renders a tokenizer's chat template, and end it when it takes too long or too much memory.

    Args:
        tokenizer: The tokenizer.
        call: Renders the template.
        name: Name of the model in error messages.

    Returns:
        What `call` returns; its errors pass.

    Raises:
        ConfigError: The template does not end, or computes powers.
    """
    if _has_powers(str(tokenizer.chat_template)):
        raise ConfigError(f"the chat template of {name} computes powers (**), which may take hours; use another model")
    try:
        return bounded_call(call, seconds=_SECONDS, memory_bytes=_MEMORY_BYTES)
    except BoundExceeded as cause:
        raise ConfigError(f"the chat template of {name} {cause}; it may be faulty or hostile: use another") from cause


@lru_cache(maxsize=16)
def _has_powers(template: str) -> bool:
    """Whether a template has the operator `**`: one such operation can take hours, and cannot be interrupted."""
    try:
        tokens = [value for _, kind, value in Environment().lex(template) if kind != "whitespace"]
    except TemplateError:
        return False  # transformers refuses it as well, with the reason
    return any(token == "**" and before not in ("(", ",") for before, token in zip(["", *tokens], tokens, strict=False))
