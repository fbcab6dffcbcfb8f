"""An agent that searches a folder of documents with a tool: python agent.py FOLDER QUESTION"""

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from pydantic import Field

from reader_rag import (
    FaissStore,
    LocalEmbedding,
    ReaderError,
    ReaderLLM,
    configure_threads,
    ingest,
    make_retriever,
)


async def answer(store: FaissStore, embed_model: LocalEmbedding, question: str) -> str:
    """The agent's answer to a question.

    Args:
        store: The documents.
        embed_model: The store's embedding model.
        question: The question.
    """
    retriever = make_retriever(store, embed_model, top_k=2)

    def search(words: Annotated[str, Field(json_schema_extra={"maxLength": 40})]) -> str:
        """Search the documents for passages about these words."""
        print(f"searching: {words}")
        return "\n".join(found.node.get_content() for found in retriever.retrieve(words or question))

    agent = FunctionAgent(
        tools=[search],
        llm=ReaderLLM("smollm2-135m", max_tokens=300),
        system_prompt="Answer from the passages that the search returns.",
        initial_tool_choice="search",  # a small model does not always decide for a call by itself
    )
    return str(await AgentWorkflow(agents=[agent]).run(user_msg=question))


def main(folder: Path, question: str) -> None:
    """Ingest a folder, and print the agent's answer.

    Args:
        folder: The documents.
        question: The question.
    """
    configure_threads()  # before torch is imported
    embed_model = LocalEmbedding("minilm")
    with TemporaryDirectory() as store_dir:
        ingest([folder], store_dir, embed_model=embed_model)
        with FaissStore.open(store_dir, embed_model=embed_model) as store:
            print(asyncio.run(answer(store, embed_model, question)))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]).resolve(), sys.argv[2])
    except ReaderError as error:
        sys.exit(f"error: {error}")
