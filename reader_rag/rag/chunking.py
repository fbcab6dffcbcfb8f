"""Splits documents into nodes that fit the embedding model, each with its character span in the document."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.node_parser.node_utils import build_nodes_from_splits
from llama_index.core.schema import Document, TextNode

from reader_rag.rag.embedding import TextSizes
from reader_rag.rag.files import UnusableFileError

# WordPiece encodes a word of any length as one [UNK] token, so a chunk is limited in characters too.
_MOST_CHARACTERS_PER_TOKEN = 16
_NOT_SPACE = re.compile(r"\S")


class Chunker:
    """LlamaIndex's `SentenceSplitter` with the tokenizer of the embedding model.

    Args:
        embed_model: The embedding model; its tokenizer counts the tokens.
        tokens: Most tokens of a chunk, without special tokens.
        overlap: Most tokens that neighbouring chunks share.
    """

    def __init__(self, embed_model: TextSizes, tokens: int, overlap: int) -> None:
        self._embed_model = embed_model
        self._tokens = tokens
        self._overlap = overlap
        self._sizes_of_characters: dict[str, int] = {}

    def split(self, documents: Sequence[Document]) -> list[TextNode]:
        """Split documents.

        Args:
            documents: The documents.

        Returns:
            Their chunks, in order.

        Raises:
            UnusableFileError: A single character has more tokens than a chunk may have.
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
                _set_spans(nodes, document.text)
                return nodes
            # A chunk can have more tokens than its parts have together, and the splitter only adds up the parts.
            limit = min(limit - 1, limit * self._tokens // longest)

    def _size(self, text: str) -> int:
        # The splitter splits text without spaces, and so counts it, character by character.
        if len(text) != 1:
            return max(self._embed_model.count_tokens(text), -(-len(text) // _MOST_CHARACTERS_PER_TOKEN))
        if text not in self._sizes_of_characters:
            self._sizes_of_characters[text] = max(1, self._embed_model.count_tokens(text))
        return self._sizes_of_characters[text]


def _set_spans(nodes: Sequence[TextNode], text: str) -> None:
    """Set each node's character span in the document's text.

    LlamaIndex searches each chunk from its predecessor's start on, which finds repeated text too early. The splitter
    drops white space only, so a chunk begins at the latest at the first other character after its predecessor. The last
    occurrence up to there is the chunk, or is equal to it.
    """
    end = 0
    for node in nodes:
        next_character = _NOT_SPACE.search(text, end)
        latest = next_character.start() if next_character else end
        start = text.rfind(node.text, 0, latest + len(node.text))
        node.start_char_idx, node.end_char_idx = start, start + len(node.text)
        end = node.end_char_idx
