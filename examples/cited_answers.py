"""Answer from a folder of documents, with the characters that were copied: cited_answers.py FOLDER QUESTION"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from reader_rag import (
    FaissStore,
    LocalEmbedding,
    ReaderError,
    ReaderLLM,
    configure_threads,
    ingest,
    make_query_engine,
)


def main(folder: Path, question: str) -> None:
    """Answer a question, and print the citations beside the text.

    Args:
        folder: The documents.
        question: The question.
    """
    configure_threads()  # before torch is imported
    embed_model = LocalEmbedding("minilm")
    llm = ReaderLLM("smollm2-135m", max_tokens=128)
    with TemporaryDirectory() as store_dir:
        ingest([folder], store_dir, embed_model=embed_model)
        with FaissStore.open(store_dir, embed_model=embed_model) as store:
            response = make_query_engine(store, llm, embed_model).query(question)
    text, marked, position = str(response), "", 0
    citations = response.metadata["citations"]
    for number, citation in enumerate(citations, start=1):
        marked += f"{text[position : citation.text_start]}«{citation.text}»[{number}]"
        position = citation.text_end
    print(marked + text[position:])
    for number, citation in enumerate(citations, start=1):
        print(f"[{number}] {citation.file_path}, characters {citation.document_start}-{citation.document_end}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]).resolve(), sys.argv[2])
    except ReaderError as error:
        sys.exit(f"error: {error}")
