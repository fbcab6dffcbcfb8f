"""An output parser whose prompts `ReaderLLM` answers under a grammar."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.output_parsers import PydanticOutputParser

from reader_rag.config.grammar import Grammar
from reader_rag.llm.messages import describe_grammar

OutputT = TypeVar("OutputT", bound=BaseModel)


class GrammarOutputParser(PydanticOutputParser, Generic[OutputT]):  # type: ignore[type-arg]
    """`PydanticOutputParser` for any LlamaIndex component that formats messages with a parser and parses the answer.

    The prompts that it formats end with a description of the schema. `ReaderLLM` knows it, and answers with JSON of the
    class; for other LLMs it is a description.

    Args:
        output_cls: The class.

    Example:
        >>> LLMTextCompletionProgram.from_defaults(
        ...     output_parser=GrammarOutputParser(City), prompt_template_str="About {place}.", llm=llm
        ... )
    """

    def __init__(self, output_cls: type[OutputT]) -> None:
        super().__init__(output_cls=output_cls)
        self.grammar = Grammar.json_schema(output_cls)
        self._description = "\n" + self.get_format_string(escape_json=False)

    def format(self, query: str) -> str:
        """A text with the schema in words, which `ReaderLLM` answers under the schema's grammar.

        Args:
            query: The text, formatted already.
        """
        describe_grammar(self._description, self.grammar)
        return query + self._description

    def parse(self, text: str) -> Any:
        """The object of an answer.

        Args:
            text: The answer.

        Raises:
            pydantic.ValidationError: It is no object of the class: `max_tokens` ended it, or a check of the class that
                its schema cannot express fails.
        """
        return self.output_cls.model_validate_json(text)
