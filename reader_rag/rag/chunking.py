"""Splits documents into nodes that fit the embedding model, each with its character span in the document."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from llama_index.core.node_parser import NodeParser, SentenceSplitter
from llama_index.core.node_parser.node_utils import build_nodes_from_splits
from llama_index.core.node_parser.text.sentence import DEFAULT_PARAGRAPH_SEP
from llama_index.core.schema import BaseNode, Document, MetadataMode, NodeRelationship, RelatedNodeInfo, TextNode

from reader_rag.rag.embedding import SizedEmbedding, TextSizes
from reader_rag.rag.files import FileDocument, UnusableFileError

# WordPiece encodes a word of any length as one [UNK] token, so a chunk is limited in characters too.
_MOST_CHARACTERS_PER_TOKEN = 16
_NOT_SPACE = re.compile(r"\S")
_LEAST_TOKENS = 16  # of a text beside its metadata

# Part of each file's hash: a new version makes every store split and embed its files again.
_CHUNKER_VERSION = 1


class Splitter(Protocol):
    """Splits documents into nodes."""

    settings: str
    """Description of what decides where it splits, as part of each document's hash."""

    def split(self, documents: Sequence[Document]) -> Sequence[BaseNode]:
        """The nodes of documents, in order; raises `UnusableFileError` where they cannot be split."""


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
        self.settings = f"chunker {_CHUNKER_VERSION}, {tokens} tokens, overlap {overlap}"

    def split(self, documents: Sequence[Document]) -> list[TextNode]:
        """Split documents.

        Args:
            documents: The documents.

        Returns:
            Their chunks, in order.

        Raises:
            UnusableFileError: A single character has more tokens than a chunk may have, or the metadata that is
                embedded with each chunk leaves no room for it.
        """
        return [node for document in documents for node in self._split(document)]

    def _split(self, document: Document) -> list[TextNode]:
        most = self._most_tokens(document)
        limit = most
        labels = _LineLabels(document)
        while True:
            splitter = SentenceSplitter(
                chunk_size=limit,
                chunk_overlap=min(self._overlap, limit - 1),
                tokenizer=lambda text: range(self._size(text)),
                paragraph_separator="\n" if labels.known else DEFAULT_PARAGRAPH_SEP,  # lines with labels stay whole
            )
            try:
                texts = splitter.split_text(document.text)
            except ValueError as error:
                raise UnusableFileError(f"cannot be split into chunks of {limit} tokens: {error}") from error
            longest = max((self._size(text) for text in texts), default=0)
            if longest <= most:
                nodes = build_nodes_from_splits(texts, document)
                for node in nodes:
                    node.metadata = dict(document.metadata)
                _set_spans(nodes, document.text)
                labels.set(nodes)
                _shift_spans(nodes, document)
                return nodes
            # A chunk can have more tokens than its parts have together, and the splitter only adds up the parts.
            limit = min(limit - 1, limit * most // longest)

    def _most_tokens(self, document: Document) -> int:
        """Most tokens of a chunk of a document, beside the metadata that is embedded with it."""
        metadata = document.get_metadata_str(mode=MetadataMode.EMBED)
        if not metadata:
            return self._tokens
        taken = self._embed_model.count_tokens(f"{metadata}\n\n")
        left = self._embed_model.max_text_tokens - taken
        if left < _LEAST_TOKENS:
            raise UnusableFileError(
                f"its metadata has {taken} tokens of the {self._embed_model.max_text_tokens} that the embedding reads; "
                f"name what is not to be embedded in excluded_embed_metadata_keys"
            )
        return min(self._tokens, left)

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


def _shift_spans(nodes: Sequence[TextNode], document: Document) -> None:
    """Make the spans of nodes those in the file's text, of which the document is a part."""
    if isinstance(document, FileDocument) and document.start:
        for node in nodes:
            if node.start_char_idx is not None and node.end_char_idx is not None:
                node.start_char_idx += document.start
                node.end_char_idx += document.start


class _LineLabels:
    """Labels of a document's lines, such as the rows of a table: chunks get those of their first and last line."""

    def __init__(self, document: Document) -> None:
        self._key, self._labels = "", tuple[str, ...]()
        if isinstance(document, FileDocument):
            self._key, self._labels = document.line_key, document.line_labels
        self._starts = [0, *accumulate(len(line) + 1 for line in document.text.split("\n"))] if self._labels else []
        self.known = bool(self._labels)

    def set(self, nodes: Sequence[TextNode]) -> None:
        """Set the labels in the nodes' metadata.

        Args:
            nodes: Nodes with spans in the document's text.
        """
        for node in nodes if self._labels else ():
            if node.start_char_idx is None or node.end_char_idx is None:
                continue
            first = self._labels[bisect_right(self._starts, node.start_char_idx) - 1]
            last = self._labels[bisect_right(self._starts, max(node.start_char_idx, node.end_char_idx - 1)) - 1]
            joint = "-" if first.isdigit() and last.isdigit() else " to "
            node.metadata[self._key] = first if first == last else f"{first}{joint}{last}"


class ParserSplitter:
    """Splits documents with a LlamaIndex node parser.

    Args:
        parser: The node parser.
        sizes: Sizes of the embedding.
    """

    def __init__(self, parser: NodeParser, sizes: TextSizes) -> None:
        self._parser = parser
        self._sizes = sizes
        described = json.dumps(parser.to_dict(), sort_keys=True, default=lambda value: type(value).__name__)
        self.settings = f"{type(parser).__module__}.{type(parser).__qualname__} {described}"
        self.truncated = 0
        """Nodes that were longer than what the embedding reads."""

    def split(self, documents: Sequence[Document]) -> list[BaseNode]:
        """Split documents.

        Args:
            documents: The documents, parts of one file or one document.

        Returns:
            What the parser makes of them, with right spans in the document's text, or none.
        """
        nodes: list[BaseNode] = []
        for document in documents:
            made = self._parser.get_nodes_from_documents([document])
            texts = [node for node in made if isinstance(node, TextNode)]
            for node in texts:
                _correct_span(node, document.text)
            _LineLabels(document).set(texts)
            _shift_spans(texts, document)
            nodes += made
        for one in nodes:
            one.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=documents[0].node_id)
            if isinstance(self._sizes, SizedEmbedding):
                size = self._sizes.count_tokens(one.get_content(metadata_mode=MetadataMode.EMBED))
                self.truncated += size > self._sizes.max_text_tokens
        return nodes


def _correct_span(node: TextNode, text: str) -> None:
    """Set the span of a node that is not where the node's text is; to none where there is no or more than one place."""
    start = node.start_char_idx
    if start is None or text[start : start + len(node.text)] != node.text:
        start = text.find(node.text)
        if start < 0 or not node.text or text.find(node.text, start + 1) >= 0:
            node.start_char_idx = node.end_char_idx = None
            return
    node.start_char_idx, node.end_char_idx = start, start + len(node.text)
