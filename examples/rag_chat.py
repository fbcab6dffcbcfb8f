"""Chat about a folder of documents, in the terminal: python rag_chat.py FOLDER"""

import sys
from pathlib import Path

from reader_rag import (
    FaissStore,
    LocalEmbedding,
    ReaderError,
    ReaderLLM,
    configure_threads,
    ingest,
    make_chat_engine,
)


def main(folder: Path) -> None:
    """Ingest a folder, then answer questions until an empty line.

    Args:
        folder: The documents; the store is made next to this folder.
    """
    configure_threads()  # before torch is imported
    store_dir = folder.with_name(f"{folder.name}-store")
    embed_model = LocalEmbedding("minilm")
    report = ingest([folder], store_dir, embed_model=embed_model)
    for skipped in report.skipped:
        print(f"skipped {skipped.path}: {skipped.reason}")

    llm = ReaderLLM("smollm2-135m", max_tokens=256)
    with FaissStore.open(store_dir, embed_model=embed_model) as store:
        chat = make_chat_engine(store, llm, embed_model)
        print(f"{report.total_chunks} passages. Ask something; an empty line ends.")
        while question := sys.stdin.readline().strip():
            answer = chat.stream_chat(question)
            for text in answer.response_gen:
                print(text, end="", flush=True)
            print()
            for source in answer.source_nodes:
                print(f"  [{source.score:.2f}] {source.node.metadata['file_name']}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]).resolve())
    except ReaderError as error:
        sys.exit(f"error: {error}")
