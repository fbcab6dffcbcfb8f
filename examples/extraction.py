"""Extract an object from each text file, one line of JSON each: python extraction.py FILE..."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from reader_rag import GrammarProgram, ReaderError, ReaderLLM, configure_threads

Name = Annotated[str, Field(max_length=40)]  # bounds: a small model does not always end a string by itself


class Animal(BaseModel):
    """What a text says about an animal."""

    name: Name
    kind: Literal["bird", "fish", "mammal", "other"]
    food: Annotated[list[Name], Field(max_length=3)]


def main(files: list[Path]) -> None:
    """Print the object of each file.

    Args:
        files: Text files.
    """
    configure_threads()  # before torch is imported
    llm = ReaderLLM("smollm2-135m", max_tokens=160)
    program = GrammarProgram.from_defaults(Animal, "Describe the animal in this text:\n{text}", llm=llm)
    for file in files:
        print(program(text=file.read_text(encoding="utf-8")[:4000]).model_dump_json())


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main([Path(argument) for argument in sys.argv[1:]])
    except ReaderError as error:
        sys.exit(f"error: {error}")
