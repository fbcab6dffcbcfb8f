"""An embedding without weights, for tests of the programs."""

from __future__ import annotations

import re
import zlib

import numpy as np

from reader_rag.rag import SizedEmbedding


class WordEmbedding(SizedEmbedding):
    """Counts words into buckets: texts that share words are near."""

    buckets: int = 64

    @property
    def max_text_tokens(self) -> int:
        return 48

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = np.zeros(self.buckets)
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % self.buckets] += 1.0
        return [float(x) for x in vector]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)
