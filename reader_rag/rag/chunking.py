"""Documents -> nodes that an embedding model reads to their last token, each knowing where it lies in its document."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.node_parser.node_utils import build_nodes_from_splits
from llama_index.core.schema import Document, TextNode

from reader_rag.rag.embedding import SizedEmbedding
from reader_rag.rag.files import UnusableFileError

# WordPiece turns an endless word into one [UNK] token: without a bound in characters it would be one endless chunk.
_MOST_CHARACTERS_PER_TOKEN = 16
_NOT_SPACE = re.compile(r"\S")


class Chunker:
    """LlamaIndex's `SentenceSplitter`, counting as the embedding model does.

    Args:
        embed_model: Whose tokenizer counts.
        tokens: Most tokens of a chunk, special tokens not counted.
        overlap: Tokens that neighbouring chunks share at most.
    """

    def __init__(self, embed_model: SizedEmbedding, tokens: int, overlap: int) -> None:
        self._embed_model = embed_model
        self._tokens = tokens
        self._overlap = overlap
        self._sizes_of_characters: dict[str, int] = {}

    def split(self, documents: Sequence[Document]) -> list[TextNode]:
        """The documents' chunks in order.

        Raises:
            UnusableFileError: A single character takes more tokens than a chunk may have.
        """
        return [node for document in documents for node in self._split(document)]

    def _split(self, document: Document) -> list[TextNode]:
        limit = self._tokens
        while True:
            splitter = SentenceSplitter(
                chunk_size=limit,
                chunk_overlap=min(self._overlap, limit - 1),
                tokenizer=lambda text: range(self._size(text)),
            )
            try:
                texts = splitter.split_text(document.text)
            except ValueError as error:
                raise UnusableFileError(f"cannot be split into chunks of {limit} tokens: {error}") from error
            longest = max((self._size(text) for text in texts), default=0)
            if longest <= self._tokens:
                nodes = build_nodes_from_splits(texts, document)
                for node in nodes:
                    node.metadata = dict(document.metadata)
                _place(nodes, document.text)
                return nodes
            # The tokens of a whole can be more than those of its parts together, which is all the splitter adds up.
            limit = min(limit - 1, limit * self._tokens // longest)

    def _size(self, text: str) -> int:
        # Text without spaces is split, and so measured, character by character.
        if len(text) != 1:
            return max(self._embed_model.count_tokens(text), -(-len(text) // _MOST_CHARACTERS_PER_TOKEN))
        if text not in self._sizes_of_characters:
            self._sizes_of_characters[text] = max(1, self._embed_model.count_tokens(text))
        return self._sizes_of_characters[text]


def _place(nodes: Sequence[TextNode], text: str) -> None:
    """Set each node's character span in the document's text.

    LlamaIndex looks for a chunk from its predecessor's start on, and so places repeated text too early, further so with
    every chunk. The splitter drops white space only: a chunk begins, at the latest, at the first other character after
    its predecessor. The last occurrence up to there is the chunk, or reads the same.
    """
    end = 0
    for node in nodes:
        next_character = _NOT_SPACE.search(text, end)
        latest = next_character.start() if next_character else end
        start = text.rfind(node.text, 0, latest + len(node.text))
        node.start_char_idx, node.end_char_idx = start, start + len(node.text)
        end = node.end_char_idx
