"""Passages around the retrieved ones in their documents, for the draft index only.

An answer often continues where a passage ends, or repeats a sentence of the same document that was not retrieved. Text
that is only indexed for drafts does not lengthen the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from reader_rag.rag.stores.contract import DocumentStore

MOST_CHARACTERS = 24_000
"""Most characters of surrounding passages for one question by default; about 6,000 tokens."""


class Surroundings:
    """Finds the other passages of the documents that retrieved passages belong to.

    Args:
        store: The store that the passages were retrieved from.
        most_characters: Most characters of all surrounding passages together; 0: no passages.
    """

    def __init__(self, store: DocumentStore, most_characters: int = MOST_CHARACTERS) -> None:
        self._store = store
        self._most = most_characters

    def of(self, retrieved: Sequence[NodeWithScore]) -> list[BaseNode]:
        """The other passages of the documents.

        Args:
            retrieved: The retrieved passages, most similar first.

        Returns:
            Passages that were not retrieved, by their distance from a retrieved one in the document, nearest first, up
            to the limit of characters.
        """
        if not self._most or not retrieved:
            return []
        retrieved_ids = {source.node.node_id for source in retrieved}
        documents = list(dict.fromkeys(source.node.ref_doc_id for source in retrieved if source.node.ref_doc_id))
        ranked: list[tuple[int, int, BaseNode]] = []
        for rank, document in enumerate(documents):
            nodes = self._store.get_nodes(doc_ids=[document])
            positions = [i for i, node in enumerate(nodes) if node.node_id in retrieved_ids]
            ranked += [
                (min((abs(i - position) for position in positions), default=len(nodes)), rank, node)
                for i, node in enumerate(nodes)
                if node.node_id not in retrieved_ids
            ]
        ranked.sort(key=lambda entry: entry[:2])
        chosen, room = [], self._most
        for _, _, node in ranked:
            room -= len(node.get_content(metadata_mode=MetadataMode.NONE))
            if room < 0:
                break
            chosen.append(node)
        return chosen
