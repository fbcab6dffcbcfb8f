"""Text beyond the prompt: what stands around the retrieved passages in their documents.

An answer often goes on where a passage ends, or repeats a sentence of the same document that was not retrieved. Such
text costs the prompt nothing when it is only searched for drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from reader_rag.rag.stores.contract import DocumentStore

MOST_CHARACTERS = 24_000
"""Of text beyond the prompt, for one question; about 6,000 tokens."""


class Surroundings:
    """Finds the other passages of the documents that retrieved passages belong to.

    Args:
        store: Where the passages came from.
        most_characters: Most text to bring; 0 brings none.
    """

    def __init__(self, store: DocumentStore, most_characters: int = MOST_CHARACTERS) -> None:
        self._store = store
        self._most = most_characters

    def of(self, retrieved: Sequence[NodeWithScore]) -> list[BaseNode]:
        """The passages around these ones.

        Args:
            retrieved: What the prompt is made of, the nearest first.

        Returns:
            Passages that are not among them: those next to a retrieved one first, then those one further away, and so
            on through the whole documents, as many as fit.
        """
        if not self._most or not retrieved:
            return []
        held = {source.node.node_id for source in retrieved}
        documents = list(dict.fromkeys(source.node.ref_doc_id for source in retrieved if source.node.ref_doc_id))
        ranked: list[tuple[int, int, BaseNode]] = []
        for rank, document in enumerate(documents):
            nodes = self._store.get_nodes(doc_ids=[document])
            places = [at for at, node in enumerate(nodes) if node.node_id in held]
            ranked += [
                (min((abs(at - place) for place in places), default=len(nodes)), rank, node)
                for at, node in enumerate(nodes)
                if node.node_id not in held
            ]
        ranked.sort(key=lambda entry: entry[:2])
        chosen, room = [], self._most
        for _, _, node in ranked:
            room -= len(node.get_content(metadata_mode=MetadataMode.NONE))
            if room < 0:
                break
            chosen.append(node)
        return chosen
